"""Archives from the network: fetched with a checksum, unpacked in one step, without writing anywhere else."""

from __future__ import annotations

import hashlib
import http.client
import os
import secrets
import shutil
import tarfile
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from eigendamage.progress import track

CHUNK = 1 << 20
SECONDS = 60  # without an answer


@dataclass(frozen=True)
class Archive:
    """A file on the network and the folder that is in it."""

    url: str
    md5: str
    folder: str

    @property
    def file(self) -> str:
        return self.url.rpartition("/")[2]


def unpacked(archive: Archive, root: Path, download: bool = True, progress: bool = True) -> Path:
    """The folder of an archive under ``root``: as it is there, or from the archive there, or from the network.

    Raises:
        FileNotFoundError: It is not there, and ``download`` is off or there is no network. The message says what to put where.
        ValueError: The archive is not the one it should be.
    """
    folder, file = root / archive.folder, root / archive.file
    if folder.is_dir():
        return folder
    if not file.is_file():
        if not download:
            raise FileNotFoundError(_instructions(archive, root, "downloads are off"))
        root.mkdir(parents=True, exist_ok=True)
        _fetch(archive, root, progress)
    else:
        _require_checksum(file, _md5(file), archive)
    _extract(file, folder, progress)
    return folder


def _instructions(archive: Archive, root: Path, reason: str) -> str:
    return (
        f"there is no {root / archive.folder}, and {reason}. "
        f"Download {archive.url} where there is a network, and put it there as {root / archive.file} (MD5 {archive.md5})"
    )


# --- fetching ---------------------------------------------------------------------------------------------------------------


def _fetch(archive: Archive, root: Path, progress: bool) -> None:
    with _temporary(root) as temporary:
        digest = hashlib.md5(usedforsecurity=False)
        try:
            with urllib.request.urlopen(archive.url, timeout=SECONDS) as answer, open(temporary, "wb") as file:
                size = int(answer.headers.get("Content-Length") or 0)
                total = -(-size // CHUNK) if size else None
                for chunk in track(_chunks(answer), f"{archive.file} (MiB)", progress, total):
                    file.write(chunk)
                    digest.update(chunk)
        except (OSError, http.client.HTTPException) as error:  # urllib has errors of both kinds
            raise FileNotFoundError(_instructions(archive, root, f"it cannot be downloaded ({error})")) from None
        _require_checksum(archive.url, digest.hexdigest(), archive)
        os.replace(temporary, root / archive.file)


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(CHUNK):
        yield chunk


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _require_checksum(where: str | Path, found: str, archive: Archive) -> None:
    if found != archive.md5:
        raise ValueError(f"{where} is damaged or is something else: its MD5 is {found}, {archive.file} has {archive.md5}")


# --- unpacking --------------------------------------------------------------------------------------------------------------


def _extract(file: Path, folder: Path, progress: bool) -> None:
    """The folder of that name in the archive. It appears whole or not at all."""
    with _temporary(folder.parent) as temporary:
        for name, source in track(_members(file), f"unpacking {file.name}", progress):
            with source:
                path = _inside(temporary, name, file)
                path.parent.mkdir(parents=True, exist_ok=True)
                with open(path, "wb") as target:
                    shutil.copyfileobj(source, target, CHUNK)
        if not (temporary / folder.name).is_dir():
            raise ValueError(f"{file} has no folder {folder.name} in it")
        try:
            os.replace(temporary / folder.name, folder)
        except OSError:
            if not folder.is_dir():  # another process was faster
                raise


def _members(file: Path) -> Iterator[tuple[str, IO[bytes]]]:
    """The ordinary files of an archive. Links and devices are left out: no data set has any."""
    if zipfile.is_zipfile(file):
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                if not info.is_dir():
                    yield info.filename, archive.open(info)
        return
    with tarfile.open(file) as archive:
        for member in archive:
            source = archive.extractfile(member) if member.isreg() else None
            if source is not None:
                yield member.name, source


def _inside(root: Path, name: str, archive: Path) -> Path:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or "\\" in name or ":" in name:
        raise ValueError(f"{archive} is refused: it would write to {name!r}, outside of its folder")
    return root / path


@contextmanager
def _temporary(root: Path) -> Iterator[Path]:
    """A name in ``root`` for a file or folder that is gone afterwards."""
    path = root / f".{secrets.token_hex(8)}.tmp"
    try:
        yield path
    finally:
        path.unlink(missing_ok=True) if path.is_file() else shutil.rmtree(path, ignore_errors=True)

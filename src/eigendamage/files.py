"""One safetensors file: named tensors and JSON beside them, written in one step, checked when read, without pickle."""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from eigendamage.checks import require

VERSION = 1


def write(path: str | os.PathLike[str], tensors: dict[str, Tensor], content: dict[str, Any], kind: str) -> None:
    """Write ``tensors`` and the JSON data ``content`` to ``path``: the whole file or, when anything fails, nothing.

    Raises:
        FileNotFoundError: The folder of ``path`` does not exist.
        TypeError: A tensor is of a type that safetensors cannot hold, or ``content`` is not JSON data.
    """
    path = _target(path)
    plain = {name: _plain(name, tensor) for name, tensor in tensors.items()}
    text = json.dumps(content)
    metadata = {"eigendamage": str(VERSION), "kind": kind, "content": text, "sha256": _digest(plain, str(VERSION), kind, text)}
    with _replacing(path) as temporary:
        try:
            save_file(plain, temporary, metadata)
        except KeyError as error:
            raise TypeError(f"{path} cannot be written: safetensors cannot hold {error} tensors") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write ``text`` as UTF-8: the whole file or, when anything fails, nothing.

    Raises:
        FileNotFoundError: The folder of ``path`` does not exist.
    """
    path = _target(path)
    with _replacing(path) as temporary:
        temporary.write_bytes(text.encode())


def read(path: str | os.PathLike[str], kind: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The tensors, on the CPU, and the content of a file that `write` wrote with the same ``kind``.

    Raises:
        ValueError: The file is damaged, or it is something else.
    """
    require("path", path, str | os.PathLike, "the name of a file")
    try:
        # The errors of open() name the file; safe_open's do not.
        with open(path, "rb"), safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            # Cloned: what was read must not change with the file that it is mapped from.
            tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is cut short or damaged ({error})") from None
    version, found, text = (metadata.get(key, "") for key in ("eigendamage", "kind", "content"))
    if not version.isdecimal():
        raise ValueError(f"{path} was not written by eigendamage")
    if int(version) > VERSION:
        raise ValueError(f"{path} has format {version}; this eigendamage reads formats up to {VERSION}")
    if found != kind:
        raise ValueError(f"{path} holds a {found}, not a {kind}")
    if metadata.get("sha256") != _digest(tensors, version, found, text):
        raise ValueError(f"{path} is damaged: its checksum does not match its content")
    return tensors, json.loads(text)


def _target(path: str | os.PathLike[str]) -> Path:
    require("path", path, str | os.PathLike, "the name of a file")
    path = Path(path).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: there is no folder {path.parent}")
    return path


def _plain(name: str, tensor: Tensor) -> Tensor:
    """A contiguous copy on the CPU; a copy because safetensors refuses tensors that share memory."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        what = "meta" if tensor.is_meta else f"{tensor.layout}, {tensor.dtype}"
        raise TypeError(f"{name} is not an ordinary dense tensor and cannot be stored ({what})")
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor.detach())


def _digest(tensors: dict[str, Tensor], *texts: str) -> str:
    digest = hashlib.sha256(json.dumps(texts).encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


@contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary file beside ``path`` that takes its place at the end, or disappears."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        temporary.touch(exist_ok=False)
        mode = temporary.stat().st_mode
        yield temporary
        temporary.chmod(mode)  # safetensors makes files that only their owner can read
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

"""The data sets in their official layouts, files that are something else, and batches made many images at a time."""

from __future__ import annotations

import hashlib
import io
import pickle
import tarfile
import zipfile
from pathlib import Path

import numpy
import pytest
import torch
from torch.nn import functional as F

from eigendamage.lab import data as data_sets
from eigendamage.lab import downloads
from eigendamage.lab.data import DATA, Images, load_data
from eigendamage.lab.downloads import Archive, unpacked
from eigendamage.lab.unpickling import unpickle

REAL = Path(__file__).parents[1] / "data"  # where the command line puts data sets


def cifar_pixels(count: int, seed: int) -> numpy.ndarray:
    return numpy.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=numpy.uint8)


def as_python_2(pixels: numpy.ndarray, labels: list[int], key: bytes = b"labels") -> bytes:
    """A pickle as Python 2 wrote it, and as the official files are: text opcodes, and bytes as its plain strings."""

    def string(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value if len(value) < 256 else b"T" + len(value).to_bytes(4, "little") + value

    def number(value: int) -> bytes:
        return b"K" + bytes([value])

    shape = b"".join(b"M" + size.to_bytes(2, "little") for size in pixels.shape) + b"\x86"
    dtype = b"cnumpy\ndtype\n" + string(b"u1") + number(0) + number(1) + b"\x87R"
    dtype += b"(" + number(3) + string(b"|") + b"NNN" + b"J\xff\xff\xff\xff" * 2 + number(0) + b"tb"
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\n" + number(0) + b"\x85" + string(b"b") + b"\x87R"
    array += b"(" + number(1) + shape + dtype + b"\x89" + string(pixels.tobytes()) + b"tb"
    entries = string(b"data") + array + string(key) + b"](" + b"".join(map(number, labels)) + b"e"
    return b"\x80\x02}(" + string(b"batch_label") + string(b"training batch 1 of 5") + entries + b"u."


def write_cifar10(root: Path) -> None:
    folder = root / "cifar-10-batches-py"
    folder.mkdir()
    for seed, name in enumerate(("data_batch_1", "data_batch_2", "data_batch_3", "data_batch_4", "data_batch_5", "test_batch")):
        (folder / name).write_bytes(as_python_2(cifar_pixels(3, seed), [seed, 1, 9]))


# --- pickles ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("protocol", range(5))
def test_arrays_bytes_and_lists_are_read_from_pickles(tmp_path: Path, protocol: int) -> None:
    content = {b"data": cifar_pixels(2, 0), b"labels": [1, 2], b"filenames": [b"a.png", b"\xff"], b"batch_label": b"one"}
    (tmp_path / "file").write_bytes(pickle.dumps(content, protocol=protocol))
    found = unpickle(tmp_path / "file")
    assert numpy.array_equal(found.pop(b"data"), content.pop(b"data")) and found == content


def test_pickles_of_python_2_are_read(tmp_path: Path) -> None:
    pixels = cifar_pixels(4, 0)
    (tmp_path / "file").write_bytes(as_python_2(pixels, [1, 2, 3, 4]))
    found = unpickle(tmp_path / "file")
    assert (
        numpy.array_equal(found[b"data"], pixels) and found[b"data"].dtype == numpy.uint8 and found[b"labels"] == [1, 2, 3, 4]
    )


class Trap:
    """Creates a file when it is unpickled by anyone who is not careful."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return open, (str(self.path), "w")


@pytest.mark.parametrize("place", ["alone", "as the data", "in a list"])
def test_a_pickle_that_would_run_code_is_refused_and_does_not(tmp_path: Path, place: str) -> None:
    trap = Trap(tmp_path / "sprung")
    content = {"alone": trap, "as the data": {b"data": trap}, "in a list": {b"labels": [trap]}}[place]
    (tmp_path / "file").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match=r"file is refused: it asks for (_io|io|__builtin__)\.open; arrays, bytes, lists"):
        unpickle(tmp_path / "file")
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy\nload\n(S'x'\ntR.",
        b"(S'true'\nios\nsystem\n.",
        b"c_codecs\nencode\n(Vx\nVzip\ntR.",
        b"\x80\x04\x8c\x05numpy\x8c\x0fndarray.__new__\x93.",
    ],
)
def test_other_ways_to_run_code_are_refused(tmp_path: Path, code: bytes) -> None:
    (tmp_path / "file").write_bytes(code)
    with pytest.raises(ValueError, match="is refused: it asks for"):
        unpickle(tmp_path / "file")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is not a pickle, or is cut short"),
        (b"GIF89a", "is not a pickle"),
        (pickle.dumps({b"data": cifar_pixels(2, 0)})[:-40], "is not a pickle, or is cut short"),
        (pickle.dumps([1, 2]), "holds list, not a dictionary"),
    ],
)
def test_damaged_pickles_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "file").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        unpickle(tmp_path / "file")


# --- data sets --------------------------------------------------------------------------------------------------------------


def test_cifar10_in_its_official_layout(tmp_path: Path) -> None:
    write_cifar10(tmp_path)
    data = load_data("cifar10", tmp_path, download=False)
    assert (data.classes, len(data.train), len(data.test)) == (10, 15, 3)
    assert data.train.labels.tolist() == [0, 1, 9, 1, 1, 9, 2, 1, 9, 3, 1, 9, 4, 1, 9]
    assert torch.equal(data.test.pixels.flatten(1), torch.from_numpy(cifar_pixels(3, 5)))


def test_cifar100_has_its_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    for seed, name in enumerate(("train", "test")):
        (folder / name).write_bytes(as_python_2(cifar_pixels(2, seed), [seed, 99], b"fine_labels"))
    data = load_data("cifar100", tmp_path, download=False)
    assert data.classes == 100 and data.test.labels.tolist() == [1, 99]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({b"data": numpy.zeros((2, 3072), numpy.float32), b"labels": [0, 1]}, r"its data must be bytes \[images, 3072\]"),
        ({b"data": numpy.zeros((2, 5), numpy.uint8), b"labels": [0, 1]}, "its data must be bytes"),
        ({b"data": numpy.zeros((2, 3072), numpy.uint8), b"labels": [0]}, "one of labels for each of its images"),
        ({b"data": numpy.zeros((2, 3072), numpy.uint8), b"labels": [0, 10]}, "labels must be numbers from 0 to 9"),
    ],
)
def test_files_that_are_not_of_cifar_are_named(tmp_path: Path, content: dict, message: str) -> None:
    write_cifar10(tmp_path)
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(content))
    with pytest.raises(ValueError, match=f"data_batch_3 is .*{message}"):
        load_data("cifar10", tmp_path, download=False)


def write_tiny_imagenet(root: Path) -> dict[str, int]:
    """Three plain grey images: their values by the path of each."""
    image = pytest.importorskip("PIL.Image")
    files = {"train/n02/images/n02_0.JPEG": 40, "train/n01/images/n01_0.JPEG": 90, "val/images/val_0.JPEG": 200}
    for name, value in files.items():
        path = root / "tiny-imagenet-200" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        image.new("L" if value == 90 else "RGB", (64, 64), value if value == 90 else (value,) * 3).save(path)
    (root / "tiny-imagenet-200" / "wnids.txt").write_text("n02\nn01\n")
    (root / "tiny-imagenet-200" / "val" / "val_annotations.txt").write_text("val_0.JPEG\tn01\t0\t0\t62\t62\n")
    return files


def test_tiny_imagenet_is_decoded_once(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    data = load_data("tiny-imagenet", tmp_path, download=False)
    assert data.classes == 200 and data.train.pixels.shape == (2, 3, 64, 64)
    assert data.train.labels.tolist() == [0, 1] and data.test.labels.tolist() == [1]
    assert data.train.pixels.flatten(1).unique(dim=1).flatten().tolist() == [40, 90] and int(data.test.pixels.max()) == 200
    for path in (tmp_path / "tiny-imagenet-200").rglob("*.JPEG"):
        path.unlink()
    assert torch.equal(load_data("tiny-imagenet", tmp_path, download=False).train.pixels, data.train.pixels)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("val_1.JPEG\tn03\t0\t0\t62\t62", "the class 'n03' is not one of the 2 in wnids.txt"),
        ("val_1.JPEG n01", r"must begin with an image and its class, with tabs between; got 'val_1\.JPEG n01'"),
        ("val_1.JPEG\t", "must begin with an image and its class"),
        ("", "must begin with an image and its class, with tabs between; got ''"),
    ],
)
def test_a_line_of_tiny_imagenet_s_labels_that_cannot_be_is_named(tmp_path: Path, line: str, message: str) -> None:
    write_tiny_imagenet(tmp_path)
    with open(tmp_path / "tiny-imagenet-200" / "val" / "val_annotations.txt", "a") as file:
        file.write(f"{line}\n")
    with pytest.raises(ValueError, match=rf"val_annotations\.txt, line 2: {message}"):
        load_data("tiny-imagenet", tmp_path, download=False)
    assert not (tmp_path / "tiny-imagenet-200.safetensors").exists()


def test_a_tiny_imagenet_that_is_not_whole_is_named(tmp_path: Path) -> None:
    write_tiny_imagenet(tmp_path)
    image, folder = pytest.importorskip("PIL.Image"), tmp_path / "tiny-imagenet-200"
    image.new("RGB", (64, 32)).save(folder / "val" / "images" / "val_0.JPEG")
    with pytest.raises(ValueError, match=r"val_0\.JPEG must be of 64 by 64 pixels; got 64 by 32"):
        load_data("tiny-imagenet", tmp_path, download=False)
    (folder / "val" / "val_annotations.txt").write_text("")
    with pytest.raises(ValueError, match="tiny-imagenet-200 is not whole: there are no images to test on"):
        load_data("tiny-imagenet", tmp_path, download=False)


def test_digits_need_no_files(tmp_path: Path) -> None:
    data = load_data("digits", tmp_path)
    assert (data.classes, len(data.train), len(data.test)) == (10, 1198, 599) and data.train.pixels.shape[1:] == (3, 16, 16)
    inputs, _ = next(iter(data.train.batches(1198)))
    assert abs(float(inputs.mean())) < 1e-3 and abs(float(inputs.std()) - 1) < 1e-3
    assert not any(tmp_path.iterdir())


def test_other_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"data: must be one of 'cifar10', 'cifar10-split', .* 'digits'; got 'mnist'"):
        load_data("mnist", tmp_path)


@pytest.mark.skipif(not (REAL / "cifar-10-batches-py").is_dir(), reason="CIFAR-10 is not here")
def test_the_real_cifar10() -> None:
    data = load_data("cifar10", REAL, download=False)
    assert (len(data.train), len(data.test)) == (50_000, 10_000) and data.test.labels.bincount().tolist() == [1000] * 10
    inputs, _ = next(iter(data.train.batches(5000)))
    assert inputs.mean((0, 2, 3)).abs().max() < 0.05


# --- downloads --------------------------------------------------------------------------------------------------------------


def tar_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()


def zip_of(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def served(folder: Path, content: bytes, name: str = "set.tar.gz", md5: str | None = None) -> Archive:
    folder.mkdir(exist_ok=True)
    (folder / name).write_bytes(content)
    return Archive((folder / name).as_uri(), md5 or hashlib.md5(content).hexdigest(), "set")


@pytest.mark.parametrize(("name", "pack"), [("set.tar.gz", tar_of), ("set.zip", zip_of)])
def test_an_archive_is_fetched_checked_and_unpacked(tmp_path: Path, name: str, pack) -> None:
    archive = served(tmp_path / "server", pack({"set/a": b"one", "set/deep/b": b"two", "readme": b""}), name)
    root = tmp_path / "new" / "root"
    assert unpacked(archive, root) == root / "set"
    assert (root / "set" / "deep" / "b").read_bytes() == b"two"
    assert sorted(path.name for path in root.iterdir()) == ["set", name]
    (tmp_path / "server" / name).unlink()
    assert unpacked(archive, root) == root / "set"  # now it is there


def test_an_archive_that_was_put_there_by_hand_needs_no_network(tmp_path: Path) -> None:
    archive = served(tmp_path, tar_of({"set/a": b"one"}))
    assert (unpacked(archive, tmp_path, download=False) / "a").read_bytes() == b"one"


def test_without_a_network_the_message_says_what_to_put_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = Archive((tmp_path / "nowhere" / "set.tar.gz").as_uri(), "0" * 32, "set")
    for download, reason in ((True, "it cannot be downloaded"), (False, "downloads are off")):
        with pytest.raises(FileNotFoundError) as caught:
            unpacked(archive, tmp_path / "root", download)
        for part in (reason, archive.url, str(tmp_path / "root" / "set.tar.gz"), archive.md5):
            assert part in str(caught.value)
    monkeypatch.setattr(data_sets, "CIFAR10", archive)
    with pytest.raises(FileNotFoundError, match=r"set\.tar\.gz"):
        load_data("cifar10", tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []


def test_another_file_than_expected_is_refused(tmp_path: Path) -> None:
    archive = served(tmp_path / "server", tar_of({"set/a": b"one"}), md5="0" * 32)
    with pytest.raises(ValueError, match="is damaged or is something else: its MD5 is"):
        unpacked(archive, tmp_path / "root")
    assert list((tmp_path / "root").iterdir()) == []
    with pytest.raises(ValueError, match="is damaged or is something else"):
        unpacked(archive, tmp_path / "server", download=False)
    assert not (tmp_path / "server" / "set").exists()


@pytest.mark.parametrize("pack", [tar_of, zip_of])
@pytest.mark.parametrize("name", ["../outside", "set/../../outside", "/tmp/outside-of-eigendamage"])
def test_an_archive_that_would_write_elsewhere_is_refused(tmp_path: Path, name: str, pack) -> None:
    archive = served(tmp_path / "server", pack({"set/a": b"one", name: b"two"}))
    with pytest.raises(ValueError, match="is refused: it would write to"):
        unpacked(archive, tmp_path / "root")
    assert not (tmp_path / "outside").exists() and not Path("/tmp/outside-of-eigendamage").exists()
    assert [path.name for path in (tmp_path / "root").iterdir()] == ["set.tar.gz"]


def test_links_in_an_archive_are_left_out(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        link = tarfile.TarInfo("set/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(link)
        info = tarfile.TarInfo("set/a")
        archive.addfile(info, io.BytesIO())
    folder = unpacked(served(tmp_path / "server", buffer.getvalue()), tmp_path / "root")
    assert [path.name for path in folder.iterdir()] == ["a"]


def test_the_archives_name_their_files() -> None:
    files = [archive.file for archive in (data_sets.CIFAR10, data_sets.CIFAR100, data_sets.TINY_IMAGENET)]
    assert files == ["cifar-10-python.tar.gz", "cifar-100-python.tar.gz", "tiny-imagenet-200.zip"]
    assert all(isinstance(name, str) for name in DATA) and downloads.CHUNK > 0


# --- batches ----------------------------------------------------------------------------------------------------------------


def images(count: int = 10, size: int = 6, **how) -> Images:
    pixels = torch.randint(1, 256, (count, 3, size, size), dtype=torch.uint8)
    return Images(pixels, torch.arange(count), (0.5, 0.4, 0.3), (0.2, 0.3, 0.25), **how)


def test_images_are_normalised() -> None:
    source = images()
    inputs, labels = next(iter(source.batches(4)))
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (source.mean, source.std))
    torch.testing.assert_close(inputs, (source.pixels[:4] / 255 - mean) / std)
    assert labels.tolist() == [0, 1, 2, 3] and inputs.dtype == torch.float32


def test_batches_hold_every_image_once_and_the_last_may_be_left_out() -> None:
    for drop_last, sizes in ((False, [4, 4, 2]), (True, [4, 4])):
        batches = images().batches(4, shuffle=True, drop_last=drop_last)
        labels = [labels for _, labels in batches]
        assert len(batches) == len(sizes) and [len(part) for part in labels] == sizes
        assert len(torch.cat(labels).unique()) == sum(sizes)


def test_an_epoch_depends_on_the_seed_and_its_number_alone() -> None:
    source = images()

    def epoch(seed: int, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        batches = source.batches(4, shuffle=True, augment=True, seed=seed)
        batches.set_epoch(number)
        parts = list(zip(*batches, strict=True))
        return torch.cat(parts[0]), torch.cat(parts[1])

    first = epoch(0, 1)
    torch.manual_seed(99)
    assert all(map(torch.equal, first, epoch(0, 1)))
    for seed, number in ((0, 0), (1, 0), (1, 1), (0, 2)):
        assert not torch.equal(first[0], epoch(seed, number)[0])


def test_a_random_crop_is_a_window_of_the_padded_image_or_its_mirror() -> None:
    source = images(600, padding=2)
    padded = F.pad(source.pixels, (2,) * 4)
    windows = padded.unfold(2, 6, 1).unfold(3, 6, 1)  # [image, channel, row, column, 6, 6]
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (source.mean, source.std))
    inputs, _ = next(iter(source.batches(600, augment=True)))
    pixels = ((inputs * std + mean) * 255).round().byte()
    seen = set()
    for image, of_image in zip(pixels, windows, strict=True):
        places = [
            (row, column, mirrored)
            for row in range(5)
            for column in range(5)
            for mirrored in (False, True)
            if torch.equal(image.flip(2) if mirrored else image, of_image[:, row, column])
        ]
        assert len(places) == 1
        seen.update(places)
    assert len(seen) == 50  # every window, both ways


def test_images_whose_mirror_image_is_something_else_are_not_mirrored() -> None:
    source = images(50, padding=0, mirrored=False)
    assert torch.equal(next(iter(source.batches(50, augment=True)))[0], next(iter(source.batches(50)))[0])


def test_channels_last_holds_the_same_values() -> None:
    source = images()
    for augment in (False, True):
        plain, last = (next(iter(source.batches(4, augment=augment, channels_last=asked)))[0] for asked in (False, True))
        assert torch.equal(plain, last) and plain.is_contiguous() and last.is_contiguous(memory_format=torch.channels_last)


def test_subsets() -> None:
    source = images()
    assert source.subset([3, 1]).labels.tolist() == [3, 1]
    some = source.subset(4, seed=1)
    assert len(some) == 4 and torch.equal(some.labels, source.subset(4, seed=1).labels)
    assert not torch.equal(some.labels, source.subset(4, seed=2).labels)
    with pytest.raises(ValueError, match="which: there are 10 images; got 11"):
        source.subset(11)


def test_a_batch_larger_than_what_there_is() -> None:
    assert [len(labels) for _, labels in images().batches(64)] == [10]
    with pytest.raises(ValueError, match="size: there are 10 images, which make no whole batch of 64"):
        images().batches(64, drop_last=True)

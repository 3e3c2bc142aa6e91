"""The data sets of the paper in their official layouts, and handwritten digits, which need no download."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy
import torch
from jaxtyping import UInt8
from torch import Tensor

from eigendamage import files
from eigendamage.checks import require, require_choice
from eigendamage.lab.downloads import Archive, unpacked
from eigendamage.lab.images import Batches as Batches
from eigendamage.lab.images import Images as Images
from eigendamage.lab.unpickling import unpickle
from eigendamage.progress import track

CIFAR10 = Archive(
    "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", "cifar-10-batches-py"
)
CIFAR100 = Archive(
    "https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", "cifar-100-python"
)
TINY_IMAGENET = Archive(
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip", "90528d7ca1a48142e341f4ef8d21d0de", "tiny-imagenet-200"
)
DECODED = "images"  # the kind of file that holds decoded images


@dataclass(frozen=True, eq=False)
class Data:
    name: str
    classes: int
    train: Images
    test: Images

    def to(self, device: torch.device | str) -> Data:
        return replace(self, train=self.train.to(device), test=self.test.to(device))


def load_data(name: str, root: str | os.PathLike[str] = "data", download: bool = True, progress: bool = True) -> Data:
    """A data set of the table `DATA`.

    Args:
        name: in the table.
        root: the folder that holds the data sets, each in its official layout.
        download: fetch what is not there.
        progress: show bars on a terminal.

    Raises:
        FileNotFoundError: It is not there and cannot be fetched; the message says which file to put where.
        ValueError: There is no such data set, or its files are damaged.
    """
    require_choice("data", name, tuple(DATA))
    require("root", root, str | os.PathLike, "the name of a folder")
    return DATA[name](Path(root), download, progress)


# --- CIFAR ------------------------------------------------------------------------------------------------------------------


def _cifar10(root: Path, download: bool, progress: bool) -> Data:
    folder = unpacked(CIFAR10, root, download, progress)
    mean, std = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)
    train = _cifar([folder / f"data_batch_{number}" for number in range(1, 6)], b"labels", 10)
    test = _cifar([folder / "test_batch"], b"labels", 10)
    return Data("cifar10", 10, Images(*train, mean, std), Images(*test, mean, std))


def _cifar10_split(root: Path, download: bool, progress: bool) -> Data:
    """CIFAR-10's training set alone, a tenth of it to test on: what hyperparameters are chosen on."""
    data = _cifar10(root, download, progress)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(0))
    held = len(order) // 10
    return replace(data, name="cifar10-split", train=data.train.subset(order[held:]), test=data.train.subset(order[:held]))


def _cifar100(root: Path, download: bool, progress: bool) -> Data:
    folder = unpacked(CIFAR100, root, download, progress)
    mean, std = (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761)
    train, test = (_cifar([folder / part], b"fine_labels", 100) for part in ("train", "test"))
    return Data("cifar100", 100, Images(*train, mean, std), Images(*test, mean, std))


def _cifar(paths: Sequence[Path], key: bytes, classes: int) -> tuple[Tensor, Tensor]:
    pixels, labels = zip(*(_cifar_file(path, key, classes) for path in paths), strict=True)
    return torch.cat(pixels), torch.cat(labels)


def _cifar_file(path: Path, key: bytes, classes: int) -> tuple[Tensor, Tensor]:
    content = unpickle(path)
    pixels, labels = content.get(b"data"), content.get(key)
    if not isinstance(pixels, numpy.ndarray) or pixels.dtype != numpy.uint8 or pixels.shape[1:] != (3072,):
        raise ValueError(f"{path} is not a file of CIFAR: its data must be bytes [images, 3072]")
    if not isinstance(labels, list) or len(labels) != len(pixels):
        raise ValueError(f"{path} is not a file of CIFAR: it must have one of {key.decode()} for each of its images")
    if any(type(label) is not int or not 0 <= label < classes for label in labels):
        raise ValueError(f"{path} is damaged: {key.decode()} must be numbers from 0 to {classes - 1}")
    return torch.from_numpy(pixels.copy()).view(-1, 3, 32, 32), torch.tensor(labels)


# --- Tiny-ImageNet ----------------------------------------------------------------------------------------------------------


def _tiny_imagenet(root: Path, download: bool, progress: bool) -> Data:
    """Decoding takes minutes, so what comes of it is kept beside the folder."""
    decoded = root / "tiny-imagenet-200.safetensors"
    if decoded.is_file():
        tensors, _ = files.read(decoded, DECODED)
    else:
        tensors = _decode(unpacked(TINY_IMAGENET, root, download, progress), progress)
        files.write(decoded, tensors, {}, DECODED)
    mean, std = (0.4802, 0.4481, 0.3976), (0.2770, 0.2691, 0.2821)
    train, test = (Images(tensors[f"{part}.pixels"], tensors[f"{part}.labels"], mean, std) for part in ("train", "test"))
    return Data("tiny-imagenet", 200, train, test)


def _decode(folder: Path, progress: bool) -> dict[str, Tensor]:
    """The validation set serves as test set, as in the paper: the labels of the real one were never published."""
    numbers = {name: number for number, name in enumerate((folder / "wnids.txt").read_text().split())}
    train = [(path, numbers[name]) for name in numbers for path in sorted((folder / "train" / name).rglob("*.JPEG"))]
    test = _annotated(folder / "val" / "val_annotations.txt", numbers)
    tensors = {}
    for part, entries in (("train", train), ("test", test)):
        if not entries:
            raise ValueError(f"{folder} is not whole: there are no images to {part} on")
        with ThreadPoolExecutor() as pool:
            images = list(track(pool.map(_read_jpeg, [path for path, _ in entries]), part, progress, len(entries)))
        tensors[f"{part}.pixels"] = torch.stack(images)
        tensors[f"{part}.labels"] = torch.tensor([number for _, number in entries])
    return tensors


def _annotated(path: Path, numbers: Mapping[str, int]) -> list[tuple[Path, int]]:
    """Each image of the validation set and the number of its class."""
    entries = []
    for row, line in enumerate(path.read_text().splitlines(), 1):
        file, name, *_ = [*line.split("\t"), ""]
        if not file or not name:
            raise ValueError(f"{path}, line {row}: must begin with an image and its class, with tabs between; got {line!r}")
        if name not in numbers:
            raise ValueError(f"{path}, line {row}: the class {name!r} is not one of the {len(numbers)} in wnids.txt")
        entries.append((path.parent / "images" / file, numbers[name]))
    return entries


def _read_jpeg(path: Path) -> UInt8[Tensor, "3 height width"]:
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError(f'Tiny-ImageNet needs Pillow ({error}). Install it with: pip install "eigendamage[lab]"') from None
    with Image.open(path) as image:
        if image.size != (64, 64):
            raise ValueError(f"{path} must be of 64 by 64 pixels; got {image.width} by {image.height}")
        return torch.from_numpy(numpy.array(image.convert("RGB"))).permute(2, 0, 1).contiguous()


# --- digits -----------------------------------------------------------------------------------------------------------------


def _digits(root: Path, download: bool, progress: bool) -> Data:
    """Scikit-learn's 8×8 digits, twice as large and in three channels, as every network of the lab takes them."""
    try:
        from sklearn import datasets
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise ImportError(f'digits need scikit-learn ({error}). Install it with: pip install "eigendamage[lab]"') from None
    images, labels = datasets.load_digits(return_X_y=True)
    parts = train_test_split((images * 255 / 16).round(), labels, test_size=1 / 3, stratify=labels, random_state=0)
    train, test = (torch.tensor(part, dtype=torch.uint8).view(-1, 1, 8, 8).expand(-1, 3, -1, -1) for part in parts[:2])
    mean, std = float(train.double().mean()) / 255, float(train.double().std()) / 255
    sets = [
        Images(pixels.repeat_interleave(2, 2).repeat_interleave(2, 3), torch.tensor(labels), (mean,) * 3, (std,) * 3, 2, False)
        for pixels, labels in ((train, parts[2]), (test, parts[3]))
    ]
    return Data("digits", 10, *sets)


DATA: dict[str, Callable[[Path, bool, bool], Data]] = {
    "cifar10": _cifar10,
    "cifar10-split": _cifar10_split,
    "cifar100": _cifar100,
    "tiny-imagenet": _tiny_imagenet,
    "digits": _digits,
}

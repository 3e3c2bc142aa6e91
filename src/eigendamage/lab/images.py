"""Images in memory as bytes, and batches of them: cropped, mirrored and normalised many at a time, where they lie."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from eigendamage.checks import require_whole
from eigendamage.processes import place


@dataclass(frozen=True, eq=False)
class Images:
    """Pixels and labels on one device, what normalises the pixels, and what augments them."""

    pixels: UInt8[Tensor, "n channels height width"]
    labels: Int64[Tensor, " n"]
    mean: tuple[float, ...]  # of the channels, of pixels from 0 to 1
    std: tuple[float, ...]
    padding: int = 4  # a random crop comes from the image with this many black pixels around it
    mirrored: bool = True  # whether an image and its mirror image are of one class

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device | str) -> Images:
        return replace(self, pixels=self.pixels.to(device), labels=self.labels.to(device))

    def subset(self, which: int | Sequence[int] | Tensor, seed: int = 0) -> Images:
        """The images at these indices, or so many drawn at random.

        Raises:
            ValueError: There are not so many images.
        """
        if isinstance(which, int):
            require_whole("which", which, least=1)
            if which > len(self):
                raise ValueError(f"which: there are {len(self)} images; got {which}")
            which = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))[:which]
        index = torch.as_tensor(which, device=self.pixels.device)
        return replace(self, pixels=self.pixels[index], labels=self.labels[index])

    def batches(
        self,
        size: int,
        *,
        shuffle: bool = False,
        augment: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        channels_last: bool = False,
    ) -> Batches:
        """Batches of normalised images and labels, of ``size`` images over all processes together.

        Args:
            size: of a batch. Each process gets its share.
            shuffle: in another order every epoch.
            augment: random crops of the padded images, half of them mirrored.
            seed: of order and augmentation.
            drop_last: leave out a last batch that is smaller.
            channels_last: the memory format of the images.
        """
        require_whole("size", size, least=1)
        if drop_last and size > len(self):
            raise ValueError(f"size: there are {len(self)} images, which make no whole batch of {size}")
        return Batches(self, size, shuffle, augment, seed, drop_last, channels_last)


@dataclass
class Batches:
    """What epoch ``epoch`` yields depends on it and on the seed alone."""

    images: Images
    size: int
    shuffle: bool
    augment: bool
    seed: int
    drop_last: bool
    channels_last: bool
    epoch: int = 0

    def __len__(self) -> int:
        count = len(self.images)
        return count // self.size if self.drop_last else -(-count // self.size)

    def set_epoch(self, number: int) -> None:
        self.epoch = number

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        images, device = self.images, self.images.pixels.device
        generator = torch.Generator().manual_seed(_mixed(self.seed, self.epoch))
        count = len(images)
        order = torch.randperm(count, generator=generator) if self.shuffle else torch.arange(count)
        # Everything random of an epoch is drawn at once, on the CPU so that it is the same on every device.
        shifts = torch.randint(2 * images.padding + 1, (count, 2), generator=generator).to(device)
        flips = torch.randint(2, (count,), generator=generator, dtype=torch.bool).to(device)
        order = order.to(device)
        scale, offset = _normalisation(images)
        rank, processes = place()
        for number in range(len(self)):
            start, stop = number * self.size, min((number + 1) * self.size, count)
            mine = slice(start + (stop - start) * rank // processes, start + (stop - start) * (rank + 1) // processes)
            pixels, labels = images.pixels[order[mine]], images.labels[order[mine]]
            if self.augment:
                pixels = _cropped(pixels, images.padding, shifts[mine], flips[mine] if images.mirrored else None)
            inputs = torch.addcmul(offset, pixels.to(torch.float32), scale)
            layout = torch.channels_last if self.channels_last else torch.contiguous_format
            yield inputs.contiguous(memory_format=layout), labels


def _mixed(seed: int, epoch: int) -> int:
    """One seed of two numbers; near ones give streams that have nothing to do with each other."""
    return int(numpy.random.SeedSequence([seed, epoch]).generate_state(1, numpy.uint64)[0])


def _normalisation(images: Images) -> tuple[Float[Tensor, "1 channels 1 1"], Float[Tensor, "1 channels 1 1"]]:
    """What a byte is multiplied with, and what is added then."""
    mean, std = (torch.tensor(values, dtype=torch.float64).view(1, -1, 1, 1) for values in (images.mean, images.std))
    device = images.pixels.device
    return (1 / (255 * std)).float().to(device), (-mean / std).float().to(device)


def _cropped(
    pixels: UInt8[Tensor, "n channels height width"],
    padding: int,
    shifts: Int64[Tensor, "n 2"],
    flips: Tensor | None,
) -> UInt8[Tensor, "n channels height width"]:
    """From each padded image a window of the image's size at its shift; mirrored where ``flips``."""
    height, width = pixels.shape[2:]
    rows, columns = (torch.arange(size, device=pixels.device).expand(len(pixels), size) for size in (height, width))
    if flips is not None:
        columns = torch.where(flips[:, None], columns.flip(1), columns)
    rows, columns = rows + shifts[:, :1], columns + shifts[:, 1:]
    padded = F.pad(pixels, (padding,) * 4)
    each = torch.arange(len(pixels), device=pixels.device)[:, None, None]
    return padded.permute(0, 2, 3, 1)[each, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)

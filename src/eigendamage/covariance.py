"""Sums of outer products of a layer's inputs: over channels (section 4.5) and over patches (section 2).

Both are the same matrix seen twice: the channel form is the mean of the diagonal blocks of the patch form, one block per
kernel position. Neither extracts patches where it can be helped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from eigendamage.layers import Axis, axes_of, patches, prepare, weight_of

# Patches are extracted for this many elements at a time, so that a strided layer costs little memory.
CHUNK = 1 << 24


def accumulation_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


class ChannelSum:
    """Sum over examples, output positions and kernel positions of ``a aᵀ``, divided by the number of kernel positions."""

    def __init__(self, module: nn.Module) -> None:
        weight = weight_of(module)
        self.module, self.axes = module, axes_of(module)
        self.sum = weight.new_zeros(weight.shape[1], weight.shape[1], dtype=accumulation_dtype(weight))

    def add(self, inputs: Tensor) -> None:
        x = prepare(self.module, inputs.to(self.sum.dtype)).movedim(1, -1)
        matrix = x.reshape(-1, x.shape[-1])
        cover = _cover(self.axes, x)
        if bool((cover == 1).all()):
            self.sum.addmm_(matrix.T, matrix)
        else:
            self.sum.addmm_((x * cover.unsqueeze(-1)).reshape(matrix.shape).T, matrix)

    def total(self) -> Tensor:
        return self.sum


def _cover(axes: list[Axis], x: Tensor) -> Tensor:
    """How often each input position is read by some (output position, kernel position), over the kernel positions."""
    cover = x.new_ones(())
    for axis, size in zip(axes, x.shape[1:-1], strict=True):
        cover = cover.unsqueeze(-1) * _cover_along(axis, size).to(x)
    return cover


def _cover_along(axis: Axis, size: int) -> Tensor:
    length = (size - 1) * axis.stuffing + 1 + max(axis.before, 0) + max(axis.after, 0)
    padded = torch.zeros(length, dtype=torch.float64)
    start = max(-axis.before, 0)  # a transposed convolution may crop instead of pad
    span = axis.stride * (axis.outputs(size) - 1) + 1
    for tap in range(axis.kernel):
        first = start + tap * axis.dilation
        padded[first : first + span : axis.stride] += 1
    at = max(axis.before, 0) + torch.arange(size) * axis.stuffing
    return padded[at] / axis.kernel


class PatchSum:
    """Sum over examples and output positions of ``p pᵀ`` for patches ``p`` in the order of ``weight_of().flatten(1)``."""

    def __init__(self, module: nn.Module) -> None:
        weight = weight_of(module)
        self.module, self.axes = module, axes_of(module)
        self.size = math.prod(weight.shape[1:])
        self.zero = weight.new_zeros((), dtype=accumulation_dtype(weight))
        self.direct: Tensor | None = None
        self.stationary: dict[tuple[int, ...], _Stationary] = {}

    def add(self, inputs: Tensor) -> None:
        x = prepare(self.module, inputs.to(self.zero.dtype))
        if self.axes and all(axis.stride == 1 and axis.stuffing == 1 for axis in self.axes):
            space = tuple(x.shape[2:])
            if space not in self.stationary:
                self.stationary[space] = _Stationary(self.axes, space, x.shape[1], self.zero)
            self.stationary[space].add(x.movedim(1, -1))
            return
        if self.direct is None:
            self.direct = self.zero.new_zeros(self.size, self.size)
        positions = math.prod(axis.outputs(size) for axis, size in zip(self.axes, x.shape[2:], strict=True))
        for part in x.split(max(1, CHUNK // (positions * self.size))):
            matrix = patches(self.module, part).flatten(0, 1)
            self.direct.addmm_(matrix.T, matrix)

    def total(self) -> Tensor:
        total = self.zero.new_zeros(self.size, self.size) if self.direct is None else self.direct
        return sum((part.total() for part in self.stationary.values()), total)


class _Stationary:
    """Patch covariance of a layer with stride 1, where away from the borders only the offset of two taps matters.

    The block of taps (j, j') is the sum over a window of positions u of x[u] x[u + j' - j]ᵀ. All windows are cut into the same
    few regions (first rows, middle, last rows; likewise columns), each offset's product is summed once per region, and
    every block adds up the regions in its window. A 3×3 kernel costs 13 products of the whole input in place of 81.
    """

    def __init__(self, axes: list[Axis], space: tuple[int, ...], channels: int, zero: Tensor) -> None:
        self.axes, self.channels, self.zero = axes, channels, zero
        self.windows = [
            [_clip(tap * a.dilation - a.before, a.outputs(size), size) for tap in range(a.kernel)]
            for a, size in zip(axes, space, strict=True)
        ]
        self.segments = [_segments(windows, size) for windows, size in zip(self.windows, space, strict=True)]
        self.space = space
        self.sums: dict[tuple[tuple[int, ...], tuple[tuple[int, int], ...]], Tensor] = {}

    def add(self, x: Tensor) -> None:
        for key in self._offsets_and_regions():
            offset, region = key
            left, right = self._pair(x, offset, region)
            if key not in self.sums:
                self.sums[key] = self.zero.new_zeros(self.channels, self.channels)
            self.sums[key].addmm_(left.T, right)

    def _offsets_and_regions(self) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
        """Each offset between two taps, up to sign, with the regions in which both positions lie inside the input."""
        for offset in itertools.product(*(range(1 - a.kernel, a.kernel) for a in self.axes)):
            if offset < (0,) * len(offset):
                continue
            steps = [o * a.dilation for o, a in zip(offset, self.axes, strict=True)]
            for region in itertools.product(*self.segments):
                clipped = tuple(
                    (max(low, -step), min(high, size - step))
                    for (low, high), step, size in zip(region, steps, self.space, strict=True)
                )
                if all(low < high for low, high in clipped):
                    yield offset, clipped

    def _pair(self, x: Tensor, offset: tuple[int, ...], region: tuple[tuple[int, int], ...]) -> tuple[Tensor, Tensor]:
        steps = [o * a.dilation for o, a in zip(offset, self.axes, strict=True)]
        here = (slice(None), *(slice(low, high) for low, high in region))
        there = (slice(None), *(slice(low + s, high + s) for (low, high), s in zip(region, steps, strict=True)))
        return x[here].reshape(-1, self.channels), x[there].reshape(-1, self.channels)

    def total(self) -> Tensor:
        taps = list(itertools.product(*(range(a.kernel) for a in self.axes)))
        blocks = self.zero.new_zeros(len(taps), len(taps), self.channels, self.channels)
        for (offset, region), value in self.sums.items():
            for i, tap in enumerate(taps):
                other = tuple(t + o for t, o in zip(tap, offset, strict=True))
                if other in taps and self._covers(tap, region):
                    j = taps.index(other)
                    blocks[i, j] += value
                    if i != j:
                        blocks[j, i] += value.T
        return blocks.permute(2, 0, 3, 1).reshape(self.channels * len(taps), -1)

    def _covers(self, tap: tuple[int, ...], region: tuple[tuple[int, int], ...]) -> bool:
        windows = [self.windows[axis][t] for axis, t in enumerate(tap)]
        return all(w_low <= low and high <= w_high for (w_low, w_high), (low, high) in zip(windows, region, strict=True))


def _clip(start: int, length: int, size: int) -> tuple[int, int]:
    return min(max(start, 0), size), min(max(start + length, 0), size)


def _segments(windows: list[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    cuts = sorted({0, size, *(end for window in windows for end in window)})
    return list(itertools.pairwise(cuts))

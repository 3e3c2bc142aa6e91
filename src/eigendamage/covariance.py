"""Sums of outer products of a layer's inputs: over channels (section 4.5) and over patches (section 2).

Both are the same matrix seen twice: the channel form is the mean of the diagonal blocks of the patch form, one block per
kernel position. Neither extracts patches where it can be helped.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

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
            self.stationary[space].add(x)
            return
        if self.direct is None:
            self.direct = self.zero.new_zeros(self.size, self.size)
        positions = math.prod(axis.outputs(size) for axis, size in zip(self.axes, x.shape[2:], strict=True))
        for part in x.split(max(1, CHUNK // (positions * self.size))):
            matrix = patches(self.module, part).flatten(0, 1)
            self.direct.addmm_(matrix.T, matrix)

    def total(self) -> Tensor:
        parts = [part.total() for part in self.stationary.values()] + ([] if self.direct is None else [self.direct])
        total = parts.pop() if parts else self.zero.new_zeros(self.size, self.size)
        for part in parts:
            total += part
        return total


Region = tuple[tuple[int, int], ...]  # from, to along each axis
Tap = tuple[int, ...]  # a position in the kernel, or the offset of one from another


class _Stationary:
    """Patch covariance of a layer with stride 1, where away from the borders only the offset of two taps matters.

    The block of taps (j, j') is the sum over a window of positions u of x[u] x[u + j' - j]ᵀ. The windows of one offset are cut
    into the same few regions (first rows, middle, last rows; likewise columns), the product is summed once per region, and
    every block adds up the regions in its window. The middle, which lies in every window, takes one convolution for all
    offsets: a 3×3 kernel costs little more than the gradient of a 5×5 one in place of 81 products.

    Where there are fewer regions than distinct blocks, as on small maps, the sums are kept by region and the blocks made of
    them at the end. Elsewhere each product goes to its blocks at once: about half of the matrix is the most that is held.
    """

    def __init__(self, axes: list[Axis], space: tuple[int, ...], channels: int, zero: Tensor) -> None:
        self.axes, self.space, self.channels = axes, space, channels
        own = [_windows(axis, size, 0) for axis, size in zip(axes, space, strict=True)]
        middle = tuple((max(low for low, _ in w.values()), min(high for _, high in w.values())) for w in own)
        inside = math.prod(max(0, high - low) for low, high in middle)
        self.middle = middle if 2 * inside >= math.prod(space) else None  # small maps are all border
        self.taps = list(itertools.product(*(range(axis.kernel) for axis in axes)))
        products = list(self._products())
        pairs = [pair for pair in itertools.product(self.taps, repeat=2) if pair[0] <= pair[1]]
        by_region = len(products) < len(pairs)
        # For every block the sums that it is made of, and for every product the sums that it is added to, by number.
        self.blocks: dict[tuple[Tap, ...], list[int]] = {pair: [] if by_region else [i] for i, pair in enumerate(pairs)}
        self.products: list[tuple[Tap, Region, list[int]]] = []
        for i, (offset, region, taps) in enumerate(products):
            parts = [self.blocks[tap, _sum(tap, offset)] for tap in taps]
            if by_region:
                for part in parts:
                    part.append(i)
            self.products.append((offset, region, [i] if by_region else [number for part in parts for number in part]))
        # One tensor: small ones between a batch's activations would keep freed memory from going back to the system.
        self.sums = zero.new_zeros(min(len(products), len(pairs)), channels, channels)

    def _products(self) -> Iterator[tuple[Tap, Region, list[Tap]]]:
        """Each offset between two taps, up to sign, each region of its windows, and the taps whose windows it lies in."""
        for offset in itertools.product(*(range(1 - axis.kernel, axis.kernel) for axis in self.axes)):
            if offset < (0,) * len(offset):
                continue
            along = [_windows(a, size, o) for a, size, o in zip(self.axes, self.space, offset, strict=True)]
            windows = {tap: tuple(w[t] for w, t in zip(along, tap, strict=True)) for tap in itertools.product(*along)}
            if self.middle is not None:
                yield offset, self.middle, list(windows)
            cuts = [()] * len(along) if self.middle is None else self.middle
            for region in itertools.product(*(_segments([*w.values()], also) for w, also in zip(along, cuts, strict=True))):
                if self.middle is None or not _within(region, self.middle):
                    yield offset, region, [tap for tap, window in windows.items() if _within(region, window)]

    def add(self, x: Tensor) -> None:
        """Add inputs ``[batch, in, *space]``."""
        in_middle = None if self.middle is None else self._products_in_middle(x, self.middle)
        last = x.movedim(1, -1).contiguous()
        for offset, region, numbers in self.products:
            if in_middle is not None and region == self.middle:
                at: tuple[Any, ...] = tuple(o + a.kernel - 1 for o, a in zip(offset, self.axes, strict=True))
                product = in_middle[(..., *at)].contiguous()
            else:
                left, right = self._pair(last, offset, region)
                if len(numbers) == 1:
                    self.sums[numbers[0]].addmm_(left.T, right)
                    continue
                product = left.T @ right
            for number in numbers:
                self.sums[number] += product

    def _products_in_middle(self, x: Tensor, middle: Region) -> Tensor:
        """``[in, in, *offsets]``: for every offset the sum of x[u] x[u + offset]ᵀ, as the gradient of a wider kernel."""
        around = [
            size
            for (low, high), axis, length in reversed(list(zip(middle, self.axes, self.space, strict=True)))
            for size in (axis.reach - low, high + axis.reach - length)
        ]
        inside: list[Any] = [slice(low, high) for low, high in middle]
        here = x[(..., *inside)].contiguous()
        kernel = x.new_empty(self.channels, self.channels, *(2 * axis.kernel - 1 for axis in self.axes))
        n = len(self.axes)
        dilation = [axis.dilation for axis in self.axes]
        _, gradient, _ = torch.ops.aten.convolution_backward(
            here, F.pad(x, around), kernel, None, [1] * n, [0] * n, dilation, False, [0] * n, 1, [False, True, False]
        )
        return gradient

    def _pair(self, x: Tensor, offset: Tap, region: Region) -> tuple[Tensor, Tensor]:
        steps = [o * a.dilation for o, a in zip(offset, self.axes, strict=True)]
        here = (slice(None), *(slice(low, high) for low, high in region))
        there = (slice(None), *(slice(low + s, high + s) for (low, high), s in zip(region, steps, strict=True)))
        return x[here].reshape(-1, self.channels), x[there].reshape(-1, self.channels)

    def total(self) -> Tensor:
        count = len(self.taps)
        total = self.sums.new_empty(self.channels, count, self.channels, count)
        for i, tap in enumerate(self.taps):
            total[:, i] = torch.stack([self._block(tap, other) for other in self.taps], dim=-1)
        return total.view(self.channels * count, -1)

    def _block(self, tap: Tap, other: Tap) -> Tensor:
        if tap > other:
            return self._block(other, tap).T
        block = self.sums.new_zeros(self.channels, self.channels)
        for number in self.blocks[tap, other]:
            block += self.sums[number]
        return block


def _sum(tap: Tap, offset: Tap) -> Tap:
    return tuple(t + o for t, o in zip(tap, offset, strict=True))


def _windows(axis: Axis, size: int, offset: int) -> dict[int, tuple[int, int]]:
    """For each tap that has another ``offset`` taps on: the positions u at which it and the other both lie inside the input."""
    step, outputs = offset * axis.dilation, axis.outputs(size)
    windows = {}
    for tap in range(max(0, -offset), min(axis.kernel, axis.kernel - offset)):
        start = tap * axis.dilation - axis.before
        windows[tap] = (max(start, 0, -step), min(start + outputs, size, size - step))
    return windows


def _segments(windows: list[tuple[int, int]], also: Iterable[int]) -> list[tuple[int, int]]:
    """The windows cut at each other's ends, so that each piece lies in a window wholly or not at all."""
    cuts = sorted({*also, *(end for window in windows for end in window)})
    return [piece for piece in itertools.pairwise(cuts) if any(_within((piece,), (window,)) for window in windows)]


def _within(region: Region, around: Region) -> bool:
    return all(a <= low and high <= b for (low, high), (a, b) in zip(region, around, strict=True))

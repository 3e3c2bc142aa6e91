"""How an operation of torch carries the channels of its first argument to its result."""

from __future__ import annotations

import math
import re
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Label(NamedTuple):
    """Which dimension of a tensor holds channels, and the unit of each of them."""

    dim: int
    units: Tensor


VIEWS = {"view", "_unsafe_view", "_reshape_alias", "squeeze", "unsqueeze"}
REDUCTIONS = {"mean", "sum", "prod", "amax", "amin", "max", "min", "var", "std", "linalg_vector_norm", "select", "unbind"}
CUTS = {"slice", "split", "split_with_sizes"}
SPATIAL = re.compile(
    r"_?(?:(?:adaptive_)?(?:avg|max)_pool|upsample_[a-z_]+|(?:reflection|replication)_pad)(\d)d(?:_with_indices|_aa)?"
)
# Elementwise operations that torch does not tag as such.
ELEMENTWISE = {"_prelu_kernel", "_to_copy", "alias", "copy", "copy_", "detach", "expand", "fill_", "hardswish", "hardswish_"}
ELEMENTWISE |= {"lift_fresh", "masked_fill_", "native_dropout", "zero_"}


def is_elementwise(name: str, func: Any) -> bool:
    return name in ELEMENTWISE or torch.Tag.pointwise in getattr(func, "tags", ())


def carried(operation: str, label: Label, before: Tensor, arguments: dict[str, Any], after: Tensor) -> Label | None:
    """The label of a result; None where the channels are mixed, taken apart, or not understood."""
    dim, units, rank = label.dim, label.units, before.dim()
    if operation in VIEWS:
        return _reshaped(label, before, after)
    if operation in REDUCTIONS:
        return _reduced(label, rank, arguments)
    if operation in CUTS:
        return label if after.shape[dim] == before.shape[dim] else None
    if operation == "permute":
        return Label([place % rank for place in arguments["dims"]].index(dim), units)
    if operation in ("transpose", "t"):
        a, b = arguments.get("dim0", 0) % rank, arguments.get("dim1", -1) % rank
        return Label({a: b, b: a}.get(dim, dim), units)
    if operation == "index":
        return _indexed(label, arguments["indices"])
    if operation == "constant_pad_nd":
        return label if dim < rank - len(arguments["pad"]) // 2 else None
    spatial = SPATIAL.fullmatch(operation)
    return label if spatial and dim < rank - int(spatial[1]) else None


def _reshaped(label: Label, before: Tensor, after: Tensor) -> Label | None:
    """Channels survive where the dimensions in front hold as much as before; dimensions merged from behind repeat them."""
    size, front = len(label.units), math.prod(before.shape[: label.dim])
    if size == 1 or before.numel() == 0 or before.numel() != after.numel():
        return None
    for dim, merged in enumerate(after.shape):
        if math.prod(after.shape[:dim]) == front and merged % size == 0:
            return Label(dim, label.units.repeat_interleave(merged // size))
    return None


def _reduced(label: Label, rank: int, arguments: dict[str, Any]) -> Label | None:
    dims = arguments.get("dim")
    gone = {dim % rank for dim in (dims if isinstance(dims, list | tuple) else [dims]) if dim is not None}
    if not gone or label.dim in gone:
        return None
    return label if arguments.get("keepdim") else Label(label.dim - sum(dim < label.dim for dim in gone), label.units)


def _indexed(label: Label, indices: list[Tensor | None]) -> Label | None:
    """One tensor of positions along another dimension, which takes the place of that dimension."""
    used = {dim: index for dim, index in enumerate(indices) if index is not None}
    if len(used) != 1 or label.dim in used:
        return None
    dim, index = used.popitem()
    return (
        None
        if index.dtype in (torch.bool, torch.uint8)
        else Label(label.dim + (dim < label.dim) * (index.dim() - 1), label.units)
    )

"""Layers of every supported kind, with inputs that fit them, for hypothesis to draw from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

from eigendamage.layers import CONVOLUTIONS, TRANSPOSED

KINDS = ("conv", "transposed", "linear", "huggingface")


@st.composite
def layers(draw: st.DrawFn, kinds: Sequence[str] = KINDS) -> tuple[nn.Module, Tensor]:
    """A layer in double precision and a batch of inputs, with maps as small as the layer takes them."""
    module, shape = draw(_built(draw(st.sampled_from(kinds))))
    module = module.double().requires_grad_(draw(st.booleans()))
    batch = draw(st.lists(st.integers(1, 3), max_size=3)) if not shape[1:] else [draw(st.integers(1, 3))]
    return module, torch.randn(*batch, *shape, dtype=torch.float64)


@st.composite
def _built(draw: st.DrawFn, kind: str) -> tuple[nn.Module, tuple[int, ...]]:
    inputs, outputs = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    bias = draw(st.booleans())
    if kind == "linear":
        return nn.Linear(inputs, outputs, bias), (inputs,)
    if kind == "huggingface":
        return Conv1D(outputs, inputs), (inputs,)
    dims = draw(st.integers(1, 3))

    def each(low: int, high: int | Sequence[int]) -> tuple[int, ...]:
        highs = high if isinstance(high, Sequence) else [high] * dims
        return tuple(draw(st.integers(low, top)) for top in highs)

    walk: dict[str, Any] = {"kernel_size": each(1, 3), "stride": each(1, 3), "dilation": each(1, 2), "bias": bias}
    if kind == "transposed":
        most = [max(pair) - 1 for pair in zip(walk["stride"], walk["dilation"], strict=True)]
        walk |= {"padding": each(0, 2), "output_padding": each(0, most)}
        return TRANSPOSED[dims](inputs, outputs, **walk), (inputs, *_sizes(draw, walk, _transposed_outputs))
    walk["padding_mode"] = draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"]))
    walk["padding"] = draw(st.sampled_from(["same", "valid", each(0, 2), each(0, 2)]))
    if walk["padding"] == "same":
        walk["stride"] = (1,) * dims
    return CONVOLUTIONS[dims](inputs, outputs, **walk), (inputs, *_sizes(draw, walk, _outputs))


def _sizes(draw: st.DrawFn, walk: dict[str, Any], outputs: Any) -> list[int]:
    """Per axis, the smallest size with an output, or a little more."""
    smallest = [next(s for s in range(1, 20) if outputs(walk, axis, s) > 0) for axis in range(len(walk["kernel_size"]))]
    return [size + draw(st.integers(0, 3)) for size in smallest]


def _outputs(walk: dict[str, Any], axis: int, size: int) -> int:
    reach = walk["dilation"][axis] * (walk["kernel_size"][axis] - 1)
    padding = {"same": math.ceil(reach / 2), "valid": 0}.get(walk["padding"], walk["padding"][axis])
    fits = {"reflect": size > padding, "circular": size >= padding}.get(walk["padding_mode"], True)
    return (size + (reach if walk["padding"] == "same" else 2 * padding) - reach) * fits


def _transposed_outputs(walk: dict[str, Any], axis: int, size: int) -> int:
    stride, dilation, kernel = walk["stride"][axis], walk["dilation"][axis], walk["kernel_size"][axis]
    return (size - 1) * stride - 2 * walk["padding"][axis] + dilation * (kernel - 1) + walk["output_padding"][axis] + 1

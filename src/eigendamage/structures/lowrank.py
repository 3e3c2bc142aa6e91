"""Low rank in the whitened metric: the structures that a budget chooses from (beyond the paper).

Each offers a grid of ranks with the loss that K-FAC predicts for it, and is built so that the loss is the least for its ranks.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, bias_of, build_along, build_like, build_pointwise, weight_of
from eigendamage.methods.whitened import balanced, factors, losses_by_rank, losses_by_two_ranks, tucker, whitened
from eigendamage.structures import channels
from eigendamage.structures.base import Grid, Ranks, Stage, Structure, chain

# Ranks offered per axis: all of a narrow layer, evenly spread ones of a wide layer.
GRID = 64


def _spread(limit: int) -> Tensor:
    return torch.arange(1, limit + 1) if limit <= GRID else torch.linspace(1, limit, GRID).round().long()


# --- two factors: linear and pointwise layers, where this is the optimum ----------------------------------------------------


def _svd_limits(shape: LayerShape) -> dict[str, int]:
    return {"rank": min(shape.inputs * shape.taps, shape.outputs)}


def _svd_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * shape.taps * ranks["rank"], shape.core_positions),
        (ranks["rank"] * shape.outputs, shape.output_positions),
    ]


def _svd_grid(weight: Tensor, layer: LayerCurvature) -> Grid:
    ranks = _spread(_svd_limits(layer.shape)["rank"])
    return {"rank": ranks}, losses_by_rank(whitened(weight, layer, "patch").tensor)[ranks - 1]


def _build_svd(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    """The kernel stays in the first stage, which is followed by a 1×1 stage."""
    white = whitened(weight_of(module), layer, "patch")
    left, right = factors(white.tensor, ranks["rank"])
    left, right = balanced(white.output_inverse @ left, right @ white.input_inverse)
    first = right.reshape(-1, *weight_of(module).shape[1:])
    return chain(first=build_like(module, first, None), second=build_pointwise(module, left, bias_of(module)))


# --- 1×1, kernel, 1×1 (Tucker-2), without a first or last stage that has full rank ------------------------------------------


def _tucker_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * ranks["in"] * (ranks["in"] < shape.inputs), shape.front_positions),
        (ranks["in"] * ranks["out"] * shape.taps, shape.core_positions),
        (ranks["out"] * shape.outputs * (ranks["out"] < shape.outputs), shape.output_positions),
    ]


def _tucker_grid(weight: Tensor, layer: LayerCurvature) -> Grid:
    losses = losses_by_two_ranks(whitened(weight, layer, "channel").tensor.flatten(2))
    outputs, inputs = torch.meshgrid(_spread(weight.shape[0]), _spread(weight.shape[1]), indexing="ij")
    full = (outputs == weight.shape[0]) & (inputs == weight.shape[1])  # that is the dense layer
    outputs, inputs = outputs[~full], inputs[~full]
    return {"in": inputs, "out": outputs}, losses[outputs - 1, inputs - 1]


def _build_tucker(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    white = whitened(weight_of(module), layer, "channel")
    u, v = tucker(white.tensor.flatten(2), ranks["out"], ranks["in"])
    core = torch.einsum("or,oi...,ic->rc...", u, white.tensor, v)
    expand, output_scale = _rotation(white.output_inverse @ u)
    reduce, input_scale = _rotation(white.input_inverse @ v)
    core = torch.einsum("sr,rc...,dc->sd...", output_scale, core, input_scale)
    stages: dict[str, nn.Module] = {}
    if reduce is not None:
        stages["reduce"] = build_pointwise(module, reduce.T, None)
    stages["core"] = build_like(module, core, bias_of(module) if expand is None else None)
    if expand is not None:
        stages["expand"] = build_pointwise(module, expand, bias_of(module))
    return chain(**stages)


def _rotation(basis: Tensor) -> tuple[Tensor | None, Tensor]:
    """An outer stage with orthonormal columns, for the sake of fine-tuning, and what is left for the core.

    A basis of full rank is no stage of its own: all of it goes into the core.
    """
    if basis.shape[0] == basis.shape[1]:
        return None, basis
    orthonormal, rest = torch.linalg.qr(basis)
    return orthonormal, rest


# --- one axis after the other: k×1, then 1×k, or the other way round --------------------------------------------------------


def _separable_fits(shape: LayerShape) -> bool:
    return shape.kind == "conv" and len(shape.kernel) == 2 and min(shape.kernel) > 1


def _separable_limits(shape: LayerShape, first: int) -> dict[str, int]:
    return {"rank": min(shape.inputs * shape.kernel[first], shape.outputs * shape.kernel[1 - first])}


def _separable_stages(shape: LayerShape, ranks: Ranks, first: int) -> list[Stage]:
    between = shape.axis_positions[0]
    if first == 1:
        between = shape.input_positions * shape.output_positions // between
    along, across = shape.kernel[first], shape.kernel[1 - first]
    return [
        (shape.inputs * along * ranks["rank"], between),
        (ranks["rank"] * across * shape.outputs, shape.output_positions),
    ]


def _separable_matrix(tensor: Tensor, first: int) -> Tensor:
    """[out · taps of the second axis, in · taps of the first axis]."""
    order = (0, 3, 1, 2) if first == 0 else (0, 2, 1, 3)
    moved = tensor.permute(order)
    return moved.reshape(moved.shape[0] * moved.shape[1], -1)


def _separable_grid(weight: Tensor, layer: LayerCurvature, first: int) -> Grid:
    ranks = _spread(_separable_limits(layer.shape, first)["rank"])
    return {"rank": ranks}, losses_by_rank(_separable_matrix(whitened(weight, layer, "channel").tensor, first))[ranks - 1]


def _build_separable(module: nn.Module, layer: LayerCurvature, ranks: Ranks, first: int) -> nn.Module:
    white = whitened(weight_of(module), layer, "channel")
    outputs, inputs, *kernel = white.tensor.shape
    left, right = factors(_separable_matrix(white.tensor, first), ranks["rank"])
    before = torch.einsum("rik,ij->rjk", right.reshape(-1, inputs, kernel[first]), white.input_inverse)
    after = torch.einsum("oj,jkr->okr", white.output_inverse, left.reshape(outputs, kernel[1 - first], -1))
    left, right = balanced(after.flatten(0, 1), before.flatten(1))
    before, after = right.reshape(before.shape), left.reshape(after.shape).transpose(1, 2)
    return chain(first=build_along(module, before, None, first), second=build_along(module, after, bias_of(module), 1 - first))


SVD = Structure(_svd_limits, _svd_stages, _build_svd, grid=_svd_grid)
TUCKER = Structure(channels.limits, _tucker_stages, _build_tucker, fits=lambda shape: shape.taps > 1, grid=_tucker_grid)
ROWS_COLUMNS, COLUMNS_ROWS = (
    Structure(
        partial(_separable_limits, first=first),
        partial(_separable_stages, first=first),
        partial(_build_separable, first=first),
        fits=_separable_fits,
        grid=partial(_separable_grid, first=first),
    )
    for first in (0, 1)
)

"""Low rank in the metric of K-FAC: the structures that a budget chooses from (beyond the paper).

Each offers a grid of ranks with the loss that K-FAC predicts for it, and is built so that the loss is about the least for its
ranks. They differ in the kernel axes along which their first stage is shared, and in whether they have a third stage.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, bias_of, build_along, build_like, build_pointwise, weight_of
from eigendamage.methods.regression import Problem, leading, losses_by_rank, losses_by_two_ranks, problem, refined, rest
from eigendamage.structures import channels
from eigendamage.structures.base import Grid, Ranks, Stage, Structure, blank, chain, spread

Shared = Callable[[LayerShape], tuple[int, ...]]


def _grid(weight: Tensor, layer: LayerCurvature, shared: Shared, limit: Callable[[LayerShape], dict[str, int]]) -> Grid:
    ranks = spread(limit(layer.shape)["rank"])
    given = problem(weight, layer, shared(layer.shape))
    return {"rank": ranks}, losses_by_rank(given, leading(given, int(ranks[-1])))[ranks - 1]


def _two_factors(module: nn.Module, layer: LayerCurvature, rank: int, shared: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """``[rank, own]`` and ``[out, rank, shared]``, balanced."""
    given = problem(weight_of(module), layer, shared)
    first, core, last = refined(given, leading(given, rank), len(given.weight))
    behind = torch.einsum("oa,abs->osb", last, core)
    left, right = balanced(behind.flatten(0, 1), first.T)
    return right, left.reshape(behind.shape).transpose(1, 2)


def balanced(left: Tensor, right: Tensor) -> tuple[Tensor, Tensor]:
    """Factors of the same product, with orthogonal directions and equally large.

    Those of least loss may differ by orders of magnitude: fine-tuning would overshoot in one of them.
    """
    q, r = torch.linalg.qr(left)
    p, s = torch.linalg.qr(right.T)
    u, scale, v = torch.linalg.svd(r @ s.T)
    return q @ (u * scale.sqrt()), (scale.sqrt()[:, None] * v) @ p.T


# --- two factors, the kernel in the first: for linear and pointwise layers this is the optimum ------------------------------


def _svd_limits(shape: LayerShape) -> dict[str, int]:
    return {"rank": min(shape.inputs * shape.taps, shape.outputs)}


def _svd_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * shape.taps * ranks["rank"], shape.core_positions),
        (ranks["rank"] * shape.outputs, shape.output_positions),
    ]


def _svd_grid(weight: Tensor, layer: LayerCurvature) -> Grid:
    return _grid(weight, layer, lambda shape: (), _svd_limits)


def _build_svd(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    first, second = _two_factors(module, layer, ranks["rank"], ())
    return _svd_of(module, first.reshape(-1, *weight_of(module).shape[1:]), second.flatten(1))


def _sketch_svd(module: nn.Module, ranks: Ranks) -> nn.Module:
    outputs, *kernel = weight_of(module).shape
    return _svd_of(module, blank(module, ranks["rank"], *kernel), blank(module, outputs, ranks["rank"]))


def _svd_of(module: nn.Module, first: Tensor, second: Tensor) -> nn.Module:
    return chain(first=build_like(module, first, None), second=build_pointwise(module, second, bias_of(module)))


# --- 1×1, kernel, 1×1 (Tucker-2), without a first or last stage that has full rank ------------------------------------------


def _tucker_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * ranks["in"] * (ranks["in"] < shape.inputs), shape.front_positions),
        (ranks["in"] * ranks["out"] * shape.taps, shape.core_positions),
        (ranks["out"] * shape.outputs * (ranks["out"] < shape.outputs), shape.output_positions),
    ]


def _whole_kernel(shape: LayerShape) -> tuple[int, ...]:
    return tuple(range(len(shape.kernel)))


def _tucker_grid(weight: Tensor, layer: LayerCurvature) -> Grid:
    given = problem(weight, layer, _whole_kernel(layer.shape))
    inputs, outputs = spread(weight.shape[1]), spread(weight.shape[0])
    losses = losses_by_two_ranks(given, leading(given, weight.shape[1]), inputs.tolist())[:, outputs - 1].flatten()
    pairs = torch.cartesian_prod(inputs, outputs).view(-1, 2)
    offered = (pairs != torch.tensor([weight.shape[1], weight.shape[0]])).any(1)  # full ranks are the dense layer
    return {"in": pairs[offered, 0], "out": pairs[offered, 1]}, losses[offered]


def _build_tucker(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    given = problem(weight_of(module), layer, _whole_kernel(layer.shape))
    first, core, last = _tucker(given, ranks["in"], ranks["out"])
    if ranks["in"] < layer.shape.inputs:
        # Outer stages have orthonormal rows or columns, for the sake of fine-tuning.
        first, scale = torch.linalg.qr(first)
        core = torch.einsum("cb,abs->acs", scale, core)
    if ranks["out"] < layer.shape.outputs:
        last, scale = torch.linalg.qr(last)
        core = torch.einsum("ca,abs->cbs", scale, core)
    else:
        core = torch.einsum("oa,abs->obs", last, core)
    return _tucker_of(module, first, core.reshape(*core.shape[:2], *layer.shape.kernel), last)


def _sketch_tucker(module: nn.Module, ranks: Ranks) -> nn.Module:
    outputs, inputs, *kernel = weight_of(module).shape
    sizes = (inputs, ranks["in"]), (ranks["out"], ranks["in"], *kernel), (outputs, ranks["out"])
    return _tucker_of(module, *(blank(module, *size) for size in sizes))


def _tucker_of(module: nn.Module, first: Tensor, core: Tensor, last: Tensor) -> nn.Module:
    """The stages of these factors; an outer one that is square is part of the core already."""
    stages: dict[str, nn.Module] = {}
    if first.shape[1] < len(first):
        stages["reduce"] = build_pointwise(module, first.T, None)
    expanded = last.shape[1] < len(last)
    stages["core"] = build_like(module, core, None if expanded else bias_of(module))
    if expanded:
        stages["expand"] = build_pointwise(module, last, bias_of(module))
    return chain(**stages)


def _tucker(given: Problem, inputs: int, outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    own = given.weight.shape[1]
    if inputs == own:
        first = torch.eye(own, dtype=given.weight.dtype)
        last, core = rest(given, first, outputs)
        return first, core, last
    return refined(given, leading(given, inputs), outputs)


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


def _separable_grid(weight: Tensor, layer: LayerCurvature, first: int) -> Grid:
    return _grid(weight, layer, lambda shape: (1 - first,), partial(_separable_limits, first=first))


def _build_separable(module: nn.Module, layer: LayerCurvature, ranks: Ranks, first: int) -> nn.Module:
    before, after = _two_factors(module, layer, ranks["rank"], (1 - first,))
    return _separable_of(module, before.reshape(ranks["rank"], layer.shape.inputs, -1), after, first)


def _sketch_separable(module: nn.Module, ranks: Ranks, first: int) -> nn.Module:
    outputs, inputs, *kernel = weight_of(module).shape
    sizes = (ranks["rank"], inputs, kernel[first]), (outputs, ranks["rank"], kernel[1 - first])
    before, after = (blank(module, *size) for size in sizes)
    return _separable_of(module, before, after, first)


def _separable_of(module: nn.Module, before: Tensor, after: Tensor, first: int) -> nn.Module:
    return chain(first=build_along(module, before, None, first), second=build_along(module, after, bias_of(module), 1 - first))


SVD = Structure(_svd_limits, _svd_stages, _build_svd, grid=_svd_grid, sketch=_sketch_svd)
TUCKER = Structure(channels.limits, _tucker_stages, _build_tucker, lambda shape: shape.taps > 1, _tucker_grid, _sketch_tucker)
ROWS_COLUMNS, COLUMNS_ROWS = (
    Structure(
        partial(_separable_limits, first=first),
        partial(_separable_stages, first=first),
        partial(_build_separable, first=first),
        fits=_separable_fits,
        grid=partial(_separable_grid, first=first),
        sketch=partial(_sketch_separable, first=first),
    )
    for first in (0, 1)
)

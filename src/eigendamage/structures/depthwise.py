"""A depthwise core between two bases (section 4.6), and between two pointwise stages of least loss (beyond the paper)."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, weight_of
from eigendamage.methods.depthwise import depthwise_factors
from eigendamage.methods.eigendamage import eigenbasis, strongest
from eigendamage.methods.polyadic import factors, losses_of
from eigendamage.methods.regression import problem
from eigendamage.structures.base import Grid, Ranks, Stage, Structure, blank, rotated, spread
from eigendamage.structures.bottleneck import pruned_basis


def _depthwise_limits(shape: LayerShape) -> dict[str, int]:
    return {"in": shape.inputs, "out": shape.outputs, "depthwise": shape.inputs * shape.outputs}


def _depthwise_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * ranks["depthwise"], shape.front_positions),
        (ranks["depthwise"] * shape.taps, shape.core_positions),
        (ranks["depthwise"] * shape.outputs, shape.output_positions),
    ]


def _build_depthwise(module: nn.Module, layer: LayerCurvature, ranks: Ranks, fisher_norm: bool) -> nn.Module:
    inputs, core, outputs = pruned_basis(module, layer, ranks, "channel")
    values = _kept_values(module, layer, ranks) if fisher_norm else (None, None)
    v, u, diagonals = depthwise_factors(core.flatten(2), ranks["depthwise"], *values)
    kernels = diagonals.T.reshape(-1, 1, *core.shape[2:])
    return rotated(module, inputs @ u, kernels, outputs @ v, groups=len(kernels))


def _kept_values(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> tuple[Tensor, Tensor]:
    basis = eigenbasis(weight_of(module), layer, "channel")
    outputs, inputs = strongest(basis.output_scores, ranks["out"]), strongest(basis.input_scores, ranks["in"])
    return layer.eigen_gradients[0][outputs], layer.eigen_channels[0][inputs]


# --- of least loss, for budgets ---------------------------------------------------------------------------------------------

# The ranks for which the loss is worked out, as shares of the largest one that pays; between them it is interpolated.
NODES = (0.1, 0.2, 0.35, 0.5, 0.75, 1.0)


def _mobile_limits(shape: LayerShape) -> dict[str, int]:
    return {"rank": shape.inputs * shape.outputs}


def _mobile_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    rank = ranks["rank"]
    return [
        (shape.inputs * rank, shape.front_positions),
        (rank * shape.taps, shape.core_positions),
        (rank * shape.outputs, shape.output_positions),
    ]


def _mobile_grid(weight: Tensor, layer: LayerCurvature) -> Grid:
    shape = layer.shape
    most = shape.inputs * shape.outputs * shape.taps // (shape.inputs + shape.outputs + shape.taps)
    most = max(1, min(most, 2 * min(shape.inputs, shape.outputs)))
    nodes = sorted({max(1, round(share * most)) for share in NODES})
    given = problem(weight, layer, _whole_kernel(shape))
    losses = torch.tensor(losses_of(given, nodes), dtype=torch.float64).cummin(0).values
    ranks = spread(most)
    ranks = ranks[ranks >= nodes[0]]
    return {"rank": ranks}, _between(ranks.double(), torch.tensor(nodes, dtype=torch.float64), losses)


def _between(ranks: Tensor, nodes: Tensor, losses: Tensor) -> Tensor:
    """Losses fall about exponentially."""
    logs = losses.clamp(min=1e-30).log()
    if len(nodes) == 1:
        return logs.exp().expand(len(ranks))
    right = torch.searchsorted(nodes, ranks).clamp(1, len(nodes) - 1)
    share = (ranks - nodes[right - 1]) / (nodes[right] - nodes[right - 1])
    return torch.lerp(logs[right - 1], logs[right], share).exp()


def _build_mobile(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    outputs, inputs, taps = factors(problem(weight_of(module), layer, _whole_kernel(layer.shape)), ranks["rank"])
    return _mobile_of(module, inputs, taps.T.reshape(-1, 1, *layer.shape.kernel), outputs)


def _sketch_mobile(module: nn.Module, ranks: Ranks) -> nn.Module:
    outputs, inputs, *kernel = weight_of(module).shape
    rank = ranks["rank"]
    return _mobile_of(module, blank(module, inputs, rank), blank(module, rank, 1, *kernel), blank(module, outputs, rank))


def _mobile_of(module: nn.Module, inputs: Tensor, kernels: Tensor, outputs: Tensor) -> nn.Module:
    return rotated(module, inputs, kernels, outputs, groups=len(kernels))


def _whole_kernel(shape: LayerShape) -> tuple[int, ...]:
    return tuple(range(len(shape.kernel)))


def _has_kernel(shape: LayerShape) -> bool:
    return shape.taps > 1


DEPTHWISE = Structure(_depthwise_limits, _depthwise_stages, partial(_build_depthwise, fisher_norm=False), _has_kernel)
DEPTHWISE_FISHER = Structure(_depthwise_limits, _depthwise_stages, partial(_build_depthwise, fisher_norm=True), _has_kernel)
MOBILE = Structure(_mobile_limits, _mobile_stages, _build_mobile, _has_kernel, _mobile_grid, _sketch_mobile)

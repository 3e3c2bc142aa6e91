"""A depthwise core between two bases (section 4.6)."""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, weight_of
from eigendamage.methods.depthwise import depthwise_factors
from eigendamage.methods.eigendamage import eigenbasis, strongest
from eigendamage.structures.base import Ranks, Stage, Structure, rotated
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


def _has_kernel(shape: LayerShape) -> bool:
    return shape.taps > 1


DEPTHWISE = Structure(_depthwise_limits, _depthwise_stages, partial(_build_depthwise, fisher_norm=False), _has_kernel)
DEPTHWISE_FISHER = Structure(_depthwise_limits, _depthwise_stages, partial(_build_depthwise, fisher_norm=True), _has_kernel)

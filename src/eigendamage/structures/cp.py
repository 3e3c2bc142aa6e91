"""A sum of rank-one kernels (CP): 1×1, one kernel along each axis, 1×1."""

from __future__ import annotations

from torch import nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, bias_of, build_along, build_pointwise, weight_of
from eigendamage.methods.cp import cp_factors
from eigendamage.structures.base import Ranks, Stage, Structure, chain


def _cp_limits(shape: LayerShape) -> dict[str, int]:
    return {"cp": shape.inputs * shape.outputs}


def _cp_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    rank = ranks["cp"]
    along = [(rank * taps, positions) for taps, positions in zip(shape.kernel, shape.axis_positions, strict=True)]
    return [(shape.inputs * rank, shape.input_positions), *along, (rank * shape.outputs, shape.output_positions)]


def _build_cp(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    outputs, inputs, *kernels = cp_factors(weight_of(module), ranks["cp"])
    along = {
        f"axis_{axis}": build_along(module, kernel.T.unsqueeze(1), None, axis, groups=len(kernel.T))
        for axis, kernel in enumerate(kernels)
    }
    return chain(
        factor_in=build_pointwise(module, inputs.T, None), **along, factor_out=build_pointwise(module, outputs, bias_of(module))
    )


CP = Structure(_cp_limits, _cp_stages, _build_cp)

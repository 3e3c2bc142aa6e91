"""As it is, or with fewer channels."""

from __future__ import annotations

from torch import nn

from eigendamage.layers import LayerShape, bias_of, build_like, weight_of
from eigendamage.structures.base import Ranks, Stage, Structure, blank


def limits(shape: LayerShape) -> dict[str, int]:
    return {"in": shape.inputs, "out": shape.outputs}


def stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [(ranks["in"] * ranks["out"] * shape.taps, shape.core_positions)]


def dense_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return stages(shape, limits(shape))


def _sketch(module: nn.Module, ranks: Ranks) -> nn.Module:
    bias = bias_of(module)
    weight = blank(module, ranks["out"], ranks["in"], *weight_of(module).shape[2:])
    return build_like(module, weight, None if bias is None else bias[: ranks["out"]])


CHANNELS = Structure(limits, stages, sketch=_sketch)
DENSE = Structure(lambda shape: {}, dense_stages, sketch=lambda module, ranks: module)

"""As it is, or with fewer channels."""

from __future__ import annotations

from eigendamage.layers import LayerShape
from eigendamage.structures.base import Ranks, Stage, Structure


def limits(shape: LayerShape) -> dict[str, int]:
    return {"in": shape.inputs, "out": shape.outputs}


def stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [(ranks["in"] * ranks["out"] * shape.taps, shape.core_positions)]


def dense_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return stages(shape, limits(shape))


CHANNELS = Structure(limits, stages)
DENSE = Structure(lambda shape: {}, dense_stages)

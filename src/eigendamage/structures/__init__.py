"""What a layer can become: a table of structures, one file each kind, with their costs and how they are built.

A structure replaces a layer by a chain of stock modules with the same inputs and outputs. The bias stays on the last stage,
where it is exact at padded borders too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eigendamage.layers import LayerShape
from eigendamage.structures import bottleneck, channels, cp, depthwise, lowrank
from eigendamage.structures.base import Ranks, Structure, spread
from eigendamage.structures.bottleneck import ROTATIONS, STAGES, merge, parts_of_bottleneck

STRUCTURES: dict[str, Structure] = {
    "dense": channels.DENSE,
    "channels": channels.CHANNELS,
    "bottleneck": bottleneck.BOTTLENECK,
    "merged": bottleneck.MERGED,
    "bottleneck-patch": bottleneck.BOTTLENECK_PATCH,
    "depthwise": depthwise.DEPTHWISE,
    "depthwise-fisher": depthwise.DEPTHWISE_FISHER,
    "mobile": depthwise.MOBILE,
    "cp": cp.CP,
    "svd": lowrank.SVD,
    "tucker": lowrank.TUCKER,
    "rows-columns": lowrank.ROWS_COLUMNS,
    "columns-rows": lowrank.COLUMNS_ROWS,
}


def params(structure: str, shape: LayerShape, ranks: Ranks) -> Any:
    """Parameters of a layer; for tensors of ranks, a tensor."""
    bias = ranks["out"] if structure == "channels" else shape.outputs
    return sum(weights for weights, _ in STRUCTURES[structure].stages(shape, ranks)) + bias * shape.bias


def macs(structure: str, shape: LayerShape, ranks: Ranks) -> Any:
    """Multiply-accumulates of a layer for one example; for tensors of ranks, a tensor."""
    return sum(weights * positions for weights, positions in STRUCTURES[structure].stages(shape, ranks))


def check_ranks(name: str, structure: str, shape: LayerShape, ranks: Ranks) -> None:
    """Raise ValueError unless the structure exists, takes these ranks, and each lies between 1 and its limit."""
    if not isinstance(structure, str) or structure not in STRUCTURES:
        raise ValueError(f"{name}: structure {structure!r} is unknown; there are {', '.join(STRUCTURES)}")
    if not STRUCTURES[structure].fits(shape):
        raise ValueError(f"{name}: cannot become {structure}: it is {shape.kind} with kernel {shape.kernel}")
    limits = STRUCTURES[structure].limits(shape)
    if not isinstance(ranks, Mapping):
        raise ValueError(f"{name}: {structure} takes the ranks {sorted(limits)}; got {ranks!r}")
    if ranks.keys() != limits.keys():
        raise ValueError(f"{name}: {structure} takes the ranks {sorted(limits)}; got {sorted(ranks)}")
    for rank, limit in limits.items():
        if type(ranks[rank]) is not int or not 1 <= ranks[rank] <= limit:
            raise ValueError(
                f"{name}: rank {rank!r} of {structure} must be a whole number from 1 to {limit}; got {ranks[rank]!r}"
            )


__all__ = [
    "ROTATIONS",
    "STAGES",
    "STRUCTURES",
    "Structure",
    "check_ranks",
    "macs",
    "merge",
    "params",
    "parts_of_bottleneck",
    "spread",
]

"""Between which layers channels can go that nothing else sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

from eigendamage.coupling import FIXED, Coupling


@dataclass(frozen=True)
class Link:
    """The outputs of one layer, which only one other layer reads, with what stands between them channel by channel."""

    source: str
    target: str
    channels: int
    repeats: int  # how many inputs of the target, next to each other, are of one channel: more than one behind a flattening
    between: tuple[str, ...]  # batch norm, depthwise convolutions and the like

    def inputs(self, kept: list[int]) -> list[int]:
        """The inputs of the target that belong to these channels."""
        return [channel * self.repeats + index for channel in kept for index in range(self.repeats)]


def links(coupling: Coupling, layers: Collection[str]) -> list[Link]:
    """One link for each of these layers whose output channels are free and are read by exactly one other of them."""
    seen_by: dict[int, set[str]] = defaultdict(set)
    for name, side in coupling.sides.items():
        for unit in (*side.inputs, *side.outputs):
            seen_by[unit].add(name)
    found = (_link(source, coupling, layers, seen_by) for source in coupling.sides if source in layers)
    return [link for link in found if link is not None]


def _link(source: str, coupling: Coupling, layers: Collection[str], seen_by: dict[int, set[str]]) -> Link | None:
    units = coupling.sides[source].outputs
    if FIXED in units or len(set(units)) != len(units) or len(units) < 2:
        return None
    names = set.union(*(seen_by[unit] for unit in units)) - {source}
    readers = [name for name in names if name in layers]
    between = sorted(names - set(readers))
    if len(readers) != 1:
        return None
    target = readers[0]
    inputs = coupling.sides[target].inputs
    repeats = len(inputs) // len(units)
    if inputs != tuple(unit for unit in units for _ in range(repeats)) or set(units) & set(coupling.sides[target].outputs):
        return None
    if set(units) & set(coupling.sides[source].inputs):
        return None
    if any(coupling.sides[name].inputs != units or coupling.sides[name].outputs != units for name in between):
        return None
    return Link(source, target, len(units), repeats, tuple(between))

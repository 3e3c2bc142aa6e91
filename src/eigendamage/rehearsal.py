"""Sizes that a model's own code has written in, found by running it as if channels were gone.

Watching a pass (`coupling`) shows which channels meet. Whether the code would run with fewer of them shows only a rehearsal.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage.coupling import FIXED, Coupling, channel_dim_of, components, hooked, input_of, numbered, watched
from eigendamage.layers import kind_of
from eigendamage.passes import alike, restoring, runs_in_training, tensors_in

WRITTEN_IN = "the model's code has its channel count written in"


def trace(model: nn.Module, run: Callable[[], object], fixed: Collection[str] = ()) -> Coupling:
    """Watch ``run()``, which calls ``model``, in eval mode, on a batch and returns its output; it is called several times.

    The output channels of the layers named in ``fixed`` stay. Model and random state are left as they were found.

    Raises:
        ValueError: if ``run`` returns no tensor.
    """
    return _rehearsed(model, run, watched(model, run, fixed))


@contextmanager
def sliced(model: nn.Module, coupling: Coupling, units: Collection[int]) -> Iterator[None]:
    """Forward passes run as if these units were gone: no layer hands on their channels, and none expects them."""
    kept = _positions(coupling, units, kept=True)

    def before(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        tensor = input_of(args, kwargs)
        dim = channel_dim_of(module, tensor.dim())
        full = tensor.new_zeros(*tensor.shape[:dim], len(coupling.sides[name].inputs), *tensor.shape[dim + 1 :])
        return _replaced(args, kwargs, tensor, full.index_copy(dim, kept[name][0].to(tensor.device), tensor))

    def after(name: str, module: nn.Module, args: object, kwargs: object, output: Tensor) -> Tensor:
        return output.index_select(channel_dim_of(module, output.dim()), kept[name][1].to(output.device))

    modules = {name: model.get_submodule(name) for name in kept}
    with hooked(modules, before, after), _narrowed(modules, kept):
        yield


@contextmanager
def _narrowed(modules: Mapping[str, nn.Module], kept: Mapping[str, tuple[Tensor, Tensor]]) -> Iterator[None]:
    """Layers that give the widths they will have without these units, to code that asks for them."""
    told = [
        (module, attribute, getattr(module, attribute), len(positions))
        for name, module in modules.items()
        for attributes in (("in_channels", "out_channels"), ("in_features", "out_features"))
        for attribute, positions in zip(attributes, kept[name], strict=True)
        if attribute in vars(module)
    ]
    try:
        for module, attribute, _, width in told:
            setattr(module, attribute, width)
        yield
    finally:
        for module, attribute, width, _ in told:
            setattr(module, attribute, width)


@contextmanager
def masked(model: nn.Module, coupling: Coupling, units: Collection[int]) -> Iterator[None]:
    """Forward passes run at full size, but no layer listens to the channels of these units."""
    gone = _positions(coupling, units, kept=False)

    def before(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        tensor = input_of(args, kwargs)
        silenced = tensor.index_fill(channel_dim_of(module, tensor.dim()), gone[name][0].to(tensor.device), 0)
        return _replaced(args, kwargs, tensor, silenced)

    with hooked({name: model.get_submodule(name) for name in gone}, before, lambda *call: None):
        yield


def _positions(coupling: Coupling, units: Collection[int], kept: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """The positions that are kept, or those that are not, on both sides of each module that loses any."""

    def of(side: tuple[int, ...]) -> Tensor:
        return torch.tensor([i for i, unit in enumerate(side) if (unit in gone) != kept], dtype=torch.long)

    gone = frozenset(units)
    sides = coupling.sides.items()
    return {name: (of(s.inputs), of(s.outputs)) for name, s in sides if not gone.isdisjoint((*s.inputs, *s.outputs))}


def _replaced(args: tuple[Any, ...], kwargs: dict[str, Any], old: Tensor, new: Tensor) -> object:
    args = tuple(new if value is old else value for value in args)
    return args, {key: new if value is old else value for key, value in kwargs.items()}


def _rehearsed(model: nn.Module, run: Callable[[], object], coupling: Coupling) -> Coupling:
    """The coupling, with those units fixed that the model's code cannot do without."""
    groups = _groups(coupling)
    sole = _indispensable(coupling)
    trains = runs_in_training(model, run)

    def outputs() -> list[Tensor]:
        with torch.no_grad(), restoring(model):
            return tensors_in(run())

    def holds(chosen: list[list[int]]) -> bool:
        units = [unit for group in chosen for unit in [unit for unit in group if unit not in sole][::2]]
        with masked(model, coupling, units):
            expected = outputs()
        try:
            with sliced(model, coupling, units):
                return alike(outputs(), expected) and (not trains or runs_in_training(model, run))
        except Exception:  # a model may raise anything when a size is not the one it counts on
            return False

    def standing(chosen: list[list[int]], accepted: list[list[int]]) -> list[list[int]]:
        """Groups that can shrink together, found by halving; one group at a time only where something fails."""
        if not chosen or holds(accepted + chosen):
            return accepted + chosen
        half = len(chosen) // 2
        return standing(chosen[half:], standing(chosen[:half], accepted)) if half else accepted

    failing = set(chain(*groups)).difference(*standing(groups, []))
    layers = [name for name in coupling.sides if kind_of(model.get_submodule(name))]
    reasons = {name: WRITTEN_IN for name in layers if not failing.isdisjoint(coupling.sides[name].outputs)}
    return Coupling(numbered(coupling.sides, failing), reasons | coupling.reasons)


def _free(coupling: Coupling) -> list[list[int]]:
    """The free units of each side of each module, in order and once each."""
    sides = {units for side in coupling.sides.values() for units in (side.inputs, side.outputs)}
    return [[unit for unit in dict.fromkeys(units) if unit != FIXED] for units in sides]


def _groups(coupling: Coupling) -> list[list[int]]:
    """Units that share a side of a module, directly or through others."""
    sides = [torch.tensor(units) for units in _free(coupling) if units]
    roots = components(1 + max((int(units.max()) for units in sides), default=-1), [(u[:-1], u[1:]) for u in sides])
    groups: dict[int, list[int]] = {}
    for unit, root in enumerate(roots.tolist()):
        groups.setdefault(root, []).append(unit)
    return list(groups.values())


def _indispensable(coupling: Coupling) -> set[int]:
    """One unit of each side that has no fixed channel, so that no side is ever left empty."""
    sides = [units for side in coupling.sides.values() for units in (side.inputs, side.outputs)]
    return {units[0] for units in sides if FIXED not in units}

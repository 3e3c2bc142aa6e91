"""Which layers a model's own code lets something else stand in for.

A compressed layer is an ``nn.Sequential``. Most code only calls its layers and cannot tell. Some reads their weight, asks for
their class, or calls them past the place where they are registered. A pass with stand-ins everywhere tells which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage.layers import call_by_stages, describe_like
from eigendamage.passes import alike, restoring, runs_in_training

REASON = "the model's code does more with it than call it in its place"
ESCAPES = "a copy of the model goes on calling the original of it"


def irreplaceable(model: nn.Module, run: Callable[[], Tensor], names: Collection[str]) -> dict[str, str]:
    """Those of the layers ``names`` that ``run()``, which calls ``model``, needs themselves, and why."""

    def outputs(standing_in: list[str]) -> list[Tensor]:
        with torch.no_grad(), restoring(model), _standing_in(model, standing_in):
            return [run()]

    names = sorted(name for name in names if name)  # whoever calls the model cannot tell what it is
    expected = outputs([])

    def holds(chosen: list[str]) -> bool:
        try:
            actual = outputs(chosen)
        except Exception:  # a model's code may raise anything when a layer is not what it counts on
            return False
        return (alike(actual, expected) or not repeats) and trained(chosen)

    def trained(standing_in: list[str]) -> bool:
        with _standing_in(model, standing_in):
            return not trains or runs_in_training(model, run)

    def needed(chosen: list[str], accepted: list[str]) -> list[str]:
        """Found by halving; one layer at a time only where something fails."""
        if not chosen or holds(accepted + chosen):
            return []
        if len(chosen) == 1:
            return chosen
        left, right = chosen[: len(chosen) // 2], chosen[len(chosen) // 2 :]
        found = needed(left, accepted)
        return found + needed(right, accepted + [name for name in left if name not in found])

    repeats, trains = True, runs_in_training(model, run)
    if holds(names):
        return {}
    repeats = alike(outputs([]), expected)  # the outputs of a model that does not repeat itself tell nothing
    return dict.fromkeys(needed(names, []), REASON)


def escaping(model: nn.Module, run: Callable[[nn.Module], object], names: Collection[str]) -> dict[str, str]:
    """Those of the layers ``names`` that a copy of the model does not call its own copy of, as from a closure, and why."""
    twin = copy.deepcopy(model, {id(tensor): tensor for tensor in chain(model.parameters(), model.buffers())})
    called: dict[nn.Module, None] = {}

    def saw(module: nn.Module, *args: object) -> None:
        called[module] = None

    layers, copies = ([network.get_submodule(name) for name in names] for network in (model, twin))
    handles = [module.register_forward_hook(saw) for module in (*layers, *copies)]
    try:
        with torch.no_grad(), restoring(model):
            run(twin)
    finally:
        for handle in handles:
            handle.remove()
    if called.keys().isdisjoint(copies):  # a forward function of the user's own that does not call what it is given
        return {}
    return {name: ESCAPES for name, layer in zip(names, layers, strict=True) if layer in called}


@contextmanager
def _standing_in(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """An ``nn.Sequential`` in the place of each of these layers, which are then called by nothing else."""
    layers = [model.get_submodule(name) for name in names]
    substitutes = {layer: describe_like(nn.Sequential(copy.copy(layer)), layer).train(layer.training) for layer in layers}
    children = [(parent, name, child) for parent in model.modules() for name, child in parent._modules.items()]
    places = [(parent, name, child) for parent, name, child in children if child is not None and child in substitutes]
    flags: list[tuple[nn.Module, str, Any]] = []
    try:
        for layer in layers:
            vars(layer)["forward"] = _refuse
        for parent, name, child in places:
            parent._modules[name] = substitutes[child]
        flags = call_by_stages(model)
        yield
    finally:
        for module, flag, value in flags:
            setattr(module, flag, value)
        for parent, name, child in places:
            parent._modules[name] = child
        for layer in layers:
            vars(layer).pop("forward", None)


def _refuse(*args: object, **kwargs: object) -> object:
    raise RuntimeError("something else stands in for this layer")

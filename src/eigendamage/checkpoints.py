"""Where a training stands after an epoch, in one safetensors file, so that it can go on from there."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage import files
from eigendamage.layers import some
from eigendamage.processes import place

KIND = "training"
Rows = list[dict[str, Any]]


def write(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    history: Rows,
    batches: Iterable[Any],
) -> None:
    """Everything that the rest of the training depends on. Only the first of several processes writes."""
    if place()[0] == 0:
        states = {"model": model.state_dict(), "optimizer": _flat(optimizer), "random": _random_states(model, batches)}
        tensors = {f"{kind}.{name}": tensor for kind, state in states.items() for name, tensor in state.items()}
        files.write(path, tensors, {"settings": settings, "history": history}, KIND)


def resume(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    settings: dict[str, Any],
    batches: Iterable[Any],
) -> Rows:
    """Put model, optimiser and random numbers where they were, and return the history; nothing if there is no such file.

    Raises:
        ValueError: The file is damaged, or belongs to another training or model.
    """
    if not path.exists():
        return []
    tensors, content = files.read(path, KIND)
    before = content["settings"]
    for name in before | settings:  # what only one of them has, such as a teacher's share, differs too
        if before.get(name) != settings.get(name):
            raise ValueError(
                f"checkpoint: {path} is of a training with {name}={before.get(name)!r}; "
                f"this one has {name}={settings.get(name)!r}"
            )
    states: dict[str, dict[str, Tensor]] = {"model": {}, "optimizer": {}, "random": {}}
    for key, tensor in tensors.items():
        kind, _, name = key.partition(".")
        states[kind][name] = tensor
    _fill(model, states["model"], path)
    optimizer.load_state_dict({"state": _nested(states["optimizer"]), "param_groups": optimizer.state_dict()["param_groups"]})
    if place()[0] == 0:  # the others' random numbers were their own
        _restore(states["random"], model, batches)
    return content["history"]


def _fill(model: nn.Module, state: dict[str, Tensor], path: Path) -> None:
    held = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in held.items()}
    if wrong := [name for name in shapes.keys() | state.keys() if name not in state or shapes.get(name) != state[name].shape]:
        raise ValueError(f"checkpoint: {path} is of another model; they differ in {some(sorted(wrong))}")
    model.load_state_dict(state)


def _flat(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    states = optimizer.state_dict()["state"]
    return {f"{number}.{name}": value for number, state in states.items() for name, value in state.items() if value is not None}


def _nested(state: dict[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    found: dict[int, dict[str, Tensor]] = {}
    for key, value in state.items():
        number, _, name = key.partition(".")
        found.setdefault(int(number), {})[name] = value
    return found


def _random_states(model: nn.Module, batches: Iterable[Any]) -> dict[str, Tensor]:
    states = {"cpu": torch.get_rng_state()}
    if (device := _device(model)).type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    if generator := _generator(batches):
        states["loader"] = generator.get_state()
    return states


def _restore(states: dict[str, Tensor], model: nn.Module, batches: Iterable[Any]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states and (device := _device(model)).type == "cuda":
        torch.cuda.set_rng_state(states["cuda"], device)
    if "loader" in states and (generator := _generator(batches)):
        generator.set_state(states["loader"])


def _generator(batches: Iterable[Any]) -> torch.Generator | None:
    """Of a DataLoader that draws its order from a generator of its own."""
    generator = getattr(batches, "generator", None)
    return generator if isinstance(generator, torch.Generator) else None


def _device(model: nn.Module) -> torch.device:
    return next(model.parameters()).device

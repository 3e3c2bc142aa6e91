"""Forward passes that leave no trace in the model and in which every layer takes part, and whether two of them agree."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from types import ModuleType

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, run as it is written, with buffers, random state and the mode of every module as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    # Whoever compiled a model has imported this; it takes seconds.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with restoring(model), eager:
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


class NoTensor(TypeError):
    """A pass went through, but what it gave back is not one tensor."""


def runs_in_training(model: nn.Module, run: Callable[[], object]) -> bool:
    """Whether ``run()``, which calls ``model``, gets through in training mode. Some code runs only there."""
    modes = [(module, module.training) for module in model.modules()]
    with torch.no_grad(), restoring(model):
        try:
            model.train()
            run()
        except NoTensor:
            return True
        except Exception:  # the model's code may raise anything
            return False
        finally:
            for module, mode in modes:
                module.training = mode
    return True


def backward(loss: Tensor, anchor: Tensor, again: bool) -> None:
    """``loss.backward()``, but only ``anchor`` of all the tensors that the loss depends on gets a gradient.

    The graph is kept if it is to be gone through ``again``.
    """
    others = [leaf for leaf in _leaves(loss) if leaf is not anchor]
    held = [leaf.grad for leaf in others]
    try:
        for leaf in others:
            leaf.grad = None
        loss.backward(retain_graph=again)
    finally:
        for leaf, gradient in zip(others, held, strict=True):
            leaf.grad = gradient


def _leaves(loss: Tensor) -> list[Tensor]:
    """The tensors in which a backward pass would leave gradients."""
    found: list[Tensor] = []
    seen, waiting = set(), [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            found.append(node.variable)
        waiting += [following for following, _ in node.next_functions]
    return found


@contextmanager
def restoring(model: nn.Module) -> Iterator[None]:
    """Buffers and random state are put back, so that a pass is the same each time."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    with torch.no_grad():
                        buffer.copy_(before)


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """No fused kernel takes the place of the layers, as ``nn.TransformerEncoder`` has."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)


def tensors_in(value: object, seen: set[int] | None = None) -> list[Tensor]:
    """Every tensor in a nest of containers, dataclasses and plain objects."""
    seen = set() if seen is None else seen
    if isinstance(value, Tensor):
        return [value]
    if id(value) in seen or isinstance(value, nn.Module | ModuleType | type):
        return []
    seen.add(id(value))
    parts = [*value.values()] if isinstance(value, Mapping) else []
    parts += value if isinstance(value, list | tuple | set | frozenset | deque) else []
    parts += [getattr(value, field.name) for field in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
    parts += getattr(value, "__dict__", {}).values()
    return [tensor for part in parts for tensor in tensors_in(part, seen)]


def alike(actual: list[Tensor], expected: list[Tensor]) -> bool:
    return len(actual) == len(expected) and all(map(_equal, actual, expected))


def _equal(actual: Tensor, expected: Tensor) -> bool:
    """Equal up to rounding, in proportion to the largest value that is not there to mask others."""
    if actual.shape != expected.shape or not expected.is_floating_point():
        return torch.equal(actual, expected)
    kind = torch.finfo(expected.dtype)
    usual = expected.abs()[expected.abs() < kind.max**0.5]
    scale = float(usual.max()) if usual.numel() else 0.0
    return torch.allclose(actual, expected, rtol=kind.eps**0.5, atol=kind.eps**0.5 * scale, equal_nan=True)

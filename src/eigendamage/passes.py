"""Forward passes that leave no trace in the model and in which every layer takes part, and whether two of them agree."""

from __future__ import annotations

import dataclasses
import sys
from collections import deque
from collections.abc import Iterator, Mapping
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

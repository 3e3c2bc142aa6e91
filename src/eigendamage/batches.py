"""Batches in whatever form a loader gives them, and the model's outputs for one."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy
import torch
from torch import Tensor, nn

from eigendamage.passes import NoTensor, tensors_in

Forward = Callable[[nn.Module, Any], Tensor]


def outputs_of(
    model: nn.Module,
    batch: Any,
    forward: Forward | None = None,
    autocast: torch.dtype | None = None,
) -> Tensor:
    """What the model makes of one batch.

    Raises TypeError for a batch or an output that is no tensor, ValueError for inputs on another device and a model without
    parameters.
    """
    first = next(model.parameters(), None)
    if first is None:
        raise ValueError("model: has no parameters")
    device = first.device
    context = contextlib.nullcontext() if autocast is None else torch.autocast(device.type, dtype=autocast)
    with context:
        outputs = forward(model, batch) if forward else _called(model, _inputs(batch, device))
    outputs = getattr(outputs, "logits", outputs)
    if not isinstance(outputs, Tensor):
        raise NoTensor(
            f"the model returned {type(outputs).__name__}, not a tensor; "
            "pass forward=lambda model, batch: ... that returns the logits"
        )
    return outputs


def pair(batch: Any) -> tuple[Any, Any]:
    """Inputs and targets. Raises TypeError for a batch that is no pair of them."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise TypeError(
            f"batches: each must be a pair (inputs, targets); got {type(batch).__name__}. "
            "For anything else pass forward=lambda model, batch: logits"
        )
    return batch[0], batch[1]


def _inputs(batch: Any, device: torch.device) -> Any:
    inputs, _ = pair(batch)
    if isinstance(inputs, numpy.ndarray | str | int | float | None):
        raise TypeError(f"batches: the inputs must be tensors; got {type(inputs).__name__}")
    if isinstance(inputs, Tensor) and inputs.device != device:
        raise ValueError(f"batches: the inputs are on {inputs.device}, the model is on {device}; move one to the other")
    return inputs


def _called(model: nn.Module, inputs: Any) -> Any:
    try:
        return model(inputs)
    except RuntimeError as error:
        expected = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
        if isinstance(inputs, Tensor) and inputs.dtype != expected:
            raise ValueError(f"batches: the inputs are {inputs.dtype}, the model is {expected} ({error})") from error
        if isinstance(error, torch.OutOfMemoryError):
            raise
        shape = f" of shape {tuple(inputs.shape)}" if isinstance(inputs, Tensor) else ""
        raise ValueError(f"batches: the model cannot be called with inputs{shape} ({error})") from error


class Sample:
    """The first batches of a pass, with what the model made of them: as many as fit."""

    BYTES = 64 << 20

    def __init__(self) -> None:
        self.held: list[tuple[Any, Tensor]] = []
        self.left = self.BYTES

    def keep(self, batch: Any, outputs: Tensor) -> None:
        if self.left > 0:
            self.left -= sum(tensor.numel() * tensor.element_size() for tensor in tensors_in((batch, outputs)))
            self.held.append((batch, outputs.detach().clone()))

    def part(self, examples: int) -> Sample:
        """The first of these batches, which hold about so many examples."""
        part = Sample()
        for batch, outputs in self.held:
            if examples > 0:
                part.held.append((batch, outputs))
            examples -= examples_in(batch, outputs)
        return part


def targets_of(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return batch.get("labels")
    return batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None


def detached(batches: Iterable[Any], examples: int | None) -> Iterator[Any]:
    """The batches without autograd history, the last one cut so that no more than ``examples`` pass."""
    left = examples
    for batch in batches:
        size = batch_size(batch)
        yield _map(batch, lambda t: t) if left is None else _cut(batch, size, left)
        if left is not None:
            left -= size
            if left <= 0:
                return


def last_examples(batches: Iterable[Any], examples: int) -> list[Any]:
    """The batches at the end, the first of them cut so that they hold no more than ``examples``."""
    held: deque[Any] = deque()
    spare = -examples
    for batch in batches:
        held.append(batch)
        spare += batch_size(batch)
        while held and batch_size(held[0]) <= spare:
            spare -= batch_size(held.popleft())
    if held and spare > 0:
        size = batch_size(held[0])
        held[0] = _map(held[0], lambda t: t[spare:] if t.dim() and len(t) == size else t)
    return list(held)


def _cut(batch: Any, size: int, count: int) -> Any:
    return _map(batch, lambda t: t[:count] if t.dim() and len(t) == size else t)


def first_examples(batch: Any, count: int, run: Callable[[Any], object]) -> Any:
    """``count`` examples, or the whole batch where the model counts on its size."""
    size = batch_size(batch)
    few = _cut(batch, size, count)
    try:
        with torch.no_grad():
            run(few)
    except Exception:  # the model's code may raise anything
        return batch
    return few


def in_reverse(batch: Any) -> Any:
    """The same batch with its examples the other way round."""
    size = batch_size(batch)
    return _map(batch, lambda t: t.flip(0) if len(t) == size else t)


def examples_in(batch: Any, outputs: Tensor) -> int:
    """How many examples a pass was over; outputs may have several rows for each, as the tokens of a text."""
    size = batch_size(batch)
    return size if size and len(outputs) % size == 0 else len(outputs)


def batch_size(batch: Any) -> int:
    """Length of the first tensor with a batch dimension."""
    if isinstance(batch, Tensor):
        return len(batch) if batch.dim() else 0
    parts = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else ()
    return next((size for part in parts if (size := batch_size(part))), 0)


def _map(batch: Any, change: Callable[[Tensor], Tensor]) -> Any:
    if isinstance(batch, Tensor):
        return change(batch.detach()) if batch.dim() else batch.detach()
    if isinstance(batch, Mapping):
        return {key: _map(value, change) for key, value in batch.items()}
    if type(batch) in (tuple, list):
        return type(batch)(_map(value, change) for value in batch)
    return batch

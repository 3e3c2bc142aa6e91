"""The gradients of a batch: worked out anew, or replayed from a CUDA graph where starting kernels takes longest."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Of a batch, leaving gradients in the parameters: the loss, without history, and over how many examples it is a mean.
Gradients = Callable[[Any], tuple[Tensor, int]]
# Batches that are gone through as usual before the graph is recorded: by then libraries have chosen how to work.
WARMUP = 3


def gradients_of(objective: Callable[[Any], tuple[Tensor, int]], parameters: Sequence[nn.Parameter], summed: bool) -> Gradients:
    """Of the objective's mean, or where ``summed`` of its sum over examples."""

    def gradients(batch: Any) -> tuple[Tensor, int]:
        value, count = objective(batch)
        for parameter in parameters:
            parameter.grad = None
        (value * count if summed else value).backward()
        return value.detach(), count

    return gradients


class Recorded:
    """Gradients replayed from a CUDA graph, which does the same work on the same memory without Python.

    Batches that are no pair of tensors of the first one's shapes, such as a smaller last one, go the usual way; so do all where
    the model cannot be recorded, with a warning.
    """

    def __init__(self, gradients: Gradients, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients, self.parameters = gradients, parameters
        self.stream = torch.cuda.Stream(parameters[0].device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.left: int | None = WARMUP  # None: it cannot be recorded
        self.batch: tuple[Tensor, ...] = ()

    def __call__(self, batch: Any) -> tuple[Tensor, int]:
        if self.left is None or not _tensors(batch):
            return self.gradients(batch)
        if not self.batch:
            self.batch = tuple(tensor.clone() for tensor in batch)
        if any(_kind(new) != _kind(old) for new, old in zip(batch, self.batch, strict=True)):
            return self.gradients(batch)
        if self.left:
            self.left -= 1
            return self._aside(batch)
        if self.graph is None and not self._record():
            return self.gradients(batch)
        assert self.graph is not None
        for held, tensor in zip(self.batch, batch, strict=True):
            held.copy_(tensor)
        self.graph.replay()
        for parameter, gradient in zip(self.parameters, self.held, strict=True):
            parameter.grad = gradient
        return self.value.clone(), self.count

    def _aside(self, batch: Any) -> tuple[Tensor, int]:
        """On the stream that recording will be on, since memory and libraries' handles belong to one."""
        own = torch.cuda.current_stream(self.stream.device)  # of the model's device, which need not be the current one
        self.stream.wait_stream(own)
        with torch.cuda.stream(self.stream):
            result = self.gradients(batch)
        own.wait_stream(self.stream)
        return result

    def _record(self) -> bool:
        """Whether it could be done. Nothing runs while it is recorded."""
        graph = torch.cuda.CUDAGraph()
        generator = torch.cuda.default_generators[self.stream.device_index]
        random = generator.clone_state()
        try:
            # Twice the stream: where recording ends in an error, torch does not leave the one that it has entered.
            # Other threads may go on meanwhile, such as that of a loader which pins memory.
            recording = torch.cuda.graph(graph, stream=self.stream, capture_error_mode="thread_local")
            with torch.cuda.stream(self.stream), recording:
                self.value, self.count = self.gradients(self.batch)
        except Exception as error:  # as usual it has worked, and what is truly wrong will be raised there
            reason = _reason(error)
            warnings.warn(f"the model cannot be recorded as a CUDA graph, and is trained without: {reason}", stacklevel=2)
            generator.graphsafe_set_state(random)  # else it still takes itself to be recorded, and refuses to work
            self.left = None
            return False
        self.graph, self.held = graph, [parameter.grad for parameter in self.parameters]
        return True


def _tensors(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2 and all(isinstance(x, Tensor) and x.is_cuda for x in batch)


def _reason(error: BaseException) -> str:
    """What came first: the end of a recording that has failed is an error too, and says nothing of why."""
    while error.__context__ is not None:
        error = error.__context__
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.dtype, tensor.device, tensor.stride()

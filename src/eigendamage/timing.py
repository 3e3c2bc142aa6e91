"""Time on this machine: of whole models side by side, and of what a layer could become."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage.cost import called
from eigendamage.layers import channel_dim, deep_copy, kind_of, slice_per_channel
from eigendamage.passes import evaluating
from eigendamage.structures import STRUCTURES
from eigendamage.structures.base import Ranks

# A stage is run at least so often and so long, unless it is that quick; the quickest run counts.
RUNS, SECONDS, MOST_RUNS = 3, 0.02, 140
# Whole models take turns, so often at least, and for about so long if that does not take too often.
TURNS, TOGETHER, MOST_TURNS = 15, 1.0, 200


def interleaved(tasks: Sequence[Callable[[], object]], turns: int) -> list[list[float]]:
    """Seconds of each task in every turn, after one to warm up: what slows the machine down slows all of them."""
    seconds: list[list[float]] = [[] for _ in tasks]
    for turn in range(turns + 1):
        for task, of_task in zip(tasks, seconds, strict=True):
            taken = _seconds(task)
            if turn:
                of_task.append(taken)
    return seconds


def _seconds(task: Callable[[], object]) -> float:
    _finish()
    start = time.perf_counter()
    task()
    _finish()
    return time.perf_counter() - start


def _finish() -> None:
    """An accelerator runs behind; wait for it."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


# Seconds of a stage, and the shape and strides of what it makes.
_REMEMBERED: dict[Hashable, tuple[float, tuple[int, ...], tuple[int, ...]]] = {}


class Stopwatch:
    """Times a model and what its layers could become for ``example_inputs``, on their device, with the threads set now.

    The stages of a layer are timed one by one and added up: the quickest run of each, since what a busy machine adds has
    nothing to do with the stage. A stage that was timed once, in whatever layer, is remembered.
    """

    def __init__(self, model: nn.Module, example_inputs: Any) -> None:
        self.model, self.example_inputs = model, example_inputs
        self.modules = {name: module for name, module in model.named_modules() if not module._modules}
        self.calls: dict[str, list[Tensor]] = {name: [] for name in self.modules}
        with self._quietly():
            with _noting(self.modules, self.calls):
                called(model, example_inputs)
            self.dense = min(interleaved([partial(called, model, example_inputs)], TURNS)[0])
        self.turns = min(max(TURNS, round(TOGETHER / self.dense)), MOST_TURNS)

    def compare(self, other: nn.Module) -> float:
        """The time of another model as a share of this one's: medians of both taking turns."""
        with self._quietly(), evaluating(other):
            models = (self.model, other)
            ours, theirs = interleaved([partial(called, model, self.example_inputs) for model in models], self.turns)
        return statistics.median(theirs) / statistics.median(ours)

    def layer(self, name: str, structure: str, ranks: Ranks) -> float:
        """Seconds of all calls of a layer in one pass, if it became this."""
        sketch = STRUCTURES[structure].sketch
        assert sketch is not None
        with self._quietly():
            built = sketch(self.modules[name], ranks)
            return self._passes(name, built, ranks["in"] if structure == "channels" else None)

    def narrow(self, name: str, channels: int) -> float:
        """Seconds of all calls of a module that keeps its channels apart, if it had so many."""
        module = self.modules[name]
        if kind_of(module) is None:
            module = deep_copy(module).eval()
            slice_per_channel(module, torch.arange(channels))
            with self._quietly():
                return self._passes(name, module, channels)
        with self._quietly():  # a depthwise convolution: taken to become no faster
            return self._passes(name, module, None)

    def _passes(self, name: str, built: nn.Module, channels: int | None) -> float:
        stages = list(built) if isinstance(built, nn.Sequential) else [built]
        return sum(self._stages(stages, _narrowed(x, self.modules[name], channels)) for x in self.calls[name])

    def _stages(self, stages: Sequence[nn.Module], inputs: Tensor) -> float:
        total = 0.0
        for stage in stages:
            device = inputs.device.type
            mixed = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
            state = torch.get_num_threads(), mixed, stage.training, *(weight.stride() for weight in stage.parameters())
            key = (repr(stage), inputs.shape, inputs.stride(), inputs.dtype, str(inputs.device), *state)
            if key not in _REMEMBERED:
                output = stage(inputs)
                _REMEMBERED[key] = (_quickest(partial(stage, inputs)), output.shape, output.stride())
            seconds, shape, stride = _REMEMBERED[key]
            total += seconds
            inputs = torch.empty_strided(shape, stride, dtype=inputs.dtype, device=inputs.device).fill_(0.01)
        return total

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        with torch.no_grad(), evaluating(self.model):
            yield


def _quickest(task: Callable[[], object]) -> float:
    _seconds(task)
    taken = [_seconds(task) for _ in range(RUNS)]
    while sum(taken) < SECONDS and len(taken) < MOST_RUNS:
        taken.append(_seconds(task))
    return min(taken)


def _narrowed(inputs: Tensor, module: nn.Module, channels: int | None) -> Tensor:
    """Inputs like these, with as many channels as are left."""
    dim = channel_dim(module, inputs.dim()) if kind_of(module) else 1
    narrow = inputs if channels is None else inputs.narrow(dim, 0, channels)
    return torch.empty_like(narrow).fill_(0.01)


@contextmanager
def _noting(modules: dict[str, nn.Module], calls: dict[str, list[Tensor]]) -> Iterator[None]:
    def note(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        calls[name] += [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)][:1]

    handles = [module.register_forward_pre_hook(partial(note, name), with_kwargs=True) for name, module in modules.items()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()

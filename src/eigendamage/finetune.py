"""The training loop shared by the demo, the examples and the rounds of iterative pruning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigendamage.batches import pair
from eigendamage.checks import require, require_batches, require_choice, require_number, require_whole
from eigendamage.progress import track


@dataclass(frozen=True)
class Epoch:
    """What one epoch of training left behind."""

    number: int
    loss: float
    learning_rate: float


def finetune(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    epochs: int = 150,
    learning_rate: float = 1e-3,
    momentum: float = 0.9,
    weight_decay: float = 1e-4,
    schedule: str = "steps",
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy,
    progress: bool = True,
) -> list[Epoch]:
    """Train ``model`` in place with SGD; the defaults are those of the paper (section 5.2).

    Args:
        model: any module; it is left in the mode it was found in.
        batches: pairs ``(inputs, targets)``, gone through once an epoch, so an iterator that ends will not do.
        epochs: how often.
        learning_rate: where the schedule starts.
        momentum: of SGD.
        weight_decay: of SGD, on every parameter.
        schedule: ``"steps"`` divides the rate by 10 after 1/2 and after 3/4 of the epochs, ``"cosine"`` brings it to zero
            batch by batch.
        loss: of outputs and targets, averaged over the batch.
        progress: show a bar on a terminal.

    Returns:
        One entry an epoch: the mean training loss and the rate it began with.

    Raises:
        ValueError: for arguments out of range, no batches, or a loss that is not finite.
    """
    require("model", model, nn.Module, "a torch.nn.Module")
    _check(epochs, learning_rate, schedule, batches)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model: has no parameter that requires a gradient, so there is nothing to train")
    optimizer = torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
    modes = [(module, module.training) for module in model.modules()]
    history = []
    try:
        model.train()
        for number in range(epochs):
            rates = _rates(schedule, learning_rate, number, epochs, batches)
            history.append(_epoch(number, model, track(batches, f"epoch {number + 1}", progress), optimizer, rates, loss))
    finally:
        for module, mode in modes:
            module.training = mode
    return history


def _epoch(
    number: int,
    model: nn.Module,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    rates: Iterator[float],
    loss: Callable[[Tensor, Tensor], Tensor],
) -> Epoch:
    total, examples, first_rate = 0.0, 0, math.nan
    for batch, rate in zip(batches, rates, strict=False):
        inputs, targets = pair(batch)
        first_rate = rate if math.isnan(first_rate) else first_rate
        for group in optimizer.param_groups:
            group["lr"] = rate
        value = loss(model(inputs), targets)
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
        total += float(value.detach()) * len(inputs)
        examples += len(inputs)
    if not examples:
        raise ValueError("batches: the loader is empty")
    if not math.isfinite(total):
        raise ValueError(
            f"the loss became {total / examples} in epoch {number + 1}; a smaller learning_rate than {first_rate:g} may help"
        )
    return Epoch(number + 1, total / examples, first_rate)


def _rates(schedule: str, start: float, epoch: int, epochs: int, batches: Iterable[Any]) -> Iterator[float]:
    """The learning rate of every batch of an epoch."""
    if schedule == "steps":
        rate = start * 0.1 ** ((2 * epoch >= epochs) + (4 * epoch >= 3 * epochs)) if epochs > 1 else start
        while True:
            yield rate
    length = len(batches)  # type: ignore[arg-type]
    for step in range(length):
        yield start * (1 + math.cos(math.pi * (epoch + step / length) / epochs)) / 2


def _check(epochs: int, learning_rate: float, schedule: str, batches: Iterable[Any]) -> None:
    require_whole("epochs", epochs, least=0)
    require_number("learning_rate", learning_rate, "above 0", lambda x: x > 0)
    require_choice("schedule", schedule, ("steps", "cosine"))
    require_batches("batches", batches)
    if schedule == "cosine" and not hasattr(batches, "__len__"):
        raise ValueError('schedule: "cosine" must know how many batches there are; give a loader or list with a length')
    if iter(batches) is batches and epochs > 1:
        raise ValueError(f"batches: an iterator ends after one epoch; {epochs} epochs need a list or a DataLoader")

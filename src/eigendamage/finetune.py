"""The training loop shared by the lab, the demo, the examples and the rounds of iterative pruning."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigendamage import checkpoints
from eigendamage.batches import Forward
from eigendamage.checks import require, require_batches, require_choice, require_function, require_number, require_whole
from eigendamage.objective import Objective
from eigendamage.processes import distributed, place, sum_over_processes
from eigendamage.progress import track
from eigendamage.recording import Gradients, Recorded, gradients_of
from eigendamage.synchronised import share_gradients, synchronised


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
    optimizer: str = "sgd",
    warmup: int | float = 0,
    teacher: nn.Module | None = None,
    distill: float = 0.5,
    temperature: float = 2.0,
    autocast: torch.dtype | None = None,
    penalty: Callable[[nn.Module], Tensor] | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    forward: Forward | None = None,
    loss: Callable[[Tensor, Any], Tensor] = F.cross_entropy,
    each_epoch: Callable[[Epoch, nn.Module], object] | None = None,
    cuda_graph: bool = False,
    progress: bool = True,
) -> list[Epoch]:
    """Train ``model`` in place; the defaults are those of the paper (section 5.2).

    Under torch.distributed each process gives its share of every batch, as many batches as the others, and all end with the
    weights that one process with the whole batches would have, up to rounding and random numbers that the model draws.

    Args:
        model: any module; it is left in the mode it was found in.
        batches: pairs ``(inputs, targets)``, gone through once an epoch, so an iterator that ends will not do. Where it, or its
            ``sampler``, has a ``set_epoch``, that is called with the number of epochs done.
        epochs: how often.
        learning_rate: where the schedule starts.
        momentum: of SGD.
        weight_decay: on every parameter.
        schedule: ``"steps"`` divides the rate by 10 after 1/2 and after 3/4 of the epochs, ``"cosine"`` brings it to zero
            batch by batch.
        optimizer: ``"sgd"`` or ``"adamw"``.
        warmup: epochs, or a part of one, over which the rate grows to that of the schedule.
        teacher: a model whose predictions are learned too, such as the dense one.
        distill: the share of that in the loss; 1 needs no targets.
        temperature: that softens the predictions of both.
        autocast: ``torch.bfloat16`` to run the models in mixed precision.
        penalty: of the model, added to the loss of every batch.
        checkpoint: a file that is written after every epoch. Where it is there, the training goes on from it and ends as if it
            had not been interrupted: bit for bit on a CPU, if randomness comes from torch or depends on ``set_epoch`` alone.
        forward: as in `measure`, for batches that are not pairs.
        loss: of outputs and targets, averaged over the batch.
        each_epoch: called with every epoch and the model, before the checkpoint is written. It may change the model's mode.
        cuda_graph: record the work of a batch once and replay it, on a GPU that waits for Python more than it works, as with
            many small layers. The model must do the same for every batch; ``each_epoch`` may change its values in place.
        progress: show a bar on a terminal.

    Returns:
        One entry an epoch: the mean training loss and the rate it began with.

    Raises:
        ValueError: for arguments out of range, no batches, a checkpoint of another training, or a loss that is not finite.
    """
    require("model", model, nn.Module, "a torch.nn.Module")
    _check(epochs, learning_rate, schedule, batches, warmup)
    require_number("momentum", momentum, "at least 0 and below 1", lambda x: 0 <= x < 1)
    require_number("weight_decay", weight_decay, "at least 0", lambda x: x >= 0)
    require_choice("optimizer", optimizer, ("sgd", "adamw"))
    if each_epoch is not None:
        require_function("each_epoch", each_epoch, "an epoch and a model")
    require("cuda_graph", cuda_graph, bool, "True or False")
    objective = Objective(model, teacher, distill, temperature, autocast, penalty, forward, loss)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("model: has no parameter that requires a gradient, so there is nothing to train")
    gradients = gradients_of(objective, parameters, summed=distributed())
    if cuda_graph:
        if parameters[0].device.type != "cuda" or distributed():
            where = "several processes train it" if distributed() else f"the model is on {parameters[0].device}"
            raise ValueError(f"cuda_graph: is for one process with its model on a GPU; {where}")
        gradients = Recorded(gradients, parameters)
    descent: torch.optim.Optimizer = (
        torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum, weight_decay=weight_decay)
        if optimizer == "sgd"
        else torch.optim.AdamW(parameters, lr=learning_rate, weight_decay=weight_decay)
    )
    settings = {
        **{"epochs": epochs, "learning_rate": learning_rate, "momentum": momentum, "weight_decay": weight_decay},
        **{"schedule": schedule, "optimizer": optimizer, "warmup": warmup, "autocast": str(autocast)},
        **({"distill": distill, "temperature": temperature} if teacher is not None else {}),
        **({"batches": len(batches)} if isinstance(batches, Sized) else {}),
    }
    path = _path_of(checkpoint)
    history = []
    if path is not None:
        history = [Epoch(**row) for row in checkpoints.resume(path, model, descent, settings, batches)]
    shown = progress and place()[0] == 0
    with _modes_kept(model, teacher), synchronised(model):
        for number in range(len(history), epochs):
            model.train()
            _announce(batches, number)
            rates = _rates(schedule, learning_rate, number, epochs, warmup, batches)
            history.append(_epoch(number, gradients, track(batches, f"epoch {number + 1}", shown), descent, rates))
            if each_epoch is not None:
                each_epoch(history[-1], model)
            if path is not None:
                checkpoints.write(path, model, descent, settings, [asdict(epoch) for epoch in history], batches)
    return history


def _epoch(
    number: int,
    gradients: Gradients,
    batches: Iterable[Any],
    optimizer: torch.optim.Optimizer,
    rates: Iterator[float],
) -> Epoch:
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    values, counts, first_rate = [], [], math.nan
    for batch, rate in zip(batches, rates, strict=False):
        first_rate = rate if math.isnan(first_rate) else first_rate
        for group in optimizer.param_groups:
            group["lr"] = rate
        value, count = gradients(batch)
        if distributed():
            share_gradients(parameters, count)
        optimizer.step()
        values.append(value)  # to look at it here would make the device wait
        counts.append(count)
    if not values:
        raise ValueError("batches: the loader is empty")
    total = math.fsum(value * count for value, count in zip(torch.stack(values).tolist(), counts, strict=True))
    sums = torch.tensor([total, sum(counts)], dtype=torch.float64)
    loss, seen = sum_over_processes(sums, values[0].device).tolist()
    if not math.isfinite(loss):
        raise ValueError(
            f"the loss became {loss / seen} in epoch {number + 1}; a smaller learning_rate than {first_rate:g} may help"
        )
    return Epoch(number + 1, loss / seen, first_rate)


def _rates(
    schedule: str, start: float, epoch: int, epochs: int, warmup: int | float, batches: Iterable[Any]
) -> Iterator[float]:
    """The learning rate of every batch of an epoch."""
    if schedule == "steps" and not warmup:
        while True:
            yield _step(start, epoch, epochs)
    length = len(batches)  # type: ignore[arg-type]
    for step in range(length):
        done = epoch + step / length
        rate = _step(start, epoch, epochs) if schedule == "steps" else start * (1 + math.cos(math.pi * done / epochs)) / 2
        yield rate * min(1.0, (done + 1 / length) / warmup) if warmup else rate


def _step(start: float, epoch: int, epochs: int) -> float:
    return start * 0.1 ** ((2 * epoch >= epochs) + (4 * epoch >= 3 * epochs)) if epochs > 1 else start


def _announce(batches: Iterable[Any], epoch: int) -> None:
    for holder in (batches, getattr(batches, "sampler", None)):
        set_epoch = getattr(holder, "set_epoch", None)
        if set_epoch is not None:
            set_epoch(epoch)


@contextmanager
def _modes_kept(model: nn.Module, teacher: nn.Module | None) -> Iterator[None]:
    modes = [(module, module.training) for root in (model, teacher) if root is not None for module in root.modules()]
    try:
        if teacher is not None:
            teacher.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _path_of(checkpoint: str | os.PathLike[str] | None) -> Path | None:
    if checkpoint is None:
        return None
    require("checkpoint", checkpoint, str | os.PathLike, "the name of a file")
    path = Path(checkpoint).resolve()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"checkpoint: there is no folder {path.parent}")
    return path


def _check(epochs: int, learning_rate: float, schedule: str, batches: Iterable[Any], warmup: int | float) -> None:
    require_whole("epochs", epochs, least=0)
    require_number("learning_rate", learning_rate, "above 0", lambda x: x > 0)
    require_choice("schedule", schedule, ("steps", "cosine"))
    require_number("warmup", warmup, "a number of epochs, at least 0", lambda x: x >= 0)
    require_batches("batches", batches)
    if not isinstance(batches, Sized):
        for name, value, asked in (("schedule", schedule, schedule == "cosine"), ("warmup", warmup, warmup > 0)):
            if asked:
                raise ValueError(f"{name}: {value!r} must know how many batches there are; give a loader or list with a length")
    if iter(batches) is batches and epochs > 1:
        raise ValueError(f"batches: an iterator ends after one epoch; {epochs} epochs need a list or a DataLoader")

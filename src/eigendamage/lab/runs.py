"""A training and the folder it leaves behind: its configuration, a line of metrics an epoch, and the model."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigendamage.batches import outputs_of
from eigendamage.checks import require, require_choice, require_number, require_whole
from eigendamage.files import write_text
from eigendamage.finetune import Epoch, finetune
from eigendamage.lab.data import Data, Images
from eigendamage.lab.folders import CHECKPOINT, METRICS, MODEL, configuration_of, prepare
from eigendamage.lab.folders import metrics_in as metrics_in
from eigendamage.processes import place, sum_over_processes
from eigendamage.storage import load, save

PRECISIONS: dict[str, torch.dtype | None] = {"float32": None, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Training:
    """How a network is trained, as plain data: ``Training(**json.loads(text))``. The defaults are the paper's fine-tuning."""

    epochs: int = 150
    batch_size: int = 128  # over all processes together
    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: str = "steps"
    warmup: int | float = 0  # in epochs
    optimizer: str = "sgd"
    l1: float = 0.0  # on the scales of batch norm, for Slimming
    precision: str = "float32"
    channels_last: bool = False
    augment: bool = True
    seed: int = 0
    distill: float = 0.0  # the share of the teacher's predictions in the loss

    def __post_init__(self) -> None:
        require_whole("epochs", self.epochs, least=0)
        require_whole("batch_size", self.batch_size, least=1)
        require_number("learning_rate", self.learning_rate, "above 0", lambda x: x > 0)
        require_number("momentum", self.momentum, "at least 0 and below 1", lambda x: 0 <= x < 1)
        for name in ("weight_decay", "warmup", "l1"):
            require_number(name, getattr(self, name), "at least 0", lambda x: x >= 0)
        require_choice("schedule", self.schedule, ("steps", "cosine"))
        require_choice("optimizer", self.optimizer, ("sgd", "adamw"))
        require_choice("precision", self.precision, tuple(PRECISIONS))
        for name in ("channels_last", "augment"):
            require(name, getattr(self, name), bool, "True or False")
        require_whole("seed", self.seed, least=0)
        require_number("seed", self.seed, "below 2**63", lambda x: x < 2**63)
        require_number("distill", self.distill, "between 0 and 1", lambda x: 0 <= x <= 1)

    @property
    def arguments(self) -> dict[str, Any]:
        """What `finetune` is told of it, whatever the data."""
        named = ("epochs", "learning_rate", "momentum", "weight_decay", "schedule", "optimizer", "warmup", "distill")
        return {**{name: getattr(self, name) for name in named}, "autocast": PRECISIONS[self.precision]}


@dataclass(frozen=True)
class Score:
    """Top-1 accuracy, as a share, and the mean cross-entropy."""

    accuracy: float
    loss: float


def evaluate(
    model: nn.Module,
    images: Images,
    *,
    batch_size: int = 500,
    precision: str = "float32",
    channels_last: bool = False,
) -> Score:
    """How good a model is on all of these images. Under torch.distributed each process sees its share of them.

    Raises:
        ValueError: for a precision that is not in `PRECISIONS`.
    """
    require("model", model, nn.Module, "a torch.nn.Module")
    require("images", images, Images, "images of a data set")
    require_choice("precision", precision, tuple(PRECISIONS))
    modes = [(module, module.training) for module in model.modules()]
    correct, loss = [], []
    try:
        model.eval()
        with torch.no_grad():
            for inputs, labels in images.batches(batch_size, channels_last=channels_last):
                outputs = outputs_of(model, (inputs, labels), autocast=PRECISIONS[precision]).float()
                correct.append((outputs.argmax(1) == labels).sum())
                loss.append(F.cross_entropy(outputs, labels, reduction="sum"))
    finally:
        for module, mode in modes:
            module.training = mode
    sums = torch.stack([torch.stack(correct).sum().double(), torch.stack(loss).double().sum()])
    right, total = sum_over_processes(sums, sums.device).tolist()
    return Score(right / len(images), total / len(images))


def train(
    model: nn.Module,
    data: Data,
    training: Training,
    folder: str | os.PathLike[str],
    *,
    teacher: nn.Module | None = None,
    resume: bool = True,
    progress: bool = True,
) -> list[dict[str, Any]]:
    """Train ``model`` in place, and keep in ``folder`` what became of it.

    Interrupted at any moment, the same call goes on and comes to the same end. Where the training has ended before, the model
    gets the weights that it left. Under torch.distributed the first process writes.

    Args:
        model: with the weights to start from.
        data: what it is trained and tested on; it is moved to the model's device.
        training: how.
        folder: made where there is none.
        teacher: the model to learn from, where ``training.distill`` is above 0.
        resume: go on with what is in the folder; otherwise begin anew.
        progress: show bars on a terminal.

    Returns:
        The metrics: a dictionary an epoch.

    Raises:
        ValueError: The folder holds another training.
    """
    require("model", model, nn.Module, "a torch.nn.Module")
    require("data", data, Data, "what load_data(...) returns")
    require("training", training, Training, "a Training")
    if (teacher is not None) != (training.distill > 0):
        raise ValueError(f"teacher: goes with a distill above 0, which is {training.distill}; give both or neither")
    folder = Path(folder)
    first = place()[0] == 0
    if first:
        folder.mkdir(parents=True, exist_ok=True)
        prepare(folder, configuration_of(model, data, training, teacher), resume)
    _wait()
    if (folder / MODEL).is_file():
        model.load_state_dict(load(model, folder / MODEL).state_dict())
        return metrics_in(folder)
    device = next(model.parameters()).device
    data = data.to(device)
    if training.channels_last:
        model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    journal = _Journal(folder if first else None, data.test, training)
    batches = data.train.batches(
        training.batch_size,
        shuffle=True,
        augment=training.augment,
        seed=training.seed,
        channels_last=training.channels_last,
    )
    cuda = [torch.cuda.current_device() if device.index is None else device.index] if device.type == "cuda" else []
    with torch.random.fork_rng(cuda), torch.backends.cudnn.flags(enabled=True, benchmark=True):
        torch.manual_seed(training.seed)
        finetune(
            model,
            batches,
            teacher=teacher,
            **training.arguments,
            penalty=penalty_of(model, training),
            checkpoint=folder / CHECKPOINT,
            each_epoch=journal,
            cuda_graph=device.type == "cuda" and place()[1] == 1,
            progress=progress,
        )
    if first:
        save(model, folder / MODEL)
        (folder / CHECKPOINT).unlink(missing_ok=True)
    _wait()
    return metrics_in(folder)


def penalty_of(model: nn.Module, training: Training) -> Callable[[nn.Module], Tensor] | None:
    """What the training adds to the loss; None where that is nothing."""
    return _L1(model, training.l1) if training.l1 else None


class _L1:
    """The sum of the absolute scales of batch norm."""

    def __init__(self, model: nn.Module, strength: float) -> None:
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.affine]
        self.scales: list[Tensor] = [norm.weight for norm in norms]
        self.strength = strength
        if not norms:
            raise ValueError("l1: is on the scales of batch norm, and the model has none")

    def __call__(self, model: nn.Module) -> Tensor:
        return self.strength * torch.cat(self.scales).abs().sum()


class _Journal:
    """Writes a line of metrics for every epoch."""

    def __init__(self, folder: Path | None, test: Images, training: Training) -> None:
        self.folder, self.test, self.training = folder, test, training
        self.started = time.perf_counter()

    def __call__(self, epoch: Epoch, model: nn.Module) -> None:
        score = evaluate(
            model,
            self.test,
            precision=self.training.precision,
            channels_last=self.training.channels_last,
        )
        now = time.perf_counter()
        line = {
            "epoch": epoch.number,
            "train_loss": epoch.loss,
            "learning_rate": epoch.learning_rate,
            "test_accuracy": score.accuracy,
            "test_loss": score.loss,
            "seconds": round(now - self.started, 3),
        }
        self.started = now
        if self.folder is not None:
            # A run that was stopped between this line and its checkpoint comes here twice.
            before = metrics_in(self.folder)[: epoch.number - 1]
            write_text(self.folder / METRICS, "".join(json.dumps(entry) + "\n" for entry in [*before, line]))


def _wait() -> None:
    """Until every process is here."""
    sum_over_processes(torch.zeros(()), torch.device("cuda" if torch.cuda.is_available() else "cpu"))

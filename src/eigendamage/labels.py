"""From a model's outputs to the summed loss whose gradients make the Fisher."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORED = -100  # torch's own mark for a target that does not count
# A softened prediction is this uncertain, measured as 1 − Σp² and relative to a guess among all classes.
UNCERTAINTY = 0.5
HALVINGS = 40
Loss = Callable[[Tensor, Tensor], Tensor]


class Uniforms:
    """A stream of uniform numbers that does not depend on how many are asked for at a time."""

    BLOCK = 4096

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.left = torch.empty(0, dtype=torch.float64)

    def take(self, count: int) -> Tensor:
        while len(self.left) < count:
            block = torch.rand(self.BLOCK, dtype=torch.float64, generator=self.generator)
            self.left = torch.cat([self.left, block])
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def summed_loss(outputs: Tensor, targets: object, labels: str, task: str, loss: Loss | None, uniforms: Uniforms) -> Tensor:
    """The loss summed over the batch: of sampled labels for the Fisher, of the given ones for the empirical Fisher."""
    if loss is not None:
        return _own_loss(loss, outputs, targets)
    if task == "regression":
        return _gaussian(outputs, targets, labels, uniforms)
    return _categorical(outputs, targets, labels, uniforms)


def softened_loss(outputs: Tensor, targets: object, uniforms: Uniforms) -> Tensor:
    """The loss, summed over the batch, whose gradients say how much the logits of every example count.

    A network that is sure of its training examples has a Fisher of nearly nothing but the few it is unsure of. So each
    example gets a temperature T at which it is unsure, and T times its loss, so that H = diag(p) − ppᵀ for the softened p.
    """
    logits, given = _rows(outputs, targets, "sampled")
    temperatures = _temperatures(logits.detach())
    sampled = _sample(logits.detach() / temperatures[:, None], uniforms.take(len(logits)))
    if given is not None:
        sampled = torch.where(given == IGNORED, given, sampled)
    losses = F.cross_entropy(logits / temperatures[:, None], sampled, reduction="none", ignore_index=IGNORED)
    return (losses * temperatures).sum()


def increased_loss(outputs: Tensor, before: Tensor, targets: object, task: str, loss: Loss | None) -> Tensor:
    """By how much the loss, summed over the batch, is larger than with the outputs of ``before``.

    Where there are no targets it is the divergence from those outputs.
    """
    if loss is not None:
        return _own_loss(loss, outputs, targets) - _own_loss(loss, before, targets)
    if task == "regression":
        middle = targets if isinstance(targets, Tensor) and targets.shape == outputs.shape else before
        return (_precise(outputs - middle).square().sum() - _precise(before - middle).square().sum()) / 2
    logits, given = _rows(outputs, targets, "sampled")
    as_before, _ = _rows(before, targets, "sampled")
    if given is None:
        return F.kl_div(logits.log_softmax(1), as_before.log_softmax(1), reduction="sum", log_target=True)
    after, unchanged = (F.cross_entropy(values, given, reduction="sum", ignore_index=IGNORED) for values in (logits, as_before))
    return after - unchanged


def change_of_outputs(outputs: Tensor, before: Tensor, targets: object, task: str) -> Tensor:
    """½ δᵀHδ of the change of the outputs, summed over the batch, with the H of a softened prediction (`softened_loss`)."""
    if task == "regression":
        return _precise(outputs - before).square().sum() / 2
    logits, given = _rows(before, targets, "sampled")
    change = _rows(outputs, targets, "sampled")[0] - logits
    p = (logits / _temperatures(logits)[:, None]).softmax(1)
    each = (p * change.square()).sum(1) - (p * change).sum(1).square()
    return (each if given is None else each[given != IGNORED]).sum() / 2


def _temperatures(logits: Tensor) -> Tensor:
    """The lowest temperature, at least one, at which each row is uncertain enough; by bisection of its logarithm."""
    wanted = UNCERTAINTY * (1 - 1 / logits.shape[1])
    low, high = logits.new_zeros(len(logits)), (4 * (logits.amax(1) - logits.amin(1)).clamp(min=1)).log()
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        enough = 1 - (logits / middle.exp()[:, None]).softmax(1).square().sum(1) >= wanted
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    already = 1 - logits.softmax(1).square().sum(1) >= wanted
    return torch.where(already, 1.0, high.exp())


def _own_loss(loss: Loss, outputs: Tensor, targets: object) -> Tensor:
    values = loss(outputs, targets)  # type: ignore[arg-type]
    if not isinstance(values, Tensor):
        raise TypeError(f"loss: must return a tensor, one value per example or their mean; got {type(values).__name__}")
    if not values.is_floating_point():
        raise TypeError(f"loss: must return real numbers; got {values.dtype}")
    if values.dim() and len(values) != len(outputs):
        raise ValueError(
            f"loss: must return one value per example or their mean; got {tuple(values.shape)} for {len(outputs)} examples"
        )
    return values * len(outputs) if values.dim() == 0 else values.sum()


def _gaussian(outputs: Tensor, targets: object, labels: str, uniforms: Uniforms) -> Tensor:
    if labels == "sampled":
        noise = math.sqrt(2) * torch.erfinv(2 * uniforms.take(outputs.numel()) - 1)
        wanted = outputs.detach() + noise.to(outputs).reshape(outputs.shape)
    else:
        wanted = _tensor(targets)
        if wanted.shape != outputs.shape:
            raise ValueError(f"targets: have shape {tuple(wanted.shape)}, the model's outputs {tuple(outputs.shape)}")
    return _precise(outputs - wanted).square().sum() / 2


def _categorical(outputs: Tensor, targets: object, labels: str, uniforms: Uniforms) -> Tensor:
    logits, given = _rows(outputs, targets, labels)
    if labels == "sampled":
        sampled = _sample(logits.detach(), uniforms.take(len(logits)))
        given = sampled if given is None else torch.where(given == IGNORED, given, sampled)
    assert given is not None
    return F.cross_entropy(logits, given, reduction="sum", ignore_index=IGNORED)


def _rows(outputs: Tensor, targets: object, labels: str) -> tuple[Tensor, Tensor | None]:
    """Logits ``[rows, classes]`` and, where the targets are classes of these rows, the given labels."""
    if outputs.dim() < 2 or min(outputs.shape) == 0:
        raise ValueError(
            f"classification needs logits [examples, classes]; the model's outputs have shape {tuple(outputs.shape)}"
        )
    given = targets if isinstance(targets, Tensor) and not targets.is_floating_point() else None
    axis = class_axis(outputs, given)
    logits = _precise(outputs.movedim(axis, -1).flatten(0, -2))
    if given is not None and given.numel() == len(logits):
        given = _checked(given.flatten(), logits.shape[1])
    elif labels == "given":
        shown = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
        raise ValueError(f"targets: must be integer classes for outputs of shape {tuple(outputs.shape)}; got {shown}")
    else:
        given = None
    return logits, given


def _precise(values: Tensor) -> Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))


def cross_entropy(outputs: Tensor, targets: Any, reduction: str = "mean") -> Tensor:
    """Torch's own. Raises ValueError for targets that do not fit the outputs, where torch may raise anything."""
    try:
        return F.cross_entropy(outputs, targets, reduction=reduction)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        given = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        what = f"targets: {given} do not fit outputs {tuple(outputs.shape)}"
        raise ValueError(f"{what}: {next(iter(str(error).splitlines()), '')}") from error


def class_axis(outputs: Tensor, given: Tensor | None) -> int:
    """Where the classes are: as the targets show, else last for [N, length, classes] and second for images."""
    if given is not None and given.shape == outputs.shape[:1] + outputs.shape[2:]:
        return 1  # torch's own convention, so it goes first where both would fit
    if given is not None and given.shape == outputs.shape[:-1]:
        return -1
    return -1 if outputs.dim() <= 3 else 1


def _checked(given: Tensor, classes: int) -> Tensor:
    counted = given[given != IGNORED]
    if len(counted) and not 0 <= int(counted.min()) <= int(counted.max()) < classes:
        wrong = int(counted.max()) if int(counted.max()) >= classes else int(counted.min())
        raise ValueError(f"targets: label {wrong} is out of range; the model has {classes} classes, 0 to {classes - 1}")
    return given.long()


def _sample(logits: Tensor, uniforms: Tensor) -> Tensor:
    """One class per row, by inverting the cumulative distribution."""
    cumulative = logits.double().softmax(-1).cumsum(-1)
    threshold = uniforms.to(logits.device)[:, None] * cumulative[:, -1:]
    return (cumulative <= threshold).sum(-1).clamp(max=logits.shape[1] - 1)


def _tensor(targets: object) -> Tensor:
    if not isinstance(targets, Tensor):
        raise TypeError(f'targets: labels="given" needs a tensor; got {type(targets).__name__}')
    return targets

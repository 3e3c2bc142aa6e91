"""What a training makes smaller: the loss of a batch, with a teacher's predictions and a penalty where there are any."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigendamage.batches import Forward, examples_in, outputs_of, targets_of
from eigendamage.checks import require, require_choice, require_function, require_number
from eigendamage.labels import class_axis, cross_entropy


@dataclass(frozen=True, eq=False)
class Objective:
    """The loss of a batch, and over how many examples it is a mean."""

    model: nn.Module
    teacher: nn.Module | None
    distill: float
    temperature: float
    autocast: torch.dtype | None
    penalty: Callable[[nn.Module], Tensor] | None
    forward: Forward | None
    loss: Callable[[Tensor, Any], Tensor]

    def __post_init__(self) -> None:
        if self.teacher is not None:
            require("teacher", self.teacher, nn.Module, "a torch.nn.Module")
            if self.teacher is self.model:
                raise ValueError("teacher: is the model itself; give another one, such as the dense model")
        require_number("distill", self.distill, "between 0 and 1", lambda x: 0 <= x <= 1)
        require_number("temperature", self.temperature, "above 0", lambda x: x > 0)
        require_choice("autocast", self.autocast, (None, torch.bfloat16))
        for name, value, of in (
            ("penalty", self.penalty, "a model"),
            ("forward", self.forward, "a model and a batch"),
        ):
            if value is not None:
                require_function(name, value, of)
        require_function("loss", self.loss, "outputs and targets")

    def __call__(self, batch: Any) -> tuple[Tensor, int]:
        outputs = outputs_of(self.model, batch, self.forward, self.autocast)
        examples = examples_in(batch, outputs)
        if self.autocast is not None:
            outputs = outputs.float()
        if not examples:  # a batch smaller than the number of processes; the others still wait for this one's sums
            return outputs.sum() * 0, 0
        value = outputs.new_zeros(())
        share = self.distill if self.teacher is not None else 0.0
        if share < 1:
            given = self._given(outputs, targets_of(batch))
            value = (1 - share) * given if share else given
        if self.teacher is not None and share:
            with torch.no_grad():
                taught = outputs_of(self.teacher, batch, self.forward, self.autocast)
            value = value + share * _divergence(outputs, taught.to(outputs.dtype), targets_of(batch), self.temperature)
        return value if self.penalty is None else value + self.penalty(self.model), examples

    def _given(self, outputs: Tensor, targets: Any) -> Tensor:
        if targets is None and self.loss is F.cross_entropy:
            raise TypeError("batches: have no targets, which the loss needs; give pairs, a loss, or a teacher with distill=1.0")
        value = (cross_entropy if self.loss is F.cross_entropy else self.loss)(outputs, targets)
        if not isinstance(value, Tensor) or value.dim():
            found = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise ValueError(f"loss: must return the mean over the batch as a tensor without dimensions; got {found}")
        return value


def _divergence(outputs: Tensor, taught: Tensor, targets: Any, temperature: float) -> Tensor:
    """Of the softened predictions, times T² so that its gradients are as large at every temperature."""
    if outputs.shape != taught.shape:
        raise ValueError(f"teacher: its outputs are {tuple(taught.shape)}, those of the model {tuple(outputs.shape)}")
    if outputs.dim() < 2:
        raise ValueError(f"teacher: is learned from by classes; outputs of shape {tuple(outputs.shape)} have none")
    axis = class_axis(outputs, targets if isinstance(targets, Tensor) else None)
    ours, theirs = ((logits / temperature).log_softmax(axis) for logits in (outputs, taught))
    return temperature**2 * F.kl_div(ours, theirs, reduction="none", log_target=True).sum(axis).mean()

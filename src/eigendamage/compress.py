"""Measure, plan and apply in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from eigendamage.batches import Forward, batch_size, detached, outputs_of
from eigendamage.checks import require_batches, require_whole
from eigendamage.cost import Cost, forward_macs, parameters
from eigendamage.measuring import measure
from eigendamage.passes import evaluating
from eigendamage.planning import check_goal, plan, statistics_for
from eigendamage.plans import Plan, loss_text
from eigendamage.surgery import apply
from eigendamage.text import render, si


@dataclass(frozen=True)
class Report:
    """What became of a model. ``print(report)`` is a table; ``report.plan`` has every layer."""

    before: Cost
    after: Cost
    plan: Plan

    def __str__(self) -> str:
        table = Table()
        for header in ("", "dense", "compressed", "left"):
            table.add_column(header, justify="left" if not header else "right")
        for title, key in (("parameters", "params"), ("MACs per example", "macs")):
            before, after = getattr(self.before, key), getattr(self.after, key)
            table.add_row(title, si(before), si(after), f"{after / max(1, before):.1%}")
        table.add_row("predicted increase of the loss", "", loss_text(self.plan.loss), "")
        return render(table)


def compress(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    method: str | None = None,
    forward: Forward | None = None,
    loss: Callable[[Tensor, Tensor], Tensor] | None = None,
    task: str = "classification",
    examples: int | None = None,
    progress: bool = True,
    **planning: Any,
) -> tuple[nn.Module, Report]:
    """A smaller copy of ``model`` within a budget (``macs=0.5``, ``params=0.3``), refitted on the same batches.

    Args:
        model: any module; it stays untouched.
        batches: pairs ``(inputs, targets)``, or whatever ``forward`` understands; a few thousand examples are enough.
        method: as in `plan`; without one a budget finds the best structure for every layer.
        forward: as in `measure`.
        loss: as in `measure`.
        task: as in `measure`.
        examples: use no more than this many.
        progress: show bars on a terminal.
        planning: budgets and further arguments of `plan`.

    Raises:
        ValueError: as `measure`, `plan` and `apply` do.
    """
    check_goal(planning)
    data = _held(batches, examples)
    methods = statistics_for({"method": method, **planning})
    curvature = measure(model, data, methods=methods, forward=forward, loss=loss, task=task, progress=progress)
    chosen = plan(model, curvature, method=method, **planning)
    small = apply(model, chosen, curvature, refit=data, forward=forward)
    return small, Report(_cost(model, data[0], forward), _cost(small, data[0], forward), chosen)


def _held(batches: Iterable[Any], examples: int | None) -> list[Any]:
    """The batches that are used, kept because they are gone through more than once."""
    if examples is not None:
        require_whole("examples", examples, least=1)
    require_batches("batches", batches)
    held = list(detached(batches, examples))
    if not held:
        raise ValueError("batches: the loader is empty")
    return held


def _cost(model: nn.Module, batch: Any, forward: Forward | None) -> Cost:
    with evaluating(model), torch.no_grad():
        return Cost(parameters(model), forward_macs(lambda: outputs_of(model, batch, forward)) // max(1, batch_size(batch)))

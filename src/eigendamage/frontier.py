"""Cost against loss: plans for many budgets from one measurement."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table
from torch import nn

from eigendamage.checks import require_batches, require_choice, require_function, require_whole
from eigendamage.curvature import Curvature
from eigendamage.planning import check_budgets, plan
from eigendamage.plans import Plan, loss_text
from eigendamage.progress import track
from eigendamage.surgery import apply
from eigendamage.text import render, si

BUDGETS = ("macs", "params", "latency")
# The curve is drawn from here to the whole dense model.
LEAST = 0.1


@dataclass(frozen=True)
class Point:
    """One budget, the plan for it, and what was measured of the network, where that was asked for."""

    budget: float
    plan: Plan
    measured: float | None = None


@dataclass(frozen=True)
class Frontier:
    """Budgets from small to large. ``print(frontier)`` is a table, `plot` draws it."""

    currency: str
    points: list[Point]

    def __str__(self) -> str:
        measured = any(point.measured is not None for point in self.points)
        table = Table()
        for header in (self.currency, "parameters", "MACs", "predicted loss", *(["measured"] if measured else [])):
            table.add_column(header, justify="right")
        for point in self.points:
            seen = [] if not measured else ["" if point.measured is None else f"{point.measured:.4g}"]
            table.add_row(f"{point.budget:.3g}", si(point.plan.params), si(point.plan.macs), loss_text(point.plan.loss), *seen)
        return render(table)

    def plot(self, path: str | os.PathLike[str], label: str = "measured") -> None:
        """Draw the curve, and what was measured beside it. Needs matplotlib."""
        from matplotlib import pyplot

        figure, axes = pyplot.subplots(figsize=(6, 4), layout="constrained")
        budgets = [100 * point.budget for point in self.points]
        losses = [point.plan.loss if point.plan.loss is not None else float("nan") for point in self.points]
        (line,) = axes.plot(budgets, losses, "o-", color="C0", label="predicted increase of the loss")
        lines = [line]
        axes.set_xlabel(f"{self.currency} kept, %")
        axes.set_ylabel("predicted increase of the loss")
        axes.grid(alpha=0.3)
        seen = [(100 * point.budget, point.measured) for point in self.points if point.measured is not None]
        if seen:
            other = axes.twinx()
            lines += other.plot(*zip(*seen, strict=True), "s--", color="C1", label=label)
            other.set_ylabel(label)
        axes.legend(handles=lines, loc="best")
        figure.savefig(path, dpi=160)
        pyplot.close(figure)


def frontier(
    model: nn.Module,
    curvature: Curvature,
    *,
    currency: str = "macs",
    budgets: Iterable[float] | None = None,
    points: int = 20,
    measure: Callable[[nn.Module], float] | None = None,
    progress: bool = True,
    **arguments: Any,
) -> Frontier:
    """Plans over a range of budgets: the curve of cost against predicted loss.

    Args:
        model: the model that ``curvature`` was measured on.
        curvature: one measurement serves all budgets.
        currency: ``"macs"``, ``"params"`` or ``"latency"``.
        budgets: fractions of the dense model; by default ``points`` of them from a tenth to all of it, as far as they can be
            reached.
        points: how many, where ``budgets`` does not say.
        measure: judges each network made so, its accuracy or loss on data of yours; nothing is built without it.
        progress: show a bar on a terminal.
        arguments: of `plan` (``method``, ``skip``, ``multiple``, ``example_inputs``) and of `apply` (``refit``, ``forward``).

    Raises:
        ValueError: as `plan` and `apply` do, and for an empty ``budgets``; those that cannot be reached are left out where
            ``budgets`` is not given.
    """
    require_choice("currency", currency, BUDGETS)
    require_whole("points", points, least=2)
    if measure is not None:
        require_function("measure", measure, "a model")
    if currency in arguments:
        raise ValueError(f"{currency}: is what the curve is over; give budgets=[...] of it")
    if budgets is not None:
        if not isinstance(budgets, Iterable):
            raise TypeError(f"budgets: must be fractions of the dense model; got {budgets!r}")
        budgets = list(budgets)
        if not budgets:
            raise ValueError("budgets: there are none; give fractions of the dense model")
        for budget in budgets:
            check_budgets({currency: budget}, None)
    building = {key: arguments.pop(key) for key in ("refit", "forward") if key in arguments}
    if building.get("refit") is not None:
        require_batches("refit", building["refit"])
        building["refit"] = list(building["refit"])  # gone through once for every network
    wanted = _spread(points) if budgets is None else sorted(budgets)
    found = []
    for budget in track(wanted, "planning", progress):
        try:
            found.append(Point(budget, plan(model, curvature, **{**arguments, currency: budget})))
        except ValueError as error:
            if budgets is not None or "cannot be reached" not in str(error):
                raise
    if not found:
        raise ValueError(f"budgets: none of {currency} from {wanted[0]:.2g} to {wanted[-1]:.2g} can be reached")
    if measure is not None:
        made = track(found, "building", progress)
        found = [replace(point, measured=float(measure(apply(model, point.plan, curvature, **building)))) for point in made]
    return Frontier(currency, found)


def _spread(points: int) -> list[float]:
    return [LEAST + (1 - LEAST) * index / (points - 1) for index in range(points)]

"""Iterative pruning (section 4.4): measure, plan, apply and fine-tune, round after round."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from eigendamage.checks import require_batches, require_function, require_whole
from eigendamage.curvature import Curvature
from eigendamage.layers import require_values
from eigendamage.measuring import measure
from eigendamage.methods import METHODS, method_named
from eigendamage.planning import check_cap, check_ratio, plan, statistics_for
from eigendamage.plans import Plan
from eigendamage.surgery import apply


@dataclass(frozen=True, eq=False)
class Round:
    """What one round leaves behind. ``model`` has been fine-tuned."""

    number: int
    model: nn.Module
    plan: Plan
    curvature: Curvature


def iterate(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    finetune: Callable[[nn.Module], object] | None = None,
    rounds: int = 6,
    method: str = "eigendamage",
    ratio: float = 0.5,
    cap: float = 0.5,
    measuring: Mapping[str, Any] | None = None,
    **planning: Any,
) -> Iterator[Round]:
    """Prune a little, fine-tune, and again; the defaults are the paper's. Yields each round, so the caller may stop.

    The bases that a later round finds for the core of a bottleneck merge into its rotations: depth does not grow.

    Args:
        model: stays untouched.
        batches: for the statistics, gone through once a round.
        finetune: trains a model in place after each round; none by default.
        rounds: how many.
        method: as in `plan`.
        ratio: of each round.
        cap: of each round.
        measuring: further arguments of `measure`.
        planning: further arguments of `plan`.

    Raises:
        ValueError: before the first round, for arguments that no round could use.
    """
    require_values(model)
    require_batches("batches", batches)
    require_whole("rounds", rounds, least=1)
    if rounds > 1 and iter(batches) is batches:
        raise ValueError(f"batches: an iterator ends after one round; {rounds} rounds need a list or a DataLoader")
    if method_named(method).removes != "channels" and method != "eigendamage":
        several = [name for name, row in METHODS.items() if row.removes == "channels"]
        raise ValueError(f"method: rounds are of {', '.join((*several, 'eigendamage'))}; got {method!r}, which works in one")
    check_ratio(ratio)
    check_cap(cap)
    if finetune is not None:
        require_function("finetune", finetune, "a model")
    _check_keywords("measuring", measuring or {}, measure)
    _check_keywords("iterate", planning, plan)
    return _rounds(
        model, batches, finetune, rounds, {"method": method, "ratio": ratio, "cap": cap, **planning}, measuring or {}
    )


def _check_keywords(where: str, keywords: Mapping[str, Any], function: Callable[..., object]) -> None:
    for name in keywords.keys() - inspect.signature(function).parameters.keys():
        raise TypeError(f"{where}: there is no argument {name!r}")


def _rounds(
    model: nn.Module,
    batches: Iterable[Any],
    finetune: Callable[[nn.Module], object] | None,
    rounds: int,
    planning: Mapping[str, Any],
    measuring: Mapping[str, Any],
) -> Iterator[Round]:
    for number in range(1, rounds + 1):
        curvature = measure(model, batches, **{"methods": statistics_for(planning), **measuring})
        chosen = plan(model, curvature, **planning)
        model = apply(model, chosen, curvature)
        if finetune is not None:
            finetune(model)
        yield Round(number, model, chosen, curvature)

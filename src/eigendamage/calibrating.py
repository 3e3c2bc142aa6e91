"""Trials: what really becomes of the outputs when layers change, and of the loss when the whole network does.

K-FAC takes what happens at the positions of a layer, and in different layers, to be unrelated. In front of a global pooling
errors add up instead: the quadratic of such a layer is too small by as much as the number of positions. So every layer is
changed once, alone, and its predictions follow what was seen. Then a few plans are carried out: a trained network is so sure of
its examples that their loss hardly moves at first and then rises fast, and errors of layers compound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import nn

from eigendamage.budgets import best_plan, plan_of
from eigendamage.calibration import Calibration
from eigendamage.curvature import Curvature
from eigendamage.offers import Offer, Offers, offers
from eigendamage.plans import Choice
from eigendamage.surgery import apply

# Increases of the loss that whole networks aim at, and the quadratic to begin with, which is also that of single layers.
AIMS = (0.1, 0.02, 0.4)
FIRST = 0.2
ALONE = 0.05
# What is taken for an increase where none is seen, so that the next trial goes further.
LEAST = 1e-3
# No layer's prediction is corrected by more.
MOST = 1e3

Judged = Callable[[nn.Module], float]


def calibrated(
    model: nn.Module, curvature: Curvature, layers: dict[str, Choice], unit: float, change: Judged | None, increase: Judged
) -> Calibration:
    """From trials on ``model``.

    Args:
        model: the one that was measured.
        curvature: not calibrated yet.
        layers: what budgets start from.
        unit: what an increase of the loss is large or small beside.
        change: the quadratic of the change of a model's outputs; None where the loss has no such form.
        increase: by how much the loss of a model is larger.
    """
    if not 0 < unit < math.inf or all(choice.reason for choice in layers.values()):
        return Calibration()
    with torch.no_grad():
        calibration = Calibration()
        if change is not None:
            calibration = Calibration((), *_scales(model, curvature, offers(model, curvature, layers), ALONE * unit, change))
            curvature = replace(curvature, calibration=calibration)
        return replace(calibration, trials=Calibration.of(_trials(model, curvature, layers, unit, increase)).trials)


# --- layers, one at a time --------------------------------------------------------------------------------------------------


def _scales(
    model: nn.Module, curvature: Curvature, offered: Offers, aim: float, change: Judged
) -> tuple[dict[str, float], dict[str, float]]:
    """What the quadratic of every layer, and of every link by its source, is to be multiplied with."""

    def scale(predicted: float, becomes: Mapping[str, int]) -> float:
        plan = plan_of(curvature, offered, {}, [becomes.get(offer.name, 0) for offer in offered.layers])
        seen = change(apply(model, plan, curvature))
        return min(max(seen / predicted, 1 / MOST), MOST) if predicted > 0 and 0 < seen < math.inf else 1.0

    def nearest(offer: Offer, inlet: int, outlet: int) -> int | None:
        fits = (offer.inlets == inlet) & (offer.outlets == outlet)
        fits[0] = False
        far = (offer.losses.clamp(min=1e-30).log() - math.log(aim)).abs()
        return int(torch.where(fits, far, torch.inf).argmin()) if bool(fits.any()) else None

    by_name = {offer.name: offer for offer in offered.layers}
    alone = {}
    for name, offer in by_name.items():
        option = nearest(offer, 0, 0)
        if option is not None:
            alone[name] = scale(float(offer.losses[option]), {name: option})
    between = {}
    for source, width in offered.widths.items():
        target = by_name[width.link.target]
        if len(width.widths) > 1:
            at = 1 + int((width.losses[1:].clamp(min=1e-30).log() - math.log(aim)).abs().argmin())
            behind, ahead = nearest(by_name[source], 0, at), nearest(target, at, 0)
            if behind is not None and ahead is not None:
                between[source] = scale(float(width.losses[at]), {source: behind, target.name: ahead})
    return alone, between


# --- the whole network ------------------------------------------------------------------------------------------------------


def _trials(
    model: nn.Module, curvature: Curvature, layers: dict[str, Choice], unit: float, increase: Judged
) -> list[tuple[float, float]]:
    offered = offers(model, curvature, layers)
    trials: list[tuple[float, float]] = []
    wanted = FIRST * unit
    for aim in (*AIMS, None):
        plan = best_plan(curvature, offered, layers, {"loss": wanted})  # without trials yet, so of the quadratic itself
        quadratic = plan.loss or 0.0
        if quadratic in (q for q, _ in trials):
            break
        trials.append((quadratic, increase(apply(model, plan, curvature))))
        if aim is not None:
            wanted = _towards(aim * unit, trials, LEAST * unit)
    return trials


def _towards(aim: float, trials: list[tuple[float, float]], least: float) -> float:
    """The quadratic that may have this increase: from the nearest trial, as its square root."""
    near = [(max(quadratic, least), max(increase, least)) for quadratic, increase in trials]
    quadratic, increase = min(near, key=lambda trial: abs(math.log(trial[1] / aim)))
    return quadratic * (aim / increase) ** 0.5

"""From offers to a plan under budgets: the best structures for the whole network, or a method of the paper at equal cost."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from eigendamage.curvature import Curvature
from eigendamage.methods import BEST
from eigendamage.offers import Offer, Offers, whole_costs
from eigendamage.plans import Choice, Latency, Plan, kept_where
from eigendamage.solver import Options, cheapest, solve
from eigendamage.surgery import sketched
from eigendamage.timing import Stopwatch

RATIO_STEPS = 20
# How often a plan is timed and made anew to come near a budget of time, and what is near enough.
TIMINGS = 6
NEAR = 0.97

LAST = "it is the last linear layer"

Fractions = Mapping[str, float]


def dense_layers(curvature: Curvature, reasons: Mapping[str, str], skipped: Collection[str]) -> dict[str, Choice]:
    """Every layer as it is, with its reason to stay so where it has one: what plans start from."""
    reasons = {**dict.fromkeys(skipped, "skipped on request"), **reasons}
    return {name: Choice(layer.shape, reason=reasons.get(name, "")) for name, layer in curvature.layers.items()}


def layers_for_budgets(curvature: Curvature, skipped: Collection[str], last_linear: str = "leave") -> dict[str, Choice]:
    """What budgets start from. Raises ValueError if the statistics that they need were not collected."""
    curvature.require(("patches", "gradients" if "gradients" in curvature.collected else "softened"), "a budget")
    layers = dense_layers(curvature, curvature.reasons | curvature.whole, skipped)
    if curvature.last_linear and last_linear == "leave":
        layers[curvature.last_linear].reason = layers[curvature.last_linear].reason or LAST
    return layers


def best_plan(curvature: Curvature, offered: Offers, layers: Mapping[str, Choice], budgets: Mapping[str, float]) -> Plan:
    """The least predicted loss within budgets that are fractions of the dense model.

    With a budget of loss, an absolute increase: the fewest multiply-accumulates.
    """
    chosen = _solved(curvature, offered, budgets)
    if chosen is None:
        raise ValueError(_unreachable(offered, budgets))
    return plan_of(curvature, offered, layers, chosen)


def plan_of(curvature: Curvature, offered: Offers, layers: Mapping[str, Choice], chosen: Sequence[int]) -> Plan:
    """The plan of chosen options; ``layers`` say why others stay dense."""
    plan = Plan(BEST, {name: Choice(choice.shape, reason=choice.reason) for name, choice in layers.items()})
    for offer, index in zip(offered.layers, chosen, strict=True):
        structure, ranks = offer.labels[index]
        reason = "dense serves the budget best" if structure == "dense" else ""
        choice = Choice(curvature[offer.name].shape, structure, ranks, float(offer.losses[index]), reason)
        if "latency" in offer.costs:
            choice.seconds, choice.dense_seconds = (float(offer.costs["latency"][i]) for i in (index, 0))
        plan.layers[offer.name] = choice
    if curvature.coupling is not None:
        plan.kept = kept_where(curvature.coupling, _kept_units(curvature, offered, chosen))
        for name in plan.kept.keys() & plan.layers.keys() - {offer.name for offer in offered.layers}:
            # A depthwise convolution between two layers loses the channels that they lose.
            plan.layers[name] = Choice(curvature[name].shape, "channels", {"in": 1, "out": len(plan.kept[name].outputs)})
    _calibrate(plan, curvature)
    return plan


def _solved(curvature: Curvature, offered: Offers, budgets: Mapping[str, float]) -> list[int] | None:
    limits = {key: value * offered.whole[key] - offered.beside(key) for key, value in budgets.items() if key != "loss"}
    if "loss" in budgets:
        limits["loss"] = curvature.calibration.quadratic(budgets["loss"])
    if not offered.chains:
        return [] if min(limits.values()) >= 0 else None
    chains = [[_options(offer, list(limits)) for offer in chain] for chain in offered.chains]
    return solve(chains, torch.tensor(list(limits.values()), dtype=torch.float64))


def _options(offer: Offer, currencies: Sequence[str]) -> Options:
    """A budget of loss makes it a currency, and multiply-accumulates what there should be least of."""
    costs = {**offer.costs, "loss": offer.losses}
    aim = offer.costs["macs"] if "loss" in currencies else offer.losses
    return Options(aim, torch.stack([costs[key] for key in currencies], dim=1), offer.labels, offer.inlets, offer.outlets)


def _kept_units(curvature: Curvature, offered: Offers, chosen: Sequence[int]) -> Tensor:
    """Which of the units of coupled channels stay."""
    assert curvature.coupling is not None
    kept = torch.ones(curvature.coupling.count, dtype=torch.bool)
    for offer, index in zip(offered.layers, chosen, strict=True):
        if offer.name in offered.widths:
            width = offered.widths[offer.name]
            gone = width.order[width.widths[int(offer.outlets[index])] :]
            kept[torch.tensor(curvature.coupling.sides[offer.name].outputs)[gone]] = False
    return kept


def _calibrate(plan: Plan, curvature: Curvature) -> None:
    """Losses in units of the loss, of which each layer has its share."""
    total = sum(choice.loss or 0.0 for choice in plan.layers.values())
    if total > 0:
        scale = curvature.calibration.increase(total) / total
        for choice in plan.layers.values():
            choice.loss = (choice.loss or 0.0) * scale


def _unreachable(offered: Offers, budgets: Mapping[str, float]) -> str:
    wanted = ", ".join(f"{key}={value:g}" for key, value in budgets.items())
    least = {key: _least(offered, key) for key in budgets if key != "loss"}
    reach = ", ".join(f"{key}={value:.3g}" for key, value in least.items())
    together = " together" if len(budgets) > 1 else ""
    return f"the budget {wanted} cannot be reached{together}: the least that this model's layers can become is {reach}"


def _least(offered: Offers, currency: str) -> float:
    """The least fraction that can be reached of one currency by itself."""
    layers = [[_options(offer, [currency]) for offer in chain] for chain in offered.chains]
    reached = float(cheapest(layers)[0]) if layers else 0.0
    return (reached + offered.beside(currency)) / max(offered.whole[currency], 1e-30)


# --- time -------------------------------------------------------------------------------------------------------------------


def timed_plan(
    model: nn.Module,
    curvature: Curvature,
    offered: Offers,
    layers: Mapping[str, Choice],
    budgets: Mapping[str, float],
    stopwatch: Stopwatch,
) -> Plan:
    """A plan that also holds a budget of measured time.

    Times of layers are not all of it: what a plan promises is measured, and the budget that it is made for is moved until what
    is measured comes near the one wanted, from below. Where the layers' times leave no hope, the quickest plan has its chance:
    a busy machine adds more to a whole pass than to a short one of a single layer.
    """
    wanted = budgets["latency"]
    floor = _least(offered, "latency") * (1 + 1e-9)
    aim = max(wanted, floor)
    best: Plan | None = None
    least = float("inf")
    for _ in range(TIMINGS):
        try:
            plan = best_plan(curvature, offered, layers, {**budgets, "latency": aim})
        except ValueError as error:
            if best is None and aim >= wanted:
                raise ValueError(_unreachable(offered, budgets)) from error
            break
        reached = stopwatch.compare(sketched(model, plan))
        predicted = sum(choice.seconds or 0.0 for choice in plan.layers.values()) + offered.beside("latency")
        plan.latency = Latency(stopwatch.dense, predicted, reached * stopwatch.dense)
        least = min(least, reached)
        if reached <= wanted and (best is None or _loss(plan) < _loss(best)):
            best = plan
        if NEAR * wanted <= reached <= wanted:
            break
        before, aim = aim, max(min(aim * (NEAR + 1) / 2 * wanted / reached, 1.0), floor)
        if aim == before:
            break
    if best is None:
        if floor > wanted:
            raise ValueError(_unreachable(offered, budgets))
        raise ValueError(f"the budget latency={wanted:g} cannot be reached: the least that was measured is latency={least:.3g}")
    return best


def _loss(plan: Plan) -> float:
    return plan.loss if plan.loss is not None else float("inf")


# --- the paper's methods ----------------------------------------------------------------------------------------------------


def at_equal_cost(model: nn.Module, curvature: Curvature, budgets: Fractions, plan_at: Callable[[float], Plan]) -> Plan:
    """A method of the paper within the budgets: the smallest ratio at which they hold."""
    whole = whole_costs(model, curvature)
    shapes = [layer.shape for layer in curvature.layers.values()]
    beside = {key: whole[key] - sum(getattr(shape, key) for shape in shapes) for key in budgets}

    def cost(plan: Plan, key: str) -> float:
        gone = _gone_beside(model, plan) if key == "params" else 0
        return float(getattr(plan, key) + beside[key] - gone)

    def holds(plan: Plan) -> bool:
        return all(cost(plan, key) <= fraction * whole[key] for key, fraction in budgets.items())

    low, high = 0.0, 1.0 - 1e-9
    best = plan_at(high)
    if not holds(best):
        least = {key: cost(best, key) / max(1, whole[key]) for key in budgets}
        reach = ", ".join(f"{key}={value:.3g}" for key, value in least.items())
        raise ValueError(f"the budget cannot be reached by this method with this cap: the least is {reach}")
    for _ in range(RATIO_STEPS):
        middle = (low + high) / 2
        plan = plan_at(middle)
        if holds(plan):
            best, high = plan, middle
        else:
            low = middle
    return best


def _gone_beside(model: nn.Module, plan: Plan) -> int:
    """The parameters that batch norm and the like, which are none of the plan's layers, lose with their channels."""
    gone = 0
    for name in plan.kept.keys() - plan.layers.keys():
        for parameter in model.get_submodule(name).parameters():
            gone += len(parameter) - len(plan.kept[name].outputs)
    return gone

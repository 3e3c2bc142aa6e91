"""From curvature to a plan under budgets: the best structures for the whole network, or a method of the paper at equal cost."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from eigendamage import structures
from eigendamage.cost import parameters
from eigendamage.curvature import Curvature
from eigendamage.layers import candidates, weight_of
from eigendamage.methods import BEST
from eigendamage.plans import Choice, Plan
from eigendamage.solver import Options, solve
from eigendamage.structures import STRUCTURES

RATIO_STEPS = 20


def targets(model: nn.Module, curvature: Curvature, fractions: Mapping[str, float]) -> dict[str, float]:
    """What is left for the layers in each currency, of a budget given as a fraction of the whole dense model."""
    whole, ours = _whole(model, curvature), _of_layers(curvature)
    return {name: fraction * whole[name] - (whole[name] - ours[name]) for name, fraction in fractions.items()}


def _whole(model: nn.Module, curvature: Curvature) -> dict[str, int]:
    """What the dense model costs: fewer parameters than its layers together where some share them."""
    return {"params": parameters(model), "macs": max(curvature.macs, _of_layers(curvature)["macs"])}


def _of_layers(curvature: Curvature) -> dict[str, int]:
    shapes = [layer.shape for layer in curvature.layers.values()]
    return {"params": sum(shape.params for shape in shapes), "macs": sum(shape.macs for shape in shapes)}


def best_plan(
    model: nn.Module, curvature: Curvature, layers: dict[str, Choice], fractions: Mapping[str, float], multiple: int
) -> Plan:
    """The least predicted loss within the budgets, over all structures that offer options."""
    modules, limits = candidates(model), targets(model, curvature, fractions)
    names = [name for name in layers if not layers[name].reason]
    options = [_options(weight_of(modules[name]), curvature, name, layers[name], list(limits), multiple) for name in names]
    fixed = {key: sum(getattr(c, key) for c in layers.values() if c.reason) for key in limits}
    budgets = torch.tensor([limits[key] - fixed[key] for key in limits], dtype=torch.float64)
    chosen = solve(options, budgets) if options else None
    if chosen is None:
        raise ValueError(_unreachable(model, curvature, options, fractions, limits, fixed))
    plan = Plan(BEST, dict(layers))
    for name, offered, index in zip(names, options, chosen, strict=True):
        structure, ranks = offered.labels[index]
        loss = float(offered.losses[index])
        reason = "dense serves the budget best" if structure == "dense" else ""
        plan.layers[name] = Choice(layers[name].shape, structure, ranks, loss, reason)
    return plan


def _options(weight: Tensor, curvature: Curvature, name: str, choice: Choice, currencies: list[str], multiple: int) -> Options:
    """Dense, and every grid of every structure that fits and costs less in some currency."""
    cost_of = {"params": structures.params, "macs": structures.macs}
    dense = torch.tensor([[cost_of[key]("dense", choice.shape, {}) for key in currencies]], dtype=torch.float64)
    losses, costs = [torch.zeros(1, dtype=torch.float64)], [dense]
    labels: list[tuple[str, dict[str, int]]] = [("dense", {})]
    for structure, row in STRUCTURES.items():
        if row.grid is None or not row.fits(choice.shape):
            continue
        ranks, predicted = row.grid(weight, curvature[name])
        if not len(predicted):
            continue
        cost = torch.stack([cost_of[key](structure, choice.shape, ranks).double() for key in currencies], dim=1)
        useful = (cost < dense).any(1) & _hardware_friendly(ranks, multiple)
        listed = torch.stack(list(ranks.values()), dim=1)[useful].tolist()
        labels += [(structure, dict(zip(ranks, row_of, strict=True))) for row_of in listed]
        losses.append(predicted[useful])
        costs.append(cost[useful])
    return Options(torch.cat(losses), torch.cat(costs), labels)


def _hardware_friendly(ranks: Mapping[str, Tensor], multiple: int) -> Tensor:
    """Ranks that are multiples, or so small that there is none, or full."""
    fits = [(rank % multiple == 0) | (rank < multiple) | (rank == rank.max()) for rank in ranks.values()]
    return torch.stack(fits).all(0)


def _unreachable(
    model: nn.Module,
    curvature: Curvature,
    options: list[Options],
    fractions: Mapping[str, float],
    limits: Mapping[str, float],
    fixed: Mapping[str, int],
) -> str:
    whole = _whole(model, curvature)
    least = {}
    for index, key in enumerate(limits):
        others = fractions[key] * whole[key] - limits[key]
        cheapest = sum(float(layer.costs[:, index].min()) for layer in options)
        least[key] = (cheapest + fixed[key] + others) / max(1, whole[key])
    wanted = ", ".join(f"{key}={value:g}" for key, value in fractions.items())
    reach = ", ".join(f"{key}={value:.3g}" for key, value in least.items())
    return f"the budget {wanted} cannot be reached: the least that this model's layers can become is {reach}"


def at_equal_cost(
    model: nn.Module, curvature: Curvature, fractions: Mapping[str, float], plan_at: Callable[[float], Plan]
) -> Plan:
    """A method of the paper within the budgets: the smallest ratio at which they hold."""
    limits = targets(model, curvature, fractions)

    def holds(plan: Plan) -> bool:
        return all(getattr(plan, key) <= limit for key, limit in limits.items())

    low, high = 0.0, 1.0 - 1e-9
    best = plan_at(high)
    if not holds(best):
        whole = _whole(model, curvature)
        least = {key: (getattr(best, key) + fractions[key] * whole[key] - limits[key]) / max(1, whole[key]) for key in limits}
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

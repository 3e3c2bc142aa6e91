"""One budget for the whole network: every layer's options against the sum of their costs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

BISECTIONS = 60
CYCLES = 8


@dataclass(frozen=True, eq=False)
class Options:
    """What one layer can become: a predicted loss, a cost in each currency, and what to call it."""

    losses: Float[Tensor, " options"]
    costs: Float[Tensor, "options currencies"]
    labels: list[Any]


def solve(layers: list[Options], budgets: Float[Tensor, " currencies"]) -> list[int] | None:
    """The option of each layer that together cost no more than the budgets and have about the least loss.

    Lagrange multipliers by bisection, each layer choosing on its own; then what is left of the budgets buys single
    improvements. None if even the cheapest options cost too much.
    """
    scale = torch.stack([layer.costs.max(0).values for layer in layers]).sum(0).clamp(min=1)
    largest = max(float(layer.losses.abs().max()) for layer in layers) or 1.0
    layers = [replace(layer, losses=layer.losses / largest) for layer in layers]  # prices are found among ordinary numbers
    if bool((torch.stack([layer.costs.min(0).values for layer in layers]).sum(0) > budgets).any()):
        return None
    prices = torch.zeros(len(budgets), dtype=torch.float64)
    for _ in range(CYCLES if len(budgets) > 1 else 1):
        for currency in range(len(budgets)):
            prices = _bisect(layers, budgets, prices, currency, scale)
    chosen = _choose(layers, prices, scale)
    if bool((_total(layers, chosen) > budgets).any()):
        return None
    return _spend(layers, chosen, budgets)


def _choose(layers: list[Options], prices: Tensor, scale: Tensor) -> list[int]:
    return [int((layer.losses + layer.costs / scale @ prices).argmin()) for layer in layers]


def _total(layers: list[Options], chosen: list[int]) -> Tensor:
    return torch.stack([layer.costs[option] for layer, option in zip(layers, chosen, strict=True)]).sum(0)


def _bisect(layers: list[Options], budgets: Tensor, prices: Tensor, currency: int, scale: Tensor) -> Tensor:
    """The lowest price of one currency at which its budget holds, the other prices given."""

    def holds(price: float) -> bool:
        prices[currency] = price
        return bool(_total(layers, _choose(layers, prices, scale))[currency] <= budgets[currency])

    prices = prices.clone()
    if holds(0.0):
        return prices
    low, high = 0.0, 1.0
    while not holds(high) and high < 1e30:
        low, high = high, 4 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    prices[currency] = high
    return prices


def _spend(layers: list[Options], chosen: list[int], budgets: Tensor) -> list[int]:
    """Single changes that lower the loss within the budgets, the largest gain first, until there are none."""
    chosen = list(chosen)
    while True:
        left = budgets - _total(layers, chosen)
        best, gain = None, 0.0
        for index, layer in enumerate(layers):
            gains = layer.losses[chosen[index]] - layer.losses
            gains[(layer.costs - layer.costs[chosen[index]] > left).any(1)] = 0
            if float(gains.max()) > gain:
                best, gain = (index, int(gains.argmax())), float(gains.max())
        if best is None:
            return chosen
        chosen[best[0]] = best[1]

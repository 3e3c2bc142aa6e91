"""One budget for the whole network: every layer's options against the sum of their costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

BISECTIONS = 60
CYCLES = 8


@dataclass(frozen=True, eq=False)
class Options:
    """What one layer can become: a predicted loss, a cost in each currency, and what to call it.

    In a chain, a layer's option and the next one's must agree: the width at which the one lets go of its channels is that at
    which the other takes them up.
    """

    losses: Float[Tensor, " options"]
    costs: Float[Tensor, "options currencies"]
    labels: Sequence[Any]
    inlets: Int[Tensor, " options"] = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))
    outlets: Int[Tensor, " options"] = field(default_factory=lambda: torch.zeros(1, dtype=torch.long))

    def __post_init__(self) -> None:
        for name in ("inlets", "outlets"):
            object.__setattr__(self, name, getattr(self, name).expand(len(self.losses)))


Chain = Sequence[Options]


def solve(chains: Sequence[Chain], budgets: Float[Tensor, " currencies"]) -> list[int] | None:
    """The option of each layer, chain after chain, that together cost no more than the budgets and have about the least loss.

    Lagrange multipliers by bisection, each chain choosing on its own; then what is left of the budgets buys single
    improvements. None if even the cheapest options cost too much.
    """
    layers = [layer for chain in chains for layer in chain]
    scale = torch.stack([layer.costs.max(0).values for layer in layers]).sum(0).clamp(min=torch.finfo(torch.float64).tiny)
    scale = 2 ** scale.log2().round()  # so that dividing by it rounds nothing
    largest = max(float(layer.losses.abs().max()) for layer in layers) or 1.0
    # Prices are found among ordinary numbers.
    chains = [[replace(layer, losses=layer.losses / largest, costs=layer.costs / scale) for layer in chain] for chain in chains]
    layers = [layer for chain in chains for layer in chain]
    budgets = budgets / scale
    if bool((cheapest(chains) > budgets).any()):
        return None
    prices = torch.zeros(len(budgets), dtype=torch.float64)
    for _ in range(CYCLES if len(budgets) > 1 else 1):
        for currency in torch.eye(len(budgets), dtype=torch.float64):
            prices = _bisect(chains, budgets, prices * (1 - currency), currency)
    prices = _bisect(chains, budgets, prices, 1 / budgets.clamp(min=1e-9))  # a later price may have upset an earlier budget
    chosen = _choose(chains, prices)
    if bool((_total(layers, chosen) > budgets).any()):
        return None
    return _spend(layers, chosen, budgets)


def cheapest(chains: Sequence[Chain]) -> Float[Tensor, " currencies"]:
    """The least that can be reached in each currency by itself."""
    count = chains[0][0].costs.shape[1]
    prices = torch.eye(count, dtype=torch.float64)
    free = [[replace(layer, losses=torch.zeros_like(layer.losses)) for layer in chain] for chain in chains]
    layers = [layer for chain in chains for layer in chain]
    return torch.stack([_total(layers, _choose(free, prices[currency]))[currency] for currency in range(count)])


def _choose(chains: Sequence[Chain], prices: Tensor) -> list[int]:
    return [option for chain in chains for option in _along(chain, prices)]


def _along(chain: Chain, prices: Tensor) -> list[int]:
    """The options of least price along one chain: dynamic programming over the widths between its layers."""
    widths = 1 + max(int(max(layer.inlets.max(), layer.outlets.max())) for layer in chain)
    best = torch.full((widths,), torch.inf, dtype=torch.float64)
    best[0] = 0
    steps = []
    for layer in chain:
        here = best[layer.inlets] + layer.losses + layer.costs @ prices
        best = torch.full_like(best, torch.inf).scatter_reduce(0, layer.outlets, here, "amin")
        count = len(here)
        numbers = torch.arange(count).where(here == best[layer.outlets], count)  # of equally cheap options, the first
        option = torch.full((widths,), count).scatter_reduce(0, layer.outlets, numbers, "amin")
        steps.append(option)
    chosen, width = [], 0
    for layer, option in zip(reversed(chain), reversed(steps), strict=True):
        chosen.append(int(option[width]))
        width = int(layer.inlets[chosen[-1]])
    return chosen[::-1]


def _total(layers: Sequence[Options], chosen: Sequence[int]) -> Tensor:
    return torch.stack([layer.costs[option] for layer, option in zip(layers, chosen, strict=True)]).sum(0)


def _bisect(chains: Sequence[Chain], budgets: Tensor, prices: Tensor, direction: Tensor) -> Tensor:
    """The least rise of prices in a direction at which the budgets of the currencies in it hold."""
    layers = [layer for chain in chains for layer in chain]
    concerned = direction > 0

    def holds(rise: float) -> bool:
        total = _total(layers, _choose(chains, prices + rise * direction))
        return bool((total <= budgets)[concerned].all())

    if holds(0.0):
        return prices
    low, high = 0.0, 1.0
    while not holds(high) and high < 1e30:
        low, high = high, 4 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return prices + high * direction


def _spend(layers: Sequence[Options], chosen: Sequence[int], budgets: Tensor) -> list[int]:
    """Single changes that lower the loss within the budgets, the largest gain first, until there are none."""
    chosen = list(chosen)
    while True:
        left = budgets - _total(layers, chosen)
        best, gain = None, 0.0
        for index, layer in enumerate(layers):
            now = chosen[index]
            gains = layer.losses[now] - layer.losses
            gains[(layer.costs - layer.costs[now] > left).any(1)] = 0
            gains[(layer.inlets != layer.inlets[now]) | (layer.outlets != layer.outlets[now])] = 0
            if float(gains.max()) > gain:
                best, gain = (index, int(gains.argmax())), float(gains.max())
        if best is None:
            return chosen
        chosen[best[0]] = best[1]

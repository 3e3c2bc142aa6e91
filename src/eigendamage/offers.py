"""What every layer of a model could become, with predicted loss and costs: found once, for any number of budgets."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar, overload

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from eigendamage import structures
from eigendamage.cost import parameters
from eigendamage.curvature import Curvature
from eigendamage.layers import LayerShape, candidates, weight_of
from eigendamage.links import Link, links
from eigendamage.methods.regression import by_channel, losses_by_channels, order_of_channels, problem
from eigendamage.plans import Choice
from eigendamage.structures import STRUCTURES, spread
from eigendamage.timing import Stopwatch

Label = tuple[str, dict[str, int]]  # a structure and its ranks

# What a budget may choose from, beside leaving a layer as it is.
KINDS = frozenset({"channels", *(name for name, row in STRUCTURES.items() if row.grid is not None)})

# With a stopwatch, every rank is tried at so many steps.
TIMED_STEPS = 8


@dataclass(frozen=True, eq=False)
class Offer:
    """The options of one layer; the first is the layer as it is.

    ``inlets`` and ``outlets`` number the widths of the links in front of it and behind it; 0 is the whole width.
    """

    name: str
    labels: Sequence[Label]
    losses: Float[Tensor, " options"]
    costs: dict[str, Float[Tensor, " options"]]
    inlets: Int[Tensor, " options"]
    outlets: Int[Tensor, " options"]


@dataclass(frozen=True, eq=False)
class Width:
    """A link whose width is free: its channels from the most to the least needed, and the widths on offer, all of it first."""

    link: Link
    order: list[int]
    widths: list[int]
    losses: Float[Tensor, " widths"]
    between: dict[str, float]  # what each channel costs in what stands between the layers: that goes with it


@dataclass(frozen=True, eq=False)
class Offers:
    """Chains of layers between which channels may go, and what the whole dense model costs in each currency."""

    chains: list[list[Offer]]
    whole: dict[str, float]
    widths: dict[str, Width] = field(default_factory=dict)  # by the layer whose outputs they are

    @property
    def layers(self) -> list[Offer]:
        return [offer for chain in self.chains for offer in chain]

    def beside(self, currency: str) -> float:
        """What all that makes no offer costs."""
        return self.whole[currency] - sum(float(offer.costs[currency][0]) for offer in self.layers)


def offers(
    model: nn.Module,
    curvature: Curvature,
    layers: Mapping[str, Choice],
    multiple: int = 1,
    stopwatch: Stopwatch | None = None,
    kinds: frozenset[str] = KINDS,
) -> Offers:
    """What the layers without a reason to stay dense could become. With a stopwatch, ``"latency"`` is a currency.

    The curvature remembers the losses that were worked out for these weights, so that other budgets only put them together.
    """
    names = [name for name, choice in layers.items() if not choice.reason]
    asked = _Asked(multiple, kinds, stopwatch)
    modules = candidates(model)
    free = links(curvature.coupling, names) if curvature.coupling and "channels" in asked.kinds else []
    widths = {link.source: _width(link, model, curvature, asked) for link in free}
    into = {width.link.target: width for width in widths.values()}
    made = {name: _offer(name, modules[name], curvature, into.get(name), widths.get(name), asked) for name in names}
    chains = [[made[name] for name in chain] for chain in _chains(names, widths)]
    return Offers(chains, whole_costs(model, curvature, stopwatch), widths)


@dataclass(frozen=True, eq=False)
class _Asked:
    """What options must be like."""

    multiple: int
    kinds: frozenset[str]
    stopwatch: Stopwatch | None


T = TypeVar("T")


def _remembered(curvature: Curvature, name: str, what: str, module: nn.Module, find: Callable[[], T]) -> T:
    """What was found for this layer, as long as its weight and its statistics are those of then."""
    weight, layer, key = module.weight, curvature[name], ("offers", name, what)
    assert isinstance(weight, Tensor)
    held = curvature.remembered.get(key)
    if held is None or held[0] is not layer or held[1].device != weight.device or not torch.equal(held[1], weight):
        held = curvature.remembered[key] = layer, weight.detach().clone(), find()
    found: T = held[2]
    return found


def whole_costs(model: nn.Module, curvature: Curvature, stopwatch: Stopwatch | None = None) -> dict[str, float]:
    """What the dense model costs: fewer parameters than its layers together where some share them."""
    of_layers = sum(layer.shape.macs for layer in curvature.layers.values())
    costs: dict[str, float] = {"params": float(parameters(model)), "macs": float(max(curvature.macs, of_layers))}
    return costs if stopwatch is None else {**costs, "latency": stopwatch.dense}


# --- channels that only two layers see --------------------------------------------------------------------------------------


def _chains(names: Sequence[str], widths: Mapping[str, Width]) -> list[list[str]]:
    """Every layer once, those that links connect one after the other."""
    targets = {width.link.target for width in widths.values()}
    chains = []
    for name in names:
        if name in targets:
            continue
        chain = [name]
        while chain[-1] in widths:
            chain.append(widths[chain[-1]].link.target)
        chains.append(chain)
    return chains


def _width(link: Link, model: nn.Module, curvature: Curvature, asked: _Asked) -> Width:
    module, layer = model.get_submodule(link.target), curvature[link.target]

    def find() -> tuple[list[int], Tensor]:
        given = by_channel(problem(weight_of(module), layer, tuple(range(len(layer.shape.kernel)))), link.channels)
        order = order_of_channels(given)
        return order, losses_by_channels(given, order)

    order, by_width = _remembered(curvature, link.target, "channels", module, find)
    offered = _suitable({"out": spread(link.channels)[:-1]}, {"out": link.channels}, asked)
    fewer = spread(link.channels)[:-1][offered].flip(0)
    losses = by_width[fewer - 1]
    scaled = losses * curvature.calibration.links.get(link.source, 1.0)
    widths = [link.channels, *fewer.tolist()]
    return Width(link, order, widths, torch.cat([losses.new_zeros(1), scaled]), _between(link, model, curvature))


def _between(link: Link, model: nn.Module, curvature: Curvature) -> dict[str, float]:
    """Of one channel. Parameters that others share stay as many as they are."""
    uses = Counter(id(parameter) for _, parameter in model.named_parameters(remove_duplicate=False))
    own = [p for name in link.between for p in model.get_submodule(name).parameters() if uses[id(p)] == 1]
    macs = sum(curvature[name].shape.macs for name in link.between if name in curvature.layers)
    params = sum(parameter.numel() for parameter in own if parameter.shape[:1] == (link.channels,))
    return {"params": params / link.channels, "macs": macs / link.channels}


# --- the options of one layer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Group:
    """Options of one structure."""

    structure: str
    ranks: Mapping[str, Tensor]
    losses: Tensor
    pairs: Tensor  # inlet and outlet of each

    def label(self, option: int) -> Label:
        return self.structure, {key: int(rank[option]) for key, rank in self.ranks.items()}

    def cost(self, of: Callable[[str, LayerShape, Mapping[str, Tensor]], Any], shape: LayerShape) -> Tensor:
        return torch.as_tensor(of(self.structure, shape, self.ranks), dtype=torch.float64).expand(len(self.losses))


class _Labels(Sequence[Label]):
    """The labels of groups one after the other, each made when it is asked for: there are thousands, and few are."""

    def __init__(self, groups: Sequence[_Group]) -> None:
        self.groups, self.ends = groups, list(accumulate(len(group.losses) for group in groups))

    def __len__(self) -> int:
        return self.ends[-1]

    @overload
    def __getitem__(self, option: int) -> Label: ...
    @overload
    def __getitem__(self, option: slice) -> list[Label]: ...
    def __getitem__(self, option: int | slice) -> Label | list[Label]:
        if isinstance(option, slice):
            return [self[index] for index in range(*option.indices(len(self)))]
        option = range(len(self))[option]
        group = bisect_right(self.ends, option)
        return self.groups[group].label(option - self.ends[group])  # counted from the end of its own group


def _offer(
    name: str,
    module: nn.Module,
    curvature: Curvature,
    into: Width | None,
    out_of: Width | None,
    asked: _Asked,
) -> Offer:
    layer, scale = curvature[name], curvature.calibration.layers.get(name, 1.0)
    groups = [_Group("dense", {}, torch.zeros(1, dtype=torch.float64), torch.zeros(1, 2).long())]
    for structure, row in STRUCTURES.items():
        if row.grid is None or structure not in asked.kinds or not row.fits(layer.shape):
            continue
        find = partial(row.grid, weight_of(module), layer)
        ranks, losses = _remembered(curvature, name, structure, module, find)
        useful = _suitable(ranks, row.limits(layer.shape), asked) & _cheaper(structure, layer.shape, ranks)
        if bool(useful.any()):
            count = int(useful.sum())
            ranks = {key: rank[useful] for key, rank in ranks.items()}
            groups.append(_Group(structure, ranks, scale * losses[useful], torch.zeros(count, 2).long()))
    if into is not None or out_of is not None:
        groups.append(_narrower(layer.shape, into, out_of))
    pairs = torch.cat([group.pairs for group in groups])
    costs = {
        currency: torch.cat([group.cost(of, layer.shape) for group in groups])
        for currency, of in (("params", structures.params), ("macs", structures.macs))
    }
    if out_of is not None:
        widths = torch.tensor(out_of.widths, dtype=torch.float64)[pairs[:, 1]]
        costs = {currency: values + out_of.between[currency] * widths for currency, values in costs.items()}
    losses = torch.cat([group.losses for group in groups])
    offer = Offer(name, _Labels(groups), losses, costs, pairs[:, 0], pairs[:, 1])
    return offer if asked.stopwatch is None else _timed(offer, out_of, asked.stopwatch)


def _narrower(shape: LayerShape, into: Width | None, out_of: Width | None) -> _Group:
    """Every pair of widths but the whole ones. What goes at the outputs, the layer behind answers for."""
    ins = torch.tensor([shape.inputs]) if into is None else torch.tensor(into.widths) * into.link.repeats
    outs = torch.tensor([shape.outputs]) if out_of is None else torch.tensor(out_of.widths)
    losses = torch.zeros(1, dtype=torch.float64) if into is None else into.losses
    pairs = torch.cartesian_prod(torch.arange(len(ins)), torch.arange(len(outs)))[1:]
    return _Group("channels", {"in": ins[pairs[:, 0]], "out": outs[pairs[:, 1]]}, losses[pairs[:, 0]], pairs)


def _cheaper(structure: str, shape: LayerShape, ranks: Mapping[str, Tensor]) -> Tensor:
    return (structures.params(structure, shape, ranks) < shape.params) | (structures.macs(structure, shape, ranks) < shape.macs)


def _suitable(ranks: Mapping[str, Tensor], limits: Mapping[str, int], asked: _Asked) -> Tensor:
    """Ranks that are multiples, or so small that there is none, or full; few enough to be timed where that is wanted."""
    multiple = asked.multiple
    fits = [(rank % multiple == 0) | (rank < multiple) | (rank == limits[key]) for key, rank in ranks.items()]
    if asked.stopwatch is not None:
        fits += [_near_a_step(rank, limits[key], multiple) for key, rank in ranks.items()]
    return torch.stack(fits).all(0)


def _near_a_step(rank: Tensor, limit: int, multiple: int) -> Tensor:
    """The offered ranks that are nearest to an eighth, a quarter, … of the limit."""
    allowed = rank.unique()
    allowed = allowed[(allowed % multiple == 0) | (allowed == limit)] if bool((allowed % multiple == 0).any()) else allowed
    steps = torch.arange(1, TIMED_STEPS + 1) * limit / TIMED_STEPS
    nearest = allowed[(allowed[None, :] - steps[:, None]).abs().argmin(1)]
    return torch.isin(rank, nearest)


def _timed(offer: Offer, out_of: Width | None, stopwatch: Stopwatch) -> Offer:
    """With the time of every option; only those that are faster than the dense layer stay.

    What stands behind the layer, channel by channel, is timed with it: it becomes as narrow.
    """
    seconds = torch.tensor([stopwatch.layer(offer.name, *label) for label in offer.labels], dtype=torch.float64)
    if out_of is not None:
        behind = [sum(stopwatch.narrow(name, width) for name in out_of.link.between) for width in out_of.widths]
        seconds += torch.tensor(behind, dtype=torch.float64)[offer.outlets]
    faster = seconds < seconds[0]
    faster[0] = True
    costs = {**offer.costs, "latency": seconds}
    return Offer(
        offer.name,
        [label for label, stays in zip(offer.labels, faster.tolist(), strict=True) if stays],
        offer.losses[faster],
        {currency: values[faster] for currency, values in costs.items()},
        offer.inlets[faster],
        offer.outlets[faster],
    )

"""Channels that only two layers see: which they are, and what a model with fewer of them computes."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from dense import loss, measured
from torch import Tensor, nn
from torch.nn import functional as F

import eigendamage as ed
from eigendamage.budgets import layers_for_budgets
from eigendamage.calibration import Calibration
from eigendamage.layers import weight_of
from eigendamage.linalg import damped
from eigendamage.links import Link, links
from eigendamage.methods import BEST
from eigendamage.offers import offers
from eigendamage.plans import Choice, Plan, kept_where


def norm(channels: int) -> nn.BatchNorm2d:
    """As after training: nothing is 0 or 1."""
    module = nn.BatchNorm2d(channels)
    for tensor in (module.weight, module.running_var):
        nn.init.uniform_(tensor, 0.5, 1.5)
    for tensor in (module.bias, module.running_mean):
        nn.init.normal_(tensor, std=0.5)
    return module


class Chain(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(3, 6, 3, padding=1), norm(6), nn.ReLU(), nn.Conv2d(6, 5, 3, stride=2, padding=1), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(45, 7), nn.ReLU(), nn.Linear(7, 4)),
        )


class Residual(nn.Module):
    """Only what is inside the block is free: the stream has three who read or write it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.one, self.norm, self.two = (
            nn.Conv2d(3, 6, 1),
            nn.Conv2d(6, 8, 3, padding=1),
            norm(8),
            nn.Conv2d(8, 6, 1),
        )
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = F.relu(x + self.two(F.relu(self.norm(self.one(x)))))
        return self.head(x.mean((2, 3)))


class Joined(nn.Module):
    """A layer behind a concatenation reads the channels of two."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.both = nn.Conv2d(3, 4, 1), nn.Conv2d(3, 5, 1), nn.Conv2d(9, 6, 3, padding=1)
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.both(torch.cat([self.left(x), self.right(x)], 1)))
        return self.head(x.mean((2, 3)))


class Inverted(nn.Module):
    """A depthwise convolution keeps the channels apart, as batch norm does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.first = nn.Conv2d(3, 8, 1), norm(8)
        self.depthwise, self.second = nn.Conv2d(8, 8, 3, padding=1, groups=8), norm(8)
        self.down, self.head = nn.Conv2d(8, 5, 1), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.second(self.depthwise(F.relu(self.first(self.up(x))))))
        return self.head(self.down(x).mean((2, 3)))


class TwoReaders(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.left, self.right = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 5, 1), nn.Conv2d(6, 5, 3, padding=1)
        self.head = nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.front(x))
        return self.head((self.left(x) * self.right(x)).mean((2, 3)))


class Reused(nn.Module):
    """``again`` reads what it writes itself, ``twice`` what two layers write."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.again, self.other = nn.Conv2d(3, 6, 1), nn.Conv2d(6, 6, 3, padding=1), nn.Conv2d(3, 6, 1)
        self.twice, self.head = nn.Conv2d(6, 5, 1), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.again(F.relu(self.again(F.relu(self.one(x))))))
        return self.head((self.twice(y) + self.twice(F.relu(self.other(x)))).mean((2, 3)))


class Gated(nn.Module):
    """Squeeze and excitation: the layer that makes the gate writes to the channels that it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.squeeze, self.excite = nn.Conv2d(3, 6, 3), nn.Linear(6, 4), nn.Linear(4, 6)
        self.back, self.head = nn.Conv2d(6, 5, 1), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.front(x)
        x = x * torch.sigmoid(self.excite(F.relu(self.squeeze(x.mean((2, 3))))))[:, :, None, None]
        return self.head(F.relu(self.back(x)).mean((2, 3)))


EXPECTED = {
    Chain: [Link("0", "3", 6, 1, ("1",)), Link("3", "6", 5, 9, ()), Link("6", "8", 7, 1, ())],
    Residual: [Link("one", "two", 8, 1, ("norm",))],
    Joined: [Link("both", "head", 6, 1, ())],
    Inverted: [Link("up", "down", 8, 1, ("depthwise", "first", "second")), Link("down", "head", 5, 1, ())],
    TwoReaders: [],
    Reused: [Link("twice", "head", 5, 1, ())],
    Gated: [Link("squeeze", "excite", 4, 1, ()), Link("back", "head", 5, 1, ())],
}
every_network = pytest.mark.parametrize("network", EXPECTED, ids=lambda network: network.__name__)
every_link = pytest.mark.parametrize(
    ("network", "link"),
    [(network, link) for network, found in EXPECTED.items() for link in found],
    ids=lambda value: value.source if isinstance(value, Link) else value.__name__,
)


def case(network: type[nn.Module]) -> tuple[nn.Module, Tensor, ed.Curvature]:
    model, inputs = network().double().eval(), torch.randn(12, 3, 5, 5, dtype=torch.float64)
    return model, inputs, dataclasses.replace(measured(model, inputs, [BEST]), calibration=Calibration())


@every_network
def test_channels_are_free_that_one_layer_writes_and_one_other_reads(network: type[nn.Module]) -> None:
    _, _, curvature = case(network)
    assert links(curvature.coupling, list(curvature.measured)) == EXPECTED[network]


def test_a_layer_that_must_stay_as_it_is_holds_its_channels() -> None:
    _, _, curvature = case(Chain)
    assert [link.source for link in links(curvature.coupling, ["0", "6", "8"])] == ["6"]


def narrowed(curvature: ed.Curvature, link: Link, kept: list[int]) -> Plan:
    """The plan in which nothing but this link loses channels."""
    stay = torch.ones(curvature.coupling.count, dtype=torch.bool)
    units = curvature.coupling.sides[link.source].outputs
    stay[[unit for channel, unit in enumerate(units) if channel not in kept]] = False
    plan = Plan(
        BEST, {name: Choice(layer.shape) for name, layer in curvature.layers.items()}, kept_where(curvature.coupling, stay)
    )
    for name in plan.kept.keys() & plan.layers.keys():
        depthwise = name in link.between
        ranks = {"in": 1 if depthwise else len(plan.kept[name].inputs), "out": len(plan.kept[name].outputs)}
        plan.layers[name] = Choice(curvature[name].shape, "channels", ranks)
    return plan


def made_up_for(module: nn.Module, patches: Tensor, inputs: list[int]) -> Tensor:
    """W A_:K A_KK⁻¹ on the inputs K that stay, and zero on the others."""
    weight = weight_of(module).detach()
    taps = weight[0, 0].numel()
    kept = torch.tensor([channel * taps + tap for channel in inputs for tap in range(taps)])
    a = damped(patches)
    full = torch.zeros_like(weight).flatten(1)
    full[:, kept] = weight.flatten(1) @ a[:, kept] @ torch.linalg.inv(a[kept][:, kept])
    return full.view_as(weight)


@every_link
def test_a_narrower_link_is_the_dense_model_whose_reader_makes_up_for_it(network: type[nn.Module], link: Link) -> None:
    model, inputs, curvature = case(network)
    kept = [channel for channel in range(link.channels) if channel % 3 != 1]
    small = ed.apply(model, narrowed(curvature, link, kept), curvature)
    expected = copy.deepcopy(model)
    reader = expected.get_submodule(link.target)
    reader.weight.data = made_up_for(reader, curvature[link.target].patch_form, link.inputs(kept))
    with torch.no_grad():
        torch.testing.assert_close(small(inputs), expected(inputs), rtol=1e-9, atol=1e-11)
        assert not torch.allclose(small(inputs), model(inputs), rtol=1e-3)
    assert len(weight_of(small.get_submodule(link.source))) == len(kept)
    assert ed.count(small, inputs).params < ed.count(model, inputs).params


@every_link
def test_the_loss_of_a_narrower_link_is_that_of_its_readers_new_weight(network: type[nn.Module], link: Link) -> None:
    model, _, curvature = case(network)
    offered = offers(model, curvature, layers_for_budgets(curvature, (), "prune"))
    width, layer, reader = offered.widths[link.source], curvature[link.target], model.get_submodule(link.target)
    assert width.link == link and sorted(width.order) == list(range(link.channels)) and width.widths[0] == link.channels
    metric = torch.kron(damped(layer.sensitivity), damped(layer.patch_form))
    for count, predicted in zip(width.widths, width.losses.tolist(), strict=True):
        kept = link.inputs(sorted(width.order[:count]))
        change = made_up_for(reader, layer.patch_form, kept) - weight_of(reader).detach()
        assert predicted == pytest.approx(float(loss(metric, change)), rel=1e-6, abs=1e-12)

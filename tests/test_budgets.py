"""Plans under a budget: what they promise is what is counted afterwards."""

from itertools import pairwise

import pytest
import torch
from networks import random_network
from torch import Tensor, nn

import eigendamage as ed
from eigendamage.passes import tensors_in
from eigendamage.structures import STRUCTURES


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 12, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(12)
        self.body = nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.point = nn.Conv2d(16, 20, 1)
        self.hidden = nn.Linear(20, 24)
        self.head = nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.point(self.body(self.norm(self.stem(x)).relu()).relu()).relu()
        return self.head(self.hidden(x.mean((2, 3))).relu())


@pytest.fixture(scope="module")
def data() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(32, 3, 8, 8, generator=generator), torch.randint(0, 5, (32,), generator=generator)) for _ in range(2)]


@pytest.fixture(scope="module")
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return Small().eval()


@pytest.fixture(scope="module")
def curvature(model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> ed.Curvature:
    return ed.measure(model, data, methods=ed.METHODS, progress=False)


@pytest.mark.parametrize("budget", [{"macs": 0.7}, {"macs": 0.3}, {"params": 0.5}, {"macs": 0.5, "params": 0.4}])
@pytest.mark.parametrize("method", [None, "eigendamage", "kron-obd", "kron-obs", "c-obd", "eigendamage-depthwise", "cp"])
def test_the_result_never_costs_more_than_the_budget(model, data, curvature, budget, method) -> None:
    plan = ed.plan(model, curvature, method=method, **budget)
    small = ed.apply(model, plan, curvature)
    before, after = ed.count(model, data[0][0][:1]), ed.count(small, data[0][0][:1])
    for key, fraction in budget.items():
        assert getattr(after, key) <= fraction * getattr(before, key)


@pytest.mark.parametrize("seed", range(12))
def test_budgets_hold_on_random_networks(seed: int) -> None:
    model, inputs = random_network(seed)
    model.eval()

    def first_output(model: nn.Module, batch: tuple[Tensor, None]) -> Tensor:
        return tensors_in(model(batch[0]))[0]

    curvature = ed.measure(model, [(inputs, None)], task="regression", forward=first_output, progress=False)
    before = ed.count(model, inputs)
    try:
        small = ed.apply(model, ed.plan(model, curvature, macs=0.8), curvature)
    except ValueError as error:
        assert "the least that this model's layers can become" in str(error)
        return
    assert ed.count(small, inputs).macs <= 0.8 * before.macs


def test_a_larger_budget_never_has_a_larger_predicted_loss(model, curvature) -> None:
    losses = [ed.plan(model, curvature, macs=m / 10).loss for m in range(2, 11)]
    assert all(later <= earlier * 1.05 for earlier, later in pairwise(losses))
    assert losses[-1] == 0


def test_the_best_structures_predict_less_loss_than_the_eigenbasis_at_equal_cost(model, curvature) -> None:
    for macs in (0.7, 0.5, 0.4):
        best, kfe = ed.plan(model, curvature, macs=macs), ed.plan(model, curvature, method="eigendamage", macs=macs)
        assert best.loss < kfe.loss


def test_ranks_are_multiples_where_they_are_as_large(model, curvature) -> None:
    plan = ed.plan(model, curvature, macs=0.4, multiple=4)
    for choice in plan.layers.values():
        limits = STRUCTURES[choice.structure].limits(choice.shape)
        assert all(rank % 4 == 0 or rank < 4 or rank == limits[key] for key, rank in choice.ranks.items())


def test_a_budget_of_one_is_the_dense_model(model, curvature) -> None:
    plan = ed.plan(model, curvature, macs=1.0)
    assert all(choice.structure == "dense" for choice in plan.layers.values())


@pytest.mark.parametrize("value", [0.0, -0.5, 1.5, float("nan")])
def test_a_budget_out_of_range_is_named(model, curvature, value: float) -> None:
    with pytest.raises(ValueError, match="macs: must be a fraction of the dense model, above 0 and at most 1"):
        ed.plan(model, curvature, macs=value)


def test_a_layer_of_one_channel_has_nothing_to_offer_but_is_no_obstacle() -> None:
    model = nn.Sequential(nn.Conv2d(1, 1, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16, 8), nn.ReLU(), nn.Linear(8, 4))
    curvature = ed.measure(model, [(torch.randn(6, 1, 6, 6), torch.randint(0, 4, (6,)))], progress=False)
    assert ed.plan(model, curvature, params=0.9)["0"].structure == "dense"


def test_a_shared_bias_counts_once_and_stays_shared() -> None:
    model = nn.Sequential(nn.Linear(10, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 30), nn.Linear(30, 4))
    model[2].bias = model[0].bias
    inputs = torch.randn(40, 10)
    curvature = ed.measure(model, [(inputs, torch.randint(0, 4, (40,)))], progress=False)
    small = ed.apply(model, ed.plan(model, curvature, params=0.8), curvature)
    assert ed.count(small, inputs).params <= 0.8 * ed.count(model, inputs).params
    assert small[0].bias is small[2].bias


def test_an_impossible_budget_says_what_can_be_reached(model, curvature) -> None:
    with pytest.raises(ValueError, match=r"macs=0.001 cannot be reached: the least .* is macs=0\.\d+"):
        ed.plan(model, curvature, macs=0.001)
    with pytest.raises(ValueError, match=r"by this method with this cap: the least is macs=0\.\d+"):
        ed.plan(model, curvature, macs=0.01, method="eigendamage", cap=0.5)

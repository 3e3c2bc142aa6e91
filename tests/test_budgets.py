"""Plans under a budget: what they promise is what is counted afterwards."""

import dataclasses
from collections.abc import Callable
from functools import lru_cache, partial
from itertools import pairwise

import pytest
import torch
import torch.fx
from hypothesis import given
from hypothesis import strategies as st
from networks import random_network
from torch import Tensor, nn

import eigendamage as ed
from eigendamage.passes import tensors_in
from eigendamage.streams import ChannelSelection
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


# --- budgets that cannot be, or say too little or too much ------------------------------------------------------------------


@pytest.mark.parametrize("key", ["macs", "params", "latency"])
@pytest.mark.parametrize("value", [0.0, -1.0, 1.0001, float("inf"), float("nan")])
def test_every_fraction_out_of_range_is_named(model, data, curvature, key: str, value: float) -> None:
    more = {"example_inputs": data[0][0]} if key == "latency" else {}
    with pytest.raises(ValueError, match=f"{key}: must be a fraction of the dense model, above 0 and at most 1; got {value}"):
        ed.plan(model, curvature, **{key: value}, **more)


@pytest.mark.parametrize("value", [0.0, -0.1, float("inf"), float("nan")])
def test_every_loss_out_of_range_is_named(model, curvature, value: float) -> None:
    with pytest.raises(ValueError, match=f"loss: must be an increase of the loss, above 0; got {value}"):
        ed.plan(model, curvature, loss=value)


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"ratio": 0.5, "macs": 0.5},
        {"ratio": 0.5, "loss": 0.1},
        {"ranks": 0.5, "params": 0.5, "method": "cp"},
        {"ratio": 0.5, "macs": 0.5, "method": "kron-obd"},
    ],
)
def test_what_contradicts_a_budget_is_named(model, curvature, arguments) -> None:
    with pytest.raises(ValueError, match=r"needs one of ratio=\.\.\., ranks=\.\.\. \(for cp\), or budgets"):
        ed.plan(model, curvature, **arguments)


def test_a_method_of_the_paper_has_no_budget_of_loss(model, curvature) -> None:
    with pytest.raises(ValueError, match=r"loss: .*leave out method='kron-obd', or use macs or params"):
        ed.plan(model, curvature, method="kron-obd", loss=0.1)


@pytest.mark.parametrize("multiple", [0, -8])
def test_multiples_are_whole_numbers(model, curvature, multiple) -> None:
    with pytest.raises(ValueError, match="multiple: must be at least 1"):
        ed.plan(model, curvature, macs=0.5, multiple=multiple)


def test_several_budgets_that_cannot_be_reached_name_the_least_of_each(model, curvature) -> None:
    with pytest.raises(
        ValueError, match=r"macs=0.5, params=0.001 cannot be reached together: .* is macs=0\.\d+, params=0\.\d+"
    ):
        ed.plan(model, curvature, macs=0.5, params=0.001)


@pytest.mark.parametrize("key", ["macs", "params"])
def test_the_least_that_is_named_can_be_reached(model, data, curvature, key: str) -> None:
    with pytest.raises(ValueError, match="cannot be reached") as caught:
        ed.plan(model, curvature, **{key: 1e-4})
    least = float(str(caught.value).rsplit("=", 1)[1])
    plan = ed.plan(model, curvature, **{key: least * 1.01})
    reached = getattr(ed.count(ed.apply(model, plan, curvature), data[0][0][:1]), key)
    assert reached == pytest.approx(least * getattr(ed.count(model, data[0][0][:1]), key), rel=0.01)


@pytest.mark.parametrize("key", ["macs", "params"])
def test_what_stands_between_two_layers_is_counted_as_it_will_be(key: str) -> None:
    """The batch norms and the depthwise convolution become as narrow as the layers around them."""
    built, curvature = measured_network(Inverted, 9, True)
    example = torch.randn(1, 3, 5, 5)
    with pytest.raises(ValueError, match="cannot be reached") as caught:
        ed.plan(built, curvature, **{key: 1e-4})
    least = float(str(caught.value).rsplit("=", 1)[1])
    small = ed.apply(built, ed.plan(built, curvature, **{key: 1.005 * least}), curvature)
    assert getattr(ed.count(small, example), key) == pytest.approx(least * getattr(ed.count(built, example), key), rel=0.01)


# --- the whole budget -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [None, *ed.METHODS])
@pytest.mark.parametrize("budget", [{"macs": 1.0}, {"params": 1.0}, {"macs": 1.0, "params": 1.0}])
def test_the_whole_budget_leaves_the_model_as_it_is(model, data, curvature, method, budget) -> None:
    plan = ed.plan(model, curvature, method=method, **budget)
    same = ed.apply(model, plan, curvature)
    assert all(choice.structure == "dense" and choice.reason for choice in plan.layers.values())
    assert plan.loss in (0, None) and plan.params == plan.dense_params and plan.macs == plan.dense_macs
    assert list(same.state_dict()) == list(model.state_dict())
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in same.state_dict().items())
    assert repr(same) == repr(model)


# --- whatever the network, the result costs no more -------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 3, padding=1, bias=bias), nn.BatchNorm2d(width)
        self.one, self.two = nn.Conv2d(width, 2 * width, 3, padding=1, bias=bias), nn.Conv2d(2 * width, width, 1, bias=bias)
        self.head = nn.Linear(width, 4, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.stem(x)).relu()
        return self.head((x + self.two(self.one(x).relu())).relu().mean((2, 3)))


class Inverted(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.up, self.first = nn.Conv2d(3, 2 * width, 1, bias=bias), nn.BatchNorm2d(2 * width)
        self.apart = nn.Conv2d(2 * width, 2 * width, 3, padding=1, groups=2 * width, bias=bias)
        self.down, self.wide = nn.Conv2d(2 * width, width, 1, bias=bias), nn.Conv2d(width, width, (3, 2), stride=2, bias=bias)
        self.head = nn.Linear(width, 4, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.down(self.apart(self.first(self.up(x)).relu()).relu())
        return self.head(self.wide(x).relu().mean((2, 3)))


class Linear(nn.Module):
    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.one, self.two, self.head = nn.Linear(75, width, bias), nn.Linear(width, 2 * width, bias), nn.Linear(2 * width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.two(self.one(x.flatten(1)).relu()).relu())


class Branching(nn.Module):
    """What it does next depends on what it sees."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.stem, self.body = nn.Conv2d(3, width, 3, padding=1, bias=bias), nn.Conv2d(width, 2 * width, 3, bias=bias)
        self.hidden, self.head = nn.Linear(2 * width, 2 * width, bias), nn.Linear(2 * width, 4, bias)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        while x.abs().mean() > 0.5:
            x = x / 2
        x = self.body(x.relu()).relu().mean((2, 3))
        return self.head(self.hidden(x) if x.sum() > 0 else x)


NETWORKS = (Residual, Inverted, Linear, Branching)


@lru_cache
def measured_network(network: Callable[[int, bool], nn.Module], width: int, bias: bool) -> tuple[nn.Module, ed.Curvature]:
    with torch.random.fork_rng():
        torch.manual_seed(width)
        built = network(width, bias).eval()
        batch = torch.randn(24, 3, 5, 5), torch.randint(0, 4, (24,))
        return built, ed.measure(built, [batch], progress=False)


@lru_cache
def measured_for_channels(network: Callable[[], nn.Module]) -> tuple[nn.Module, ed.Curvature]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        built, batch = network().eval(), (torch.randn(24, 3, 8, 8), torch.randint(0, 4, (24,)))
        return built, ed.measure(built, [batch], methods=["kron-obd", "slimming"], progress=False)


class Selecting(nn.Module):
    """Every kind of module that loses channels beside the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.select, self.norm = nn.Conv2d(3, 9, 3, padding=1), ChannelSelection(9), nn.BatchNorm2d(9)
        self.one, self.bend, self.two = nn.Conv2d(9, 7, 1), nn.PReLU(7), nn.Conv2d(7, 9, 1)
        self.plain = nn.InstanceNorm2d(9, affine=True)
        self.head = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = x + self.two(self.bend(self.one(self.norm(self.select(x)).relu())))
        return self.head(self.plain(x).relu().mean((2, 3)))


CHANNELS = [partial(Residual, 9, False), partial(Inverted, 9, True), Selecting]


@pytest.mark.parametrize("method", ["kron-obd", "slimming"])
@pytest.mark.parametrize("network", CHANNELS, ids=["residual", "inverted", "selecting"])
def test_methods_that_remove_channels_count_what_goes_beside_the_layers(network, method: str) -> None:
    """The least that is named is what is counted, and no budget above it is exceeded."""
    built, curvature = measured_for_channels(network)
    example = torch.randn(1, 3, 8, 8)
    dense = ed.count(built, example).params
    with pytest.raises(ValueError, match="cannot be reached") as caught:
        ed.plan(built, curvature, method=method, params=1e-4)
    least = float(str(caught.value).rsplit("=", 1)[1])
    for budget in [1.002 * least, *torch.linspace(1.01 * least, 0.95, 9).tolist()]:
        small = ed.apply(built, ed.plan(built, curvature, method=method, params=budget), curvature)
        assert least * 0.998 <= ed.count(small, example).params / dense <= budget


@given(
    st.sampled_from(NETWORKS),
    st.sampled_from([3, 6, 9]),
    st.booleans(),
    st.fixed_dictionaries({}, optional={"macs": st.floats(0.1, 1), "params": st.floats(0.1, 1), "loss": st.floats(1e-6, 1)}),
    st.sampled_from([1, 2, 4]),
)
def test_the_result_never_costs_more_whatever_the_network(network, width: int, bias: bool, budgets, multiple: int) -> None:
    if not budgets:
        return
    built, curvature = measured_network(network, width, bias)
    try:
        plan = ed.plan(built, curvature, multiple=multiple, **budgets)
    except ValueError as error:
        assert "cannot be reached" in str(error) and ("macs" in budgets or "params" in budgets)
        return
    example = torch.randn(1, 3, 5, 5)
    before, after = ed.count(built, example), ed.count(ed.apply(built, plan, curvature), example)
    for key in budgets.keys() & {"macs", "params"}:
        assert getattr(after, key) <= budgets[key] * getattr(before, key)
    if "loss" in budgets:
        assert plan.loss <= budgets["loss"] * (1 + 1e-9)


def test_what_cannot_be_traced_gets_structures_too() -> None:
    built, curvature = measured_network(Branching, 9, True)
    with pytest.raises(torch.fx.proxy.TraceError):
        torch.fx.symbolic_trace(built)
    plan = ed.plan(built, curvature, macs=0.5)
    assert any(choice.structure not in ("dense", "channels") for choice in plan.layers.values())
    assert ed.apply(built, plan, curvature)(torch.randn(2, 3, 5, 5)).shape == (2, 4)


@pytest.mark.parametrize("multiple", [8, 16])
def test_multiples_hold_in_every_currency(multiple: int) -> None:
    layers = [nn.Conv2d(3, 24, 3, padding=1), nn.ReLU(), nn.Conv2d(24, 40, 3, stride=2), nn.ReLU(), nn.Conv2d(40, 32, 1)]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 4))
    curvature = ed.measure(model, [(torch.randn(24, 3, 6, 6), torch.randint(0, 4, (24,)))], progress=False)
    for budget in ({"macs": 0.5}, {"params": 0.4}, {"loss": 1e-3}):
        plan = ed.plan(model, curvature, multiple=multiple, **budget)
        assert any(choice.structure != "dense" for choice in plan.layers.values())
        for name, choice in plan.layers.items():
            limits = STRUCTURES[choice.structure].limits(choice.shape)
            for key, rank in choice.ranks.items():
                assert rank % multiple == 0 or rank < multiple or rank == limits[key], (name, choice.structure, choice.ranks)


# --- a budget of loss -------------------------------------------------------------------------------------------------------


def test_a_larger_loss_buys_fewer_macs_and_is_never_exceeded(model, curvature) -> None:
    largest = ed.plan(model, curvature, macs=0.3).loss
    asked = [share * largest for share in (0.001, 0.01, 0.1, 1.0)]
    plans = [ed.plan(model, curvature, loss=loss) for loss in asked]
    assert all(plan.loss <= loss * (1 + 1e-9) for plan, loss in zip(plans, asked, strict=True))
    assert all(later.macs < earlier.macs for earlier, later in pairwise(plans))


def test_a_budget_of_loss_and_one_of_parameters_hold_together(model, curvature) -> None:
    alone = ed.plan(model, curvature, params=0.5)
    plan = ed.plan(model, curvature, params=0.5, loss=2 * alone.loss)
    assert plan.loss <= 2 * alone.loss * (1 + 1e-9) and plan.params <= 0.5 * alone.dense_params
    assert plan.macs <= alone.macs * 1.05
    with pytest.raises(ValueError, match="cannot be reached together"):
        ed.plan(model, curvature, params=0.5, loss=alone.loss / 100)


# --- the paper's methods ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [{"macs": 0.6}, {"params": 0.5}, {"macs": 0.6, "params": 0.6}])
@pytest.mark.parametrize("method", ed.METHODS)
def test_every_method_keeps_a_budget_with_nothing_but_its_own_statistics(model, data, method, budget) -> None:
    """Those that best structures need were asked for, whatever the method."""
    own = ed.measure(model, data, methods=[method], progress=False)
    plan = ed.plan(model, own, method=method, **budget)
    assert plan.method == method
    before, after = ed.count(model, data[0][0]), ed.count(ed.apply(model, plan, own), data[0][0])
    for key, fraction in budget.items():
        assert getattr(after, key) <= fraction * getattr(before, key)


def test_a_model_can_be_compressed_by_a_method_within_a_budget(model, data) -> None:
    small, report = ed.compress(model, data, method="eigendamage", macs=0.6, progress=False)
    assert report.plan.method == "eigendamage"
    assert ed.count(small, data[0][0]).macs <= 0.6 * ed.count(model, data[0][0]).macs


def test_best_structures_say_what_they_miss(model, data) -> None:
    own = ed.measure(model, data, methods=["eigendamage"], progress=False)
    with pytest.raises(ValueError, match=r"a budget needs patches.*name it in measure\(\.\.\., methods="):
        ed.plan(model, own, macs=0.5)


# --- little or strange data -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("examples", [1, 2, 32])
def test_one_batch_and_even_one_example_are_enough_for_a_plan(model, data, examples: int) -> None:
    batch = tuple(part[:examples] for part in data[0])
    curvature = ed.measure(model, [batch], progress=False)
    for budget in ({"macs": 0.5}, {"params": 0.3, "macs": 0.6}):
        small = ed.apply(model, ed.plan(model, curvature, **budget), curvature)
        assert ed.count(small, batch[0]).macs <= budget["macs"] * ed.count(model, batch[0]).macs
        assert bool(small(batch[0]).isfinite().all())


def test_inputs_that_are_always_zero_go_for_nothing() -> None:
    """Half of what the hidden layers read is dead: A is singular there, and half of them can go without a trace."""
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 12, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 5))
    model = model.double()
    with torch.no_grad():
        model[0].weight[::2] = 0
        model[0].bias[::2] = -1
    images = torch.randn(24, 3, 6, 6, dtype=torch.float64)
    curvature = ed.measure(model, [(images, torch.randint(0, 5, (24,)))], progress=False)
    width = ed.plan(model, curvature, loss=1e-6, last_linear="leave")
    assert width.macs < 0.75 * width.dense_macs
    plan = ed.plan(model, curvature, macs=0.55)
    with torch.no_grad():
        change = ed.apply(model, plan, curvature)(images) - model(images)
    assert float(change.square().mean()) < 1e-3 * float(model(images).detach().var())


class Ignored(nn.Module):
    """One of two branches never says anything: its gradients are all zero."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.ignored = nn.Linear(12, 40), nn.Linear(12, 40)
        self.mix, self.head = nn.Linear(40, 30), nn.Linear(30, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.used(x).relu() + (self.ignored(x) - 100).relu()
        return self.head(self.mix(x).relu())


def test_a_layer_that_the_loss_does_not_see_stays_and_the_others_keep_the_budget() -> None:
    model, inputs = Ignored(), torch.randn(60, 12)
    curvature = ed.measure(model, [(inputs, torch.randint(0, 4, (60,)))], progress=False)
    plan = ed.plan(model, curvature, params=0.8)
    assert plan["ignored"].structure == "dense" and plan["ignored"].reason == "no gradient of the loss reaches it"
    small = ed.apply(model, plan, curvature)
    assert ed.count(small, inputs).params <= 0.8 * ed.count(model, inputs).params
    assert 0 < plan.loss < 1 and bool(small(inputs).isfinite().all())


# --- the same again ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [{"macs": 0.4}, {"params": 0.5, "macs": 0.6}, {"loss": 0.01}])
def test_the_same_seed_makes_the_same_plan(model, data, budget) -> None:
    plans = []
    for other in (1, 2):
        torch.manual_seed(other)
        curvature = ed.measure(model, data, methods=["best"], progress=False, seed=3)
        plans.append(ed.plan(model, curvature, **budget).to_json())
    assert plans[0] == plans[1]


def test_the_number_of_threads_makes_no_difference_to_a_plan() -> None:
    model, curvature = measured_network(Linear, 9, True)
    before, plans = torch.get_num_threads(), []
    try:
        for threads in (1, 2):
            torch.set_num_threads(threads)
            plans.append(ed.plan(model, dataclasses.replace(curvature, remembered={}), params=0.5))
    finally:
        torch.set_num_threads(before)
    one, two = ([(choice.structure, choice.ranks) for choice in plan.layers.values()] for plan in plans)
    assert one == two and plans[0].kept == plans[1].kept


def test_other_weights_are_not_taken_for_those_of_before(data) -> None:
    """What the curvature remembers is of the weights that it was worked out for."""
    model = Small().eval()
    curvature = ed.measure(model, data, progress=False)
    first = ed.plan(model, curvature, macs=0.5)
    with torch.no_grad():
        model.body.weight.mul_(torch.linspace(0, 3, len(model.body.weight)).view(-1, 1, 1, 1))
    again = ed.plan(model, curvature, macs=0.5)
    assert again.loss != first.loss
    fresh = dataclasses.replace(curvature, remembered={})
    assert again.to_json() == ed.plan(model, fresh, macs=0.5).to_json()


def test_other_budgets_work_nothing_out_again(data, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Small().eval()
    curvature = ed.measure(model, data, progress=False)
    expected = ed.plan(model, curvature, params=0.5, multiple=2, structures=["tucker", "channels"]).to_json()
    for name in ("problem", "order_of_channels", "losses_by_channels"):
        monkeypatch.delattr(f"eigendamage.offers.{name}")
    monkeypatch.delattr("eigendamage.structures.lowrank.problem")
    assert ed.plan(model, curvature, params=0.5, multiple=2, structures=["tucker", "channels"]).to_json() == expected
    assert ed.plan(model, curvature, macs=0.6).macs > 0

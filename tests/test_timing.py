"""Budgets of time, by a clock that counts work instead of seconds, so that every expectation is exact."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.module import register_module_forward_hook

import eigendamage as ed
from eigendamage import offers, timing
from eigendamage.cost import called, forward_macs
from eigendamage.layers import kind_of
from eigendamage.structures import STRUCTURES
from eigendamage.timing import Stopwatch

MICROSECOND = 1e-6


class Clock:
    """A millionth of a second for every multiply-accumulate, and as for so many more for every layer that is called."""

    for_each = 0
    seen: ClassVar[dict[int, dict[Any, Any]]] = defaultdict(dict)  # what was timed so, for the next test too

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.charge(0)

    def charge(self, for_each: int) -> None:
        self.for_each = for_each
        self.patch.setattr(timing, "_REMEMBERED", self.seen[for_each])

    def __call__(self, task: Callable[[], object]) -> float:
        layers = []
        handle = register_module_forward_hook(lambda module, args, output: layers.append(kind_of(module) is not None))
        try:
            return MICROSECOND * (forward_macs(task) + self.for_each * sum(layers))
        finally:
            handle.remove()

    def of(self, model: nn.Module, inputs: Tensor) -> float:
        with torch.no_grad():
            return self(lambda: called(model.eval(), inputs))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(monkeypatch)
    monkeypatch.setattr(timing, "_seconds", clock)
    monkeypatch.setattr(offers, "TIMED_STEPS", 4)
    for name, value in {"RUNS": 1, "SECONDS": 0.0, "TURNS": 1, "MOST_TURNS": 1}.items():
        monkeypatch.setattr(timing, name, value)
    return clock


class Network(nn.Module):
    """Batch norm, a depthwise convolution between two layers, and a layer that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12)
        self.apart, self.wide = nn.Conv2d(12, 12, 3, padding=1, groups=12), nn.Conv2d(12, 16, 3, stride=2, padding=1)
        self.again, self.hidden, self.head = nn.Conv2d(16, 16, 3, padding=1), nn.Linear(16, 24), nn.Linear(24, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.wide(self.apart(F.relu(self.norm(self.stem(x))))))
        x = F.relu(self.again(F.relu(self.again(x))))
        return self.head(F.relu(self.hidden(x.mean((2, 3)))))


Case = tuple[nn.Module, ed.Curvature, Tensor]


@pytest.fixture(scope="module")
def case() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = Network().eval()
        batch = torch.randn(48, 3, 8, 8), torch.randint(0, 5, (48,))
        return model, ed.measure(model, [batch], methods=[*ed.METHODS, "best"], progress=False), batch[0][:2]


# --- the stopwatch ----------------------------------------------------------------------------------------------------------


def test_the_whole_model_is_the_sum_of_its_layers_each_call_counted_once(case: Case, clock: Clock) -> None:
    """Calls were once noted in every pass that was timed, so that a layer had the time of all of them."""
    model, curvature, inputs = case
    stopwatch = Stopwatch(model, inputs)
    assert stopwatch.dense == pytest.approx(MICROSECOND * ed.count(model, inputs).macs)
    for _ in range(2):
        seconds = {name: stopwatch.layer(name, "dense", {}) for name in curvature.layers if name != "apart"}
        for name, taken in seconds.items():
            assert taken == pytest.approx(MICROSECOND * len(inputs) * curvature[name].shape.macs), name
        apart = stopwatch.narrow("apart", 12)
        assert sum(seconds.values()) + apart == pytest.approx(stopwatch.dense)
        assert stopwatch.compare(model) == 1


def test_a_structure_takes_the_time_of_its_stages(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    stopwatch = Stopwatch(model, inputs)
    clock.charge(200)
    for name in ("wide", "again"):
        shape, calls = curvature[name].shape, 2 if name == "again" else 1
        for structure, row in STRUCTURES.items():
            if row.sketch is None or not row.fits(shape):
                continue
            ranks = {key: max(1, limit // 3) for key, limit in row.limits(shape).items()}
            work = len(inputs) * sum(weights * positions for weights, positions in row.stages(shape, ranks))
            stages = {"svd": 2, "tucker": 3, "mobile": 3, "rows-columns": 2, "columns-rows": 2}.get(structure, 1)
            expected = MICROSECOND * (work + 200 * stages * calls)
            assert stopwatch.layer(name, structure, ranks) == pytest.approx(expected), (name, structure)


def test_a_stage_is_timed_once_and_again_with_other_threads(case: Case, clock: Clock) -> None:
    model, _, inputs = case
    clock.patch.setattr(timing, "_REMEMBERED", {})
    stopwatch = Stopwatch(model, inputs)
    first = stopwatch.layer("wide", "svd", {"rank": 3})
    clock.for_each = 1000
    assert stopwatch.layer("wide", "svd", {"rank": 3}) == first
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(before + 1)
        assert stopwatch.layer("wide", "svd", {"rank": 3}) > first
    finally:
        torch.set_num_threads(before)


def test_another_model_takes_its_share(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    small = ed.apply(model, ed.plan(model, curvature, macs=0.5), curvature)
    expected = ed.count(small, inputs).macs / ed.count(model, inputs).macs
    assert Stopwatch(model, inputs).compare(small) == pytest.approx(expected)


def test_tasks_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    times = iter(range(100))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: float(next(times)))
    seconds = timing.interleaved([lambda: order.append("a"), lambda: order.append("b")], turns=3)
    assert order == ["a", "b"] * 4 and seconds == [[1.0] * 3] * 2


# --- budgets ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overhead", [0, 200])
@pytest.mark.parametrize("latency", [0.8, 0.5])
def test_a_budget_of_time_holds_by_the_clock(case: Case, clock: Clock, latency: float, overhead: float) -> None:
    model, curvature, inputs = case
    clock.charge(overhead)
    plan = ed.plan(model, curvature, latency=latency, example_inputs=inputs)
    taken = clock.of(ed.apply(model, plan, curvature), inputs)
    assert taken <= latency * clock.of(model, inputs)
    assert plan.latency.dense == pytest.approx(clock.of(model, inputs))
    assert plan.latency.measured == pytest.approx(taken)
    apart = MICROSECOND * len(inputs) * curvature["apart"].shape.macs  # a depthwise convolution is taken to get no faster
    assert taken - 1e-12 <= plan.latency.predicted <= taken + apart
    assert taken >= 0.8 * latency * clock.of(model, inputs)  # and it is used


def test_a_structure_is_taken_only_where_it_is_faster(case: Case, clock: Clock) -> None:
    """With so much time for every layer that is called, more stages are slower, however few they multiply."""
    model, curvature, inputs = case
    clock.charge(100_000)
    plan = ed.plan(model, curvature, latency=0.995, example_inputs=inputs)
    changed = {name: choice for name, choice in plan.layers.items() if choice.structure != "dense"}
    assert changed and all(choice.structure == "channels" for choice in changed.values())
    clock.charge(200)
    plan = ed.plan(model, curvature, latency=0.7, example_inputs=inputs)
    stopwatch = Stopwatch(model, inputs)
    for name, choice in plan.layers.items():
        if choice.seconds is not None and choice.structure != "dense":
            assert choice.seconds < choice.dense_seconds
            behind = [stopwatch.narrow("apart", 12)] if name == "stem" else []
            assert choice.dense_seconds == pytest.approx(stopwatch.layer(name, "dense", {}) + sum(behind))


def test_the_table_shows_the_predicted_and_the_measured_time(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    plan = ed.plan(model, curvature, latency=0.6, example_inputs=inputs)
    text = str(plan)
    dense, measured = plan.latency.dense, plan.latency.measured
    assert f"one pass: dense {1e3 * dense:.3g} ms, predicted " in text
    assert f"measured {1e3 * measured:.3g} ms ({measured / dense:.0%})" in text
    header, rows = plan.rows()
    assert "time" in header
    changed = next(name for name, choice in plan.layers.items() if choice.structure != "dense" and choice.seconds)
    row = next(row for row in rows if row[0] == changed)
    assert row[header.index("time")] == f"{1e3 * plan[changed].dense_seconds:.3g} → {1e3 * plan[changed].seconds:.3g} ms"


def test_json_keeps_the_times(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    plan = ed.plan(model, curvature, latency=0.6, example_inputs=inputs)
    assert json.loads(plan.to_json())["latency"]["measured"] == plan.latency.measured
    again = ed.Plan.from_json(plan.to_json())
    assert again == plan and str(again) == str(plan)


def test_the_same_clock_makes_the_same_plan(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    one, other = (ed.plan(model, curvature, latency=0.55, example_inputs=inputs).to_json() for _ in range(2))
    assert one == other


@pytest.mark.parametrize("other", [{"params": 0.5}, {"macs": 0.4}, {"loss": 10.0}])
def test_other_budgets_hold_together_with_time(case: Case, clock: Clock, other: dict[str, float]) -> None:
    model, curvature, inputs = case
    clock.charge(200)
    plan = ed.plan(model, curvature, latency=0.7, example_inputs=inputs, **other)
    small = ed.apply(model, plan, curvature)
    assert clock.of(small, inputs) <= 0.7 * clock.of(model, inputs)
    before, after = ed.count(model, inputs), ed.count(small, inputs)
    for key in other.keys() - {"loss"}:
        assert getattr(after, key) <= other[key] * getattr(before, key)
    if "loss" in other:
        assert plan.loss <= other["loss"] * (1 + 1e-9)


def test_an_impossible_budget_of_time_says_what_can_be_reached(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    with pytest.raises(ValueError, match=r"latency=1e-05 cannot be reached: the least .* become is latency=0\.\d+"):
        ed.plan(model, curvature, latency=1e-5, example_inputs=inputs)


def test_where_the_whole_is_slower_than_its_layers_the_least_that_was_measured_is_named(
    case: Case, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, curvature, inputs = case
    monkeypatch.setattr(Stopwatch, "compare", lambda self, other: 0.9 + 0.01 * ed.count(other, inputs).macs / 1e6)
    with pytest.raises(ValueError, match=r"latency=0\.6 cannot be reached: the least that was measured is latency=0\.90"):
        ed.plan(model, curvature, latency=0.6, example_inputs=inputs)


def test_where_only_the_layers_times_leave_no_hope_the_quickest_plan_has_its_chance(
    case: Case, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy machine adds to a whole pass what it does not add to the quickest run of a stage."""
    model, curvature, inputs = case
    whole = Stopwatch.__init__

    def busy(self: Stopwatch, *arguments: Any) -> None:
        whole(self, *arguments)
        self.dense *= 3

    monkeypatch.setattr(Stopwatch, "__init__", busy)
    plan = ed.plan(model, curvature, latency=0.6, example_inputs=inputs)
    assert clock.of(ed.apply(model, plan, curvature), inputs) <= 0.6 * clock.of(model, inputs)


def test_a_whole_that_gains_less_than_its_layers_is_asked_for_more(
    case: Case, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part of the time is in no layer: the budget of the layers is moved until the whole model keeps its own."""
    model, curvature, inputs = case
    dense = ed.count(model, inputs).macs

    def compare(self: Stopwatch, other: nn.Module) -> float:
        return 0.2 + 0.8 * ed.count(other, inputs).macs / dense

    monkeypatch.setattr(Stopwatch, "compare", compare)
    plan = ed.plan(model, curvature, latency=0.6, example_inputs=inputs)
    assert 0.5 <= plan.latency.measured / plan.latency.dense <= 0.6


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"latency": 0.5}, "latency: needs example_inputs"),
        ({"latency": 1.5, "example_inputs": 0}, "latency: must be a fraction of the dense model, above 0 and at most 1"),
        ({"latency": 0.5, "method": "eigendamage", "example_inputs": 0}, "latency: .*leave out method='eigendamage'"),
        ({"macs": 0.5, "example_inputs": 0}, r"example_inputs: are for latency"),
        ({"latency": 0.5, "ratio": 0.5, "example_inputs": 0}, "one of ratio"),
    ],
)
def test_what_does_not_go_with_a_budget_of_time_is_named(case: Case, arguments: dict, message: str) -> None:
    model, curvature, inputs = case
    if "example_inputs" in arguments:
        arguments = {**arguments, "example_inputs": inputs}
    with pytest.raises(ValueError, match=message):
        ed.plan(model, curvature, **arguments)


def test_a_budget_of_all_the_time_is_the_dense_model(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    plan = ed.plan(model, curvature, latency=1.0, example_inputs=inputs)
    assert all(choice.structure == "dense" for choice in plan.layers.values())


def test_the_model_is_left_as_it_was(case: Case, clock: Clock) -> None:
    model, curvature, inputs = case
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    ed.plan(model, curvature, latency=0.6, example_inputs=inputs)
    assert all(module.training and not module._forward_pre_hooks for module in model.modules())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.eval()


def test_a_real_clock_makes_a_plan_that_was_measured_to_keep_its_budget(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    model, curvature, _ = case
    monkeypatch.setattr(offers, "TIMED_STEPS", 4)
    monkeypatch.setattr(timing, "SECONDS", 0.002)
    monkeypatch.setattr(timing, "TOGETHER", 0.1)
    try:
        plan = ed.plan(model, curvature, latency=0.9, example_inputs=torch.randn(64, 3, 8, 8))
    except ValueError as error:  # a busy machine, or one on which nothing small is faster
        assert "cannot be reached" in str(error)
        return
    assert 0 < plan.latency.measured <= 0.9 * plan.latency.dense

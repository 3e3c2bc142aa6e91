"""The curve of cost against loss: every point is a plan for its budget, and less never costs less."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import eigendamage as ed
from eigendamage.lab import networks

Batches = list[tuple[Tensor, Tensor]]
Case = tuple[nn.Module, Batches, ed.Curvature]


def random_images(batches: int, size: int, classes: int = 10) -> Batches:
    return [(torch.randn(32, 3, size, size), torch.randint(0, classes, (32,))) for _ in range(batches)]


@pytest.fixture(scope="module")
def case() -> Case:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [nn.Conv2d(3, 10, 3, padding=1), nn.BatchNorm2d(10), nn.ReLU(), nn.Conv2d(10, 14, 3, stride=2), nn.ReLU()]
        model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(14, 30), nn.ReLU(), nn.Linear(30, 10))
        data = random_images(2, 8)
        return model.eval(), data, ed.measure(model, data, progress=False)


@pytest.mark.parametrize("currency", ["macs", "params"])
def test_every_point_is_the_plan_for_its_budget_and_less_never_costs_less(case: Case, currency: str) -> None:
    model, data, curvature = case
    found = ed.frontier(model, curvature, currency=currency, points=12, progress=False)
    budgets = [point.budget for point in found.points]
    assert budgets == sorted(budgets) and budgets[-1] == 1 and len(budgets) > 6
    assert all(later.plan.loss <= earlier.plan.loss for earlier, later in pairwise(found.points))
    assert found.points[-1].plan.loss == 0 < found.points[0].plan.loss
    dense = getattr(ed.count(model, data[0][0][:1]), currency)
    for point in found.points:
        small = ed.apply(model, point.plan, curvature)
        assert getattr(ed.count(small, data[0][0][:1]), currency) <= point.budget * dense
        assert point.plan.loss <= ed.plan(model, curvature, **{currency: point.budget}).loss


def test_budgets_of_ones_own_come_in_order(case: Case) -> None:
    model, _, curvature = case
    found = ed.frontier(model, curvature, budgets=[0.9, 0.4, 0.6], progress=False)
    assert [point.budget for point in found.points] == [0.4, 0.6, 0.9]
    with pytest.raises(ValueError, match=r"macs=0\.0001 cannot be reached"):
        ed.frontier(model, curvature, budgets=[0.5, 0.0001], progress=False)


def test_measured_is_what_the_function_says_of_each_network(case: Case) -> None:
    model, data, curvature = case

    def size(network: nn.Module) -> int:
        return ed.count(network, data[0][0][:1]).macs

    found = ed.frontier(model, curvature, budgets=[0.4, 0.7, 1.0], measure=size, progress=False)
    for point in found.points:
        assert point.measured == size(ed.apply(model, point.plan, curvature))


def test_networks_are_refitted_before_they_are_measured(case: Case) -> None:
    model, data, curvature = case

    def total(network: nn.Module) -> float:
        return float(network(data[0][0]).detach().sum())

    found = ed.frontier(model, curvature, budgets=[0.4], measure=total, refit=data, progress=False)
    plan = found.points[0].plan
    assert found.points[0].measured == total(ed.apply(model, plan, curvature, refit=data))
    assert found.points[0].measured != total(ed.apply(model, plan, curvature))


def test_the_table_has_a_row_for_every_point(case: Case) -> None:
    model, _, curvature = case
    found = ed.frontier(model, curvature, currency="params", budgets=[0.5, 0.75], measure=lambda network: 0.125, progress=False)
    text = str(found)
    assert all(word in text for word in ("params", "MACs", "predicted loss", "measured", "0.5", "0.75"))
    assert text.count("0.125") == 2
    assert f"{found.points[0].plan.loss:.3g}" in text
    assert "measured" not in str(ed.frontier(model, curvature, budgets=[0.5], progress=False))


@pytest.mark.parametrize("measured", [False, True])
def test_the_plot_is_written(case: Case, tmp_path: Path, measured: bool) -> None:
    model, _, curvature = case
    judge = (lambda network: 0.5) if measured else None
    found = ed.frontier(model, curvature, budgets=[0.4, 0.6, 1.0], measure=judge, progress=False)
    found.plot(tmp_path / "curve.png", label="accuracy")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG") and (tmp_path / "curve.png").stat().st_size > 5000


def test_methods_of_the_paper_have_a_curve_too(case: Case) -> None:
    model, data, curvature = case
    found = ed.frontier(model, curvature, method="eigendamage", budgets=[0.5, 0.8], progress=False)
    for point in found.points:
        small = ed.apply(model, point.plan, curvature)
        assert point.plan.method == "eigendamage"
        assert ed.count(small, data[0][0]).macs <= point.budget * ed.count(model, data[0][0]).macs


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"currency": "loss"}, "currency: must be one of 'macs', 'params', 'latency'; got 'loss'"),
        ({"points": 1}, "points: must be at least 2; got 1"),
        ({"budgets": [0.5, 1.5]}, "macs: must be a fraction of the dense model, above 0 and at most 1; got 1.5"),
        ({"budgets": []}, "budgets: there are none"),
        ({"macs": 0.5}, "macs: is what the curve is over"),
        ({"structures": []}, "structures: there are none"),
        ({"measure": 3}, "measure: "),
        ({"ratio": 0.5}, "one of ratio"),
        ({"currency": "latency"}, "latency: needs example_inputs"),
    ],
)
def test_arguments_that_cannot_be_are_named(case: Case, arguments: dict, message: str) -> None:
    model, _, curvature = case
    with pytest.raises((ValueError, TypeError), match=message):
        ed.frontier(model, curvature, progress=False, **arguments)


def test_where_nothing_can_be_reached_that_is_said() -> None:
    """A model of one layer that makes the logits, which stays."""
    model, batch = nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), (torch.randn(8, 12), torch.randint(0, 3, (8,)))
    found = ed.frontier(model, ed.measure(model, [batch], progress=False), points=3, progress=False)
    assert [point.budget for point in found.points] == [1.0]


def test_twenty_budgets_take_less_time_than_one_more_measurement() -> None:
    model, data = networks.build("resnet20", 10).eval(), random_images(1, 16)
    start = time.perf_counter()
    curvature = ed.measure(model, data, methods=["best"], progress=False)
    measuring = time.perf_counter() - start
    start = time.perf_counter()
    found = ed.frontier(model, curvature, points=20, progress=False)
    assert time.perf_counter() - start < measuring
    assert len(found.points) >= 18

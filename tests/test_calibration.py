"""From the quadratic to the increase of the loss: a power law through what trials showed, and that it keeps its word."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import eigendamage as ed
from eigendamage.calibration import SLOPES, Calibration
from eigendamage.demo import load_digits

# Increases of a trial over the one before it, of its quadratic and of the loss.
factors = st.tuples(st.floats(1.2, 50), st.floats(1.2, 50))
Trials = tuple[tuple[float, float], ...]
amounts = st.floats(1e-6, 1e4)


@st.composite
def laws(draw: st.DrawFn, least: int = 0) -> Trials:
    trials, quadratic, increase = [], draw(st.floats(1e-4, 1)), draw(st.floats(1e-4, 1))
    for by in draw(st.lists(factors, min_size=least, max_size=4)):
        quadratic, increase = quadratic * by[0], increase * by[1]
        trials.append((quadratic, increase))
    return tuple(trials)


@given(laws())
def test_the_law_goes_through_the_trials(law: Trials) -> None:
    calibration = Calibration(law)
    for quadratic, increase in calibration.trials:
        assert calibration.increase(quadratic) == pytest.approx(increase, rel=1e-9)
        assert calibration.quadratic(increase) == pytest.approx(quadratic, rel=1e-9)


@given(laws(least=2), st.floats(0, 1))
def test_between_two_trials_it_is_a_power_law(law: Trials, share: float) -> None:
    calibration = Calibration(law)
    for (a, b), (c, d) in pairwise(calibration.trials):
        at = math.exp((1 - share) * math.log(a) + share * math.log(c))
        assert calibration.increase(at) == pytest.approx(math.exp((1 - share) * math.log(b) + share * math.log(d)), rel=1e-7)


@given(laws(least=1), st.floats(1.01, 1e3))
def test_outside_the_trials_it_is_no_steeper_and_no_flatter_than_errors_compound(law: Trials, factor: float) -> None:
    calibration = Calibration(law)
    first, last = calibration.trials[0], calibration.trials[-1]
    for (quadratic, increase), by in ((first, 1 / factor), (last, factor)):
        slope = math.log(calibration.increase(by * quadratic) / increase) / math.log(by)
        assert SLOPES[0] - 1e-6 <= slope <= SLOPES[1] + 1e-6


@given(laws(), amounts, amounts)
def test_a_larger_quadratic_never_has_a_smaller_increase(law: Trials, one: float, other: float) -> None:
    calibration = Calibration(law)
    small, large = sorted((one, other))
    assert calibration.increase(small) <= calibration.increase(large) * (1 + 1e-12)
    assert calibration.quadratic(small) <= calibration.quadratic(large) * (1 + 1e-12)


@given(laws(), amounts)
def test_one_way_and_back_again_is_where_one_was(law: Trials, at: float) -> None:
    calibration = Calibration(law)
    assert calibration.quadratic(calibration.increase(at)) == pytest.approx(at, rel=1e-6)
    assert calibration.increase(calibration.quadratic(at)) == pytest.approx(at, rel=1e-6)


@given(laws())
def test_no_change_has_no_increase(law: Trials) -> None:
    calibration = Calibration(law)
    assert calibration.increase(0.0) == calibration.quadratic(0.0) == 0
    assert Calibration().increase(0.7) == Calibration().quadratic(0.7) == 0.7


trials = st.lists(st.tuples(st.floats(-1, 5), st.floats(-1, 5)), max_size=6)


@given(trials, st.randoms())
def test_trials_that_contradict_smaller_ones_say_nothing_whatever_their_order(trials: list, rng) -> None:
    kept = Calibration.of(trials).trials
    assert all(a < c and b < d for (a, b), (c, d) in pairwise(kept))
    assert all(pair in trials and min(pair) > 0 for pair in kept)
    for pair in trials:
        if pair not in kept:
            assert min(pair) <= 0 or any(a == pair[0] or (a < pair[0] and b >= pair[1]) for a, b in kept)
    rng.shuffle(trials)
    assert Calibration.of(trials).trials == kept


# --- a trained network ------------------------------------------------------------------------------------------------------


class Reader(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12), nn.ReLU()),
            *(nn.Conv2d(12, 20, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(20), nn.ReLU()),
            *(nn.Conv2d(20, 24, 3, padding=1, bias=False), nn.BatchNorm2d(24), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 10)),
        )


Trained = tuple[nn.Module, ed.Curvature, tuple[Tensor, Tensor]]


@pytest.fixture(scope="module")
def trained() -> Iterator[Trained]:
    """A network, its curvature from two thirds of the training images, and the other third."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        digits = load_digits(seed=0)
        model = Reader()
        ed.finetune(model, digits.batches(), epochs=8, learning_rate=0.05, schedule="cosine", progress=False)
        images, labels = digits.train
        curvature = ed.measure(model.eval(), [(images[:800], labels[:800])], progress=False)
        yield model, curvature, (images[800:], labels[800:])


def loss_on(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float(F.cross_entropy(model.eval()(images), labels))


@pytest.mark.parametrize("asked", [0.02, 0.05, 0.1, 0.2, 0.3])
def test_the_loss_that_is_asked_for_is_about_what_held_out_images_show(trained: Trained, asked: float) -> None:
    model, curvature, held_out = trained
    plan = ed.plan(model, curvature, loss=asked)
    increase = loss_on(ed.apply(model, plan, curvature), *held_out) - loss_on(model, *held_out)
    assert 0.5 * asked <= plan.loss <= asked * (1 + 1e-9)
    assert plan.loss / 2 - 0.005 <= increase <= 2 * plan.loss + 0.005


@pytest.mark.parametrize("macs", [0.6, 0.4, 0.25, 0.15])
def test_so_is_the_loss_that_is_predicted_for_a_cost(trained: Trained, macs: float) -> None:
    model, curvature, held_out = trained
    plan = ed.plan(model, curvature, macs=macs)
    increase = loss_on(ed.apply(model, plan, curvature), *held_out) - loss_on(model, *held_out)
    assert plan.loss / 2 - 0.005 <= increase <= 2 * plan.loss + 0.005


def test_a_larger_loss_buys_a_smaller_network(trained: Trained) -> None:
    model, curvature, _ = trained
    plans = [ed.plan(model, curvature, loss=loss) for loss in (0.003, 0.01, 0.03, 0.1, 0.3)]
    assert all(later.macs < earlier.macs for earlier, later in pairwise(plans))


def test_a_file_keeps_what_trials_showed(trained: Trained, tmp_path) -> None:
    model, curvature, _ = trained
    curvature.save(tmp_path / "curvature.safetensors")
    loaded = ed.Curvature.load(tmp_path / "curvature.safetensors")
    assert len(curvature.calibration.trials) >= 2 and curvature.calibration.layers and curvature.calibration.links
    assert loaded.calibration == curvature.calibration
    for budget in ({"macs": 0.4}, {"loss": 0.05}):
        assert ed.plan(model, loaded, **budget).to_json() == ed.plan(model, curvature, **budget).to_json()

"""A depthwise core of least loss between two pointwise stages, against the dense quadratic form."""

from __future__ import annotations

import pytest
import torch
from dense import factor, loss
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import shape_of, weight_of
from eigendamage.linalg import canonical_polyadic, compose, damped
from eigendamage.methods import polyadic
from eigendamage.methods.polyadic import factors, losses_of
from eigendamage.methods.regression import Problem, problem
from eigendamage.structures import STRUCTURES
from eigendamage.structures.lowrank import balanced


def case(inputs: int, outputs: int, kernel: tuple[int, ...]) -> tuple[nn.Module, LayerCurvature, Problem, Tensor]:
    """A convolution, random factors, the problem with all of the kernel shared, and the dense metric with its damping."""
    module = {1: nn.Conv1d, 2: nn.Conv2d}[len(kernel)](inputs, outputs, kernel).double()
    layer = LayerCurvature(shape_of(module), patches=factor(module.weight[0].numel()), softened=factor(outputs))
    given_problem = problem(weight_of(module), layer, tuple(range(len(kernel))))
    return module, layer, given_problem, torch.kron(damped(layer.softened), damped(layer.patches))


def composed(outputs: Tensor, inputs: Tensor, taps: Tensor, module: nn.Module) -> Tensor:
    return torch.einsum("oj,gj,sj->ogs", outputs, inputs, taps).view_as(module.weight)


sizes = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([(2, 2), (3, 2), (3,), (1, 3)]))


@given(sizes, st.integers(1, 12), st.integers(0, 1000))
def test_the_predicted_loss_is_that_of_the_composed_weight(size, rank: int, seed: int) -> None:
    torch.manual_seed(seed)
    module, _, given_problem, metric = case(*size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polyadic, "ROUGH", polyadic.FINE)
        (predicted,) = losses_of(given_problem, [rank])
    actual = float(loss(metric, composed(*factors(given_problem, rank), module) - module.weight.detach()))
    assert predicted == pytest.approx(actual, rel=1e-5, abs=1e-7 * given_problem.energy)


@given(sizes, st.integers(1, 6), st.integers(0, 1000))
def test_nothing_else_behind_the_same_filters_has_less_loss(size, rank: int, seed: int) -> None:
    """The gradient of the dense loss with respect to the last stage vanishes."""
    torch.manual_seed(seed)
    module, _, given_problem, metric = case(*size)
    outputs, inputs, taps = factors(given_problem, rank)
    outputs.requires_grad_()
    value = loss(metric, composed(outputs, inputs, taps, module) - module.weight.detach())
    (gradient,) = torch.autograd.grad(value, outputs)
    scale = given_problem.moved.norm() * inputs.norm(dim=0) * taps.norm(dim=0) * damped(metric).diagonal().max()
    assert bool((gradient.norm(dim=0) <= 1e-6 * scale + 1e-12).all())


def test_it_knows_what_the_loss_needs_and_the_plain_decomposition_does_not() -> None:
    ours, plain = [], []
    for seed in range(10):
        torch.manual_seed(seed)
        module, _, given_problem, metric = case(4, 5, (2, 2))
        weight = module.weight.detach()
        ours.append(float(loss(metric, composed(*factors(given_problem, 3), module) - weight)))
        plain.append(float(loss(metric, compose(canonical_polyadic(weight.flatten(2), 3)).view_as(weight) - weight)))
    assert sum(ours) < 0.6 * sum(plain)
    assert sum(a < b for a, b in zip(ours, plain, strict=True)) >= 9


def test_every_channel_is_as_large_in_all_three_factors() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        _, _, given_problem, _ = case(5, 4, (3, 3))
        outputs, inputs, taps = (part.norm(dim=0) for part in factors(given_problem, 6))
        torch.testing.assert_close(outputs, inputs)
        torch.testing.assert_close(taps, inputs)


@given(st.integers(1, 7), st.integers(1, 7), st.integers(1, 7), st.floats(-3, 3), st.integers(0, 100))
def test_balanced_factors_have_the_same_product_and_equal_orthogonal_sizes(
    rows: int, columns: int, rank: int, scale: float, seed: int
) -> None:
    torch.manual_seed(seed)
    rank = min(rank, rows, columns)
    left = torch.randn(rows, rank, dtype=torch.float64) * 10**scale
    right = torch.randn(rank, columns, dtype=torch.float64)
    one, other = balanced(left, right)
    torch.testing.assert_close(one @ other, left @ right)
    torch.testing.assert_close(one.T @ one, other @ other.T)
    grams = one.T @ one
    torch.testing.assert_close(grams, grams.diagonal().diag(), atol=1e-8 * float(grams.max()), rtol=0)


# --- weights that have few channels of their own ----------------------------------------------------------------------------


def degenerate(kind: str, module: nn.Module) -> None:
    outputs, inputs, *kernel = module.weight.shape
    with torch.no_grad():
        if kind == "zero":
            module.weight.zero_()
        elif kind == "one channel":
            parts = torch.randn(outputs), torch.randn(inputs), torch.randn(kernel[0] * kernel[1])
            module.weight.copy_(torch.einsum("o,g,s->ogs", *parts).view_as(module.weight))
        elif kind == "dead inputs":
            module.weight[:, 1:].zero_()


@pytest.mark.parametrize("kind", ["zero", "one channel", "dead inputs", "full"])
def test_more_channels_than_the_weight_has_are_no_obstacle(kind: str) -> None:
    """Filters that repeat each other had a covariance without a Cholesky factor, and stopped the whole measurement."""
    module, layer, given_problem, metric = case(4, 20, (3, 3))
    degenerate(kind, module)
    given_problem = problem(weight_of(module), layer, (0, 1))
    dense = float(loss(metric, module.weight.detach()))
    row = STRUCTURES["mobile"]
    assert bool(row.grid(weight_of(module), layer)[1].isfinite().all())
    for rank in (1, 12, 40, 80):
        outputs, inputs, taps = factors(given_problem, rank)
        actual = float(loss(metric, composed(outputs, inputs, taps, module) - module.weight.detach()))
        assert actual <= dense * (1 + 1e-6)
        if kind != "full" and rank > 9:  # no more than one channel for each of the nine places of one input
            assert actual <= 1e-4 * dense + 1e-12
        if rank == 80:  # all that a weight of these sizes can be
            assert actual <= 1e-6 * dense + 1e-12

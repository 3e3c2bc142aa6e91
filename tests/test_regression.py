"""Structures of least loss, against the dense quadratic form ½ vec(D)ᵀ (S ⊗ A) vec(D)."""

from __future__ import annotations

import itertools
from itertools import pairwise

import pytest
import torch
from dense import factor, loss
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import shape_of, weight_of
from eigendamage.linalg import damped
from eigendamage.methods.regression import (
    by_channel,
    leading,
    losses_by_channels,
    losses_by_rank,
    losses_by_two_ranks,
    order_of_channels,
    problem,
    refined,
    rest,
)
from eigendamage.structures import STRUCTURES

SHARED = {"svd": (), "tucker": (0, 1), "rows-columns": (1,), "columns-rows": (0,)}


def case(inputs: int = 3, outputs: int = 5, kernel: tuple[int, int] = (3, 2)) -> tuple[nn.Module, LayerCurvature, Tensor]:
    """A convolution, random factors, and the dense metric with the same damping."""
    module = nn.Conv2d(inputs, outputs, kernel, bias=False).double()
    a, s = factor(inputs * kernel[0] * kernel[1]), factor(outputs)
    return module, LayerCurvature(shape_of(module), patches=a, softened=s), torch.kron(damped(s), damped(a))


def composed(structure: str, built: nn.Module) -> Tensor:
    """The kernel that a chain of stages stands for, ``[out, in, *kernel]``: its answer to a single one in every place."""
    height = sum(stage.kernel_size[0] - 1 for stage in built) + 1
    width = sum(stage.kernel_size[1] - 1 for stage in built) + 1
    inputs = next(built.children()).in_channels
    ones = torch.eye(inputs * height * width, dtype=torch.float64).view(-1, inputs, height, width)
    return built(ones).detach().flatten(1).T.reshape(-1, inputs, height, width)


def ranks_of(structure: str, module: nn.Module, share: float) -> dict[str, int]:
    return {key: max(1, round(share * limit)) for key, limit in STRUCTURES[structure].limits(shape_of(module)).items()}


@pytest.mark.parametrize("structure", SHARED)
@pytest.mark.parametrize("share", [0.2, 0.5, 0.8, 1.0])
def test_what_is_built_has_no_larger_loss_than_the_grid_promises(structure: str, share: float) -> None:
    module, layer, metric = case()
    ranks = ranks_of(structure, module, share)
    built = STRUCTURES[structure].build(module, layer, ranks)
    actual = float(loss(metric, composed(structure, built) - weight_of(module).detach()))
    offered, losses = STRUCTURES[structure].grid(weight_of(module), layer)
    same = torch.stack([offered[key] == rank for key, rank in ranks.items()]).all(0)
    if not bool(same.any()):  # full ranks of Tucker-2: that is the dense layer
        assert share == 1 and actual < 1e-9
        return
    assert actual <= float(losses[same].item()) * (1 + 1e-6) + 1e-12


@pytest.mark.parametrize("rank", range(1, 6))
def test_two_factors_with_the_whole_kernel_are_the_optimum(rank: int) -> None:
    """Eckart and Young: no matrix of this rank is nearer in the metric, so the loss is the tail of the singular values."""
    module, layer, metric = case()
    built = STRUCTURES["svd"].build(module, layer, {"rank": rank})
    a, s = damped(layer.patches), damped(layer.softened)
    white = torch.linalg.cholesky(s).T @ weight_of(module).detach().flatten(1) @ torch.linalg.cholesky(a)
    tail = torch.linalg.svdvals(white)[rank:].square().sum() / 2
    torch.testing.assert_close(loss(metric, composed("svd", built) - weight_of(module).detach()), tail)


@pytest.mark.parametrize("shared", SHARED.values())
def test_the_loss_by_rank_is_that_of_the_best_rest(shared: tuple[int, ...]) -> None:
    """For a given first stage nothing behind it is better: the gradient of the loss vanishes there."""
    module, layer, _ = case()
    given_problem = problem(weight_of(module), layer, shared)
    first = torch.randn(given_problem.weight.shape[1], 2, dtype=torch.float64)
    last, core = rest(given_problem, first, len(given_problem.weight))
    behind = torch.einsum("oa,abs->obs", last, core).requires_grad_()
    own, others = given_problem.weight.shape[1:]
    s, a = damped(layer.softened), given_problem.inputs.reshape(own * others, -1)
    change = (given_problem.weight - torch.einsum("obs,gb->ogs", behind, first)).flatten(1)
    value = ((s @ change @ a) * change).sum() / 2
    (gradient,) = torch.autograd.grad(value, behind)
    assert float(gradient.abs().max()) < 1e-8 * float(value.detach()) + 1e-10
    torch.testing.assert_close(losses_by_rank(given_problem, first)[-1], value.detach())


def test_the_loss_by_two_ranks_is_that_of_the_best_third_stage() -> None:
    module, layer, metric = case()
    given_problem = problem(weight_of(module), layer, (0, 1))
    basis = leading(given_problem, given_problem.weight.shape[1])
    table = losses_by_two_ranks(given_problem, basis, [1, 2, 3])
    for inputs, outputs in itertools.product((1, 2, 3), (1, 3, 5)):
        last, core = rest(given_problem, basis[:, :inputs], outputs)
        weight = torch.einsum("oa,abs,gb->ogs", last, core, basis[:, :inputs]).view_as(module.weight)
        torch.testing.assert_close(loss(metric, weight - module.weight.detach()), table[inputs - 1, outputs - 1])


@given(st.sampled_from(sorted(SHARED)), st.integers(1, 4), st.integers(1, 5), st.integers(1, 3), st.integers(0, 100))
def test_losses_fall_with_the_rank_and_vanish_at_the_last(
    structure: str, inputs: int, outputs: int, size: int, seed: int
) -> None:
    torch.manual_seed(seed)
    module, layer, _ = case(inputs, outputs, (size, 2))
    given_problem = problem(weight_of(module), layer, SHARED[structure])
    losses = losses_by_rank(given_problem, leading(given_problem, given_problem.weight.shape[1])).tolist()
    assert all(later <= earlier + 1e-12 for earlier, later in pairwise(losses))
    assert losses[-1] < 1e-9 * given_problem.energy + 1e-12


def test_refining_never_makes_it_worse_and_is_worth_something() -> None:
    gained = 0
    for seed in range(10):
        torch.manual_seed(seed)
        module, layer, metric = case(6, 6, (3, 3))
        given_problem = problem(weight_of(module), layer, (0, 1))
        basis = leading(given_problem, 3)
        first, core, last = refined(given_problem, basis, 6)
        weight = torch.einsum("oa,abs,gb->ogs", last, core, first).view_as(module.weight)
        before, after = losses_by_rank(given_problem, basis)[-1], loss(metric, weight - module.weight.detach())
        assert after <= before * (1 + 1e-9)
        gained += bool(after < 0.95 * before)
    assert gained >= 5


# --- fewer channels ---------------------------------------------------------------------------------------------------------


def least_loss_without(gone: list[int], module: nn.Module, metric: Tensor) -> float:
    """The loss without these input channels and with the best of all other weights, by the whole linear system."""
    mask = torch.zeros_like(module.weight, dtype=torch.bool)
    mask[:, gone] = True
    lost, kept = mask.flatten().nonzero().squeeze(1), (~mask).flatten().nonzero().squeeze(1)
    change = torch.zeros(module.weight.numel(), dtype=torch.float64)
    change[lost] = -module.weight.detach().flatten()[lost]
    change[kept] = -torch.linalg.solve(metric[kept][:, kept], metric[kept][:, lost] @ change[lost])
    return float(loss(metric, change))


def test_the_loss_of_fewer_channels_is_that_of_the_whole_linear_system() -> None:
    module, layer, metric = case(4, 3, (2, 2))
    given_problem = problem(weight_of(module), layer, (0, 1))
    order = order_of_channels(given_problem)
    assert sorted(order) == [0, 1, 2, 3]
    losses = losses_by_rank(given_problem, torch.eye(4, dtype=torch.float64)[:, order])
    for kept in (1, 2, 3):
        assert float(losses[kept - 1]) == pytest.approx(least_loss_without(order[kept:], module, metric), rel=1e-6)


def test_the_first_channel_to_go_is_the_one_that_costs_least() -> None:
    for seed in range(5):
        torch.manual_seed(seed)
        module, layer, metric = case(5, 3, (2, 1))
        order = order_of_channels(problem(weight_of(module), layer, (0, 1)))
        assert order[-1] == min(range(5), key=lambda channel: least_loss_without([channel], module, metric))


@given(st.integers(2, 5), st.integers(1, 4), st.integers(1, 3), st.integers(0, 1000))
def test_channels_go_one_by_one_in_the_order_of_what_that_costs(channels: int, outputs: int, each: int, seed: int) -> None:
    """``each``: how many inputs side by side are of one channel, as behind a flattening."""
    torch.manual_seed(seed)
    module, layer, metric = case(channels * each, outputs, (2, 1))
    given_problem = by_channel(problem(weight_of(module), layer, (0, 1)), channels)
    order, gone = order_of_channels(given_problem), []

    def without(channel: int) -> float:
        lost = [index * each + place for index in [*gone, channel] for place in range(each)]
        return least_loss_without(lost, module, metric)

    losses = losses_by_channels(given_problem, order).tolist()
    assert losses[-1] < 1e-9 * given_problem.energy
    while len(gone) < channels - 1:
        least = min(without(channel) for channel in range(channels) if channel not in gone)
        assert without(order[channels - 1 - len(gone)]) == pytest.approx(least, rel=1e-6, abs=1e-12)
        gone.append(order[channels - 1 - len(gone)])
        lost = [index * each + place for index in gone for place in range(each)]
        expected = least_loss_without(lost, module, metric)
        assert losses[channels - 1 - len(gone)] == pytest.approx(expected, rel=1e-6, abs=1e-12)


def test_of_many_channels_some_go_at_a_time_and_those_are_still_cheap() -> None:
    """From 40 channels, two go before the others are looked at again; that is no worse than a random order, by far."""
    module, layer, _ = case(40, 6, (1, 1))
    given_problem = problem(weight_of(module), layer, (0, 1))
    order = order_of_channels(given_problem)
    assert sorted(order) == list(range(40))
    ours = losses_by_channels(given_problem, order)
    for _ in range(10):
        other = losses_by_channels(given_problem, torch.randperm(40).tolist())
        assert bool((ours[5:36] < other[5:36]).all())


def test_dead_and_repeated_channels_go_first() -> None:
    """Channel 1 is always zero and channel 3 always channel 0: both cost nothing, and the damping makes up for A's rank."""
    module = nn.Conv2d(4, 3, 1).double()
    sample = torch.randn(50, 4, dtype=torch.float64)
    sample[:, 1], sample[:, 3] = 0, sample[:, 0]
    layer = LayerCurvature(shape_of(module), patches=sample.T @ sample / 50, softened=factor(3))
    given_problem = problem(weight_of(module), layer, (0, 1))
    order = order_of_channels(given_problem)
    assert set(order[:2]) in ({0, 2}, {2, 3})
    losses = losses_by_rank(given_problem, torch.eye(4, dtype=torch.float64)[:, order])
    assert float(losses[1]) < 1e-3 * given_problem.energy


def test_a_layer_without_curvature_still_has_finite_structures() -> None:
    module = nn.Conv2d(3, 4, 3).double()
    zero = LayerCurvature(shape_of(module), patches=torch.zeros(27, 27), softened=torch.zeros(4, 4))
    for structure in SHARED:
        built = STRUCTURES[structure].build(module, zero, ranks_of(structure, module, 0.5))
        assert all(bool(weight.isfinite().all()) for weight in built.parameters())


def test_weights_of_zero_have_finite_structures() -> None:
    module, layer, _ = case()
    nn.init.zeros_(module.weight)
    for structure in SHARED:
        built = STRUCTURES[structure].build(module, layer, ranks_of(structure, module, 0.5))
        assert float(composed(structure, built).abs().max()) == 0

"""The methods against dense matrices: F = torch.kron(S, A) on ``weight.flatten()`` (see `dense` for the order of vec)."""

from __future__ import annotations

import pytest
import torch
from dense import constrained_minimiser, factor, layer_curvature, loss, rows_of, weights
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape
from eigendamage.linalg import canonical_polyadic, compose, damped, eigen, khatri_rao
from eigendamage.methods import METHODS, channel_scores, kron_obd, kron_obs, needs_of, obd, obs, slimming
from eigendamage.methods.cp import cp_factors, full_rank, rank_for
from eigendamage.methods.depthwise import depthwise_factors
from eigendamage.methods.eigendamage import Eigenbasis, eigenbasis, strongest

filters, columns = st.integers(1, 6), st.integers(1, 6)
close = torch.testing.assert_close


# --- the paper's example of section 3 ---------------------------------------------------------------------------------------

THETA = torch.ones(3, dtype=torch.float64)
HESSIAN = torch.tensor([[1, 0.99, 0], [0.99, 1, 0.01], [0, 0.01, 0.5]], dtype=torch.float64)
INVERSE = HESSIAN.inverse()
OBD = obd.weight_scores(THETA, HESSIAN.diagonal())
OBS = obs.weight_scores(THETA, INVERSE.diagonal())


def digits(values: Tensor) -> list[float]:
    return [round(value, 2) + 0.0 for value in values.reshape(-1).tolist()]


def test_paper_case_1_obs_is_better_for_one_weight() -> None:
    assert strongest(-OBD, 1).tolist() == [2]
    obd_change = torch.tensor([0, 0, -1], dtype=torch.float64)
    assert digits(OBD) == [0.5, 0.5, 0.25]
    assert digits(loss(HESSIAN, obd_change)) == [0.25]
    # OBS finds the first two weights equal to the digits printed. The change is the paper's, for the first of them, but for
    # the sign of its third component, which eq. 7 makes −0.02.
    obs_change = -INVERSE[:, 0] / INVERSE[0, 0]
    assert digits(OBS)[:2] == [0.01, 0.01]
    assert digits(obs_change) == [-1, 0.99, -0.02]
    assert digits(loss(HESSIAN, obs_change)) == [0.01]
    close(loss(HESSIAN, obs_change), OBS[0])


def test_paper_case_2_obd_is_better_for_two_weights() -> None:
    # OBD finds the first two weights equal; the paper takes the second.
    assert digits(OBD[[1, 2]].sum()) == digits(OBD[[0, 2]].sum()) == [0.75]
    assert digits(loss(HESSIAN, torch.tensor([0, -1, -1], dtype=torch.float64))) == [0.76]
    assert strongest(-OBS, 2).tolist() == [0, 1]
    assert digits(OBS[[0, 1]].sum()) == [0.02]
    assert digits(loss(HESSIAN, torch.tensor([-1, -1, 0], dtype=torch.float64))) == [1.99]


def test_the_change_of_obs_is_the_constrained_minimiser() -> None:
    for weight in range(3):
        gone = torch.arange(3) == weight
        close(constrained_minimiser(HESSIAN, THETA, gone), -INVERSE[:, weight] / INVERSE[weight, weight])


# --- scores of filters ------------------------------------------------------------------------------------------------------


@given(filters, columns)
def test_c_obd_sums_the_losses_of_single_weights(out: int, size: int) -> None:
    weight, fisher = weights(out, size, 2), weights(out, size, 2).square()
    expected = [
        sum(float(w) ** 2 * float(f) / 2 for w, f in zip(weight[i].flatten(), fisher[i].flatten(), strict=True))
        for i in range(out)
    ]
    close(obd.scores(weight, fisher).tolist(), expected)


@given(filters, columns, st.integers(1, 8))
def test_c_obs_takes_the_diagonal_of_the_dense_inverse(out: int, size: int, rank: int) -> None:
    weight, s, a = weights(out, size), factor(out), factor(size, rank)
    diagonal = torch.kron(damped(s), damped(a)).inverse().diagonal()
    expected = (weight.flatten().square() / diagonal / 2).reshape(out, size).sum(1)
    close(obs.scores(weight, a, s), expected, rtol=1e-6, atol=0)


@given(filters, columns)
def test_kron_obd_is_the_loss_of_one_filter_under_the_dense_fisher(out: int, size: int) -> None:
    weight, s, a = weights(out, size, 1), factor(out), factor(size)
    for i, score in enumerate(kron_obd.scores(weight, a, s)):
        change = torch.zeros_like(weight)
        change[i] = -weight[i]
        close(score, loss(torch.kron(s, a), change))


@given(filters, columns)
def test_kron_obs_is_the_least_loss_of_removing_one_filter(out: int, size: int) -> None:
    weight, s, a = weights(out, size), factor(out), factor(size)
    fisher = torch.kron(damped(s), a)
    for i, score in enumerate(kron_obs.scores(weight, a, s)):
        change = constrained_minimiser(fisher, weight.flatten(), rows_of([i], out, size))
        close(score, loss(fisher, change), rtol=1e-6, atol=1e-12)


@given(st.integers(2, 6), columns, st.data())
def test_obs_compensates_several_filters_as_the_dense_minimiser_does(out: int, size: int, data: st.DataObject) -> None:
    weight, s, a = weights(out, size), factor(out), factor(size)
    kept = data.draw(st.sets(st.integers(0, out - 1), min_size=1, max_size=out).map(sorted))
    gone = [i for i in range(out) if i not in kept]
    change = constrained_minimiser(torch.kron(damped(s), a), weight.flatten(), rows_of(gone, out, size)).reshape(out, size)
    close((weight + change)[gone], torch.zeros(len(gone), size, dtype=torch.float64))
    close(obs.compensated(weight, s, torch.tensor(kept)), (weight + change)[kept], rtol=1e-6, atol=1e-9)


@given(st.integers(2, 6), columns)
def test_obs_compensates_one_filter_as_eq_11_does(out: int, size: int) -> None:
    weight, s = weights(out, size), factor(out)
    inverse = damped(s).inverse()
    for i in range(out):
        change = -torch.outer(inverse[:, i], weight[i]) / inverse[i, i]
        kept = torch.tensor([j for j in range(out) if j != i])
        close(obs.compensated(weight, s, kept), (weight + change)[kept], rtol=1e-6, atol=1e-9)


def test_obs_scores_are_finite_for_curvature_without_full_rank() -> None:
    for s, a in ((factor(5, 1), factor(4, 1)), (torch.zeros(5, 5), torch.zeros(4, 4))):
        assert obs.scores(weights(5, 4), a, s).isfinite().all()
        assert obs.compensated(weights(5, 4), s, torch.tensor([0, 3])).isfinite().all()


def test_kron_obd_takes_all_of_the_input_covariance_not_only_its_diagonal() -> None:
    a = torch.tensor([[1.0, 0.9], [0.9, 1.0]])
    aligned, opposed = kron_obd.scores(torch.tensor([[1.0, 1.0], [1.0, -1.0]]), a, torch.eye(2)).tolist()
    close([aligned, opposed], [1.9, 0.1], rtol=1e-6, atol=1e-6)


def test_slimming_scores_by_the_size_of_the_scale() -> None:
    assert slimming.scores(torch.tensor([-2.0, 0.5])).tolist() == [2, 0.5]


# --- the table --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name, row in METHODS.items() if row.removes == "channels"])
def test_every_channel_method_scores_every_output_from_what_it_needs(name: str) -> None:
    method, weight = METHODS[name], weights(4, 3, 2)
    values = {"patches": factor(6), "gradients": factor(4), "fisher": weights(4, 3, 2).square(), "scale": weights(4).abs()}
    layer = LayerCurvature(LayerShape("conv", 3, 4, (2,), False), **{need: values[need] for need in method.needs})
    scores = channel_scores(method, weight, layer)
    assert scores is not None and scores.shape == (4,) and scores.dtype == torch.float64 and bool((scores > 0).all())
    assert channel_scores(method, weight, LayerCurvature(layer.shape)) is None


def test_methods_need_the_union_of_their_statistics_and_channels_a_coupling() -> None:
    assert needs_of(["eigendamage"]) == {"inputs", "gradients"}
    assert needs_of(["eigendamage", "c-obd"]) == {"inputs", "gradients", "fisher", "coupling"}
    assert needs_of(["cp"]) == set()


# --- EigenDamage ------------------------------------------------------------------------------------------------------------


sizes, bases = st.tuples(*[st.integers(1, 4)] * 2, st.integers(1, 3)), st.sampled_from(["channel", "patch"])


def in_eigenbasis(out: int, inputs: int, taps: int, basis: str) -> tuple[Tensor, Eigenbasis, Tensor]:
    """A weight, its eigenbasis, and the dense F ``[out · in · taps]²`` that belongs to the basis."""
    module = nn.Conv1d(inputs, out, taps).double()
    layer = layer_curvature(module)
    a = layer.patches if basis == "patch" else torch.kron(layer.channel_form, torch.eye(taps, dtype=torch.float64))
    return module.weight.detach(), eigenbasis(module.weight, layer, basis), torch.kron(layer.gradients, a)


def rotation(basis: Eigenbasis, weight: Tensor) -> Tensor:
    """Q_S ⊗ Q_A, over every kernel position where the basis is of channels."""
    taps = weight[0].numel() // len(basis.input_vectors)
    inputs = torch.kron(basis.input_vectors.contiguous(), torch.eye(taps, dtype=torch.float64))
    return torch.kron(basis.output_vectors.contiguous(), inputs)


@given(sizes, bases)
def test_theta_is_the_squared_core_times_the_diagonal_of_the_rotated_fisher(size: tuple[int, int, int], name: str) -> None:
    weight, basis, fisher = in_eigenbasis(*size, name)
    q = rotation(basis, weight)
    rotated = q.T @ fisher @ q
    close(rotated, torch.diag(rotated.diagonal()), rtol=0, atol=1e-9)
    core = q.T @ weight.flatten()
    close(basis.core.flatten(), core)
    theta = (core.square() * rotated.diagonal()).reshape(len(weight), len(basis.input_vectors), -1).sum(2)
    close(basis.importance, theta, rtol=1e-7, atol=1e-9)
    close(basis.output_scores, theta.sum(1) / 2, rtol=1e-7, atol=1e-9)
    close(basis.input_scores, theta.sum(0) / 2, rtol=1e-7, atol=1e-9)


@given(sizes, bases, st.data())
def test_predicted_loss_is_that_of_the_dense_fisher(size: tuple[int, int, int], name: str, data: st.DataObject) -> None:
    weight, basis, fisher = in_eigenbasis(*size, name)
    out, inputs = basis.importance.shape
    outputs = torch.tensor(sorted(data.draw(st.sets(st.integers(0, out - 1), min_size=1))))
    kept = torch.tensor(sorted(data.draw(st.sets(st.integers(0, inputs - 1), min_size=1))))
    core = basis.core.reshape(out, inputs, -1)
    left = torch.zeros_like(core)
    left[outputs[:, None], kept] = core[outputs[:, None], kept]
    expected = loss(fisher, rotation(basis, weight) @ (left - core).flatten())
    close(basis.loss(kept, outputs), float(expected), rtol=1e-7, atol=1e-9)


def test_eigenvalues_come_largest_first_and_never_negative() -> None:
    values, vectors = eigen(factor(6, 2) - 1e-12 * torch.eye(6, dtype=torch.float64))
    assert bool((values >= 0).all()) and bool((values.diff() <= 0).all())
    close(vectors.T @ vectors, torch.eye(6, dtype=torch.float64))


def test_the_earlier_of_two_equal_directions_stays() -> None:
    assert strongest(torch.tensor([1.0, 3.0, 1.0, 1.0]), 2).tolist() == [0, 1]


# --- canonical polyadic decompositions --------------------------------------------------------------------------------------


def error(tensor: Tensor, factors: list[Tensor]) -> float:
    return float((compose(factors) - tensor).norm() / tensor.norm())


def test_khatri_rao_is_the_columnwise_kronecker_product() -> None:
    a, b = weights(3, 2), weights(4, 2)
    close(khatri_rao([a, b]), torch.stack([torch.kron(a[:, r], b[:, r]) for r in range(2)], dim=1))


def test_compose_is_the_sum_of_outer_products() -> None:
    a, b, c = weights(2, 3), weights(4, 3), weights(5, 3)
    close(compose([a, b, c]), sum(torch.einsum("i,j,k->ijk", a[:, r], b[:, r], c[:, r]) for r in range(3)))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("shape", "rank"), [((6, 5, 9), 1), ((6, 5, 9), 3), ((8, 4, 3), 2), ((5, 5, 3, 3), 2)])
def test_als_recovers_a_tensor_of_low_rank(shape: tuple[int, ...], rank: int, seed: int) -> None:
    torch.manual_seed(seed)
    tensor = compose([torch.linalg.qr(weights(size, rank)).Q for size in shape])
    assert error(tensor, canonical_polyadic(tensor, rank, sweeps=1000, tolerance=1e-14)) < 1e-5


@given(st.tuples(columns, columns, columns), st.integers(1, 8))
def test_als_is_no_worse_than_the_best_first_factor_for_its_start(shape: tuple[int, int, int], rank: int) -> None:
    tensor = weights(*shape)
    start = canonical_polyadic(tensor, rank, sweeps=0)
    others = khatri_rao(start[1:])
    first = torch.linalg.lstsq(others, tensor.flatten(1).T, driver="gelsd").solution.T
    assert error(tensor, canonical_polyadic(tensor, rank)) <= error(tensor, [first, *start[1:]]) + 1e-9


@pytest.mark.parametrize("rank", [1, 3, 7])
def test_more_sweeps_never_hurt(rank: int) -> None:
    tensor = weights(5, 4, 6)
    errors = [error(tensor, canonical_polyadic(tensor, rank, sweeps)) for sweeps in (1, 2, 5, 20, 100)]
    assert errors == sorted(errors, reverse=True)


def test_the_same_tensor_gives_the_same_factors_bit_for_bit_and_leaves_the_random_state() -> None:
    tensor, state = weights(4, 3, 2), torch.get_rng_state()
    first, second = canonical_polyadic(tensor, 6), canonical_polyadic(tensor, 6)
    assert all(map(torch.equal, first, second))
    assert torch.equal(state, torch.get_rng_state())


def test_cp_ranks_are_fractions_and_multiples_of_the_rank_of_the_filters() -> None:
    shape = LayerShape("conv", 4, 10, (2, 1), False)
    assert full_rank(shape) == 8
    assert [rank_for(shape, fraction) for fraction in (0.01, 0.5, 1.0, 1.5)] == [1, 4, 8, 12]


def test_cp_factors_are_those_of_outputs_inputs_and_each_axis() -> None:
    assert [tuple(f.shape) for f in cp_factors(weights(5, 4, 3, 2), 6)] == [(5, 6), (4, 6), (3, 6), (2, 6)]


# --- depthwise: eq. 20 and its Mahalanobis form -----------------------------------------------------------------------------


def mahalanobis(core: Tensor, factors: tuple[Tensor, ...], metric: Tensor) -> Tensor:
    """½ vec(V D Uᵀ − W′)ᵀ F vec(V D Uᵀ − W′) with the dense F."""
    return loss(metric, torch.einsum("or,ir,tr->oit", *factors) - core)


Factors = tuple[Tensor, ...]


def slopes(core: Tensor, factors: Factors, metric: Tensor) -> list[float]:
    """Per factor: the gradient of the objective, relative to what it is where that factor is zero."""
    found = []
    for k, factor_k in enumerate(factors):
        norms = []
        for start in (factor_k, torch.zeros_like(factor_k)):
            free = start.clone().requires_grad_()
            objective = mahalanobis(core, (*factors[:k], free, *factors[k + 1 :]), metric)
            norms.append(torch.autograd.grad(objective, free)[0].norm())
        found.append(float(norms[0] / norms[1]))
    return found


@pytest.mark.parametrize("seed", range(10))
def test_each_norm_has_its_own_depthwise_factors_and_they_solve_its_normal_equations(seed: int) -> None:
    torch.manual_seed(seed)
    core = compose([weights(size, 2) for size in (5, 4, 6)]) + 0.2 * weights(5, 4, 6)
    s, a = weights(5).square() + 0.1, weights(4).square() + 0.1
    identity = torch.eye(core.numel(), dtype=torch.float64)
    metric = torch.kron(torch.diag(s), torch.kron(torch.diag(a), torch.eye(6, dtype=torch.float64)))
    frobenius, fisher = depthwise_factors(core, 2), depthwise_factors(core, 2, s, a)
    assert mahalanobis(core, fisher, metric) < mahalanobis(core, frobenius, metric)
    assert mahalanobis(core, frobenius, identity) < mahalanobis(core, fisher, identity)
    for factors, own, other in ((frobenius, identity, metric), (fisher, metric, identity)):
        assert slopes(core, factors, own)[2] < 1e-10  # the factor that was solved for last: exactly
        assert max(slopes(core, factors, own)) < 1e-3 < max(slopes(core, factors, other))


def test_depthwise_without_curvature_in_a_direction_stays_finite() -> None:
    for s, a in ((torch.tensor([1.0, 0, 0]), torch.tensor([0.0, 2])), (torch.zeros(3), torch.zeros(2))):
        assert all(bool(factor.isfinite().all()) for factor in depthwise_factors(weights(3, 2, 4), 2, s, a))


def test_depthwise_recovers_a_separable_core_in_either_norm() -> None:
    v, u, d = weights(6, 2), weights(5, 2), weights(9, 2)
    core = torch.einsum("or,ir,tr->oit", v, u, d)
    for values in ((None, None), (weights(6).square() + 0.1, weights(5).square() + 0.1)):
        close(torch.einsum("or,ir,tr->oit", *depthwise_factors(core, 2, *values)), core, rtol=0, atol=1e-3)

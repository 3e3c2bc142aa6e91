"""Dense linear algebra against its definition."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from eigendamage.linalg import DAMPING, canonical_polyadic, compose, damped, eigen, exact, inverse, inverse_diagonal, roots


@st.composite
def covariances(draw: st.DrawFn) -> Tensor:
    """A sum of outer products: often singular, sometimes zero, on any scale."""
    size, examples = draw(st.integers(1, 6)), draw(st.integers(0, 8))
    x = torch.randn(examples, size, dtype=torch.float64) * 10.0 ** draw(st.integers(-6, 6))
    return x.T @ x


@given(covariances())
def test_eigenvalues_come_largest_first_with_their_vectors(matrix: Tensor) -> None:
    values, vectors = eigen(matrix)
    scale = float(matrix.norm())
    torch.testing.assert_close(vectors * values @ vectors.T, matrix, rtol=1e-10, atol=1e-12 * scale)
    torch.testing.assert_close(vectors.T @ vectors, torch.eye(len(matrix), dtype=torch.float64))
    assert (values >= 0).all()
    assert (values.diff() <= 0).all()


@given(covariances())
def test_damping_is_relative_to_the_mean_of_the_diagonal(matrix: Tensor) -> None:
    mean = float(matrix.trace()) / len(matrix)
    added = DAMPING * (mean if mean > 0 else 1)
    torch.testing.assert_close(damped(matrix), matrix + added * torch.eye(len(matrix), dtype=torch.float64))


@given(covariances())
def test_the_inverse_diagonal_is_that_of_the_inverse(matrix: Tensor) -> None:
    torch.testing.assert_close(inverse_diagonal(matrix), torch.linalg.inv(damped(matrix)).diagonal(), rtol=1e-6, atol=0)


@given(covariances())
def test_roots_multiply_to_the_damped_matrix_and_undo_each_other(matrix: Tensor) -> None:
    root, inverse = roots(matrix)
    torch.testing.assert_close(root @ root, damped(matrix), rtol=1e-9, atol=1e-12 * float(matrix.norm()))
    torch.testing.assert_close(root @ inverse, torch.eye(len(matrix), dtype=torch.float64), rtol=0, atol=1e-8)
    torch.testing.assert_close(root, root.T)


@pytest.mark.parametrize("work", [eigen, roots, damped])
def test_everything_is_computed_in_double_precision_from_the_symmetric_part(work) -> None:
    matrix = torch.randn(4, 4)
    lopsided = matrix @ matrix.T + torch.triu(torch.ones(4, 4), 1)
    symmetric = (exact(lopsided) + exact(lopsided).T) / 2
    for actual, expected in zip(_tensors(work(lopsided)), _tensors(work(symmetric)), strict=True):
        assert actual.dtype == torch.float64
        assert torch.equal(actual, expected)


def _tensors(result: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def test_of_a_matrix_the_best_approximation_is_found() -> None:
    matrix = torch.randn(5, 7, dtype=torch.float64)
    values = torch.linalg.svdvals(matrix)
    for rank in range(1, 6):
        error = (matrix - compose(canonical_polyadic(matrix, rank))).norm()
        torch.testing.assert_close(error, values[rank:].norm(), rtol=1e-6, atol=1e-9)


def test_an_inverse_by_blocks_is_the_inverse() -> None:
    sample = torch.randn(700, 601, dtype=torch.float64)
    matrix = damped(sample.T @ sample)
    torch.testing.assert_close(inverse(matrix) @ matrix, torch.eye(601, dtype=torch.float64), atol=1e-8, rtol=0)

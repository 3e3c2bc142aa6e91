"""Dense linear algebra for curvature: always in float64 on the CPU, always of a symmetrised matrix."""

from __future__ import annotations

import math
from functools import reduce
from string import ascii_lowercase

import torch
from jaxtyping import Float
from torch import Tensor

# Added to the diagonal before a matrix is inverted, relative to the mean of the diagonal.
DAMPING = 1e-4
# A matrix that is so much wider than high is decomposed by way of its rows' products.
WIDE = 4
# Half of a matrix that is inverted at once.
BLOCK = 128


def exact(matrix: Tensor) -> Tensor:
    return matrix.detach().to("cpu", torch.float64)


def eigen(matrix: Float[Tensor, "n n"]) -> tuple[Float[Tensor, " n"], Float[Tensor, "n n"]]:
    """Eigenvalues, largest first and none below zero, and eigenvectors in columns."""
    values, vectors = torch.linalg.eigh(_symmetric(matrix))
    return values.flip(0).clamp(min=0), vectors.flip(1)


def damped(matrix: Float[Tensor, "n n"], damping: float = DAMPING) -> Float[Tensor, "n n"]:
    """The matrix made safely invertible; a zero matrix becomes the identity times the damping."""
    matrix = _symmetric(matrix)
    mean = matrix.diagonal().mean()
    scale = mean if mean > 0 else torch.ones_like(mean)
    return matrix + damping * scale * torch.eye(len(matrix), dtype=matrix.dtype)


def inverse_diagonal(matrix: Float[Tensor, "n n"]) -> Float[Tensor, " n"]:
    """Diagonal of the inverse of the damped matrix."""
    return torch.cholesky_inverse(torch.linalg.cholesky(damped(matrix))).diagonal()


def inverse(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """The inverse of a positive definite matrix, by blocks: nearly all of it is products of matrices, and they are quick."""
    half = len(matrix) // 2
    if half < BLOCK:
        return torch.cholesky_inverse(torch.linalg.cholesky(matrix))
    first = inverse(matrix[:half, :half])
    across = first @ matrix[:half, half:]
    last = inverse(matrix[half:, half:] - matrix[half:, :half] @ across)
    corner = -across @ last
    return torch.cat([torch.cat([first - corner @ across.T, corner], dim=1), torch.cat([corner.T, last], dim=1)])


def roots(matrix: Float[Tensor, "n n"]) -> tuple[Float[Tensor, "n n"], Float[Tensor, "n n"]]:
    """The symmetric square root of the damped matrix, and its inverse."""
    values, vectors = torch.linalg.eigh(damped(matrix))
    root = values.sqrt()
    return (vectors * root) @ vectors.T, (vectors / root) @ vectors.T


def _symmetric(matrix: Tensor) -> Tensor:
    matrix = exact(matrix)
    return (matrix + matrix.T) / 2


def khatri_rao(factors: list[Tensor]) -> Tensor:
    """Column-wise Kronecker product of matrices ``[n_i, rank]``, the first index slowest (appendix B)."""
    return reduce(lambda a, b: torch.einsum("ir,jr->ijr", a, b).flatten(0, 1), factors)


def canonical_polyadic(
    tensor: Tensor, rank: int, sweeps: int = 100, tolerance: float = 1e-8, damping: float = 0.0
) -> list[Tensor]:
    """Factors ``[n_k, rank]`` whose sum of outer products is near ``tensor``: alternating least squares (appendix B).

    Started from leading singular vectors, so that the same tensor gives the same factors. With damping each step is quicker,
    and the parts do not grow without bound to cancel each other.
    """
    tensor = exact(tensor)
    factors = [_leading(_unfold(tensor, mode), rank) for mode in range(tensor.dim())]
    size = float(tensor.norm())
    previous = math.inf
    for _ in range(sweeps):
        for mode in range(tensor.dim()):
            gram = reduce(torch.mul, (f.T @ f for other, f in enumerate(factors) if other != mode))
            products = _products(tensor, factors, mode)
            factors[mode] = _solved(gram, products, damping)
            if mode < tensor.dim() - 1:  # one mode carries the scale, the others stay well conditioned
                factors[mode] = factors[mode] / factors[mode].norm(dim=0).clamp(min=torch.finfo(tensor.dtype).tiny)
        error = float((tensor - compose(factors)).norm())
        if previous - error <= tolerance * size:
            break
        previous = error
    return factors


def _products(tensor: Tensor, factors: list[Tensor], mode: int) -> Tensor:
    """The unfolded tensor times the Khatri–Rao product of the other factors, which itself would be large."""
    axes, rank = ascii_lowercase[: tensor.dim()], ""
    left = axes
    for other in sorted(set(range(tensor.dim())) - {mode}, key=lambda other: -tensor.shape[other]):
        rest = left.replace(axes[other], "")
        tensor, left = torch.einsum(f"{left}{rank},{axes[other]}z->{rest}z", tensor, factors[other]), rest
        rank = "z"
    return tensor


def _solved(gram: Tensor, products: Tensor, damping: float) -> Tensor:
    if not damping:
        return products @ torch.linalg.pinv(gram, hermitian=True)
    return torch.cholesky_solve(products.T, torch.linalg.cholesky(damped(gram, damping))).T


def compose(factors: list[Tensor]) -> Tensor:
    """The tensor that canonical polyadic factors stand for."""
    return (factors[0] @ khatri_rao(factors[1:]).T).reshape([len(f) for f in factors])


def _unfold(tensor: Tensor, mode: int) -> Tensor:
    return tensor.movedim(mode, 0).flatten(1)


def _leading(matrix: Tensor, rank: int) -> Tensor:
    """Leading left singular vectors; where there are fewer than ``rank``, fixed pseudo-random columns fill up."""
    wide = WIDE * len(matrix) <= matrix.shape[1]  # then the squares are much quicker, and near enough to start from
    vectors = torch.linalg.eigh(matrix @ matrix.T)[1].flip(1) if wide else torch.linalg.svd(matrix, full_matrices=False).U
    vectors = vectors[:, :rank]
    missing = rank - vectors.shape[1]
    if missing <= 0:
        return vectors
    filler = torch.randn(len(matrix), missing, dtype=matrix.dtype, generator=torch.Generator().manual_seed(rank))
    return torch.cat([vectors, filler / filler.norm(dim=0)], dim=1)

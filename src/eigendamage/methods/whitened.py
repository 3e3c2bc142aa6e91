"""The best subspaces for the loss: low rank of the whitened weight (beyond the paper).

The K-FAC loss of a change D is ½‖S^½ D A^½‖². So the weight is whitened, T = S^½ W A^½, approximated in the
Frobenius norm, and mapped back. The KFE of the paper ignores W when it picks its basis; this does not.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from eigendamage.curvature import LayerCurvature
from eigendamage.linalg import exact, roots

HOOI_SWEEPS = 10


@dataclass(frozen=True, eq=False)
class Whitened:
    """T, and how to map its subspaces back to weights."""

    tensor: Tensor  # [out, in, *kernel] over channels, [out, in · taps] over patches
    input_root: Tensor
    input_inverse: Tensor
    output_root: Tensor
    output_inverse: Tensor


def whitened(weight: Float[Tensor, "out inputs *kernel"], layer: LayerCurvature, over: str) -> Whitened:
    weight = exact(weight)
    covariance = layer.patch_form if over == "patch" else layer.channel_form
    assert covariance is not None and layer.gradients is not None
    input_root, input_inverse = roots(covariance)
    output_root, output_inverse = roots(layer.gradients)
    flat = weight.flatten(1) if over == "patch" else weight
    tensor = torch.einsum("or,ri...,ic->oc...", output_root, flat, input_root)
    return Whitened(tensor, input_root, input_inverse, output_root, output_inverse)


def losses_by_rank(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, " ranks"]:
    """½ of the energy that the best approximation of rank 1, 2, … leaves out (Eckart–Young)."""
    return _left_out(torch.linalg.svdvals(matrix).square())


def losses_by_two_ranks(tensor: Float[Tensor, "out inputs taps"]) -> Float[Tensor, "out inputs"]:
    """½ of the energy outside the leading subspaces of the outputs and inputs, for every pair of ranks (HOSVD)."""
    outputs = _leading(tensor.flatten(1), tensor.shape[0])
    inputs = _leading(tensor.transpose(0, 1).flatten(1), tensor.shape[1])
    core = torch.einsum("oit,or,ic->rct", tensor, outputs, inputs).square().sum(2)
    kept = core.cumsum(0).cumsum(1)
    return (tensor.square().sum() - kept).clamp(min=0) / 2


def tucker(tensor: Float[Tensor, "out inputs taps"], outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Orthonormal bases of the outputs and inputs that leave the least energy out: HOSVD, improved by HOOI."""
    u = _leading(tensor.flatten(1), outputs)
    v = _leading(tensor.transpose(0, 1).flatten(1), inputs)
    for _ in range(HOOI_SWEEPS):
        u = _leading(torch.einsum("oit,ic->oct", tensor, v).flatten(1), outputs)
        v = _leading(torch.einsum("oit,or->irt", tensor, u).flatten(1), inputs)
    return u, v


def factors(
    matrix: Float[Tensor, "rows columns"], rank: int
) -> tuple[Float[Tensor, "rows rank"], Float[Tensor, "rank columns"]]:
    """The best approximation of this rank, its scale shared evenly between both factors."""
    u, s, v = torch.linalg.svd(matrix, full_matrices=False)
    scale = s[:rank].sqrt()
    return u[:, :rank] * scale, scale[:, None] * v[:rank]


def balanced(
    left: Float[Tensor, "rows rank"], right: Float[Tensor, "rank columns"]
) -> tuple[Float[Tensor, "rows rank"], Float[Tensor, "rank columns"]]:
    """Factors of the same product, with orthogonal directions and equally large.

    Mapped back from the whitened metric they may differ by orders of magnitude: fine-tuning would overshoot in one of them.
    """
    q, r = torch.linalg.qr(left)
    p, s = torch.linalg.qr(right.T)
    inner_left, inner_right = factors(r @ s.T, left.shape[1])
    return q @ inner_left, inner_right @ p.T


def _left_out(energies: Tensor) -> Tensor:
    return (energies.sum() - energies.cumsum(0)).clamp(min=0) / 2


def _leading(matrix: Tensor, rank: int) -> Tensor:
    return torch.linalg.eigh(matrix @ matrix.T).eigenvectors[:, -rank:].flip(1)

"""Kron-OBD: the loss of a filter under F = S ⊗ A with S taken as diagonal (eq. 10, appendix A)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from eigendamage.linalg import exact


def filter_energies(
    weight: Float[Tensor, "out inputs *kernel"], patches: Float[Tensor, "patch patch"]
) -> Float[Tensor, " out"]:
    """θᵢᵀ A θᵢ of every filter."""
    filters = exact(weight).flatten(1)
    return torch.einsum("op,op->o", filters @ exact(patches), filters)


def scores(
    weight: Float[Tensor, "out inputs *kernel"],
    patches: Float[Tensor, "patch patch"],
    gradients: Float[Tensor, "out out"],
) -> Float[Tensor, " out"]:
    return exact(gradients).diagonal() * filter_energies(weight, patches) / 2

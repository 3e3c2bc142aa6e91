"""Kron-OBS: the loss of a filter under F = S ⊗ A after the best update of the others (eq. 11, appendix A)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from eigendamage.linalg import inverse_diagonal
from eigendamage.methods.kron_obd import filter_energies


def scores(
    weight: Float[Tensor, "out inputs *kernel"],
    patches: Float[Tensor, "patch patch"],
    gradients: Float[Tensor, "out out"],
) -> Float[Tensor, " out"]:
    return filter_energies(weight, patches) / (2 * inverse_diagonal(gradients))

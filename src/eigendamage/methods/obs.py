"""C-OBS: optimal brain surgeon with the K-FAC inverse, summed over each filter (eq. 7, section 4.2).

Removing a whole filter under F = S ⊗ A has the closed-form best update of the remaining filters (appendix A); it does not
depend on A, so C-OBS and Kron-OBS share it.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from eigendamage.linalg import damped, exact, inverse_diagonal


def weight_scores(weight: Float[Tensor, "*shape"], inverse: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """½ θ² / [H⁻¹]_qq of every weight (eq. 7)."""
    return exact(weight).square() / (2 * inverse)


def scores(
    weight: Float[Tensor, "out inputs *kernel"],
    patches: Float[Tensor, "patch patch"],
    gradients: Float[Tensor, "out out"],
) -> Float[Tensor, " out"]:
    inverse = torch.outer(inverse_diagonal(gradients), inverse_diagonal(patches))
    return weight_scores(weight.flatten(1), inverse).sum(1)


def compensated(
    filters: Float[Tensor, "out columns"], gradients: Float[Tensor, "out out"], kept: Tensor
) -> Float[Tensor, "kept columns"]:
    """The kept filters after the best update for the loss of the others.

    Eq. 11 for all removed filters P at once: ΔW = −W_P [(S⁻¹)_PP]⁻¹ (S⁻¹)_P:, which for the kept filters K is S_KK⁻¹ S_KP W_P.
    One filter at a time with the same S⁻¹, as algorithm 1 is written, would bring removed filters back.
    """
    filters, curvature = exact(filters), damped(gradients)
    removed = torch.ones(len(filters), dtype=torch.bool)
    removed[kept] = False
    pull = curvature[kept][:, removed] @ filters[removed]
    return filters[kept] + torch.linalg.solve(curvature[kept][:, kept], pull)

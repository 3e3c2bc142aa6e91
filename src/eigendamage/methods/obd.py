"""C-OBD: optimal brain damage with the diagonal of the Fisher, summed over each filter (eq. 5, section 4.2)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from eigendamage.linalg import exact


def weight_scores(weight: Float[Tensor, "*shape"], diagonal: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """½ θ² H_qq of every weight (eq. 5)."""
    return exact(weight).square() * exact(diagonal) / 2


def scores(weight: Float[Tensor, "out inputs *kernel"], fisher: Float[Tensor, "out inputs *kernel"]) -> Float[Tensor, " out"]:
    return weight_scores(weight, fisher).flatten(1).sum(1)

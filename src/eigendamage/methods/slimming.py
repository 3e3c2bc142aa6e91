"""NN Slimming (Liu et al., 2017): a channel matters as much as the scale its batch norm gives it."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from eigendamage.linalg import exact


def scores(scale: Float[Tensor, " out"]) -> Float[Tensor, " out"]:
    return exact(scale).abs()

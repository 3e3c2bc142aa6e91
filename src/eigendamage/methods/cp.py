"""CP decomposition (Lebedev et al., 2014): a convolution as a sum of rank-one kernels, with given ranks (section 5.4)."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from eigendamage.layers import LayerShape
from eigendamage.linalg import canonical_polyadic


def cp_factors(weight: Float[Tensor, "out inputs *kernel"], rank: int) -> list[Tensor]:
    """Factors ``[n, rank]`` for the outputs, the inputs and each kernel axis; weights only, no curvature."""
    return canonical_polyadic(weight, rank)


def full_rank(shape: LayerShape) -> int:
    """The rank of the filters as a matrix, of which the paper takes fractions and multiples."""
    return min(shape.outputs, shape.inputs * shape.taps)


def rank_for(shape: LayerShape, fraction: float) -> int:
    return max(1, math.floor(fraction * full_rank(shape) + 0.5))

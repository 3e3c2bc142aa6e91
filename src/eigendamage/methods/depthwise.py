"""EigenDamage-Depthwise: the pruned core as a depthwise convolution between two bases (section 4.6, appendix B).

W′[:, :, i] ≈ U Dᵢ Vᵀ with diagonal Dᵢ for every kernel position i is a canonical polyadic decomposition; U and V merge into the
rotations. In the KFE the metric F is diagonal and Kronecker-factored, so its Mahalanobis norm is the Frobenius norm of the
core with rows and columns scaled by the roots of the eigenvalues.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from eigendamage.linalg import canonical_polyadic, exact


def depthwise_factors(
    core: Float[Tensor, "out inputs taps"],
    rank: int,
    output_values: Float[Tensor, " out"] | None = None,
    input_values: Float[Tensor, " inputs"] | None = None,
) -> tuple[Float[Tensor, "out rank"], Float[Tensor, "inputs rank"], Float[Tensor, "taps rank"]]:
    """V, U and the diagonals D that minimise eq. 20, or its Mahalanobis form when eigenvalues are given."""
    output_scale, input_scale = _scale(output_values, core.shape[0]), _scale(input_values, core.shape[1])
    whitened = exact(core) * output_scale[:, None, None] * input_scale[None, :, None]
    outputs, inputs, taps = canonical_polyadic(whitened, rank)
    return outputs / output_scale[:, None], inputs / input_scale[:, None], taps


def _scale(values: Tensor | None, size: int) -> Tensor:
    if values is None:
        values = exact(Tensor([1.0])).expand(size)
    # Directions without curvature cost nothing; a floor keeps them representable.
    return exact(values).clamp(min=1e-8 * float(values.max())).sqrt() if float(values.max()) > 0 else _scale(None, size)

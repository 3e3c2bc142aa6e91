"""The least loss of a depthwise core between two pointwise stages, W ≈ Σⱼ uⱼ ⊗ vⱼ ⊗ dⱼ, in the metric of K-FAC (beyond 4.6).

EigenDamage-Depthwise decomposes the pruned core; this decomposes the whole weight, with its inputs and outputs whitened, and
then lets the last stage make up for what the others miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from eigendamage.linalg import canonical_polyadic, damped
from eigendamage.methods.regression import Problem, whitened_inputs

# Alternations for a prediction, and for a layer that is built.
ROUGH, FINE = 10, 60
DAMPING = 1e-6
# Channels may repeat each other, where a weight has fewer of its own: what keeps the last stage finite then.
REPEATED = 1e-10
# Of the directions of inputs and of outputs, those that hold nearly all of the weight are decomposed, and no more than this.
SHARE, MOST = 1 - 1e-4, 256


def losses_of(given: Problem, ranks: Sequence[int]) -> list[float]:
    """About the loss with so many depthwise channels. ``given`` shares the first stage along all axes of the kernel."""
    white = _whitened(given)
    return [_last(given, *white.decomposed(rank, ROUGH))[1] for rank in ranks]


def factors(
    given: Problem, rank: int
) -> tuple[Float[Tensor, "out rank"], Float[Tensor, "own rank"], Float[Tensor, "shared rank"]]:
    """u, v and d, every channel as large in one as in the others."""
    inputs, taps = _whitened(given).decomposed(rank, FINE)
    outputs, _ = _last(given, inputs, taps)
    sizes = torch.stack([factor.norm(dim=0).clamp(min=1e-30) for factor in (outputs, inputs, taps)])
    scales = sizes.log().mean(0).exp() / sizes
    return outputs * scales[0], inputs * scales[1], taps * scales[2]


def _last(
    given: Problem, inputs: Float[Tensor, "own rank"], taps: Float[Tensor, "shared rank"]
) -> tuple[Float[Tensor, "out rank"], float]:
    """The best u for these v and d, and the loss with it."""
    filters = torch.einsum("gj,sj->gsj", inputs, taps).flatten(0, 1)
    covariance = filters.T @ (given.inputs.flatten(2).flatten(0, 1) @ filters)
    sizes = covariance.diagonal().sqrt().clamp(min=1e-30)
    covariance, moved = covariance / sizes / sizes[:, None], given.moved.flatten(1) @ filters / sizes
    last = torch.linalg.solve(damped(covariance, REPEATED), moved.T).T
    missed = given.energy + float(((last @ covariance - 2 * moved) * last).sum())
    return given.inverse @ last / sizes, max(missed, 0.0) / 2


@dataclass(frozen=True, eq=False)
class _Whitened:
    """The whitened weight in the main directions of its outputs and inputs."""

    small: Float[Tensor, "outputs inputs shared"]
    directions: Float[Tensor, "own inputs"]  # of the inputs, no longer whitened

    def decomposed(self, rank: int, sweeps: int) -> tuple[Float[Tensor, "own rank"], Float[Tensor, "shared rank"]]:
        """v and d."""
        _, v, d = canonical_polyadic(self.small, rank, sweeps, damping=DAMPING)
        return self.directions @ v, d


def _whitened(given: Problem) -> _Whitened:
    white, root = whitened_inputs(given)
    outputs, inputs = _main(white.transpose(0, 1).flatten(1)), _main(white.flatten(1))
    small = torch.einsum("gps,ga,pb->bas", white, inputs, outputs)
    return _Whitened(small, torch.linalg.solve_triangular(root.T, inputs, upper=True))


def _main(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows kept"]:
    """The directions of the rows that hold nearly everything."""
    values, vectors = torch.linalg.eigh(matrix @ matrix.T)
    held = values.flip(0).clamp(min=0).cumsum(0)
    count = min(int((held < SHARE * held[-1]).sum()) + 1, MOST, len(held))
    return vectors.flip(1)[:, :count]

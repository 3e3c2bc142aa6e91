"""EigenDamage: OBD in the Kronecker-factored eigenbasis, on input and output directions alike (section 4.3, algorithm 2)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from eigendamage.curvature import LayerCurvature
from eigendamage.linalg import exact


@dataclass(frozen=True, eq=False)
class Eigenbasis:
    """A layer's weight in the KFE: W = Q_S W′ Q_Aᵀ, with the eigenvalues that scale the loss of W′ (eq. 12).

    ``core`` is ``[out, in, *kernel]`` over the channel basis of section 4.5 and ``[out, in · taps]`` over the full one.
    """

    core: Tensor
    input_vectors: Tensor
    output_vectors: Tensor
    importance: Float[Tensor, "out inputs"]  # Θ of algorithm 2, summed over kernel positions; ½ Θ is a loss

    @property
    def input_scores(self) -> Float[Tensor, " inputs"]:
        return self.importance.sum(0) / 2

    @property
    def output_scores(self) -> Float[Tensor, " out"]:
        return self.importance.sum(1) / 2

    def loss(self, inputs: Tensor, outputs: Tensor) -> float:
        """Predicted loss of keeping only these input and output directions."""
        gone = self.importance.clone()
        gone[outputs[:, None], inputs] = 0
        return float(gone.sum()) / 2


def eigenbasis(weight: Float[Tensor, "out inputs *kernel"], layer: LayerCurvature, basis: str) -> Eigenbasis:
    """The layer in the KFE over ``basis="channel"`` (section 4.5) or ``"patch"`` (section 4.3)."""
    weight = exact(weight)
    if basis == "patch":
        weight = weight.flatten(1)
    input_values, input_vectors = layer.eigen_patches if basis == "patch" else layer.eigen_channels
    output_values, output_vectors = layer.eigen_gradients
    core = torch.einsum("oi...,or,ic->rc...", weight, output_vectors, input_vectors)
    energy = core.square().flatten(2).sum(2) if core.dim() > 2 else core.square()
    return Eigenbasis(core, input_vectors, output_vectors, energy * torch.outer(output_values, input_values))


def strongest(scores: Tensor, rank: int) -> Tensor:
    """Indices of the ``rank`` largest scores, in ascending order; the earlier index wins a tie."""
    return scores.argsort(descending=True, stable=True)[:rank].sort().values

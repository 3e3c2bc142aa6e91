"""The least loss that a structure can have: regression in the metric of K-FAC (beyond the paper).

With Ŵ in place of W the loss grows by ½ tr(S (W − Ŵ) A (W − Ŵ)ᵀ), A over patches. Split the axes of a patch into those that a
first stage V reads and those along which it is shared; then the features are z = (V ⊗ I)ᵀ p, and the rest of the structure
predicts W p from them by a matrix B, of low rank if it has a third stage. For given V the best B is known in closed form; for
given B the best V solves a linear system. The KFE of the paper ignores W when it picks its bases; this does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float
from torch import Tensor

from eigendamage.curvature import LayerCurvature
from eigendamage.linalg import damped, exact, inverse

# Alternations between V and B, and conjugate gradients for V in each; they end when the loss falls by less than this.
SWEEPS = 4
STEPS = 2
TOLERANCE = 0.01
# Relative damping of the preconditioner: later stages may have columns that depend on each other.
DEPENDENT = 1e-8

# At most this share of the channels goes before the scores of those that stay are computed again.
SHARE_AT_ONCE = 1 / 16
ALIVE = 0.8


@dataclass(frozen=True, eq=False)
class Problem:
    """A layer's weight and curvature, the patch axes split into own and shared ones."""

    weight: Float[Tensor, "out own shared"]
    inputs: Float[Tensor, "own shared own shared"]  # A, damped
    root: Float[Tensor, "out out"]  # S^½
    inverse: Float[Tensor, "out out"]  # S^-½

    @cached_property
    def moved(self) -> Float[Tensor, "out own shared"]:
        """S^½ W A."""
        return torch.einsum("po,ogs,gshu->phu", self.root, self.weight, self.inputs)

    @cached_property
    def energy(self) -> float:
        """tr(S W A Wᵀ): twice the loss of a layer that is gone."""
        return float((self.moved * torch.einsum("po,ogs->pgs", self.root, self.weight)).sum())

    @cached_property
    def mean_root(self) -> Float[Tensor, "own own"]:
        """The Cholesky factor of the mean of A over what the first stage is shared along."""
        return torch.linalg.cholesky(torch.einsum("gshs->gh", self.inputs) / self.weight.shape[2])

    @cached_property
    def by_shared(self) -> Float[Tensor, "shared own shared own"]:
        """A in the order in which conjugate gradients multiply with it."""
        return self.inputs.permute(1, 0, 3, 2).contiguous()


def problem(weight: Float[Tensor, "out inputs *kernel"], layer: LayerCurvature, shared: Sequence[int]) -> Problem:
    """``shared`` are the axes of the kernel along which the first stage is shared."""
    size = weight.shape[1:]
    own = [0, *(1 + axis for axis in range(len(size) - 1) if axis not in shared)]
    order, n = [*own, *(1 + axis for axis in shared)], len(size)
    split = math.prod(size[axis] for axis in own), math.prod(size[1 + axis] for axis in shared)
    covariance = layer.patch_form
    assert covariance is not None
    inputs = damped(covariance).view(*size, *size).permute(*order, *(n + axis for axis in order))
    moved = exact(weight).permute(0, *(1 + axis for axis in order))
    return Problem(moved.reshape(-1, *split), inputs.reshape(*split, *split), *layer.sensitivity_roots)


# --- the rest, given the first stage ----------------------------------------------------------------------------------------


def _features(given: Problem, first: Float[Tensor, "own rank"]) -> tuple[Tensor, Tensor]:
    """S^½ W A (V ⊗ I) L^-ᵀ as ``[out, rank · shared]``, and L, the Cholesky factor of the features' covariance."""
    covariance = torch.einsum("bshu,hc->bscu", torch.einsum("gshu,gb->bshu", given.inputs, first), first)
    return _explained(covariance, torch.einsum("phu,hb->pbu", given.moved, first))


def _explained(covariance: Tensor, moved: Tensor) -> tuple[Tensor, Tensor]:
    moved = moved.flatten(1)
    factor = torch.linalg.cholesky(covariance.reshape(moved.shape[1], -1))
    return torch.linalg.solve_triangular(factor, moved.T, upper=False).T, factor


def losses_by_rank(given: Problem, first: Float[Tensor, "own rank"]) -> Float[Tensor, " rank"]:
    """The loss with the leading 1, 2, … columns of a first stage and the best of everything behind it."""
    return _losses(given, _features(given, first)[0])


def _losses(given: Problem, explained: Tensor) -> Tensor:
    by_column = explained.square().sum(0).view(-1, given.weight.shape[2]).sum(1)
    return (given.energy - by_column.cumsum(0)).clamp(min=0) / 2


def losses_by_two_ranks(given: Problem, first: Float[Tensor, "own rank"], counts: Sequence[int]) -> Float[Tensor, "counts out"]:
    """The loss with as many leading columns as ``counts`` says, and a third stage of rank 1, 2, …."""
    explained, _ = _features(given, first)
    explained = explained.view(len(explained), first.shape[1], -1)
    gram = explained.new_zeros(len(explained), len(explained))
    losses, done = [], 0
    for count in counts:
        more = explained[:, done:count].flatten(1)
        gram, done = gram + more @ more.T, count
        losses.append((given.energy - torch.linalg.eigvalsh(gram).flip(0).cumsum(0)).clamp(min=0) / 2)
    return torch.stack(losses)


def rest(given: Problem, first: Float[Tensor, "own rank"], outputs: int) -> tuple[Tensor, Tensor]:
    """The best ``[out, outputs]`` and ``[outputs, rank, shared]`` behind a first stage."""
    return _rest(given, first, outputs)[:2]


def _rest(given: Problem, first: Tensor, outputs: int) -> tuple[Tensor, Tensor, float]:
    """With the loss."""
    explained, factor = _features(given, first)
    turned = torch.eye(len(explained), dtype=explained.dtype)
    if outputs < len(explained):  # the main directions; else there is nothing to choose
        turned = torch.linalg.eigh(explained @ explained.T).eigenvectors.flip(1)[:, :outputs]
    explained = turned.T @ explained
    core = torch.linalg.solve_triangular(factor.T, explained.T, upper=True).T
    loss = max(given.energy - float(explained.square().sum()), 0.0) / 2
    return given.inverse @ turned, core.reshape(-1, first.shape[1], given.weight.shape[2]), loss


# --- the first stage --------------------------------------------------------------------------------------------------------


def whitened_inputs(given: Problem) -> tuple[Float[Tensor, "own out shared"], Float[Tensor, "own own"]]:
    """Rᵀ W S^½ for the mean R Rᵀ of A over what the first stage is shared along, and R."""
    return torch.einsum("hg,po,ohs->gps", given.mean_root, given.root, given.weight), given.mean_root


def leading(given: Problem, count: int) -> Float[Tensor, "own {count}"]:
    """A first stage whose leading columns are good for every rank: those of the whitened weight, its shared axes apart."""
    white, root = whitened_inputs(given)
    rows = white.flatten(1)
    if len(rows) <= rows.shape[1]:
        columns = torch.linalg.eigh(rows @ rows.T).eigenvectors.flip(1)
    else:
        columns = torch.linalg.svd(rows, full_matrices=count > rows.shape[1]).U
    return torch.linalg.solve_triangular(root.T, columns[:, :count], upper=True)


def refined(given: Problem, first: Float[Tensor, "own rank"], outputs: int) -> tuple[Tensor, Tensor, Tensor]:
    """First stage, core and last stage of about the least loss: V and B in turn, from this V."""
    last, core, best = _rest(given, first, outputs)
    for _ in range(SWEEPS):
        improved = _first_for(given, first, core, last)
        new_last, new_core, loss = _rest(given, improved, outputs)
        if not loss < best:
            break
        enough = loss > (1 - TOLERANCE) * best
        first, core, last, best = improved, new_core, new_last, loss
        if enough:
            break
    return first, core, last


def _first_for(given: Problem, first: Tensor, core: Tensor, last: Tensor) -> Tensor:
    """Conjugate gradients, from ``first``, for the V of least loss with these later stages.

    Preconditioned as if what V is shared along were unrelated and all alike: that is a Kronecker product, quick to invert.
    """
    behind = torch.einsum("po,oa,abs->pbs", given.root, last, core)
    # For each shared s, what turns A (V ⊗ I) into the gradient of V.
    turned = torch.einsum("pbu,pcs->subc", behind, behind)
    alike = torch.linalg.cholesky(damped(torch.einsum("ssbc->bc", turned), DEPENDENT))
    turned = turned.flatten(1, 2)

    def applied(v: Tensor) -> Tensor:
        return torch.bmm((given.by_shared @ v).flatten(2), turned).sum(0)

    def preconditioned(v: Tensor) -> Tensor:
        return torch.cholesky_solve(torch.cholesky_solve(v, given.mean_root).T, alike).T

    residual = torch.einsum("pgs,pbs->gb", given.moved, behind) - applied(first)
    direction = towards = preconditioned(residual)
    size = float((residual * towards).sum())
    for step_number in range(STEPS):
        if size <= 0:
            break
        image = applied(direction)
        step = size / float((direction * image).sum())
        first = first + step * direction
        if step_number == STEPS - 1:
            break
        residual = residual - step * image
        towards = preconditioned(residual)
        before, size = size, float((residual * towards).sum())
        direction = towards + size / before * direction
    return first


# --- fewer channels ---------------------------------------------------------------------------------------------------------


def by_channel(given: Problem, channels: int) -> Problem:
    """The same problem with all that belongs to one of ``channels`` inputs, side by side, along the shared axis."""
    size = (channels, -1)
    inputs = given.inputs.flatten(2).flatten(0, 1).reshape(channels, -1, channels, given.weight[0].numel() // channels)
    return Problem(given.weight.reshape(len(given.weight), *size), inputs, given.root, given.inverse)


def losses_by_channels(given: Problem, order: Sequence[int]) -> Float[Tensor, " own"]:
    """The loss of reading only the first 1, 2, … channels of this order, the weights having made up for the others."""
    order = list(order)
    return _losses(given, _explained(given.inputs[order][:, :, order], given.moved[:, order])[0])


def order_of_channels(given: Problem) -> list[int]:
    """Channels from the most to the least needed, where the weights of those that stay make up for those that go.

    OBS on the input side: the loss of channel c is ½ tr(S W_c [(A⁻¹)_cc]⁻¹ W_cᵀ), and what stays is updated.
    """
    own, shared = given.weight.shape[1:]
    precision = inverse(given.inputs.reshape(own * shared, -1))
    weight = torch.einsum("po,ogs->gsp", given.root, given.weight).flatten(0, 1)
    names, alive, gone = torch.arange(own), torch.arange(own), []
    while len(alive) > 1:
        blocks = torch.diagonal(precision.view(len(names), shared, len(names), shared), dim1=0, dim2=2).permute(2, 0, 1)[alive]
        parts = weight.view(len(names), shared, -1)[alive]
        scores = (torch.linalg.solve(blocks, parts) * parts).sum((1, 2))
        order = scores.argsort(stable=True)
        count = max(1, int(SHARE_AT_ONCE * len(alive)))
        out, alive = alive[order[:count]], alive[order[count:].sort().values]
        gone += names[out].tolist()
        rows = _rows(out, shared)
        across = precision[rows]
        coupled = torch.linalg.solve(across[:, rows], across)
        weight = weight.addmm_(coupled.T, weight[rows], alpha=-1)
        precision = precision.addmm_(across.T, coupled, alpha=-1)
        if len(alive) <= ALIVE * len(names):  # what has gone is carried along for a while: copying costs more
            rows = _rows(alive, shared)
            names, weight, precision = names[alive], weight[rows], precision[rows][:, rows]
            alive = torch.arange(len(names))
    return [*names[alive].tolist(), *reversed(gone)]


def _rows(channels: Tensor, shared: int) -> Tensor:
    return (channels[:, None] * shared + torch.arange(shared)).flatten()


def with_fewer_inputs(
    weight: Float[Tensor, "out inputs *kernel"], layer: LayerCurvature, kept: Sequence[int]
) -> Float[Tensor, "out kept *kernel"]:
    """The weight on the inputs that stay, after it has made up for the others: W A_:K A_KK⁻¹."""
    covariance = layer.patch_form
    assert covariance is not None
    size = (weight.shape[1], weight[0, 0].numel())
    inputs = damped(covariance).view(*size, *size)[:, :, list(kept)]
    moved = exact(weight).flatten(1) @ inputs.flatten(2).flatten(0, 1)
    among_kept = inputs[list(kept)].flatten(2).flatten(0, 1)
    return torch.linalg.solve(among_kept, moved.T).T.reshape(len(weight), len(kept), *weight.shape[2:])

"""The bottleneck of EigenDamage (figure 1), over channels or over full patches, and how rounds of it merge."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, bias_of, build_like, build_pointwise, shape_of, weight_of
from eigendamage.linalg import exact
from eigendamage.methods.eigendamage import eigenbasis, strongest
from eigendamage.structures import channels
from eigendamage.structures.base import Ranks, Stage, Structure, chain, rotated

STAGES = ("rotate_in", "core", "rotate_out")
ROTATIONS = ("rotate_in", "rotate_out")


def _bottleneck_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * ranks["in"], shape.front_positions),
        (ranks["in"] * ranks["out"] * shape.taps, shape.core_positions),
        (ranks["out"] * shape.outputs, shape.output_positions),
    ]


def _build_bottleneck(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    inputs, core, outputs = pruned_basis(module, layer, ranks, "channel")
    return rotated(module, inputs, core, outputs)


def pruned_basis(module: nn.Module, layer: LayerCurvature, ranks: Ranks, over: str) -> tuple[Tensor, Tensor, Tensor]:
    """Q_A, W′ and Q_S with only the strongest directions left."""
    basis = eigenbasis(weight_of(module), layer, over)
    inputs, outputs = strongest(basis.input_scores, ranks["in"]), strongest(basis.output_scores, ranks["out"])
    return basis.input_vectors[:, inputs], basis.core[outputs][:, inputs], basis.output_vectors[:, outputs]


def parts_of_bottleneck(model: nn.Module, core: str) -> nn.Sequential | None:
    """The three stages around a layer, if an earlier round made it the core of a bottleneck."""
    around, _, last = core.rpartition(".")
    parent = model.get_submodule(around)
    three = isinstance(parent, nn.Sequential) and [name for name, _ in parent.named_children()] == list(STAGES)
    return parent if three and last == "core" else None  # type: ignore[return-value]


def merge(outer: nn.Sequential, inner: nn.Sequential) -> nn.Sequential:
    """One bottleneck for ``outer`` with ``inner`` in place of its core: Q_A ← Q_A Q_A′ and Q_S ← Q_S Q_S′ (section 4.4)."""
    first, last = outer.rotate_in, outer.rotate_out
    inputs, outputs = weight_of(inner.rotate_in).flatten(1), weight_of(inner.rotate_out).flatten(1)
    rotate_in = torch.einsum("ri,i...->r...", exact(inputs), exact(weight_of(first)))
    rotate_out = exact(weight_of(last)).flatten(1) @ exact(outputs)
    strided = shape_of(first).pointwise
    return chain(
        rotate_in=build_pointwise(first, rotate_in.flatten(1), None, strided=True)
        if strided
        else build_like(first, rotate_in, None),
        core=inner.core,
        rotate_out=build_pointwise(last, rotate_out, bias_of(last)),
    )


# Over the full patch basis (section 4.3) the kernel moves into the first rotation.


def _patch_limits(shape: LayerShape) -> dict[str, int]:
    return {"in": shape.inputs * shape.taps, "out": shape.outputs}


def _patch_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * shape.taps * ranks["in"], shape.core_positions),
        (ranks["in"] * ranks["out"], shape.output_positions),
        (ranks["out"] * shape.outputs, shape.output_positions),
    ]


def _build_patch_bottleneck(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    inputs, core, outputs = pruned_basis(module, layer, ranks, "patch")
    kernels = inputs.T.reshape(-1, *weight_of(module).shape[1:])
    return chain(
        rotate_in=build_like(module, kernels, None),
        core=build_pointwise(module, core, None),
        rotate_out=build_pointwise(module, outputs, bias_of(module)),
    )


BOTTLENECK = Structure(channels.limits, _bottleneck_stages, _build_bottleneck)
MERGED = Structure(channels.limits, channels.stages, _build_bottleneck)
BOTTLENECK_PATCH = Structure(_patch_limits, _patch_stages, _build_patch_bottleneck)

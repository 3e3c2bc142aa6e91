"""What a layer can become: the cost of each structure, and how it is built from stock modules.

A structure replaces a layer by a sequence of stages with the same inputs and outputs. The bias stays on the last stage, where
it is exact at padded borders too.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, bias_of, build_along, build_like, build_pointwise, shape_of, weight_of
from eigendamage.linalg import exact
from eigendamage.methods.cp import cp_factors
from eigendamage.methods.depthwise import depthwise_factors
from eigendamage.methods.eigendamage import eigenbasis, strongest

STAGES = ("rotate_in", "core", "rotate_out")
ROTATIONS = ("rotate_in", "rotate_out")
Ranks = Mapping[str, int]
Stage = tuple[int, int]  # weights (without bias), positions at which they are multiplied


@dataclass(frozen=True)
class Structure:
    """One row of the table of structures."""

    limits: Callable[[LayerShape], dict[str, int]]  # the ranks it takes, and the largest value of each
    stages: Callable[[LayerShape, Ranks], list[Stage]]
    build: Callable[[nn.Module, LayerCurvature, Ranks], nn.Module] | None  # None: not built from ranks alone


def params(structure: str, shape: LayerShape, ranks: Ranks) -> int:
    bias = ranks["out"] if structure == "channels" else shape.outputs
    return sum(weights for weights, _ in STRUCTURES[structure].stages(shape, ranks)) + bias * shape.bias


def macs(structure: str, shape: LayerShape, ranks: Ranks) -> int:
    return sum(weights * positions for weights, positions in STRUCTURES[structure].stages(shape, ranks))


def check_ranks(name: str, structure: str, shape: LayerShape, ranks: Ranks) -> None:
    """Raise ValueError unless the structure exists, takes these ranks, and each lies between 1 and its limit."""
    if structure not in STRUCTURES:
        raise ValueError(f"{name}: structure {structure!r} is unknown; there are {', '.join(STRUCTURES)}")
    limits = STRUCTURES[structure].limits(shape)
    if ranks.keys() != limits.keys():
        raise ValueError(f"{name}: {structure} takes the ranks {sorted(limits)}; got {sorted(ranks)}")
    for rank, limit in limits.items():
        if not isinstance(ranks[rank], int) or not 1 <= ranks[rank] <= limit:
            raise ValueError(f"{name}: rank {rank!r} of {structure} must be a whole number from 1 to {limit}; got {ranks[rank]!r}")


def _stages(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


# --- as it is, or with fewer channels ---------------------------------------------------------------------------------------


def _channel_limits(shape: LayerShape) -> dict[str, int]:
    return {"in": shape.inputs, "out": shape.outputs}


def _channel_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [(ranks["in"] * ranks["out"] * shape.taps, shape.core_positions)]


def _dense_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return _channel_stages(shape, _channel_limits(shape))


# --- the bottleneck of EigenDamage (figure 1) -------------------------------------------------------------------------------


def _bottleneck_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * ranks["in"], shape.front_positions),
        (ranks["in"] * ranks["out"] * shape.taps, shape.core_positions),
        (ranks["out"] * shape.outputs, shape.output_positions),
    ]


def _build_bottleneck(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    inputs, core, outputs = _pruned_basis(module, layer, ranks, "channel")
    return _rotated(module, inputs, core, outputs)


def _pruned_basis(module: nn.Module, layer: LayerCurvature, ranks: Ranks, over: str) -> tuple[Tensor, Tensor, Tensor]:
    """Q_A, W′ and Q_S with only the strongest directions left."""
    basis = eigenbasis(weight_of(module), layer, over)
    inputs, outputs = strongest(basis.input_scores, ranks["in"]), strongest(basis.output_scores, ranks["out"])
    return basis.input_vectors[:, inputs], basis.core[outputs][:, inputs], basis.output_vectors[:, outputs]


def _rotated(module: nn.Module, inputs: Tensor, core: Tensor, outputs: Tensor, groups: int = 1) -> nn.Sequential:
    pointwise = shape_of(module).pointwise
    return _stages(
        rotate_in=build_pointwise(module, inputs.T, None, strided=pointwise),
        core=build_pointwise(module, core.flatten(1), None) if pointwise else build_like(module, core, None, groups),
        rotate_out=build_pointwise(module, outputs, bias_of(module)),
    )


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
    return _stages(
        rotate_in=build_pointwise(first, rotate_in.flatten(1), None, strided=True) if strided else build_like(first, rotate_in, None),
        core=inner.core,
        rotate_out=build_pointwise(last, rotate_out, bias_of(last)),
    )


# --- the same over the full patch basis: the kernel moves into the first rotation (section 4.3) ----------------------------


def _patch_limits(shape: LayerShape) -> dict[str, int]:
    return {"in": shape.inputs * shape.taps, "out": shape.outputs}


def _patch_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * shape.taps * ranks["in"], shape.core_positions),
        (ranks["in"] * ranks["out"], shape.output_positions),
        (ranks["out"] * shape.outputs, shape.output_positions),
    ]


def _build_patch_bottleneck(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    inputs, core, outputs = _pruned_basis(module, layer, ranks, "patch")
    kernels = inputs.T.reshape(-1, *weight_of(module).shape[1:])
    return _stages(
        rotate_in=build_like(module, kernels, None),
        core=build_pointwise(module, core, None),
        rotate_out=build_pointwise(module, outputs, bias_of(module)),
    )


# --- a depthwise core between two bases (section 4.6) -----------------------------------------------------------------------


def _depthwise_limits(shape: LayerShape) -> dict[str, int]:
    return {"in": shape.inputs, "out": shape.outputs, "depthwise": shape.inputs * shape.outputs}


def _depthwise_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    return [
        (shape.inputs * ranks["depthwise"], shape.front_positions),
        (ranks["depthwise"] * shape.taps, shape.core_positions),
        (ranks["depthwise"] * shape.outputs, shape.output_positions),
    ]


def _build_depthwise(module: nn.Module, layer: LayerCurvature, ranks: Ranks, fisher_norm: bool) -> nn.Module:
    inputs, core, outputs = _pruned_basis(module, layer, ranks, "channel")
    values = _kept_values(module, layer, ranks) if fisher_norm else (None, None)
    v, u, diagonals = depthwise_factors(core.flatten(2), ranks["depthwise"], *values)
    kernels = diagonals.T.reshape(-1, 1, *core.shape[2:])
    return _rotated(module, inputs @ u, kernels, outputs @ v, groups=len(kernels))


def _kept_values(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> tuple[Tensor, Tensor]:
    basis = eigenbasis(weight_of(module), layer, "channel")
    outputs, inputs = strongest(basis.output_scores, ranks["out"]), strongest(basis.input_scores, ranks["in"])
    return layer.eigen_gradients[0][outputs], layer.eigen_channels[0][inputs]


# --- a sum of rank-one kernels (CP) -----------------------------------------------------------------------------------------


def _cp_limits(shape: LayerShape) -> dict[str, int]:
    return {"cp": shape.inputs * shape.outputs}


def _cp_stages(shape: LayerShape, ranks: Ranks) -> list[Stage]:
    rank = ranks["cp"]
    along = [(rank * taps, positions) for taps, positions in zip(shape.kernel, shape.axis_positions, strict=True)]
    return [(shape.inputs * rank, shape.input_positions), *along, (rank * shape.outputs, shape.output_positions)]


def _build_cp(module: nn.Module, layer: LayerCurvature, ranks: Ranks) -> nn.Module:
    outputs, inputs, *kernels = cp_factors(weight_of(module), ranks["cp"])
    along = {f"axis_{axis}": build_along(module, kernel.T, axis) for axis, kernel in enumerate(kernels)}
    return _stages(
        factor_in=build_pointwise(module, inputs.T, None), **along, factor_out=build_pointwise(module, outputs, bias_of(module))
    )


STRUCTURES: dict[str, Structure] = {
    "dense": Structure(lambda shape: {}, _dense_stages, None),
    "channels": Structure(_channel_limits, _channel_stages, None),
    "bottleneck": Structure(_channel_limits, _bottleneck_stages, _build_bottleneck),
    "merged": Structure(_channel_limits, _channel_stages, _build_bottleneck),
    "bottleneck-patch": Structure(_patch_limits, _patch_stages, _build_patch_bottleneck),
    "depthwise": Structure(_depthwise_limits, _depthwise_stages, partial(_build_depthwise, fisher_norm=False)),
    "depthwise-fisher": Structure(_depthwise_limits, _depthwise_stages, partial(_build_depthwise, fisher_norm=True)),
    "cp": Structure(_cp_limits, _cp_stages, _build_cp),
}

"""Reading costs and building stages: what every structure shares."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import LayerShape, bias_of, build_like, build_pointwise, shape_of, weight_of

# Whole numbers, or tensors of them: costs are computed for a whole grid of ranks at once.
Ranks = Mapping[str, Any]
Stage = tuple[Any, int]  # weights (without bias), positions at which they are multiplied
Grid = tuple[dict[str, Tensor], Tensor]  # ranks and the predicted loss of each

# Ranks offered per axis: all of a narrow layer, evenly spread ones of a wide layer.
GRID = 64


@dataclass(frozen=True)
class Structure:
    """One row of the table of structures."""

    limits: Callable[[LayerShape], dict[str, int]]  # the ranks it takes, and the largest value of each
    stages: Callable[[LayerShape, Ranks], list[Stage]]
    build: Callable[[nn.Module, LayerCurvature, Ranks], nn.Module] | None = None  # None: not built from ranks alone
    fits: Callable[[LayerShape], bool] = lambda shape: True  # whether it makes sense for such a layer
    grid: Callable[[Tensor, LayerCurvature], Grid] | None = None  # options for a budget, where the structure offers any
    sketch: Callable[[nn.Module, Ranks], nn.Module] | None = None  # what is built, with any weights: to be timed


def spread(limit: int) -> Tensor:
    """The ranks on offer up to this one."""
    return torch.arange(1, limit + 1) if limit <= GRID else (torch.arange(1, GRID + 1) * limit / GRID).round().long()


def blank(module: nn.Module, *shape: int) -> Tensor:
    """Weights of this shape for a sketch; no zeros, in case a machine is faster with those."""
    return weight_of(module).new_full(shape, 0.01)


def chain(**modules: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(modules))


def rotated(module: nn.Module, inputs: Tensor, core: Tensor, outputs: Tensor, groups: int = 1) -> nn.Sequential:
    """1×1, core, 1×1 in place of ``module``; a pointwise layer's stride moves to the first stage, where it saves most."""
    pointwise = shape_of(module).pointwise
    return chain(
        rotate_in=build_pointwise(module, inputs.T, None, strided=pointwise),
        core=build_pointwise(module, core.flatten(1), None) if pointwise else build_like(module, core, None, groups),
        rotate_out=build_pointwise(module, outputs, bias_of(module)),
    )

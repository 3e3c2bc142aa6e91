"""Slow dense truths of what the methods compute, and small models to try them on.

The paper's vec stacks the columns of W ``[in, out]``. That is our ``[out, in · taps]`` row by row, so its F = S ⊗ A acts on
``weight.flatten()`` as ``torch.kron(S, A)``.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import eigendamage as ed
from eigendamage.curvature import Curvature, LayerCurvature
from eigendamage.layers import LayerShape, kind_of, shape_of, weight_of


def factor(size: int, rank: int | None = None) -> Tensor:
    """A random covariance."""
    sample = torch.randn(size, size + 2 if rank is None else rank, dtype=torch.float64)
    return sample @ sample.T / size


def weights(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def loss(fisher: Tensor, change: Tensor) -> Tensor:
    """½ Δθᵀ F Δθ."""
    return change.flatten() @ fisher @ change.flatten() / 2


def constrained_minimiser(fisher: Tensor, theta: Tensor, gone: Tensor) -> Tensor:
    """The change Δθ of least ½ Δθᵀ F Δθ that makes the weights ``gone`` zero, by the linear system of its multipliers."""
    constraints = torch.eye(len(theta), dtype=theta.dtype)[gone]
    corner = torch.zeros(len(constraints), len(constraints), dtype=theta.dtype)
    system = torch.cat([torch.cat([fisher, constraints.T], dim=1), torch.cat([constraints, corner], dim=1)])
    right = torch.cat([torch.zeros_like(theta), -theta[gone]])
    return torch.linalg.solve(system, right)[: len(theta)]


def rows_of(filters: Sequence[int], size: int, columns: int) -> Tensor:
    """Which entries of a flattened ``[size, columns]`` matrix belong to these filters."""
    mask = torch.zeros(size, columns, dtype=torch.bool)
    mask[list(filters)] = True
    return mask.flatten()


def top(scores: Tensor, count: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda i: -float(scores[i]))[:count])


def projected(module: nn.Module, layer: LayerCurvature, ranks: dict[str, int], basis: str) -> Tensor:
    """Q_S Q_Sᵀ W Q_A Q_Aᵀ at each kernel position, with the directions of the largest losses under the dense F."""
    weight = weight_of(module).detach()
    matrix = (
        weight.flatten(1).unsqueeze(2) if basis == "patch" else weight.flatten(2) if weight.dim() > 2 else weight.unsqueeze(2)
    )
    a = layer.patch_form if basis == "patch" else layer.channel_form
    values, outputs = torch.linalg.eigh(layer.gradients)
    input_values, inputs = torch.linalg.eigh(a)
    core = torch.einsum("oit,or,ic->rct", matrix, outputs, inputs)
    importance = core.square().sum(2) * values.clamp(min=0)[:, None] * input_values.clamp(min=0)
    outputs, inputs = outputs[:, top(importance.sum(1), ranks["out"])], inputs[:, top(importance.sum(0), ranks["in"])]
    return torch.einsum("oit,op,ij->pjt", matrix, outputs @ outputs.T, inputs @ inputs.T).reshape(weight.shape)


def with_weight(module: nn.Module, weight: Tensor) -> nn.Module:
    """A copy of the layer with this weight ``[out, in, *kernel]`` of an ordinary convolution."""
    module = copy.deepcopy(module)
    if kind_of(module) == "transposed":
        weight = weight.transpose(0, 1).flip(tuple(range(2, weight.dim())))
    elif type(module).__name__ == "Conv1D":
        weight = weight.T
    module.weight = nn.Parameter(weight.clone())
    return module


def measured(
    model: nn.Module, inputs: Tensor, methods: Sequence[str] = ("kron-obd", "eigendamage"), **arguments: Any
) -> Curvature:
    """The curvature of a model whose outputs are those of a regression, whatever their shape."""
    arguments = {"forward": lambda model, batch: flat(model(batch[0])), "task": "regression", "progress": False, **arguments}
    return ed.measure(model, [(inputs, None)], methods=methods, **arguments)


def flat(outputs: Tensor | dict[str, Tensor]) -> Tensor:
    """The logits as ``[examples, features]``."""
    logits = outputs["logits"] if isinstance(outputs, dict) else outputs
    return logits.reshape(len(logits), -1)


def layer_curvature(module: nn.Module, shape: LayerShape | None = None) -> LayerCurvature:
    """Random factors for a layer."""
    shape = shape or shape_of(module)
    return LayerCurvature(shape, patches=factor(shape.inputs * shape.taps), gradients=factor(shape.outputs))


def convnet() -> tuple[nn.Module, Tensor]:
    """Two convolutions with batch norm, two linear layers, and a batch for them."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 12, 3, padding=1, bias=False),
        nn.BatchNorm2d(12),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(48, 20),
        nn.ReLU(),
        nn.Linear(20, 5),
    )
    for norm in (model[1], model[4]):
        nn.init.uniform_(norm.weight, 0.5, 1.5)
        nn.init.normal_(norm.running_mean, std=0.1)
    return model.double().eval(), torch.randn(16, 3, 6, 6, dtype=torch.float64)

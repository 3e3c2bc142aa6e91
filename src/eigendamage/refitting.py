"""Refit the compressed layers on the compressed network's own inputs, without labels (beyond the paper).

Errors of earlier layers change what a later layer sees. In forward order, each compressed layer is built again from the weight
that maps the compressed network's inputs X to the dense network's outputs Y: ridge regression towards the trained weight,
W̃ = (Y Xᵀ + ρ W)(X Xᵀ + ρ I)⁻¹, in the metric of X. At the end
batch norm follows the compressed network.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage import structures
from eigendamage.batches import Forward, detached, outputs_of
from eigendamage.covariance import CHUNK
from eigendamage.curvature import Curvature, LayerCurvature
from eigendamage.layers import bias_of, patches, prepare, rows, set_weight, weight_of
from eigendamage.linalg import exact
from eigendamage.passes import evaluating
from eigendamage.plans import Choice, Plan
from eigendamage.progress import track

# Strength of the pull towards the trained weight, relative to the mean square of the inputs.
RIDGE = 1e-2

Replace = Callable[[nn.Module, nn.Module, nn.Module], nn.Module]


def refit(
    dense: nn.Module,
    small: nn.Module,
    plan: Plan,
    curvature: Curvature,
    batches: Iterable[Any],
    forward: Forward | None,
    put: Replace,
    progress: bool = True,
) -> nn.Module:
    """``small`` with every compressed layer and batch norm refitted on ``batches``; ``put`` replaces a module."""
    data = list(detached(batches, None))
    if not data:
        raise ValueError("refit: the loader is empty")
    names = [
        n for n, choice in plan.layers.items() if structures.STRUCTURES[choice.structure].build and choice.structure != "merged"
    ]
    with evaluating(dense), torch.no_grad():
        with _in_eval(small):
            for name in track(names, "refitting", progress):
                new = _refitted(dense, small, name, plan[name], curvature[name], data, forward)
                small = put(small, small.get_submodule(name), new)
        _refit_norms(dense, small, data, forward)
    return small


def _refitted(
    dense: nn.Module,
    small: nn.Module,
    name: str,
    choice: Choice,
    layer: LayerCurvature,
    data: list[Any],
    forward: Forward | None,
) -> nn.Module:
    module = dense.get_submodule(name)
    inputs, products, count = _moments(dense, small, name, module, data, forward)
    weight, bias = _ridge(module, inputs, products)
    better = copy.deepcopy(module)
    set_weight(better, weight.to(module.weight), None if bias is None else bias.to(module.weight))
    taps_and_channels = math.prod(weight.shape[1:])
    covariance = inputs[:taps_and_channels, :taps_and_channels] / count
    seen = {"inputs": covariance} if choice.shape.taps == 1 else {"inputs": None, "patches": covariance}
    build = structures.STRUCTURES[choice.structure].build
    assert build is not None
    return build(better, replace(layer, **seen), choice.ranks)


def _moments(
    dense: nn.Module, small: nn.Module, name: str, module: nn.Module, data: list[Any], forward: Forward | None
) -> tuple[Tensor, Tensor, int]:
    """X Xᵀ and Y Xᵀ over all positions of all batches; with a bias, X has a row of ones."""
    weight, biased = weight_of(module), bias_of(module) is not None
    size = math.prod(weight.shape[1:]) + biased
    inputs = torch.zeros(size, size, dtype=torch.float64, device=weight.device)
    products = torch.zeros(len(weight), size, dtype=torch.float64, device=weight.device)
    count = 0
    for batch in data:
        wanted = [output for _, output in _calls(dense, module, batch, forward)]
        given = [x for x, _ in _calls(small, small.get_submodule(name), batch, forward)]
        for x, output in zip(given, wanted, strict=True):
            prepared, y = prepare(module, x), rows(output, module)
            per_example = len(y) // len(prepared)
            step = max(1, CHUNK // (per_example * size))
            for start in range(0, len(prepared), step):
                matrix = patches(module, prepared[start : start + step]).flatten(0, 1)
                matrix = torch.cat([matrix, matrix.new_ones(len(matrix), 1)], dim=1) if biased else matrix
                inputs += (matrix.T @ matrix).double()
                products += (y[start * per_example :][: len(matrix)].T @ matrix).double()
            count += len(y)
    return exact(inputs), exact(products), count


def _calls(model: nn.Module, layer: nn.Module, batch: Any, forward: Forward | None) -> list[tuple[Tensor, Tensor]]:
    """Input and output of every call of a layer in one forward pass."""
    calls: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda module, args, output: calls.append((args[0].clone(), output.clone())))
    try:
        outputs_of(model, batch, forward)
    finally:
        handle.remove()
    return calls


def _ridge(module: nn.Module, inputs: Tensor, products: Tensor) -> tuple[Tensor, Tensor | None]:
    weight, bias = exact(weight_of(module)), bias_of(module)
    trained = weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), exact(bias)[:, None]], dim=1)
    pull = RIDGE * inputs.diagonal().mean().clamp(min=torch.finfo(inputs.dtype).tiny)
    identity = torch.eye(len(inputs), dtype=inputs.dtype)
    solved = torch.linalg.solve(inputs + pull * identity, (products + pull * trained).T).T
    size = weight[0].numel()
    return solved[:, :size].reshape(weight.shape), None if bias is None else solved[:, -1]


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


Norm = nn.modules.batchnorm._BatchNorm


def _refit_norms(dense: nn.Module, small: nn.Module, data: list[Any], forward: Forward | None) -> None:
    """Move batch norm's running statistics by what compression changed on ``data``.

    The trained statistics come from many more, augmented examples: taking those of ``data`` in their place would hurt a network
    that is hardly compressed.
    """
    after, before = _norm_statistics(small, data, forward), _norm_statistics(dense, data, forward)
    norms = dict(small.named_modules())
    for name, (mean, variance) in after.items():
        norm = norms[name]
        assert isinstance(norm, Norm) and norm.running_mean is not None and norm.running_var is not None
        old_mean, old_variance = before.get(name, (mean, variance))
        if old_mean.shape != mean.shape:  # fewer channels
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)
        else:
            norm.running_mean += mean - old_mean
            norm.running_var *= (variance + norm.eps) / (old_variance + norm.eps)


def _norm_statistics(model: nn.Module, data: list[Any], forward: Forward | None) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance of what every batch norm sees, averaged over batches; each normalises by its batch meanwhile."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, Norm) and m.track_running_stats}
    if not norms:
        return {}
    momenta = [norm.momentum for norm in norms.values()]
    with evaluating(model):  # which puts buffers back
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # torch's own spelling of a cumulative average
                norm.train()
            for batch in data:
                outputs_of(model, batch, forward)
            return {name: (_copy(norm.running_mean), _copy(norm.running_var)) for name, norm in norms.items()}
        finally:
            for norm, momentum in zip(norms.values(), momenta, strict=True):
                norm.momentum = momentum


def _copy(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer.clone()

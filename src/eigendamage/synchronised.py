"""Training over several processes, each with its share of every batch, as if one process had the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eigendamage.processes import distributed

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


@contextmanager
def synchronised(model: nn.Module) -> Iterator[None]:
    """All processes start from the values of the first, and batch norm sees the batches of all of them."""
    if not distributed():
        yield
        return
    norms = [module for module in model.modules() if type(module) in BATCH_NORMS and "forward" not in vars(module)]
    try:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                dist.broadcast(tensor, 0)
        for norm in norms:
            vars(norm)["forward"] = partial(_normalised, norm)
        yield
    finally:
        for norm in norms:
            vars(norm).pop("forward", None)


def share_gradients(parameters: Sequence[nn.Parameter], examples: int) -> None:
    """Gradients of losses summed over each process's examples become those of the mean over the examples of all."""
    for dtype in dict.fromkeys(parameter.dtype for parameter in parameters):
        own = [parameter for parameter in parameters if parameter.dtype is dtype]
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in own]
        flat = torch.cat([*(gradient.flatten() for gradient in gradients), own[0].new_tensor([float(examples)])])
        dist.all_reduce(flat)
        parts = (flat[:-1] / flat[-1]).split([p.numel() for p in own])
        for parameter, gradient, part in zip(own, gradients, parts, strict=True):
            parameter.grad = gradient.copy_(part.view_as(gradient))


class _Sum(torch.autograd.Function):
    """The sum over all processes. Its gradient is that of all their losses together."""

    @staticmethod
    def forward(context: Any, tensor: Tensor) -> Tensor:
        total = tensor.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Tensor:
        total = gradients[0].clone()
        dist.all_reduce(total)
        return total


_summed: Callable[[Tensor], Tensor] = _Sum.apply


def _normalised(norm: nn.Module, inputs: Tensor) -> Tensor:
    """Batch norm with the mean and variance of the batches of all processes. torch's own needs GPUs."""
    assert isinstance(norm, BATCH_NORMS)
    if not norm.training:
        return type(norm).forward(norm, inputs)
    norm._check_input_dim(inputs)
    across, shape = [0, *range(2, inputs.dim())], (1, -1, *(1,) * (inputs.dim() - 2))
    values = inputs.float() if inputs.dtype in (torch.float16, torch.bfloat16) else inputs
    # Moments around a point near the mean do not cancel.
    point = torch.zeros_like(values[0, :1]).sum() if norm.running_mean is None else norm.running_mean.clone().view(shape)
    moved = values - point
    count = moved.new_tensor([moved.numel() / max(1, moved.shape[1])])
    first, second, total = _summed(torch.cat([moved.sum(across), moved.square().sum(across), count])).split(
        [moved.shape[1], moved.shape[1], 1]
    )
    mean = first / total
    variance = (second / total - mean.square()).clamp(min=0)
    _update(norm, (mean.view(shape) + point).detach().flatten(), variance.detach(), total.detach())
    outputs = (moved - mean.view(shape)) * (variance + norm.eps).rsqrt().view(shape)
    if norm.affine:
        outputs = outputs * norm.weight.view(shape) + norm.bias.view(shape)
    return outputs.to(inputs.dtype)


@torch.no_grad()
def _update(norm: Any, mean: Tensor, variance: Tensor, count: Tensor) -> None:
    if norm.running_mean is None:
        return
    norm.num_batches_tracked.add_(1)
    share = 1 / norm.num_batches_tracked.to(mean.dtype) if norm.momentum is None else norm.momentum
    unbiased = variance * (count / (count - 1))
    norm.running_mean.add_(share * (mean - norm.running_mean))
    norm.running_var.add_(share * (unbiased - norm.running_var))

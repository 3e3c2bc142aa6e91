"""Another program in the same harness: Torch-Pruning's channel pruners, down to a budget of multiply-accumulates."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from eigendamage.batches import outputs_of, pair
from eigendamage.cost import count
from eigendamage.refitting import norm_statistics

# Channels go a little at a time, as in Torch-Pruning's own benchmarks.
STEPS = 200


@dataclass(frozen=True)
class Rival:
    """One of Torch-Pruning's criteria."""

    title: str
    importance: Callable[[Any], Any]  # given the package
    gradients: bool = False


RIVALS = {
    "torch-pruning-magnitude": Rival("Torch-Pruning, group magnitude", lambda tp: tp.importance.GroupMagnitudeImportance()),
    "torch-pruning-taylor": Rival("Torch-Pruning, group Taylor", lambda tp: tp.importance.GroupTaylorImportance(), True),
}


def rival(
    name: str, model: nn.Module, batches: Iterable[Any], macs: float, whole: Sequence[nn.Module], renew: bool
) -> nn.Module:
    """A copy of ``model`` with no more than this share of its multiply-accumulates.

    Args:
        name: in `RIVALS`.
        model: the dense one.
        batches: pairs of inputs and labels, for gradients and for batch norm.
        macs: the budget, as a fraction of the dense model's.
        whole: modules of ``model`` whose outputs all stay.
        renew: re-estimate the statistics of batch norm on the batches.

    Raises:
        ValueError: Torch-Pruning is not installed, or it cannot reach the budget.
    """
    try:
        import torch_pruning
    except ImportError:
        raise ValueError(f'method: {name!r} needs Torch-Pruning; install it with: pip install "eigendamage[lab]"') from None
    small = copy.deepcopy(model).eval()
    names = [name for name, module in model.named_modules() if module in whole]
    inputs = pair(next(iter(batches)))[0][:1]
    pruner = torch_pruning.pruner.BasePruner(
        small,
        inputs,
        importance=RIVALS[name].importance(torch_pruning),
        global_pruning=True,
        pruning_ratio=1.0,
        iterative_steps=STEPS,
        ignored_layers=[small.get_submodule(name) for name in names],
    )
    limit = macs * count(model, inputs).macs
    while count(small, inputs).macs > limit:
        if pruner.current_step >= STEPS:
            raise ValueError(f"macs: {name} cannot reach {macs:g}")
        if RIVALS[name].gradients:
            _take_gradients(small, batches)
        pruner.step()
    small.zero_grad()
    if renew:
        renew_norms(small, batches)
    return small


def _take_gradients(model: nn.Module, batches: Iterable[Any]) -> None:
    model.zero_grad()
    with torch.enable_grad():
        for batch in batches:
            F.cross_entropy(outputs_of(model, batch), pair(batch)[1], reduction="sum").backward()


def renew_norms(model: nn.Module, batches: Iterable[Any]) -> None:
    """Batch norm's running statistics, anew from these batches."""
    with torch.no_grad():
        for name, (mean, variance) in norm_statistics(model, list(batches)).items():
            norm: Any = model.get_submodule(name)
            norm.running_mean.copy_(mean)
            norm.running_var.copy_(variance)

"""What a model costs: parameters and multiply-accumulates."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from eigendamage.checks import require
from eigendamage.passes import evaluating, layer_by_layer


@dataclass(frozen=True)
class Cost:
    params: int
    macs: int


def parameters(model: nn.Module) -> int:
    """Number of parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())


def forward_macs(run: Callable[[], object]) -> int:
    """Multiply-accumulates of convolutions and matrix products in ``run()``."""
    counter = FlopCounterMode(display=False)
    # Of torch's kernels for attention the counter knows only some, and not the one for CPUs.
    with counter, sdpa_kernel(SDPBackend.MATH), warnings.catch_warnings():
        # The counter's own hooks, and compiled models are run as they are written.
        warnings.filterwarnings("ignore", "Using `torch.compile.module.` when there are global hooks", UserWarning)
        run()
    return counter.get_total_flops() // 2


def count(model: nn.Module, example_inputs: Any) -> Cost:
    """Parameters and multiply-accumulates of one forward pass over ``example_inputs``.

    A tuple of inputs is passed as arguments, a mapping as keywords. MACs are those of convolutions and matrix products.
    """

    require("model", model, nn.Module, "a torch.nn.Module")

    with torch.no_grad(), evaluating(model), layer_by_layer():
        return Cost(parameters(model), forward_macs(lambda: called(model, example_inputs)))


def called(model: nn.Module, example_inputs: Any) -> object:
    """What the model makes of example inputs: a tuple is passed as arguments, a mapping as keywords.

    Raises ValueError for inputs that the model does not take.
    """
    try:
        if isinstance(example_inputs, Mapping):
            return model(**example_inputs)
        return model(*example_inputs) if isinstance(example_inputs, tuple | list) else model(example_inputs)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"example_inputs: the model cannot be called with them ({error})") from error

"""Forward passes that leave no trace in the model, and in which every layer takes part."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Eval mode, run as it is written, with buffers, random state and the mode of every module as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    # Whoever compiled a model has imported this; it takes seconds.
    eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
    with restoring(model), eager:
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode


@contextmanager
def restoring(model: nn.Module) -> Iterator[None]:
    """Buffers and random state are put back, so that a pass is the same each time."""
    buffers = [
        (module, name, buffer, buffer.clone())
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            for module, name, buffer, before in buffers:
                module._buffers[name] = buffer
                if not torch.equal(buffer, before):
                    with torch.no_grad():
                        buffer.copy_(before)


@contextmanager
def layer_by_layer() -> Iterator[None]:
    """No fused kernel takes the place of the layers, as ``nn.TransformerEncoder`` has."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)

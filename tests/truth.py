"""Slow dense truths: one example at a time, with autograd and whole matrices."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage.curvature import TENSORS, Curvature
from eigendamage.layers import kind_of, patches, prepare, rows

Call = tuple[Tensor, Tensor]  # a layer's input and the gradient at its output


def calls(layer: nn.Module, run: Callable[[], Tensor]) -> list[Call]:
    """Every call of ``layer`` in ``run()``, which returns a loss; a gradient is zero where the loss does not depend on it."""
    inputs: list[Tensor] = []
    probes: list[Tensor] = []

    def probe(module: nn.Module, args: tuple[Tensor], output: Tensor) -> Tensor:
        inputs.append(args[0].detach().clone())
        probes.append(torch.zeros_like(output, requires_grad=True))
        return output + probes[-1]

    handle = layer.register_forward_hook(probe)
    try:
        loss = run()
    finally:
        handle.remove()
    gradients = torch.autograd.grad(loss, probes, allow_unused=True) if probes and loss.requires_grad else [None] * len(probes)
    return [(x, torch.zeros_like(p) if g is None else g) for x, p, g in zip(inputs, probes, gradients, strict=True)]


def kfac(layer: nn.Module, examples: list[list[Call]]) -> tuple[Tensor, Tensor]:
    """A over patches and S, from the calls of ``layer`` in each example."""
    seen = torch.cat([patches(layer, prepare(layer, x)).flatten(0, 1) for example in examples for x, _ in example])
    pushed = torch.cat([rows(g, layer) for example in examples for _, g in example])
    return seen.T @ seen / len(seen), pushed.T @ pushed / len(examples)


def channel_form(layer: nn.Module, over_patches: Tensor) -> Tensor:
    """The mean of the diagonal blocks, one block per kernel position."""
    taps = layer.weight[0, 0].numel() if kind_of(layer) != "linear" else 1
    return torch.stack([over_patches[tap::taps, tap::taps] for tap in range(taps)]).mean(0)


def weight_gradients(layer: nn.Module, losses: list[Tensor]) -> Tensor:
    """The gradient of each loss with respect to the layer's weight: ``[losses, *weight.shape]``."""
    one_each = torch.eye(len(losses), dtype=losses[0].dtype)
    return torch.autograd.grad(torch.stack(losses), layer.weight, one_each, is_grads_batched=True)[0]


def fisher_block(gradients: Tensor, weights: Tensor | None = None) -> Tensor:
    """The dense block ``[out · in, out · in]``: the mean, or a weighted sum, of outer products of gradients."""
    flat = gradients.flatten(1)
    weights = flat.new_full((len(flat),), 1 / len(flat)) if weights is None else weights
    return flat.T @ (weights[:, None] * flat)


def assert_same(actual: Curvature, expected: Curvature, rtol: float = 1e-10, atol: float = 1e-12) -> None:
    """Two curvatures agree in everything; bit for bit with both tolerances 0."""
    assert list(actual.layers) == list(expected.layers)
    assert (actual.reasons, actual.examples, actual.macs) == (expected.reasons, expected.examples, expected.macs)
    assert (actual.collected, actual.coupling, actual.whole) == (expected.collected, expected.coupling, expected.whole)
    for name, layer in expected.layers.items():
        assert actual[name].shape == layer.shape, name
        for key in TENSORS:
            one, other = getattr(actual[name], key), getattr(layer, key)
            assert (one is None) == (other is None), f"{name}.{key}"
            if other is not None:
                place = f"{name}.{key}: "
                torch.testing.assert_close(one, other, rtol=rtol, atol=atol, msg=place.__add__)


def state_of(model: nn.Module) -> dict[str, Any]:
    """All that a pass over a model might leave changed in it, and the random state."""
    hooks = [key for key in vars(model) if key.endswith("hooks")]
    return {
        "tensors": {name: value.clone() for name, value in model.state_dict().items()},
        "gradients": {name: p.grad for name, p in model.named_parameters()},
        "trainable": {name: p.requires_grad for name, p in model.named_parameters()},
        "modes": {name: module.training for name, module in model.named_modules()},
        "hooks": {name: [len(vars(module)[key]) for key in hooks] for name, module in model.named_modules()},
        "random": torch.get_rng_state(),
    }

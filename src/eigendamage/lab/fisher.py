"""The Fisher information of a layer, exactly: in the coordinates of its weights and in the KFE (figure 2)."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from eigendamage.curvature import LayerCurvature
from eigendamage.finetune import finetune
from eigendamage.lab.data import Data
from eigendamage.lab.settings import Fisher
from eigendamage.measuring import measure
from eigendamage.methods.eigendamage import eigenbasis

BATCH = 64
LAYER = "second"


def fisher_blocks(cell: Fisher, data: Data) -> dict[str, Any]:
    """Both matrices with their diagonals made 1, and how much of each lies off its diagonal."""
    model = network(cell, data)
    batches = data.train.batches(BATCH, shuffle=True, seed=cell.seed)
    finetune(model, batches, epochs=cell.epochs, learning_rate=cell.learning_rate, progress=False)
    layer = measure(model, data.train.batches(BATCH), methods=["eigendamage"], seed=cell.seed, progress=False)[LAYER]
    images, _ = next(iter(data.train.batches(len(data.train))))
    exact = exact_fisher(model.eval(), LAYER, images)
    rotated = in_eigenbasis(exact, model.get_submodule(LAYER).weight, layer)
    return {
        name: {"share": off_diagonal_share(matrix), "matrix": [[round(x, 3) for x in row] for row in shown(matrix).tolist()]}
        for name, matrix in (("parameters", exact), ("kfe", rotated))
    }


def network(cell: Fisher, data: Data) -> nn.Sequential:
    """Three layers with ReLU."""
    inputs = data.train.pixels[0].numel()
    with torch.random.fork_rng():
        torch.manual_seed(cell.seed)
        layers: OrderedDict[str, nn.Module] = OrderedDict(
            flatten=nn.Flatten(),
            first=nn.Linear(inputs, cell.width),
            relu1=nn.ReLU(),
            second=nn.Linear(cell.width, cell.width, bias=False),
            relu2=nn.ReLU(),
            third=nn.Linear(cell.width, data.classes),
        )
        return nn.Sequential(layers)


def exact_fisher(model: nn.Module, name: str, images: Tensor) -> Float[Tensor, "n n"]:
    """The mean over examples of E[g gᵀ], with g the gradient for this layer's weights, summed over all labels exactly."""
    layer = model.get_submodule(name)
    seen: list[tuple[Tensor, Tensor]] = []
    handle = layer.register_forward_hook(lambda module, args, output: seen.append((args[0], output)))
    try:
        logits = model(images)
    finally:
        handle.remove()
    (inputs, outputs), log_probabilities = seen[0], F.log_softmax(logits, 1)
    total = torch.zeros(outputs.shape[1] * inputs.shape[1], outputs.shape[1] * inputs.shape[1], dtype=torch.float64)
    for label in range(logits.shape[1]):
        (slopes,) = torch.autograd.grad(log_probabilities[:, label].sum(), outputs, retain_graph=True)
        gradients = torch.einsum("no,ni->noi", slopes, inputs).flatten(1).detach().double().cpu()
        weights = log_probabilities[:, label].detach().exp().double().cpu()
        total += gradients.T @ (weights[:, None] * gradients)
    return total / len(images)


def in_eigenbasis(fisher: Float[Tensor, "n n"], weight: Tensor, layer: LayerCurvature) -> Float[Tensor, "n n"]:
    """The same matrix in the coordinates of W′ = Q_Sᵀ W Q_A."""
    basis = eigenbasis(weight.detach(), layer, "channel")
    rotation = torch.kron(basis.output_vectors.T.contiguous(), basis.input_vectors.T.contiguous())
    return rotation @ fisher @ rotation.T


def shown(matrix: Float[Tensor, "n n"]) -> Float[Tensor, "n n"]:
    """With a diagonal of ones, as in the paper; a row without information stays empty."""
    scale = matrix.diagonal().clamp(min=0).sqrt()
    inverse = torch.where(scale > 0, 1 / scale, torch.zeros_like(scale))
    return inverse[:, None] * matrix * inverse


def off_diagonal_share(matrix: Float[Tensor, "n n"]) -> float:
    """The share of the matrix's squared entries that lie off its diagonal."""
    total = matrix.square().sum()
    return float((total - matrix.diagonal().square().sum()) / total)

"""What it costs when a `ChannelSelection` no longer reads a channel, by what reads from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from eigendamage.coupling import BATCH_NORMS, FIXED, Coupling
from eigendamage.curvature import Curvature, LayerCurvature
from eigendamage.layers import kind_of, weight_of
from eigendamage.methods import Method, channel_scores
from eigendamage.streams import ChannelSelection


def reading_scores(model: nn.Module, curvature: Curvature, method: Method) -> dict[str, Tensor]:
    """Scores of what each selection reads: of the batch norm behind it for Slimming, of the layers behind it otherwise.

    A selection with a reader that the method cannot score is left out.
    """
    coupling = curvature.coupling
    if coupling is None:
        return {}
    modules = {name: model.get_submodule(name) for name in coupling.sides}
    selections = [name for name, module in modules.items() if isinstance(module, ChannelSelection)]
    found = {name: _scores(coupling, coupling.sides[name].outputs, modules, curvature, method) for name in selections}
    return {name: scores for name, scores in found.items() if scores is not None}


def _scores(
    coupling: Coupling, units: tuple[int, ...], modules: Mapping[str, nn.Module], curvature: Curvature, method: Method
) -> Tensor | None:
    free = {*units} - {FIXED}
    totals = torch.zeros(coupling.count, dtype=torch.float64)
    judged = False
    for name, side in coupling.sides.items():
        if free.isdisjoint(side.inputs) or not _judges(modules[name], method):
            continue
        scores = _scores_of_inputs(method, modules[name], curvature.measured.get(name))
        if scores is None:
            return None
        inputs = torch.tensor(side.inputs)
        totals.index_add_(0, inputs[inputs != FIXED], scores[inputs != FIXED].to(totals))
        judged = True
    return totals[torch.tensor(units)] if judged else None


def _judges(module: nn.Module, method: Method) -> bool:
    """Whether what reads a channel says how much it matters: batch norm for Slimming, layers otherwise."""
    return isinstance(module, BATCH_NORMS) if "scale" in method.needs else kind_of(module) is not None


def _scores_of_inputs(method: Method, module: nn.Module, layer: LayerCurvature | None) -> Tensor | None:
    """The inputs of a layer are the outputs of its transpose, whose A and S are the layer's S and A."""
    if isinstance(module, BATCH_NORMS):
        assert method.scores is not None
        return method.scores(scale=module.weight.detach().abs().cpu()) if module.affine else None
    if layer is None or layer.shape.taps > 1:
        return None
    turned = replace(
        layer,
        patches=layer.gradients,
        inputs=None,
        gradients=layer.patch_form,
        fisher=None if layer.fisher is None else layer.fisher.transpose(0, 1),
    )
    return channel_scores(method, weight_of(module).detach().transpose(0, 1), turned)

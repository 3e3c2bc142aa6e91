"""From a model and a plan to a smaller model of stock modules."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage import structures
from eigendamage.batches import Forward
from eigendamage.checks import require
from eigendamage.coupling import FIXED, Coupling
from eigendamage.curvature import Curvature, LayerCurvature
from eigendamage.layers import (
    LayerShape,
    bias_of,
    call_by_stages,
    candidates,
    deep_copy,
    describe_like,
    kind_of,
    set_weight,
    shape_of,
    slice_per_channel,
    some,
    weight_of,
)
from eigendamage.methods import BEST, METHODS
from eigendamage.methods.obs import compensated
from eigendamage.methods.regression import with_fewer_inputs
from eigendamage.plans import Choice, Kept, Plan
from eigendamage.refitting import PARTS
from eigendamage.refitting import refit as fitted_again


def apply(
    model: nn.Module,
    plan: Plan,
    curvature: Curvature,
    *,
    refit: Iterable[Any] | None = None,
    refitted: Collection[str] = PARTS,
    forward: Forward | None = None,
) -> nn.Module:
    """A smaller copy of ``model``; the model itself stays untouched.

    Args:
        model: the one that was measured.
        plan: what its layers become.
        curvature: what was measured.
        refit: batches on which the compressed layers and batch norm are fitted again; labels are not used.
        refitted: which of them: ``"layers"``, ``"norms"``.
        forward: as in `measure`, for these batches.

    Raises:
        ValueError: for a plan or curvature of another model, ranks out of range, or channels that coupled layers keep
            differently.
    """
    require("plan", plan, Plan, "what plan(...) returns")
    require("curvature", curvature, Curvature, "what measure(...) returns")
    curvature.require_model(model)
    _check(model, plan, curvature)
    small = deep_copy(model)
    with torch.no_grad():
        _slice_channels(small, plan, curvature)
        for name, choice in plan.layers.items():
            build = structures.STRUCTURES[choice.structure].build
            if build is None:
                continue
            layer = small.get_submodule(name)
            new = build(layer, curvature[name], choice.ranks)
            if choice.structure == "merged":
                bottleneck = structures.parts_of_bottleneck(small, name)
                assert bottleneck is not None and isinstance(new, nn.Sequential)
                layer, new = bottleneck, structures.merge(bottleneck, new)
            small = _replaced(small, layer, new)
    call_by_stages(small)
    return small if refit is None else fitted_again(model, small, plan, curvature, refit, forward, _replaced, refitted)


def sketched(model: nn.Module, plan: Plan) -> nn.Module:
    """What `apply` would make of a budget's plan, with any weights: quick to build, and as fast to run."""
    small = deep_copy(model)
    with torch.no_grad():
        _slice_channels(small, plan, None)
        for name, choice in plan.layers.items():
            row = structures.STRUCTURES[choice.structure]
            if row.build is not None and row.sketch is not None:
                layer = small.get_submodule(name)
                small = _replaced(small, layer, row.sketch(layer, choice.ranks))
    call_by_stages(small)
    return small


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """``model`` with ``new`` wherever ``old`` stands; a module may stand in several places."""
    new.train(old.training).requires_grad_(next(old.parameters()).requires_grad)
    before, after = (bias_of(list(module.modules())[-1]) for module in (old, new))  # on the layer itself or on its last stage
    if before is not None and after is not None:
        after.requires_grad_(before.requires_grad)
    if isinstance(new, nn.Sequential):
        describe_like(new, old)
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return new if model is old else model


# --- channels ---------------------------------------------------------------------------------------------------------------


def _slice_channels(model: nn.Module, plan: Plan, curvature: Curvature | None) -> None:
    """Without curvature, the weights that stay do not make up for those that go."""
    for name, kept in plan.kept.items():
        module = model.get_submodule(name)
        if kind_of(module) is None:
            slice_per_channel(module, torch.tensor(kept.outputs))
        elif getattr(module, "groups", 1) > 1:
            _slice_depthwise(module, kept)
        elif curvature is not None and plan.method == BEST:
            _slice_between(module, kept, curvature[name])
        else:
            gradients = curvature[name].gradients if curvature is not None and _compensates(plan) else None
            _slice_layer(module, kept, gradients)


def _compensates(plan: Plan) -> bool:
    return plan.method in METHODS and METHODS[plan.method].compensates


def _slice_layer(module: nn.Module, kept: Kept, gradients: Tensor | None) -> None:
    weight, bias = weight_of(module).detach(), bias_of(module)
    inputs, outputs = torch.tensor(kept.inputs), torch.tensor(kept.outputs)
    if gradients is not None and len(outputs) < len(weight):
        # The bias is one more weight of the filter, on an input that is always one.
        columns = weight.flatten(1) if bias is None else torch.cat([weight.flatten(1), bias.detach()[:, None]], dim=1)
        updated = compensated(columns, gradients, outputs).to(weight)
        bias = None if bias is None else updated[:, -1]
        weight = updated[:, : weight[0].numel()].reshape(-1, *weight.shape[1:])
    else:
        weight, bias = weight[outputs], None if bias is None else bias[outputs]
    set_weight(module, weight[:, inputs], bias)


def _slice_between(module: nn.Module, kept: Kept, layer: LayerCurvature) -> None:
    """Outputs go as they are; what reads the inputs that stay makes up for those that go."""
    weight, bias = weight_of(module).detach(), bias_of(module)
    if len(kept.inputs) < weight.shape[1] and layer.patch_form is not None:
        weight = with_fewer_inputs(weight, layer, kept.inputs).to(weight)
    else:
        weight = weight[:, torch.tensor(kept.inputs)]
    outputs = torch.tensor(kept.outputs)
    set_weight(module, weight[outputs], None if bias is None else bias[outputs])


def _slice_depthwise(module: nn.Module, kept: Kept) -> None:
    bias = bias_of(module)
    weight = module.weight
    assert isinstance(weight, Tensor)
    if kind_of(module) == "transposed":
        weight = weight.reshape(-1, 1, *weight.shape[2:])  # [in, multiplier, …]: outputs in order
    outputs = torch.tensor(kept.outputs)
    sliced = weight[outputs]
    if kind_of(module) == "transposed":
        sliced = sliced.reshape(len(kept.inputs), -1, *sliced.shape[2:])
    module.weight = nn.Parameter(sliced.clone(), module.weight.requires_grad)
    if bias is not None:
        module.bias = nn.Parameter(bias[outputs].clone(), bias.requires_grad)
    module.in_channels = module.groups = len(kept.inputs)  # type: ignore[assignment]
    module.out_channels = len(kept.outputs)  # type: ignore[assignment]


# --- checks -----------------------------------------------------------------------------------------------------------------


def _check(model: nn.Module, plan: Plan, curvature: Curvature) -> None:
    present = candidates(model)
    for name, choice in plan.layers.items():
        if name not in present:
            raise ValueError(f"the plan is of another model: it knows a layer {name!r}, the model has {some(present)}")
        shape, planned = shape_of(present[name]), choice.shape
        if any(getattr(shape, key) != getattr(planned, key) for key in LayerShape.OF_THE_LAYER):
            raise ValueError(f"the plan is of another model: {name} is {shape}, the plan has {planned}")
        structures.check_ranks(name, choice.structure, choice.shape, choice.ranks)
        _check_layer(name, choice, plan, model, curvature)
    if plan.kept:
        _check_kept(plan.kept, curvature.coupling)
    if _compensates(plan):
        curvature.require(("gradients",), f"a plan of method {plan.method!r}")


def _check_layer(name: str, choice: Choice, plan: Plan, model: nn.Module, curvature: Curvature) -> None:
    reason = (curvature.whole | curvature.reasons).get(name)
    if choice.structure not in ("dense", "channels") and reason:
        raise ValueError(f"{name}: cannot become {choice.structure}: {reason}")
    if choice.structure == "merged" and structures.parts_of_bottleneck(model, name) is None:
        raise ValueError(f"{name}: cannot become merged: it is not the core of a bottleneck")
    around, dot, _ = name.rpartition(".")
    core = plan.layers.get(f"{around}{dot}core")
    follows = core is not None and core.structure == "merged"
    if choice.structure == "channels" and name not in plan.kept and not follows:
        raise ValueError(f"{name}: becomes channels, but the plan does not say which stay (plan.kept)")
    if choice.structure != "channels" and name in plan.kept:
        raise ValueError(
            f"{name}: plan.kept lists the channels that stay, so it must become channels; the plan has {choice.structure}"
        )
    if name in plan.kept:
        kept = plan.kept[name]
        depthwise = choice.shape.inputs == 1 and len(kept.inputs) != 1
        counts = {"in": 1 if depthwise else len(kept.inputs), "out": len(kept.outputs)}
        if counts != choice.ranks:
            raise ValueError(
                f"{name}: its ranks are {choice.ranks}, but plan.kept lists {counts}; edit plan.kept, then the ranks"
            )


def _check_kept(kept: Mapping[str, Kept], coupling: Coupling | None) -> None:
    """Coupled channels stay or go together, in every module."""
    if coupling is None:
        raise ValueError(
            "the plan removes channels; the curvature does not know their coupling: measure it for the plan's method"
        )
    for name in kept.keys() - coupling.sides.keys():
        raise ValueError(f"the plan is of another model: it keeps channels of {name!r}; channels go in {some(coupling.sides)}")
    verdict: dict[int, tuple[bool, str]] = {}
    for name, side in coupling.sides.items():
        for units, indices in ((side.inputs, _indices(name, kept, "inputs")), (side.outputs, _indices(name, kept, "outputs"))):
            if indices is not None and (
                sorted(set(indices)) != indices or not indices or not 0 <= indices[0] <= indices[-1] < len(units)
            ):
                raise ValueError(f"{name}: kept channels must be ascending indices from 0 to {len(units) - 1}, at least one")
            staying = set(range(len(units)) if indices is None else indices)
            for index, unit in enumerate(units):
                stays = index in staying
                before, where = (
                    verdict.setdefault(unit, (stays, f"{name} channel {index}")) if unit != FIXED else (True, "the model")
                )
                if stays != before:
                    raise ValueError(
                        f"{name}: channel {index} {'stays' if stays else 'goes'}, but {where}, coupled with it, does not"
                    )


def _indices(name: str, kept: Mapping[str, Kept], side: str) -> list[int] | None:
    return getattr(kept[name], side) if name in kept else None

"""From curvature to a plan: the verb, and the paper's methods under one global ratio."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage import structures
from eigendamage.budgets import LAST, at_equal_cost, best_plan, dense_layers, layers_for_budgets, timed_plan
from eigendamage.checks import require, require_choice, require_number, require_whole
from eigendamage.coupling import FIXED, Coupling
from eigendamage.curvature import Curvature
from eigendamage.layers import Skip, candidates, skipped_layers, some, weight_of
from eigendamage.methods import BEST, METHODS, MISSING, Method, channel_scores, method_named
from eigendamage.methods.cp import full_rank, rank_for
from eigendamage.methods.eigendamage import eigenbasis, strongest
from eigendamage.offers import KINDS, offers
from eigendamage.plans import Choice, Plan, kept_where
from eigendamage.reading import reading_scores
from eigendamage.selection import keep_by_percentile, keep_units
from eigendamage.timing import Stopwatch

LARGER = "it would hold more parameters than the dense layer"
ALL_STAYS = "the method keeps all of it"
WHOLE = "the budget is the whole model"


@dataclass(frozen=True)
class Rules:
    """The rules that the paper leaves unsaid, as the authors' program has them (see `plan`)."""

    cap: float
    basis: str
    norm: str
    normalize: bool
    allow_larger: bool
    last_linear: str
    skipped: frozenset[str]


def plan_at_ratio(model: nn.Module, curvature: Curvature, method: str, ratio: float, rules: Rules) -> Plan:
    """The paper's method at a global pruning ratio."""
    row = method_named(method)
    if row.removes == "rank":
        return plan_ranks(model, curvature, 1 - ratio, rules)
    needs = ("patches", "gradients") if row.removes == "directions" and rules.basis == "patch" else row.needs
    curvature.require(needs, f"method {method!r}" + (' with basis="patch"' if needs != row.needs else ""))
    if row.removes == "channels":
        return _plan_channels(model, curvature, method, ratio, rules, dense_layers(curvature, curvature.reasons, rules.skipped))
    return _plan_directions(
        model, curvature, method, ratio, rules, dense_layers(curvature, curvature.reasons | curvature.whole, rules.skipped)
    )


# --- directions of the eigenbasis: EigenDamage ------------------------------------------------------------------------------


def _plan_directions(
    model: nn.Module, curvature: Curvature, method: str, ratio: float, rules: Rules, layers: dict[str, Choice]
) -> Plan:
    cores = {name: structures.parts_of_bottleneck(model, name) for name in curvature.layers}
    rotations = {name.removesuffix("core") + stage for name, parts in cores.items() if parts for stage in structures.ROTATIONS}
    modules = candidates(model)
    bases = {
        name: eigenbasis(weight_of(modules[name]), layer, "channel" if cores[name] else rules.basis)
        for name, layer in curvature.measured.items()
        if not layers[name].reason and name not in rotations and (name != curvature.last_linear or rules.last_linear != "leave")
    }
    scores = {(name, side): s for name, b in bases.items() for side, s in (("in", b.input_scores), ("out", b.output_scores))}
    if rules.normalize:
        scores = {key: _normalized(values) for key, values in scores.items()}
    kept = keep_by_percentile(scores, ratio, rules.cap)
    for name in rotations:
        layers[name].reason = "the rotation of a core; it follows the core"
    for name, basis in bases.items():
        if name == curvature.last_linear and rules.last_linear == "list":
            continue
        ranks = {side: int(kept[name, side].sum()) for side in ("in", "out")}
        loss = basis.loss(
            *(strongest(s, ranks[side]) for side, s in (("in", basis.input_scores), ("out", basis.output_scores)))
        )
        if cores[name]:
            _shrink_bottleneck(layers, name, ranks, loss)
        else:
            _choose(layers[name], _direction_structure(method, rules, layers[name], ranks), loss, rules.allow_larger)
    _leave_last_linear(layers, curvature, rules)
    return Plan(method, layers)


def _leave_last_linear(layers: dict[str, Choice], curvature: Curvature, rules: Rules) -> None:
    if curvature.last_linear and rules.last_linear != "prune":
        layers[curvature.last_linear].reason = layers[curvature.last_linear].reason or LAST


def _direction_structure(method: str, rules: Rules, choice: Choice, ranks: dict[str, int]) -> tuple[str, dict[str, int]]:
    if method == "eigendamage-depthwise" and choice.shape.taps > 1:
        structure = "depthwise" if rules.norm == "frobenius" else "depthwise-fisher"
        return structure, {**ranks, "depthwise": min(ranks.values())}
    return ("bottleneck-patch" if rules.basis == "patch" and choice.shape.taps > 1 else "bottleneck"), ranks


def _choose(choice: Choice, new: tuple[str, dict[str, int]], loss: float, allow_larger: bool) -> None:
    if not allow_larger and structures.params(new[0], choice.shape, new[1]) >= choice.shape.params:
        choice.reason = LARGER
        return
    choice.structure, choice.ranks = new
    choice.loss = loss


def _shrink_bottleneck(layers: dict[str, Choice], core: str, ranks: dict[str, int], loss: float) -> None:
    """A later round: new bases of the core merge into its rotations (section 4.4)."""
    shape, (first, last) = layers[core].shape, (layers[core.removesuffix("core") + stage] for stage in structures.ROTATIONS)
    if ranks == {"in": shape.inputs, "out": shape.outputs}:
        layers[core].reason = ALL_STAYS
        return
    layers[core] = Choice(shape, "merged", ranks, loss)
    first.structure, first.ranks, first.reason = "channels", {"in": first.shape.inputs, "out": ranks["in"]}, ""
    last.structure, last.ranks, last.reason = "channels", {"in": ranks["out"], "out": last.shape.outputs}, ""


# --- channels ---------------------------------------------------------------------------------------------------------------


def _plan_channels(
    model: nn.Module, curvature: Curvature, method: str, ratio: float, rules: Rules, layers: dict[str, Choice]
) -> Plan:
    if curvature.coupling is None:
        raise ValueError(f"method {method!r} needs the coupling of channels; name the method in measure(..., methods=[...])")
    coupling, modules = curvature.coupling, candidates(model)
    row = method_named(method)
    losses = _scores(curvature, modules, row) | reading_scores(model, curvature, row)
    scores = {name: _normalized(values) for name, values in losses.items()} if rules.normalize else losses
    count = coupling.count
    _leave_last_linear(layers, curvature, rules)
    held = {name for name, choice in layers.items() if choice.reason and getattr(modules[name], "groups", 1) == 1}
    removable = _removable(coupling, scores, held | rules.skipped, count)
    totals = torch.zeros(count, dtype=torch.float64)
    units = {name: torch.tensor(coupling.sides[name].outputs) for name in scores if name in coupling.sides}
    for name, of_layer in units.items():
        free = of_layer != FIXED
        totals.index_add_(0, of_layer[free], scores[name][free])
    listed = [scores[name] for name in [curvature.last_linear] if name in scores and rules.last_linear == "list"]
    capped = [[unit for unit in side.outputs if unit != FIXED] for side in coupling.sides.values()]
    kept = keep_units(totals, removable, listed, [torch.tensor(free) for free in capped if free], ratio, rules.cap)
    plan = Plan(method, layers, kept_where(coupling, kept))
    for name, choice in layers.items():
        missing = next((MISSING[need] for need in row.needs if getattr(curvature[name], need) is None and need in MISSING), "")
        _describe_channels(plan, name, choice, losses.get(name), coupling, missing)
    return plan


def _scores(curvature: Curvature, modules: Mapping[str, nn.Module], method: Method) -> dict[str, Tensor]:
    scores = {name: channel_scores(method, weight_of(modules[name]), layer) for name, layer in curvature.measured.items()}
    return {name: values for name, values in scores.items() if values is not None}


def _normalized(scores: Tensor) -> Tensor:
    return scores / scores.sum().clamp(min=torch.finfo(scores.dtype).tiny)


def _removable(coupling: Coupling, scores: Mapping[str, Tensor], held: Collection[str], count: int) -> Tensor:
    """Units that some layer scores and no layer holds back."""
    removable = torch.zeros(count, dtype=torch.bool)
    for names, value in ((scores, True), (held, False)):
        outputs = [unit for name in names if name in coupling.sides for unit in coupling.sides[name].outputs if unit != FIXED]
        removable[outputs] = value
    return removable


def _describe_channels(plan: Plan, name: str, choice: Choice, losses: Tensor | None, coupling: Coupling, missing: str) -> None:
    if name not in plan.kept:
        choice.reason = choice.reason or coupling.reasons.get(name) or missing or ALL_STAYS
        return
    kept = plan.kept[name]
    depthwise = choice.shape.inputs == 1 and len(coupling.sides[name].inputs) > 1
    choice.structure, choice.reason = "channels", ""
    choice.ranks = {"in": 1 if depthwise else len(kept.inputs), "out": len(kept.outputs)}
    if losses is not None:
        choice.loss = float(losses.index_fill(0, torch.tensor(kept.outputs), 0).sum())


# --- given ranks: CP --------------------------------------------------------------------------------------------------------


def plan_ranks(model: nn.Module, curvature: Curvature, ranks: float | int | Mapping[str, int], rules: Rules) -> Plan:
    """CP decomposition with a multiple of each layer's rank (a float), one rank for all (an int), or a rank by layer name."""
    layers = dense_layers(curvature, curvature.reasons | curvature.whole, rules.skipped)
    if not isinstance(ranks, int | Mapping) or isinstance(ranks, bool):
        require_number("ranks", ranks, "above 0, as a multiple of each layer's rank", lambda x: x > 0)
    if isinstance(ranks, Mapping):
        unknown = [name for name in ranks if name not in layers]
        if unknown:
            raise ValueError(f"ranks: there is no layer {unknown[0]!r}; the layers are {some(layers)}")
    for name, choice in layers.items():
        if not choice.reason and isinstance(ranks, Mapping) and name not in ranks:
            choice.reason = "no rank is given for it"
        if choice.reason:
            continue
        if choice.shape.taps == 1:
            choice.reason = "it is no convolution with a kernel"
            continue
        if isinstance(ranks, Mapping):
            rank = ranks[name]
        else:
            rank = rank_for(choice.shape, ranks) if isinstance(ranks, float) else min(ranks, full_rank(choice.shape))
        structures.check_ranks(name, "cp", choice.shape, {"cp": rank})
        _choose(choice, ("cp", {"cp": rank}), 0.0, rules.allow_larger)
    return Plan("cp", layers)


# --- the verb ---------------------------------------------------------------------------------------------------------------


def plan(
    model: nn.Module,
    curvature: Curvature,
    *,
    method: str | None = None,
    ratio: float | None = None,
    ranks: float | int | Mapping[str, int] | None = None,
    macs: float | None = None,
    params: float | None = None,
    latency: float | None = None,
    loss: float | None = None,
    example_inputs: Any = None,
    multiple: int = 1,
    structures: Iterable[str] | None = None,
    cap: float = 0.95,
    basis: str = "channel",
    norm: str = "frobenius",
    normalize: bool = False,
    allow_larger: bool = False,
    last_linear: str | None = None,
    skip: Skip = (),
) -> Plan:
    """Decide what every layer becomes.

    Args:
        model: the model that ``curvature`` was measured on.
        method: a name in ``METHODS``.
        ratio: the paper's knob: the share of all channels or directions, over all layers in one list, that goes. For ``"cp"``
            the share of each layer's rank.
        ranks: for ``"cp"``: a multiple of each layer's rank (float), one rank for all (int), or ranks by layer name.
        macs: a budget: this fraction of the dense model's multiply-accumulates. Without a method, the best structure for every
            layer is found; with one, the smallest ratio at which the budget holds.
        params: likewise for parameters. Several budgets may be given.
        latency: likewise for the time of a pass over ``example_inputs``, as it is measured here and now, with the threads that
            are set; only without a method.
        loss: an absolute increase of the loss: the fewest multiply-accumulates for which no more is predicted; only without a
            method.
        example_inputs: for ``latency``, as in `count`: of the batch size, on the device and of the dtype that count.
        multiple: under a budget without a method, ranks are multiples of this where they are as large.
        structures: under a budget without a method, layers become nothing but these: ``"svd"``, ``"tucker"``,
            ``"rows-columns"``, ``"columns-rows"``, ``"mobile"``, and ``"channels"`` for fewer channels between two layers.
        cap: at most this share of a layer's rows, and of its columns, goes; the best of the layer stay.
        basis: for EigenDamage: ``"channel"`` (section 4.5) or the full ``"patch"`` basis.
        norm: for EigenDamage-Depthwise: ``"frobenius"`` or ``"fisher"`` (the Mahalanobis norm of appendix B).
        normalize: divide the scores of a layer by their sum. It hurts; the paper compares layers as they are.
        allow_larger: also use a bottleneck that holds more parameters than the dense layer.
        last_linear: the layer that makes the logits: ``"leave"`` it out (the default for directions), ``"list"`` its scores but
            keep it (the default for channels), or ``"prune"`` it like any other.
        skip: layers to leave alone, as in ``measure``.

    Raises:
        ValueError: for a method, ratio or layer that does not exist, and for a curvature of another model.
    """
    require("curvature", curvature, Curvature, "what measure(...) returns")
    curvature.require_model(model)
    row = method_named(method) if method is not None else None
    default = "leave" if row is None or row.removes == "directions" else "list"
    rules = Rules(cap, basis, norm, normalize, allow_larger, last_linear or default, frozenset(skipped_layers(model, skip)))
    _check(rules)
    asked = {"macs": macs, "params": params, "latency": latency, "loss": loss}
    budgets = {key: value for key, value in asked.items() if value is not None}
    check_goal({"ratio": ratio, "ranks": ranks, **budgets})
    if example_inputs is not None and latency is None:
        raise ValueError("example_inputs: are for latency=..., which is not given")
    if (multiple != 1 or structures is not None) and (method is not None or not budgets):
        name = "multiple" if multiple != 1 else "structures"
        raise ValueError(f"{name}: is for budgets without a method; method={method!r} has structures of its own")
    if budgets:
        return _labelled(_within(model, curvature, method, budgets, multiple, structures, example_inputs, rules))
    if row is None or method is None:
        raise ValueError(f"method: ratio and ranks need one of {some(METHODS, 20)}")
    if ranks is not None:
        if row.removes != "rank":
            raise ValueError(f"ranks: only cp takes given ranks; {method!r} finds its own from ratio=...")
        return _labelled(plan_ranks(model, curvature, ranks, rules))
    assert ratio is not None
    check_ratio(ratio)
    return _labelled(plan_at_ratio(model, curvature, method, ratio, rules))


def _labelled(plan: Plan) -> Plan:
    """Losses with what they were predicted for, and none where the method predicts none."""
    predicts = plan.method not in METHODS or METHODS[plan.method].predicts
    for choice in plan.layers.values():
        choice.loss_of = choice.description
        choice.loss = choice.loss if predicts else None
    return plan


def _within(
    model: nn.Module,
    curvature: Curvature,
    method: str | None,
    budgets: Mapping[str, float],
    multiple: int,
    kinds: Iterable[str] | None,
    example_inputs: Any,
    rules: Rules,
) -> Plan:
    check_budgets(budgets, method)
    require_whole("multiple", multiple, least=1)
    if "latency" in budgets and example_inputs is None:
        raise ValueError("latency: needs example_inputs=..., the inputs whose time counts")
    if "loss" not in budgets and all(value == 1 for value in budgets.values()):
        layers = dense_layers(curvature, curvature.reasons, rules.skipped)
        for choice in layers.values():
            choice.reason = choice.reason or WHOLE
        return Plan(method or BEST, layers)
    if method is not None:
        return at_equal_cost(model, curvature, budgets, lambda ratio: plan_at_ratio(model, curvature, method, ratio, rules))
    layers = layers_for_budgets(curvature, rules.skipped, rules.last_linear)
    stopwatch = Stopwatch(model, example_inputs) if "latency" in budgets else None
    offered = offers(model, curvature, layers, multiple, stopwatch, _kinds(kinds))
    if stopwatch is None:
        return best_plan(curvature, offered, layers, budgets)
    return timed_plan(model, curvature, offered, layers, budgets, stopwatch)


def _kinds(wanted: Iterable[str] | None) -> frozenset[str]:
    if wanted is None:
        return KINDS
    if not isinstance(wanted, Iterable):
        raise TypeError(f"structures: must be names, such as {sorted(KINDS)}; got {wanted!r}")
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    for name in names:
        require_choice("structures", name, sorted(KINDS))
    if not names:
        raise ValueError("structures: there are none; leave it out for all of them")
    return frozenset(names)


def check_budgets(budgets: Mapping[str, float], method: str | None) -> None:
    for key, value in budgets.items():
        if key == "loss":
            require_number(key, value, "an increase of the loss, above 0", lambda x: x > 0)
        else:
            require_number(key, value, "a fraction of the dense model, above 0 and at most 1", lambda x: 0 < x <= 1)
        if method is not None and key in ("latency", "loss"):
            raise ValueError(
                f"{key}: a budget of it finds its own structures; leave out method={method!r}, or use macs or params"
            )


def statistics_for(planning: Mapping[str, Any]) -> list[str]:
    """Methods that have `measure` collect what a plan with these arguments needs."""
    if planning.get("method") is None:
        return [BEST]
    return [planning["method"], *(["kron-obd"] if planning.get("basis") == "patch" else [])]


def check_goal(planning: Mapping[str, Any]) -> None:
    """Raise ValueError unless a plan with these arguments has one goal: a ratio, ranks or budgets."""
    given = [
        any(planning.get(key) is not None for key in keys)
        for keys in (("ratio",), ("ranks",), ("macs", "params", "latency", "loss"))
    ]
    if sum(given) != 1:
        raise ValueError("plan needs one of ratio=..., ranks=... (for cp), or budgets (macs=, params=, latency=, loss=)")


def check_ratio(ratio: float) -> None:
    require_number("ratio", ratio, "at least 0 and below 1", lambda x: 0 <= x < 1)


def check_cap(cap: float) -> None:
    require_number("cap", cap, "between 0 and 1", lambda x: 0 <= x <= 1)


def _check(rules: Rules) -> None:
    check_cap(rules.cap)
    require_choice("basis", rules.basis, ("channel", "patch"))
    require_choice("norm", rules.norm, ("frobenius", "fisher"))
    require_choice("last_linear", rules.last_linear, ("leave", "list", "prune"))

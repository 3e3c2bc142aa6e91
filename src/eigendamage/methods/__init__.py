"""The methods, one row each: what a method removes, which statistics it needs and how it scores.

A method of the "channels" kind is a function from a layer's weight and statistics to one score per output channel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor

from eigendamage.curvature import LayerCurvature
from eigendamage.layers import some
from eigendamage.methods import kron_obd, kron_obs, obd, obs, slimming

Scores = Callable[..., Tensor]


@dataclass(frozen=True)
class Method:
    """One row of the table."""

    title: str
    removes: str  # "channels", "directions" of the eigenbasis, or "rank"
    needs: tuple[str, ...]  # statistics of `LayerCurvature`
    scores: Scores | None = None  # for channels: called with the weight, where wanted, and the statistics it needs
    weighs: bool = True  # whether `scores` takes the weight
    compensates: bool = False  # whether the kept filters are updated for the loss of the others
    predicts: bool = True  # whether its plans say by how much the loss will grow


# Why a layer can lack a statistic that was collected.
MISSING = {"fisher": "examples cannot be told apart in its inputs", "scale": "no batch norm follows it"}

METHODS: dict[str, Method] = {
    "c-obd": Method("C-OBD", "channels", ("fisher",), obd.scores),
    "c-obs": Method("C-OBS", "channels", ("patches", "gradients"), obs.scores, compensates=True),
    "kron-obd": Method("Kron-OBD", "channels", ("patches", "gradients"), kron_obd.scores),
    "kron-obs": Method("Kron-OBS", "channels", ("patches", "gradients"), kron_obs.scores, compensates=True),
    "eigendamage": Method("EigenDamage", "directions", ("inputs", "gradients")),
    "eigendamage-depthwise": Method("EigenDamage-Depthwise", "directions", ("inputs", "gradients"), predicts=False),
    "slimming": Method("NN Slimming", "channels", ("scale",), slimming.scores, weighs=False, predicts=False),
    "cp": Method("CP decomposition", "rank", (), predicts=False),
}

# Not one of the paper's methods: the best structure for every layer, as budgets find it.
BEST = "best"
BEST_NEEDS = frozenset({"patches", "softened", "coupling"})

# What budgets and the K-FAC methods need is what `measure` collects unless it is told otherwise.
DEFAULT_METHODS = (BEST, "kron-obd", "kron-obs", "c-obs", "eigendamage")


def method_named(name: str) -> Method:
    if not isinstance(name, str) or name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; the methods are {some(METHODS, 20)}")
    return METHODS[name]


def needs_of(methods: Iterable[str]) -> frozenset[str]:
    """The statistics that these methods need, and ``"coupling"`` where channels are removed."""
    names = list(methods)
    rows = [method_named(name) for name in names if name != BEST]
    coupling = {"coupling"} if any(row.removes == "channels" for row in rows) else set()
    return frozenset(coupling.union(BEST_NEEDS if BEST in names else (), *(row.needs for row in rows)))


def channel_scores(method: Method, weight: Tensor, layer: LayerCurvature) -> Tensor | None:
    """A score per output channel, or None where the layer has nothing to score it by (no batch norm, for Slimming)."""
    values = {"patches": layer.patch_form, "gradients": layer.gradients, "fisher": layer.fisher, "scale": layer.scale}
    wanted = {need: values[need] for need in method.needs}
    if method.scores is None or any(value is None for value in wanted.values()):
        return None
    return method.scores(*([weight] if method.weighs else []), **wanted)

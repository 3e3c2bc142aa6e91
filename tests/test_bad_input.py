"""Every mistake in an argument is an error that names it, its value and what is allowed."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from dense import convnet, measured
from torch import Tensor, nn

import eigendamage as ed
from eigendamage import METHODS, Curvature, Plan
from eigendamage.plans import Kept

Edit = Callable[[Plan], object]


@lru_cache
def case() -> tuple[nn.Module, Curvature]:
    model, inputs = convnet()
    return model, measured(model, inputs, list(METHODS))


def refused(call: Callable[[], object], *parts: str) -> None:
    """The call raises a ValueError whose message has all of these parts."""
    with pytest.raises(ValueError) as caught:
        call()
    for part in parts:
        assert part in str(caught.value), str(caught.value)


def plan(**arguments: object) -> Plan:
    model, curvature = case()
    return ed.plan(model, curvature, **{"method": "eigendamage", **arguments})


def edited(edit: Edit, **arguments: object) -> Callable[[], object]:
    """Apply a plan after an edit by hand."""
    changed = plan(**{"ratio": 0.5, "allow_larger": True, **arguments})
    edit(changed)
    model, curvature = case()
    return lambda: ed.apply(model, Plan.from_json(changed.to_json()), curvature)


# --- plan -------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1.5, math.nan, math.inf])
@pytest.mark.parametrize("method", METHODS)
def test_a_ratio_outside_of_0_and_1(method: str, ratio: float) -> None:
    refused(lambda: plan(method=method, ratio=ratio), "ratio: must be at least 0 and below 1", f"got {ratio}")


@pytest.mark.parametrize("cap", [-0.5, 1.01, math.nan])
def test_a_cap_outside_of_0_and_1(cap: float) -> None:
    refused(lambda: plan(ratio=0.5, cap=cap), "cap: must be between 0 and 1", f"got {cap}")


@pytest.mark.parametrize(
    ("argument", "allowed"),
    [("basis", "'channel', 'patch'"), ("norm", "'frobenius', 'fisher'"), ("last_linear", "'leave', 'list', 'prune'")],
)
def test_a_choice_that_does_not_exist(argument: str, allowed: str) -> None:
    refused(lambda: plan(ratio=0.5, **{argument: "best"}), f"{argument}: must be one of {allowed}; got 'best'")


def test_a_method_that_does_not_exist() -> None:
    model, inputs = convnet()
    refused(lambda: plan(method="obd", ratio=0.5), "method 'obd' is unknown", *METHODS)
    refused(lambda: measured(model, inputs, ["kron"]), "method 'kron' is unknown", *METHODS)


@pytest.mark.parametrize("skip", [["3", "conv7"], "conv7"])
def test_a_layer_to_skip_that_does_not_exist(skip: object) -> None:
    model, inputs = convnet()
    refused(lambda: plan(ratio=0.5, skip=skip), "skip: ", "'conv7'", "0, 3, 8, 10")
    refused(lambda: measured(model, inputs, skip=skip), "skip: ", "'conv7'", "0, 3, 8, 10")


def test_a_ratio_and_ranks_or_neither() -> None:
    for arguments in ({}, {"ratio": 0.5, "ranks": 3}):
        refused(lambda arguments=arguments: plan(method="cp", **arguments), "one of ratio=..., ranks=...")


def test_no_method() -> None:
    refused(lambda: plan(method=None, ratio=0.5), "method: ", *METHODS)


def test_ranks_for_a_method_that_finds_its_own() -> None:
    refused(lambda: plan(ranks=3), "ranks: only cp takes given ranks; 'eigendamage' finds its own")


@pytest.mark.parametrize(
    ("ranks", "parts"),
    [
        ({"conv7": 3}, ["ranks: there is no layer 'conv7'", "0, 3, 8, 10"]),
        ({"3": 97}, ["3: rank 'cp' of cp must be a whole number from 1 to 96; got 97"]),
        (0, ["0: rank 'cp' of cp must be a whole number from 1 to 24; got 0"]),
        (-0.5, ["ranks: must be above 0, as a multiple of each layer's rank; got -0.5"]),
        (math.nan, ["ranks: must be above 0", "got nan"]),
    ],
)
def test_ranks_that_do_not_exist(ranks: object, parts: list[str]) -> None:
    refused(lambda: plan(method="cp", ranks=ranks, allow_larger=True), *parts)


# --- statistics -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("collected", "wanted", "missing"),
    [
        ("eigendamage", "kron-obd", "patches"),
        ("kron-obd", "c-obd", "fisher"),
        ("kron-obd", "slimming", "scale"),
        ("c-obd", "eigendamage", "gradients, inputs"),
    ],
)
def test_statistics_that_were_not_collected(collected: str, wanted: str, missing: str) -> None:
    model, inputs = convnet()
    curvature = measured(model, inputs, [collected])
    refused(
        lambda: ed.plan(model, curvature, method=wanted, ratio=0.5),
        f"method {wanted!r} needs {missing}",
        "measure(..., methods=[...])",
    )


def test_a_basis_whose_statistics_were_not_collected() -> None:
    model, inputs = convnet()
    curvature = measured(model, inputs, ["eigendamage"])
    refused(lambda: ed.plan(model, curvature, method="eigendamage", ratio=0.5, basis="patch"), 'basis="patch"', "patches")


def test_a_coupling_that_was_not_traced() -> None:
    model, curvature = case()
    untraced = replace(curvature, coupling=None)
    refused(
        lambda: ed.plan(model, untraced, method="kron-obd", ratio=0.5), "'kron-obd'", "coupling", "measure(..., methods=[...])"
    )
    refused(lambda: ed.apply(model, plan(method="kron-obd", ratio=0.5), untraced), "coupling")


def test_compensation_without_the_gradients_it_needs() -> None:
    model, curvature = case()
    without = replace(curvature, collected=frozenset({"fisher"}))
    refused(lambda: ed.apply(model, plan(method="kron-obs", ratio=0.5), without), "'kron-obs' needs gradients")


def test_slimming_without_batch_norm_removes_nothing() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    curvature = measured(model, torch.randn(8, 4), ["slimming"])
    unchanged = ed.plan(model, curvature, method="slimming", ratio=0.9)
    assert not unchanged.kept and all(choice.structure == "dense" and choice.reason for choice in unchanged.layers.values())
    assert str(ed.apply(model, unchanged, curvature)) == str(model)


# --- another model ----------------------------------------------------------------------------------------------------------


def others() -> dict[str, tuple[nn.Module, Tensor, list[str]]]:
    """Models like the one of `case` but for one thing, and what an error says of it."""
    wider, without, more, transposed = (convnet()[0] for _ in range(4))
    wider[3] = nn.Conv2d(8, 13, 3, padding=1, bias=False).double()
    wider[4] = nn.BatchNorm2d(13).double()
    wider[8] = nn.Linear(52, 20).double()
    without[10] = nn.Identity()
    more.append(nn.Linear(5, 5).double())
    transposed[3] = nn.ConvTranspose2d(8, 12, 3, padding=1, bias=False).double()
    inputs = convnet()[1]
    return {
        "wider": (wider.eval(), inputs, ["3", "12", "13"]),
        "without a layer": (without.eval(), inputs, ["10"]),
        "with one more": (more.eval(), inputs, ["11"]),
        "of another kind": (transposed.eval(), inputs, ["3", "transposed", "conv"]),
    }


@pytest.mark.parametrize("name", others())
def test_a_curvature_of_another_model(name: str) -> None:
    model, _, parts = others()[name]
    refused(lambda: ed.plan(model, case()[1], method="eigendamage", ratio=0.5), "the curvature is of another model", *parts)
    refused(lambda: ed.apply(model, plan(ratio=0.5), case()[1]), "the curvature is of another model", *parts)


@pytest.mark.parametrize("name", ["wider", "without a layer", "of another kind"])
@pytest.mark.parametrize("method", ["eigendamage", "kron-obd"])
def test_a_plan_of_another_model(name: str, method: str) -> None:
    model, inputs, parts = others()[name]
    curvature = measured(model, inputs, [method])
    refused(lambda: ed.apply(model, plan(method=method, ratio=0.5), curvature), "the plan is of another model", *parts)


# --- plans edited by hand ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda p: p["3"].ranks.update({"out": 13}), ["3: rank 'out' of bottleneck", "from 1 to 12; got 13"]),
        (lambda p: p["3"].ranks.update({"in": 0}), ["3: rank 'in' of bottleneck", "from 1 to 8; got 0"]),
        (lambda p: p["3"].ranks.pop("in"), ["3: bottleneck takes the ranks ['in', 'out']; got ['out']"]),
        (lambda p: setattr(p["3"], "structure", "dense"), ["3: dense takes the ranks []; got ['in', 'out']"]),
        (
            lambda p: setattr(p["3"], "structure", "thin"),
            ["3: structure 'thin' is unknown; there are dense, channels, bottleneck"],
        ),
        (lambda p: setattr(p["3"], "structure", "channels"), ["3: becomes channels, but the plan does not say which stay"]),
        (lambda p: setattr(p["3"], "structure", "merged"), ["3: cannot become merged: it is not the core of a bottleneck"]),
        (lambda p: p.kept.update({"6": Kept([0], [0])}), ["it keeps channels of '6'", "channels go in 0, 1, 3, 4, 8, 10"]),
    ],
)
def test_an_edited_rank_or_structure_that_does_not_fit(edit: Edit, parts: list[str]) -> None:
    refused(edited(edit), *parts)


@pytest.mark.parametrize(
    ("edit", "parts"),
    [
        (lambda p: p.kept["3"].outputs.pop(), ["3: its ranks are", "but plan.kept lists"]),
        (
            lambda p: (p.kept["4"].outputs.pop(), p.kept["4"].inputs.pop()),
            ["4: channel", "goes, but 3 channel", "coupled with it"],
        ),
        (lambda p: p.kept.pop("4"), ["4: channel", "stays, but 3 channel", "coupled with it"]),
        (lambda p: p.kept["1"].outputs.reverse(), ["1: kept channels must be ascending indices from 0 to 7"]),
        (lambda p: p.kept["1"].outputs.append(8), ["1: kept channels must be ascending indices from 0 to 7"]),
        (lambda p: p.kept["1"].inputs.clear(), ["1: kept channels must be ascending indices from 0 to 7, at least one"]),
        (lambda p: (p.kept["10"].outputs.pop(), p["10"].ranks.update({"out": 4})), ["10: channel 4 goes, but the model"]),
        (
            lambda p: (setattr(p["3"], "structure", "dense"), p["3"].ranks.clear()),
            ["3: plan.kept lists", "must become channels", "has dense"],
        ),
        (lambda p: p.kept.update({"conv7": Kept([0], [0])}), ["the plan is of another model", "'conv7'"]),
    ],
)
def test_edited_channels_that_do_not_fit_each_other(edit: Edit, parts: list[str]) -> None:
    refused(edited(edit, method="kron-obd"), *parts)


def test_a_structure_for_a_layer_that_must_stay_dense() -> None:
    model = nn.Sequential(nn.Conv1d(4, 4, 3, groups=2), nn.Flatten(), nn.Linear(8, 2))
    curvature = measured(model, torch.randn(5, 4, 4))
    changed = ed.plan(model, curvature, method="eigendamage", ratio=0.5)
    changed["0"].structure, changed["0"].ranks = "bottleneck", {"in": 1, "out": 1}
    refused(lambda: ed.apply(model, changed, curvature), "0: cannot become bottleneck: it is grouped (groups=2)")


def test_layers_by_names_that_do_not_exist() -> None:
    refused(lambda: plan(ratio=0.5)["conv7"], "the plan has no layer 'conv7'", "0, 3, 8, 10")
    refused(lambda: case()[1]["conv7"], "no layer 'conv7'", "0, 3, 8, 10")


def test_errors_show_a_few_of_many_names() -> None:
    model = nn.Sequential(*[nn.Linear(2, 2) for _ in range(20)])
    with pytest.raises(ValueError, match=re.escape("0, 1, 2, 3, 4, 5, 6, 7, … (20 in all)")):
        measured(model, torch.randn(3, 2), skip="conv7")

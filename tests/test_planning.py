"""What `plan` decides: the paper's global percentile, and the rules that the paper leaves unsaid."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

import pytest
import torch
from dense import convnet, loss, measured
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import eigendamage as ed
from eigendamage import METHODS, Curvature, Plan
from eigendamage.curvature import LayerCurvature
from eigendamage.layers import weight_of
from eigendamage.methods.eigendamage import eigenbasis
from eigendamage.planning import ALL_STAYS, LARGER, LAST
from eigendamage.selection import fewest

LAYERS = ["0", "3", "8", "10"]
CONVOLUTIONS, LAST_LINEAR = ["0", "3"], "10"
CHANNEL_METHODS = [name for name, row in METHODS.items() if row.removes == "channels"]
DIRECTION_METHODS = [name for name, row in METHODS.items() if row.removes == "directions"]
every_method = pytest.mark.parametrize("method", METHODS)


@lru_cache
def case() -> tuple[nn.Module, Curvature]:
    torch.manual_seed(0)
    model, inputs = convnet()
    return model, measured(model, inputs, list(METHODS))


def planned(method: str, ratio: float, **rules: object) -> Plan:
    model, curvature = case()
    return ed.plan(model, curvature, method=method, ratio=ratio, **rules)


def direction_scores(basis: str = "channel") -> dict[tuple[str, str], Tensor]:
    model, curvature = case()
    bases = {name: eigenbasis(weight_of(model.get_submodule(name)), curvature[name], basis) for name in LAYERS}
    return {(name, side): getattr(b, f"{side}put_scores") for name, b in bases.items() for side in ("in", "out")}


def at_or_below(scores: list[Tensor], ratio: float) -> float:
    values = sorted(torch.cat(scores).tolist())
    return values[math.floor(ratio * len(values)) - 1]


# --- directions -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["channel", "patch"])
@pytest.mark.parametrize("last_linear", ["leave", "list", "prune"])
def test_ranks_are_what_lies_above_one_percentile_of_all_rows_and_columns(last_linear: str, basis: str) -> None:
    scores = direction_scores(basis)
    listed = [s for (name, _), s in scores.items() if name != LAST_LINEAR or last_linear != "leave"]
    limit = at_or_below(listed, 0.5)
    plan = planned("eigendamage", 0.5, basis=basis, allow_larger=True, last_linear=last_linear, cap=1.0)
    for name in LAYERS:
        if name == LAST_LINEAR and last_linear != "prune":
            assert (plan[name].structure, plan[name].reason) == ("dense", LAST)
        else:
            assert plan[name].ranks == {side: int((scores[name, side] > limit).sum()) for side in ("in", "out")}


def test_the_last_linear_layer_is_left_out_of_directions_and_only_listed_for_channels() -> None:
    assert planned("eigendamage", 0.5) == planned("eigendamage", 0.5, last_linear="leave")
    assert planned("kron-obd", 0.5) == planned("kron-obd", 0.5, last_linear="list")


@given(st.floats(0, 0.99), st.integers(0, 100))
def test_the_cap_holds_for_rows_and_columns_of_every_layer(ratio: float, cap: int) -> None:
    plan = planned("eigendamage", ratio, cap=cap / 100, allow_larger=True, last_linear="prune")
    for choice in plan.layers.values():
        assert choice.ranks["in"] >= fewest(choice.shape.inputs, cap / 100)
        assert choice.ranks["out"] >= fewest(choice.shape.outputs, cap / 100)


@given(st.floats(0, 0.99), st.floats(0, 0.99))
def test_a_larger_ratio_never_costs_more(a: float, b: float) -> None:
    less, more = (planned("eigendamage", ratio, allow_larger=True) for ratio in sorted((a, b)))
    assert more.params <= less.params and more.macs <= less.macs and more.loss >= less.loss - 1e-12


@settings(max_examples=15)
@given(st.floats(0, 0.99))
def test_a_bottleneck_that_holds_no_fewer_parameters_stays_dense(ratio: float) -> None:
    allowed, free = planned("eigendamage", ratio), planned("eigendamage", ratio, allow_larger=True)
    for name in (name for name in LAYERS if name != LAST_LINEAR):
        smaller = free[name].params < free[name].shape.params
        assert allowed[name].structure == ("bottleneck" if smaller else "dense")
        assert allowed[name].reason == ("" if smaller else LARGER)
        assert allowed[name].ranks == (free[name].ranks if smaller else {})


def test_at_ratio_0_every_direction_stays() -> None:
    plan = planned("eigendamage", 0.0, allow_larger=True, last_linear="prune")
    assert all(choice.ranks == {"in": choice.shape.inputs, "out": choice.shape.outputs} for choice in plan.layers.values())
    assert plan.loss == 0
    assert all(choice.reason for choice in planned("eigendamage", 0.0).layers.values())


def test_the_predicted_loss_is_that_of_the_change_of_weights() -> None:
    model, curvature = case()
    plan = planned("eigendamage", 0.6, allow_larger=True)
    small = ed.apply(model, plan, curvature)
    for name in ("0", "3", "8"):
        first, core, last = (weight_of(stage).detach() for stage in small.get_submodule(name))
        change = (
            torch.einsum("os,sr...,ri->oi...", last.flatten(1), core, first.flatten(1))
            - weight_of(model.get_submodule(name)).detach()
        )
        layer, taps = curvature[name], change[0, 0].numel()
        over_channels = torch.kron(layer.channel_form, torch.eye(taps, dtype=torch.float64))
        torch.testing.assert_close(plan[name].loss, float(loss(torch.kron(layer.gradients, over_channels), change)))


def test_normalised_scores_do_not_see_the_scale_of_a_layer() -> None:
    model, curvature = case()
    scaled = {
        name: replace(layer, gradients=layer.gradients * 10.0**i) for i, (name, layer) in enumerate(curvature.layers.items())
    }
    other = replace(curvature, layers=scaled)

    def ranks(curvature: Curvature, normalize: bool, method: str) -> object:
        plan = ed.plan(model, curvature, method=method, ratio=0.5, normalize=normalize, allow_larger=True)
        return plan.kept, {name: choice.ranks for name, choice in plan.layers.items()}

    for method in ("eigendamage", "kron-obd"):
        assert ranks(curvature, True, method) == ranks(other, True, method)
        assert ranks(curvature, False, method) != ranks(other, False, method)


def test_the_basis_and_the_norm_choose_the_structure() -> None:
    def structures(method: str, **rules: object) -> list[str]:
        return [planned(method, 0.5, allow_larger=True, **rules)[name].structure for name in LAYERS[:3]]

    assert structures("eigendamage") == ["bottleneck"] * 3
    assert structures("eigendamage", basis="patch") == ["bottleneck-patch", "bottleneck-patch", "bottleneck"]
    assert structures("eigendamage-depthwise") == ["depthwise", "depthwise", "bottleneck"]
    assert structures("eigendamage-depthwise", norm="fisher") == ["depthwise-fisher", "depthwise-fisher", "bottleneck"]


def test_depthwise_prunes_what_eigendamage_does_and_has_as_many_diagonals_as_both_sides_allow() -> None:
    wide, deep = (planned(method, 0.5, allow_larger=True) for method in ("eigendamage", "eigendamage-depthwise"))
    for name in CONVOLUTIONS:
        assert deep[name].ranks == {**wide[name].ranks, "depthwise": min(wide[name].ranks.values())}


# --- channels ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", CHANNEL_METHODS)
@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.4])
def test_the_promised_number_of_channels_goes(method: str, ratio: float) -> None:
    plan = planned(method, ratio, last_linear="leave", cap=1.0)
    # Batch norm follows only the convolutions, which Slimming scores by it.
    scored = CONVOLUTIONS if method == "slimming" else ["0", "3", "8"]
    sizes = {name: plan[name].shape.outputs for name in scored}
    gone = sum(sizes[name] - len(plan.kept[name].outputs) for name in scored if name in plan.kept)
    assert gone == math.floor(ratio * sum(sizes.values()))


def test_scores_of_the_last_linear_layer_move_the_percentile_of_channels() -> None:
    model, curvature = case()
    scores = {
        name: METHODS["kron-obd"].scores(
            weight_of(model.get_submodule(name)), curvature[name].patch_form, curvature[name].gradients
        )
        for name in LAYERS
    }
    for last_linear, listed in (("list", LAYERS), ("leave", LAYERS[:3])):
        limit = at_or_below([scores[name] for name in listed], 0.5)
        plan = planned("kron-obd", 0.5, last_linear=last_linear)
        for name in LAYERS[:3]:
            assert plan.kept[name].outputs == (scores[name] > limit).nonzero().flatten().tolist()
        assert plan.kept[LAST_LINEAR].outputs == list(range(5))


@pytest.mark.parametrize("normalize", [False, True])
def test_channels_predict_the_sum_of_the_scores_that_go(normalize: bool) -> None:
    model, curvature = case()
    plan = planned("c-obd", 0.5, normalize=normalize)
    for name in CONVOLUTIONS:
        scores = METHODS["c-obd"].scores(model.get_submodule(name).weight, curvature[name].fisher)
        gone = [i for i in range(len(scores)) if i not in plan.kept[name].outputs]
        torch.testing.assert_close(plan[name].loss, float(scores[gone].sum()))


def test_channels_follow_through_flattening() -> None:
    plan = planned("kron-obd", 0.5)
    assert plan.kept["8"].inputs == [4 * channel + i for channel in plan.kept["3"].outputs for i in range(4)]


class LinearFirst(nn.Module):
    """Its only linear layer makes no logits."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.conv, self.head = nn.Linear(4, 6), nn.Conv1d(6, 6, 1), nn.Conv1d(6, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.conv(self.linear(x).relu().unsqueeze(2)))


def test_the_last_linear_layer_keeps_its_channels_unless_it_may_be_pruned() -> None:
    model = LinearFirst().double()
    curvature = measured(model, torch.randn(9, 4, dtype=torch.float64))
    for last_linear, outputs in (("leave", 6), ("list", 6), ("prune", 3)):
        plan = ed.plan(model, curvature, method="kron-obd", ratio=0.5, last_linear=last_linear, cap=0.5)
        assert len(plan.kept["linear"].outputs if "linear" in plan.kept else range(6)) == outputs


def test_channels_that_only_unscored_layers_produce_never_all_go() -> None:
    """Only `top` has a batch norm to be scored by, and nothing but the cap of `left` holds its channels."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right, self.top, self.norm = (
                nn.Conv1d(2, 2, 1),
                nn.Conv1d(2, 6, 1),
                nn.Conv1d(2, 8, 1),
                nn.BatchNorm1d(8),
            )
            self.head = nn.Conv1d(8, 2, 1)
            with torch.no_grad():
                self.norm.weight.copy_(torch.arange(8) + 1.0)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.cat([self.left(x), self.right(x)], 1) + self.norm(self.top(x)))

    model = Sum().double().eval()
    curvature = measured(model, torch.randn(3, 2, 4, dtype=torch.float64), ["slimming"])
    plan = ed.plan(model, curvature, method="slimming", ratio=0.5)
    assert plan.kept["left"].outputs == [1]
    assert ed.apply(model, plan, curvature)(torch.randn(3, 2, 4, dtype=torch.float64)).shape == (3, 2, 4)


# --- for every method -------------------------------------------------------------------------------------------------------


@every_method
@pytest.mark.parametrize("ratio", [0.0, 0.5, 0.9])
def test_every_layer_that_stays_dense_says_why_in_the_table(method: str, ratio: float) -> None:
    plan = planned(method, ratio, skip=["8"])
    rows = [row.split("│") for row in str(plan).splitlines() if row.startswith("│")]
    assert [row[1].strip() for row in rows] == [*LAYERS, "all layers"]
    for row, choice in zip(rows, plan.layers.values(), strict=False):
        assert row[2].strip() == choice.structure
        assert (row[7].strip() == choice.reason != "") == (choice.structure == "dense")


@every_method
def test_the_same_seed_gives_the_same_plan_and_the_same_network_bit_for_bit(method: str) -> None:
    model, inputs = convnet()
    results = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        curvature = measured(model, inputs, [method], seed=3)
        plan = ed.plan(model, curvature, method=method, ratio=0.4, allow_larger=True)
        results.append((plan.to_json(), ed.apply(model, plan, curvature).state_dict()))
    (json, state), (json_again, state_again) = results
    assert json == json_again
    assert all(torch.equal(state[key], state_again[key]) for key in state)


@every_method
def test_a_skipped_layer_keeps_its_outputs(method: str) -> None:
    plan = planned(method, 0.6, skip=lambda name, module: name == "3", allow_larger=True)
    if METHODS[method].removes == "channels":
        assert "3" not in plan.kept or plan.kept["3"].outputs == list(range(12))
        assert method == "slimming" or len(plan.kept["8"].outputs) < 20
    else:
        assert (plan["3"].structure, plan["3"].reason) == ("dense", "skipped on request")


def test_a_depthwise_convolution_that_is_skipped_holds_its_channels() -> None:
    model = nn.Sequential(nn.Conv1d(2, 6, 1), nn.Conv1d(6, 6, 3, groups=6), nn.Conv1d(6, 6, 1), nn.Conv1d(6, 2, 1)).double()
    curvature = measured(model, torch.randn(5, 2, 6, dtype=torch.float64))
    plan = ed.plan(model, curvature, method="kron-obd", ratio=0.8)
    assert len(plan.kept["1"].outputs) < 6 and plan["1"].ranks == {"in": 1, "out": len(plan.kept["1"].outputs)}
    plan = ed.plan(model, curvature, method="kron-obd", ratio=0.8, skip="1")
    assert not {"0", "1"} & plan.kept.keys() and plan["1"].reason and len(plan.kept["2"].outputs) < 6


def test_one_pass_over_patches_serves_every_kfac_method() -> None:
    model, curvature = case()
    only = {
        name: LayerCurvature(layer.shape, None, layer.patch_form, layer.gradients) for name, layer in curvature.layers.items()
    }
    over_patches = replace(curvature, layers=only, collected=frozenset({"patches", "gradients"}))
    for method in ("c-obs", "kron-obd", "kron-obs", *DIRECTION_METHODS):
        ours, theirs = (ed.plan(model, c, method=method, ratio=0.5, allow_larger=True) for c in (over_patches, curvature))
        assert {n: c.ranks for n, c in ours.layers.items()} == {n: c.ranks for n, c in theirs.layers.items()}


def test_channels_at_ratio_0_all_stay() -> None:
    for method in CHANNEL_METHODS:
        plan = planned(method, 0.0)
        assert not plan.kept and plan["3"].reason == ALL_STAYS


# --- CP ---------------------------------------------------------------------------------------------------------------------


def cp(ranks: float | int | dict[str, int]) -> dict[str, int]:
    model, curvature = case()
    plan = ed.plan(model, curvature, method="cp", ranks=ranks, allow_larger=True)
    assert all(choice.reason for choice in plan.layers.values() if choice.structure == "dense")
    return {name: choice.ranks["cp"] for name, choice in plan.layers.items() if choice.structure == "cp"}


def test_cp_takes_a_multiple_of_each_rank_one_rank_or_a_rank_for_each_layer() -> None:
    assert cp(0.5) == {"0": 4, "3": 6}
    assert cp(2.0) == {"0": 16, "3": 24}
    assert cp(10) == {"0": 8, "3": 10}
    assert cp({"3": 20}) == {"3": 20}


def test_the_ratio_of_cp_is_the_share_of_the_rank_that_goes() -> None:
    assert planned("cp", 0.75, allow_larger=True)["3"].ranks == {"cp": 3}


@pytest.mark.parametrize("method", METHODS)
def test_what_predicts_no_loss_claims_none(method: str) -> None:
    plan = planned(method, 0.5, allow_larger=True)
    changed = [choice for choice in plan.layers.values() if choice.structure != "dense"]
    assert changed and all((choice.predicted_loss is not None) == METHODS[method].predicts for choice in changed)


# --- edited by hand ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("basis", ["channel", "patch"])
def test_a_rank_may_be_edited_by_hand_and_the_plan_sent_through_json(basis: str) -> None:
    model, curvature = case()
    plan = planned("eigendamage", 0.5, basis=basis, allow_larger=True)
    plan["3"].ranks["out"] = 2
    plan["0"].structure, plan["0"].ranks = "dense", {}
    small = ed.apply(model, Plan.from_json(plan.to_json()), curvature)
    assert weight_of(small.get_submodule("3.core")).shape[0] == 2
    assert isinstance(small.get_submodule("0"), nn.Conv2d)
    assert sum(sum(p.numel() for p in small.get_submodule(name).parameters()) for name in LAYERS) == plan.params


def test_kept_channels_may_be_edited_by_hand_where_they_stay_coupled() -> None:
    model, curvature = case()
    plan = planned("kron-obd", 0.5)
    for name in ("3", "4"):
        plan.kept[name].outputs = [0, 5]
    plan.kept["4"].inputs = [0, 5]
    plan.kept["8"].inputs = [*range(4), *range(20, 24)]
    plan["3"].ranks["out"], plan["8"].ranks["in"] = 2, 8
    small = ed.apply(model, plan, curvature)
    assert small[3].out_channels == small[4].num_features == 2
    torch.testing.assert_close(small[3].weight, model[3].weight[[0, 5]][:, plan.kept["3"].inputs])

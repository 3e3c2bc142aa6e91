"""A plan is plain data: it survives JSON, adds up, and reads as a table."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eigendamage import METHODS, Plan
from eigendamage.layers import LayerShape
from eigendamage.plans import Choice, Kept
from eigendamage.structures import STRUCTURES

# To check an annotation, beartype looks at a random item of a container.
pytestmark = pytest.mark.filterwarnings("ignore:Do not use the `random` module inside strategies")

TEXT = "ab.0[/é→"
SHAPE = LayerShape("conv", 4, 6, (3, 3), True, input_positions=16, output_positions=9, axis_positions=(12, 9))


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    layers = {}
    for name in draw(st.lists(st.text(TEXT, min_size=1, max_size=5), unique=True, max_size=4)):
        structure = draw(st.sampled_from(list(STRUCTURES)))
        ranks = {rank: draw(st.integers(1, limit)) for rank, limit in STRUCTURES[structure].limits(SHAPE).items()}
        layers[name] = Choice(SHAPE, structure, ranks, draw(st.floats(0, 1e6)), draw(st.text(TEXT, max_size=5)))
    indices = st.lists(st.integers(0, 9), max_size=3)
    kept = draw(st.dictionaries(st.text(TEXT, max_size=5), st.builds(Kept, indices, indices), max_size=3))
    return Plan(draw(st.sampled_from(list(METHODS))), layers, kept)


@given(plans())
def test_json_keeps_everything(plan: Plan) -> None:
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert again.to_json() == plan.to_json()


@given(plans())
def test_totals_are_sums_over_layers_and_never_more_than_dense_where_all_is_dense(plan: Plan) -> None:
    assert plan.params == sum(choice.params for choice in plan.layers.values())
    assert plan.macs == sum(choice.macs for choice in plan.layers.values())
    assert plan.loss == math.fsum(choice.loss for choice in plan.layers.values() if choice.structure != "dense")
    dense = Plan(plan.method, {name: Choice(choice.shape) for name, choice in plan.layers.items()})
    assert (dense.params, dense.macs) == (plan.dense_params, plan.dense_macs)


@given(plans())
def test_any_plan_can_be_printed(plan: Plan) -> None:
    assert str(plan).count("\n") >= 4 + len(plan.layers)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "3",
        "null",
        "{}",
        '{"format": 2}',
        '{"format": 1}',
        '{"format": 1, "method": "cp", "layers": 3, "kept": {}}',
        '{"format": 1, "method": "cp", "layers": {"a": {}}, "kept": {}}',
    ],
)
def test_text_that_is_no_plan_is_an_error_that_says_so(text: str) -> None:
    with pytest.raises(ValueError, match="this is not the JSON of a plan: "):
        Plan.from_json(text)


def test_an_unknown_field_is_an_error_that_names_it() -> None:
    content = json.loads(Plan("cp", {"a": Choice(SHAPE)}).to_json())
    content["layers"]["a"]["rnaks"] = {}
    with pytest.raises(ValueError, match="rnaks"):
        Plan.from_json(json.dumps(content))


def test_a_plan_holds_no_tensors() -> None:
    def plain(value: object) -> bool:
        parts = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
        return not isinstance(value, torch.Tensor) and all(map(plain, parts))

    assert plain(asdict(Plan("cp", {"a": Choice(SHAPE, "bottleneck", {"in": 2, "out": 3})}, {"a": Kept([0], [1])})))


def test_a_table_says_what_each_layer_becomes_what_it_costs_and_why() -> None:
    long = "encoder.stages.3.blocks.11.convolution." + "deep." * 20 + "projection"
    plan = Plan(
        "eigendamage",
        {
            long: Choice(SHAPE, "bottleneck", {"in": 2, "out": 3}, loss=0.0123),
            "[bold]head[/bold]": Choice(
                replace(SHAPE, kernel=(1, 1)), reason="it is :warning: [red]special[/red] and " + "very " * 30 + "long"
            ),
        },
    )
    rows = str(plan).splitlines()
    assert rows[0] == "EigenDamage: what each layer becomes"
    for header in ("layer", "becomes", "ranks", "parameters", "MACs", "predicted loss", "why dense"):
        assert header in rows[2]
    (first,) = [row for row in rows if long in row]
    assert all(text in first for text in ("bottleneck", "in 2/4, out 3/6", "222 → 86", "1.94k → 776", "0.0123"))
    (second,) = [row for row in rows if "[bold]head[/bold]" in row]
    assert "dense" in second and "it is :warning: [red]special[/red] and " + "very " * 30 + "long" in second
    assert "all layers" in rows[-2] and "252 → 116" in rows[-2]


def test_an_unknown_layer_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"the plan has no layer 'conv9'; its layers are conv1"):
        Plan("cp", {"conv1": Choice(SHAPE)})["conv9"]


def test_a_predicted_loss_is_of_what_was_planned_and_of_nothing_else() -> None:
    planned = Choice(SHAPE, "bottleneck", {"in": 2, "out": 3}, 0.5, loss_of="bottleneck in 2 out 3")
    plan = Plan("eigendamage", {"a": Choice(SHAPE), "b": planned})
    assert plan.loss == planned.predicted_loss == 0.5
    planned.ranks["in"] = 3
    assert plan.loss is planned.predicted_loss is None and "unknown" in str(plan)
    planned.structure, planned.ranks = "dense", {}
    assert plan.loss == planned.predicted_loss == 0

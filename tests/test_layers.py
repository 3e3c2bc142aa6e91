"""Every supported layer is one weight matrix that multiplies rows, and can be built anew from it."""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import KINDS, layers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from eigendamage.layers import (
    axes_of,
    bias_of,
    build_along,
    build_like,
    build_pointwise,
    candidates,
    kind_of,
    patches,
    prepare,
    reasons_to_stay,
    rows,
    set_weight,
    shape_of,
    weight_of,
)

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def as_matrix_product(module: nn.Module, inputs: Tensor) -> Tensor:
    product = patches(module, prepare(module, inputs)).flatten(0, 1) @ weight_of(module).flatten(1).T
    bias = bias_of(module)
    return product if bias is None else product + bias


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_a_layer_is_a_matrix_product(kind: str, data: st.DataObject) -> None:
    module, inputs = data.draw(layers([kind]))
    torch.testing.assert_close(as_matrix_product(module, inputs), rows(module(inputs), module))


@given(layers(["conv", "transposed"]))
def test_an_unbatched_map_is_a_batch_of_one(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    torch.testing.assert_close(as_matrix_product(module, inputs[0]), rows(module(inputs[0]), module))


@given(layers())
def test_a_layer_built_from_its_weight_and_bias_is_the_same_layer(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    built = build_like(module, weight_of(module), bias_of(module))
    if isinstance(module, Conv1D):  # a Linear multiplies with the transpose, in another order
        torch.testing.assert_close(built(inputs), module(inputs))
    else:
        assert type(built) is type(module)
        assert str(built) == str(module)
        assert torch.equal(built(inputs), module(inputs))


@given(st.data())
def test_a_layer_with_groups_is_built_from_the_same_orientation(data: st.DataObject) -> None:
    module, inputs = data.draw(layers(["conv", "transposed"]))
    two = build_like(module, torch.cat([weight_of(module)] * 2), None, groups=2)
    assert torch.equal(weight_of(two), torch.cat([weight_of(module)] * 2))
    alone = build_like(module, weight_of(module), None)(inputs)
    torch.testing.assert_close(two(torch.cat([inputs] * 2, 1)), torch.cat([alone] * 2, 1))


@given(layers())
def test_set_weight_undoes_weight_of(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    other = copy.deepcopy(module)
    nn.init.zeros_(other.weight)
    set_weight(other, weight_of(module), bias_of(module))
    assert torch.equal(other(inputs), module(inputs))
    assert other.weight.requires_grad == module.weight.requires_grad


@given(layers(), st.data())
def test_set_weight_can_leave_out_inputs_and_outputs(drawn: tuple[nn.Module, Tensor], data: st.DataObject) -> None:
    module, inputs = drawn
    weight, bias = weight_of(module), bias_of(module)
    subsets = [data.draw(st.sets(st.integers(0, n - 1), min_size=1)) for n in (weight.shape[1], len(weight))]
    ins, outs = (torch.tensor(sorted(subset)) for subset in subsets)
    channels = -1 if kind_of(module) == "linear" else 1
    kept = torch.zeros_like(weight)
    kept[:, ins] = weight.detach()[:, ins]
    whole = copy.deepcopy(module)
    set_weight(whole, kept, bias)
    set_weight(module, weight[outs][:, ins], None if bias is None else bias[outs])
    torch.testing.assert_close(module(inputs.index_select(channels, ins)), whole(inputs).index_select(channels, outs))
    if not isinstance(module, Conv1D):
        assert str(module) == str(build_like(module, weight_of(module), bias_of(module)))


@given(layers(["conv", "transposed"]))
def test_one_dimensional_stages_make_a_separable_layer(drawn: tuple[nn.Module, Tensor]) -> None:
    """A depthwise kernel that is an outer product is its factors one after the other."""
    module, inputs = drawn
    channels = weight_of(module).shape[1]
    kernels = [torch.randn(channels, size, dtype=torch.float64) for size in module.kernel_size]
    product = kernels[0]
    for kernel in kernels[1:]:
        product = torch.einsum("c...,ck->c...k", product, kernel)
    whole = build_like(module, product.unsqueeze(1), None, groups=channels)
    stages = nn.Sequential(
        *(build_along(module, kernel.unsqueeze(1), None, axis, channels) for axis, kernel in enumerate(kernels))
    )
    torch.testing.assert_close(stages(inputs), whole(inputs))


@given(layers())
def test_a_pointwise_stage_mixes_channels(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    channels = weight_of(module).shape[1]
    bias = torch.randn(4, dtype=torch.float64)
    weight = torch.randn(4, channels, dtype=torch.float64)
    stage = build_pointwise(module, weight, bias)
    if kind_of(module) == "linear":
        expected = inputs @ weight.T + bias
    else:
        expected = F.linear(inputs.movedim(1, -1), weight, bias).movedim(-1, 1)
    torch.testing.assert_close(stage(inputs), expected)


@given(layers())
def test_a_layer_at_one_position_costs_what_its_shape_says(drawn: tuple[nn.Module, Tensor]) -> None:
    module, _ = drawn
    shape = shape_of(module)
    assert shape.params == sum(p.numel() for p in module.parameters())
    assert shape.macs == module.weight.numel()
    assert len(axes_of(module)) == len(shape.kernel) == len(shape.axis_positions)


@pytest.mark.parametrize("cls", [nn.Conv2d, nn.ConvTranspose2d])
def test_the_shape_of_a_grouped_layer_counts_all_of_its_parameters(cls: type[nn.Module]) -> None:
    module = cls(4, 6, 3, groups=2)
    assert shape_of(module).params == sum(p.numel() for p in module.parameters()) == 4 * 6 * 9 // 2 + 6


# --- which layers can change ------------------------------------------------------------------------------------------------


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


class Renamed(nn.Linear):
    """A subclass that only has another name."""


def with_hook(register: str) -> nn.Module:
    module = nn.Linear(2, 2)
    getattr(module, register)(lambda *args: None)
    return module


def frozen_in_int8() -> nn.Module:
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    return module


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
@pytest.mark.parametrize(
    ("build", "reason"),
    [
        (lambda: nn.Conv2d(4, 4, 3, groups=2), "grouped (groups=2)"),
        (lambda: nn.ConvTranspose1d(4, 4, 3, groups=4), "grouped (groups=4)"),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), "computed from other parameters"),
        (lambda: nn.utils.weight_norm(nn.Conv1d(2, 2, 1)), "computed from other parameters"),
        (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(2, 2)), "computed from other parameters"),
        (lambda: with_hook("register_forward_hook"), "hooks"),
        (lambda: with_hook("register_forward_pre_hook"), "hooks"),
        (lambda: with_hook("register_full_backward_hook"), "hooks"),
        (lambda: with_hook("register_full_backward_pre_hook"), "hooks"),
        (lambda: Doubled(2, 2), "Doubled has a forward of its own"),
        (frozen_in_int8, "int8"),
    ],
)
def test_a_layer_that_cannot_change_says_why(build, reason) -> None:
    reasons = reasons_to_stay(nn.Sequential(nn.Linear(2, 2), build()))
    assert list(reasons) == ["1"]
    assert reason in reasons["1"]


def test_a_forward_of_the_instance_keeps_the_layer() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].forward = lambda x: x
    assert reasons_to_stay(model) == {"0": "Linear has a forward of its own"}


def test_tied_weights_stay_wherever_they_are_tied_to() -> None:
    model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5), nn.Linear(2, 2), nn.Linear(2, 2))
    model[1].weight, model[3].weight = model[0].weight, model[2].weight
    assert reasons_to_stay(model) == dict.fromkeys("123", "its weight is shared with another module")


def test_a_module_of_two_names_is_one_layer_that_can_change() -> None:
    layer = nn.Linear(2, 2)
    model = nn.ModuleDict({"one": layer, "two": layer})
    assert list(candidates(model)) == ["one"]
    assert reasons_to_stay(model) == {}


def test_a_subclass_that_changes_nothing_can_change() -> None:
    assert reasons_to_stay(nn.Sequential(Renamed(2, 2), Conv1D(2, 2))) == {}


def test_a_lazy_layer_must_have_seen_a_batch() -> None:
    with pytest.raises(ValueError, match=r"run one batch through the model first"):
        reasons_to_stay(nn.Sequential(nn.LazyLinear(2)))


def blocks() -> nn.Module:
    body = nn.Sequential(nn.Linear(2, 2), nn.Conv1d(2, 2, 1))
    return nn.ModuleDict({"head": nn.Linear(2, 2), "body": body, "bodyguard": nn.Linear(2, 2)})


@pytest.mark.parametrize(
    ("skip", "skipped"),
    [
        ((), []),
        ("head", ["head"]),
        (["body"], ["body.0", "body.1"]),
        ({"body.1", "head"}, ["head", "body.1"]),
        (lambda name, module: isinstance(module, nn.Conv1d), ["body.1"]),
        (lambda name, module: name.startswith("body"), ["body.0", "body.1", "bodyguard"]),
    ],
)
def test_layers_are_skipped_by_name_by_what_holds_them_or_by_predicate(skip, skipped) -> None:
    assert reasons_to_stay(blocks(), skip) == dict.fromkeys(skipped, "skipped on request")


def test_an_unknown_name_to_skip_is_an_error_that_lists_the_layers() -> None:
    with pytest.raises(ValueError, match=r"skip: .*'tail'.*head, body\.0, body\.1, bodyguard"):
        reasons_to_stay(blocks(), ["head", "tail"])

"""Every structure: what is built is the layer with the weight that its factors stand for, and costs what is foretold."""

from __future__ import annotations

import itertools
from functools import lru_cache

import pytest
import torch
from dense import layer_curvature, measured, projected, with_weight
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import layers
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

import eigendamage as ed
from eigendamage import structures
from eigendamage.curvature import LayerCurvature
from eigendamage.layers import shape_of, weight_of
from eigendamage.linalg import compose
from eigendamage.methods.cp import cp_factors
from eigendamage.methods.depthwise import depthwise_factors
from eigendamage.structures import STRUCTURES, check_ranks
from eigendamage.structures.base import chain

LAYERS = {
    "conv1d biased, strided, padded": (lambda: nn.Conv1d(3, 5, 4, stride=3, padding=2), (3, 11)),
    "conv2d biased, padded": (lambda: nn.Conv2d(4, 6, 3, padding=1), (4, 6, 5)),
    "conv2d strided, uneven": (lambda: nn.Conv2d(4, 3, (3, 2), stride=(2, 3), padding=(0, 1), bias=False), (4, 8, 7)),
    "conv2d reflect": (lambda: nn.Conv2d(3, 4, 3, padding=(2, 1), padding_mode="reflect"), (3, 5, 6)),
    "conv2d circular, dilated": (lambda: nn.Conv2d(3, 4, 3, padding=2, dilation=2, padding_mode="circular"), (3, 6, 6)),
    "conv2d same, even kernel": (lambda: nn.Conv2d(3, 4, (2, 4), padding="same"), (3, 6, 7)),
    "conv2d pointwise, strided": (lambda: nn.Conv2d(5, 7, 1, stride=2), (5, 7, 6)),
    "conv2d pointwise, padded": (lambda: nn.Conv2d(5, 4, 1, padding=1), (5, 4, 4)),
    "conv3d": (lambda: nn.Conv3d(2, 3, (3, 2, 1), stride=(1, 2, 1), padding=(1, 0, 0)), (2, 4, 5, 3)),
    "transposed 1d, dilated": (lambda: nn.ConvTranspose1d(4, 3, 3, stride=2, padding=1, dilation=2, output_padding=1), (4, 6)),
    "transposed 2d": (lambda: nn.ConvTranspose2d(3, 5, (3, 4), stride=(2, 1), padding=(1, 2)), (3, 4, 5)),
    "transposed 3d, pointwise": (lambda: nn.ConvTranspose3d(3, 4, 1, stride=2), (3, 2, 3, 2)),
    "linear": (lambda: nn.Linear(6, 4), (6,)),
    "linear on tokens": (lambda: nn.Linear(5, 7, bias=False), (4, 5)),
    "linear on images": (lambda: nn.Linear(3, 6), (4, 2, 3)),
    "Hugging Face Conv1D": (lambda: Conv1D(6, 4), (3, 4)),
}
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
every_layer = pytest.mark.parametrize("name", LAYERS)


@lru_cache
def case(name: str) -> tuple[nn.Module, Tensor, LayerCurvature]:
    """A layer, one example for it, and random factors."""
    build, size = LAYERS[name]
    module, example = build().double(), torch.randn(1, *size, dtype=torch.float64)
    shape = measured(nn.Sequential(module), example)["0"].shape
    return module, example, layer_curvature(module, shape)


def ranks_in(data: st.DataObject, structure: str, layer: LayerCurvature) -> dict[str, int]:
    limits = STRUCTURES[structure].limits(layer.shape)
    return {rank: data.draw(st.integers(1, min(limit, 12)), label=rank) for rank, limit in limits.items()}


def assert_same_layer(built: nn.Module, expected: nn.Module, example: Tensor, atol: float = 1e-10) -> None:
    inputs = torch.randn(3, *example.shape[1:], dtype=example.dtype)
    with torch.no_grad():
        torch.testing.assert_close(built(inputs), expected(inputs), rtol=1e-8, atol=atol)


def build(structure: str, module: nn.Module, layer: LayerCurvature, ranks: dict[str, int]) -> nn.Sequential:
    build = STRUCTURES[structure].build
    assert build is not None
    with torch.no_grad():
        built = build(module, layer, ranks)
    assert isinstance(built, nn.Sequential)
    return built


# --- the bottleneck ---------------------------------------------------------------------------------------------------------

bases = pytest.mark.parametrize(("structure", "basis"), [("bottleneck", "channel"), ("bottleneck-patch", "patch")])


@every_layer
@bases
@settings(max_examples=4)
@given(st.data())
def test_a_bottleneck_is_the_layer_with_its_weight_projected(
    name: str, structure: str, basis: str, data: st.DataObject
) -> None:
    module, example, layer = case(name)
    ranks = ranks_in(data, structure, layer)
    built = build(structure, module, layer, ranks)
    weight = projected(module, layer, ranks, basis)
    assert_same_layer(built, with_weight(module, weight), example)
    torch.testing.assert_close(composed(built, structure).reshape(weight.shape), weight)


def composed(built: nn.Sequential, structure: str) -> Tensor:
    """The weight that the three stages stand for."""
    first, core, last = (weight_of(stage).detach() for stage in built)
    if structure == "bottleneck-patch":
        return torch.einsum("os,sr,ri...->oi...", last.flatten(1), core.flatten(1), first)
    return torch.einsum("os,sr...,ri->oi...", last.flatten(1), core, first.flatten(1))


@every_layer
@bases
def test_a_bottleneck_of_full_rank_is_the_layer(name: str, structure: str, basis: str) -> None:
    module, example, layer = case(name)
    built = build(structure, module, layer, STRUCTURES[structure].limits(layer.shape))
    assert_same_layer(built, module, example)


@given(layers())
def test_a_bottleneck_of_full_rank_is_any_layer(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    shape = shape_of(module)
    a, s = torch.eye(shape.inputs * shape.taps, dtype=torch.float64), torch.eye(shape.outputs, dtype=torch.float64)
    for structure in ("bottleneck", "bottleneck-patch"):
        built = build(structure, module, LayerCurvature(shape, patches=a, gradients=s), STRUCTURES[structure].limits(shape))
        with torch.no_grad():
            torch.testing.assert_close(built(inputs), module(inputs))


def test_a_bottleneck_rounds_no_worse_than_float32_does() -> None:
    module, inputs = nn.Conv2d(16, 32, 3, padding=1), torch.randn(2, 16, 8, 8)
    layer = measured(nn.Sequential(module), inputs)["0"]
    built = build("bottleneck", module, layer, {"in": 16, "out": 32})
    torch.testing.assert_close(built(inputs), module(inputs), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("mode", ["zeros", "reflect", "circular", "replicate"])
@bases
def test_mistake_3_a_bias_in_a_padded_convolution_is_right_at_the_borders(mode: str, structure: str, basis: str) -> None:
    """The bias was carried through the rotation, and padded as if it were a part of the image."""
    module = nn.Conv2d(3, 4, 3, padding=1, padding_mode=mode).double()
    nn.init.constant_(module.bias, 100)
    example, layer = torch.randn(1, 3, 4, 4, dtype=torch.float64), layer_curvature(module)
    built = build(structure, module, layer, {"in": 2, "out": 2})
    assert [stage.bias is not None for stage in built] == [False, False, True]
    assert_same_layer(built, with_weight(module, projected(module, layer, {"in": 2, "out": 2}, basis)), example)


# --- depthwise and CP -------------------------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("structure", ["depthwise", "depthwise-fisher"])
@settings(max_examples=4)
@given(st.data())
def test_a_depthwise_layer_is_the_layer_with_its_core_decomposed(name: str, structure: str, data: st.DataObject) -> None:
    module, example, layer = case(name)
    if layer.shape.pointwise:
        return  # it has no kernel to keep apart
    ranks = ranks_in(data, structure, layer)
    bottleneck = build("bottleneck", module, layer, {"in": ranks["in"], "out": ranks["out"]})
    q_a, core, q_s = (weight_of(stage).detach() for stage in bottleneck)
    fisher = structure == "depthwise-fisher"
    v, u, d = depthwise_factors(core.flatten(2), ranks["depthwise"], *(values_around(bottleneck, layer) if fisher else ()))
    weight = torch.einsum("op,pr,ir,tr,ic->oct", q_s.flatten(1), v, u, d, q_a.flatten(1))
    built = build(structure, module, layer, ranks)
    assert built.core.groups == ranks["depthwise"]
    # Eigenvalues found on another way differ by rounding, which alternating least squares carries on.
    assert_same_layer(built, with_weight(module, weight.reshape(weight_of(module).shape)), example, atol=1e-7)


def values_around(bottleneck: nn.Sequential, layer: LayerCurvature) -> tuple[Tensor, Tensor]:
    """The eigenvalues of the directions that a bottleneck kept, as Rayleigh quotients."""
    q_a, q_s = weight_of(bottleneck.rotate_in).flatten(1).detach(), weight_of(bottleneck.rotate_out).flatten(1).detach()
    return (q_s.T @ layer.gradients @ q_s).diagonal().clamp(min=0), (q_a @ layer.channel_form @ q_a.T).diagonal().clamp(min=0)


@every_layer
@settings(max_examples=4)
@given(st.data())
def test_cp_is_the_layer_with_its_kernel_decomposed(name: str, data: st.DataObject) -> None:
    module, example, layer = case(name)
    ranks = ranks_in(data, "cp", layer)
    weight = compose(cp_factors(weight_of(module), ranks["cp"]))
    assert_same_layer(build("cp", module, layer, ranks), with_weight(module, weight), example)


# --- later rounds -----------------------------------------------------------------------------------------------------------


@every_layer
@bases
@settings(max_examples=4)
@given(st.data())
def test_merged_equals_unmerged(name: str, structure: str, basis: str, data: st.DataObject) -> None:
    module, example, layer = case(name)
    ranks = ranks_in(data, structure, layer)
    outer = build(structure, module, layer, ranks)
    inner_layer = layer_curvature(outer.core)
    inner = build("bottleneck", outer.core, inner_layer, ranks_in(data, "bottleneck", inner_layer))
    with torch.no_grad():
        merged = structures.merge(outer, inner)
    assert [type(stage) for stage in merged] == [type(stage) for stage in outer]
    assert_same_layer(merged, nn.Sequential(outer.rotate_in, inner, outer.rotate_out), example)


def test_only_a_module_named_core_between_two_rotations_is_a_core() -> None:
    three = chain(rotate_in=nn.Linear(3, 2), core=nn.Linear(2, 2), rotate_out=nn.Linear(2, 4))
    around = nn.ModuleDict({"a": three, "core": nn.Linear(2, 2), "encore": nn.Linear(2, 2)})
    assert structures.parts_of_bottleneck(around, "a.core") is three
    assert structures.parts_of_bottleneck(three, "core") is three
    for name in ("core", "encore", "a.rotate_in"):
        assert structures.parts_of_bottleneck(around, name) is None


# --- costs ------------------------------------------------------------------------------------------------------------------


@every_layer
@pytest.mark.parametrize("structure", [name for name, row in STRUCTURES.items() if row.build and name != "merged"])
@settings(max_examples=4)
@given(st.data())
def test_what_is_built_costs_what_is_foretold(name: str, structure: str, data: st.DataObject) -> None:
    module, example, layer = case(name)
    if not STRUCTURES[structure].fits(layer.shape):
        return
    ranks = ranks_in(data, structure, layer)
    cost = ed.count(build(structure, module, layer, ranks), example)
    assert structures.params(structure, layer.shape, ranks) == cost.params
    assert structures.macs(structure, layer.shape, ranks) == cost.macs


@every_layer
@pytest.mark.parametrize("structure", [name for name, row in STRUCTURES.items() if row.grid])
def test_every_rank_on_offer_and_every_limit_is_built_as_it_is_sketched(name: str, structure: str) -> None:
    """Tucker-2 with more outputs than a first stage and the kernel have features was one stage short."""
    module, example, layer = case(name)
    row = STRUCTURES[structure]
    if not row.fits(layer.shape):
        return
    offered, losses = row.grid(weight_of(module), layer)
    assert bool((losses >= 0).all()) and all(len(rank) == len(losses) for rank in offered.values())
    limits = row.limits(layer.shape)
    rows = [dict(zip(offered, ranks, strict=True)) for ranks in zip(*(rank.tolist() for rank in offered.values()), strict=True)]
    corners = [
        dict(zip(limits, corner, strict=True)) for corner in itertools.product(*((1, limit) for limit in limits.values()))
    ]
    for ranks in [*rows, *corners]:
        check_ranks(name, structure, layer.shape, ranks)
        built = build(structure, module, layer, ranks)
        sketch = row.sketch(module, ranks)
        assert repr(built) == repr(sketch), ranks
        assert all(bool(weight.isfinite().all()) for weight in built.parameters()), ranks
        assert structures.params(structure, layer.shape, ranks) == sum(w.numel() for w in built.parameters()), ranks
    for ranks in corners:
        cost = ed.count(build(structure, module, layer, ranks), example)
        assert structures.macs(structure, layer.shape, ranks) == cost.macs, ranks


@every_layer
def test_a_dense_layer_costs_what_its_shape_says(name: str) -> None:
    module, example, layer = case(name)
    cost = ed.count(module, example)
    assert (layer.shape.params, layer.shape.macs) == (cost.params, cost.macs)
    assert (structures.params("dense", layer.shape, {}), structures.macs("dense", layer.shape, {})) == (cost.params, cost.macs)


@given(st.integers(1, 3), st.integers(1, 5))
def test_fewer_channels_cost_what_a_smaller_layer_costs(inputs: int, outputs: int) -> None:
    layer = measured(nn.Sequential(nn.Conv2d(3, 5, 3, stride=2)), torch.randn(1, 3, 7, 8))["0"]
    cost = ed.count(nn.Conv2d(inputs, outputs, 3, stride=2), torch.randn(1, inputs, 7, 8))
    ranks = {"in": inputs, "out": outputs}
    assert (structures.params("channels", layer.shape, ranks), structures.macs("channels", layer.shape, ranks)) == (
        cost.params,
        cost.macs,
    )


def test_positions_are_those_of_one_example_whatever_the_batches() -> None:
    module = nn.Conv1d(2, 3, 3, stride=2)
    shapes = {measured(nn.Sequential(module), torch.randn(n, 2, 9))["0"].shape for n in (1, 5)}
    assert len(shapes) == 1 and shapes.pop().macs == ed.count(module, torch.randn(1, 2, 9)).macs


# --- ranks ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("structure", "ranks", "message"),
    [
        ("diagonal", {}, r"body\.0: structure 'diagonal' is unknown; there are dense, channels, bottleneck"),
        ("bottleneck", {"in": 3}, r"body\.0: bottleneck takes the ranks \['in', 'out'\]; got \['in'\]"),
        ("bottleneck", {"in": 3, "out": 6}, r"body\.0: rank 'out' of bottleneck must be a whole number from 1 to 5; got 6"),
        ("bottleneck", {"in": 0, "out": 5}, r"body\.0: rank 'in' of bottleneck must be a whole number from 1 to 4; got 0"),
        ("dense", {"in": 1}, r"body\.0: dense takes the ranks \[\]; got \['in'\]"),
    ],
)
def test_ranks_out_of_range_are_named_with_what_is_allowed(structure: str, ranks: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_ranks("body.0", structure, shape_of(nn.Conv2d(4, 5, 3)), ranks)


def test_outputs_have_the_shape_of_the_dense_layer() -> None:
    for name in LAYERS:
        module, example, layer = case(name)
        with torch.no_grad():
            assert build("bottleneck", module, layer, {"in": 1, "out": 1})(example).shape == module(example).shape

"""The coupling against the truth: channels that are zero in the dense network are channels it can do without."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from networks import random_network, random_units, zero_units
from torch import Tensor, nn
from torch.nn import functional as F

from eigendamage.coupling import FIXED, Coupling, Sides
from eigendamage.passes import tensors_in
from eigendamage.rehearsal import WRITTEN_IN, sliced, trace


def outputs_of(model: nn.Module, *inputs: Any, **named: Any) -> list[Tensor]:
    with torch.no_grad():
        return tensors_in(model(*inputs, **named))


def check(model: nn.Module, coupling: Coupling, *inputs: Any, **named: Any) -> None:
    """Removing a random half of the free units changes nothing that zeroing them does not."""
    units = random_units(random.Random(0), coupling)
    expected = outputs_of(zero_units(model, coupling, units), *inputs, **named)
    with sliced(model, coupling, units):
        actual = outputs_of(model, *inputs, **named)
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-9)


def traced(model: nn.Module, *inputs: Any, fixed: tuple[str, ...] = (), **named: Any) -> Coupling:
    """The coupling of a model that has been checked, in double precision."""
    model = model.eval().double()
    coupling = trace(model, lambda: model(*inputs, **named), fixed)
    check(model, coupling, *inputs, **named)
    return coupling


def images(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Net(nn.Module):
    """Layers by name and a forward that is written down where it is tested."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def free(units: tuple[int, ...]) -> bool:
    """Whether all of these are free, and different."""
    return FIXED not in units and len(set(units)) == len(units)


def pinned(units: tuple[int, ...]) -> bool:
    return set(units) == {FIXED}


@pytest.mark.parametrize("seed", range(240))
def test_what_is_removed_is_what_is_zeroed(seed: int) -> None:
    model, inputs = random_network(seed)
    traced(model, inputs.double())


def test_random_networks_have_much_to_remove() -> None:
    outputs: list[int] = []
    for seed in range(24):
        model, inputs = random_network(seed)
        coupling = trace(model, partial(model, inputs))
        outputs += [unit for side in coupling.sides.values() for unit in side.outputs]
    assert sum(unit != FIXED for unit in outputs) > 0.5 * len(outputs)


# --- what is free, and what is tied to what ---------------------------------------------------------------------------------


def test_flattening_repeats_units() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16, 5), nn.ReLU(), nn.Linear(5, 2)
    )
    coupling = traced(model, images(2, 3, 6, 6))
    assert coupling.sides == {
        "0": Sides((FIXED,) * 3, (0, 1, 2, 3)),
        "4": Sides((0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3), (4, 5, 6, 7, 8)),
        "6": Sides((4, 5, 6, 7, 8), (FIXED, FIXED)),
    }
    assert coupling.reasons == {"6": "its channels are the model's output"}


def test_a_residual_sum_ties_its_terms() -> None:
    model = Net(
        lambda net, x: net.last((net.stem(x) + net.second(net.norm(net.first(net.stem(x))).relu_())).mean((2, 3))),
        stem=nn.Conv2d(3, 4, 1),
        first=nn.Conv2d(4, 6, 3, padding=1),
        norm=nn.BatchNorm2d(6),
        second=nn.Conv2d(6, 4, 3, padding=1),
        last=nn.Linear(4, 2),
    )
    sides = traced(model, images(2, 3, 5, 5)).sides
    assert sides["stem"].outputs == sides["second"].outputs == sides["last"].inputs == (0, 1, 2, 3)
    assert sides["first"].outputs == sides["norm"].inputs == sides["norm"].outputs == (4, 5, 6, 7, 8, 9)


def test_concatenation_lines_units_up_and_keeps_what_is_not_ours_fixed() -> None:
    model = Net(
        lambda net, x: net.last(torch.cat([net.a(x), x, net.b(x)], 1)),
        a=nn.Conv1d(2, 3, 1),
        b=nn.Conv1d(2, 4, 1),
        last=nn.Conv1d(9, 2, 1),
    )
    assert traced(model, images(2, 2, 5)).sides["last"].inputs == (0, 1, 2, FIXED, FIXED, 3, 4, 5, 6)


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_depthwise_with_a_multiplier(kind: Callable[..., nn.Module]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1), kind(3, 6, 3, groups=3), nn.PReLU(6), nn.Conv2d(6, 2, 1))
    sides = traced(model, images(2, 2, 5, 5)).sides
    assert sides["1"] == Sides((0, 1, 2), (0, 0, 1, 1, 2, 2))
    assert sides["2"] == Sides((0, 0, 1, 1, 2, 2), (0, 0, 1, 1, 2, 2))


def test_other_groups_are_fixed() -> None:
    coupling = traced(nn.Sequential(nn.Conv2d(2, 4, 1), nn.Conv2d(4, 6, 1, groups=2), nn.Conv2d(6, 2, 1)), images(2, 2, 3, 3))
    assert all(pinned(side.outputs) for side in coupling.sides.values())
    assert coupling.reasons["1"] == "it is grouped (groups=2)"
    assert "grouped" in coupling.reasons["0"]


def test_a_gate_is_tied_to_what_it_gates() -> None:
    model = Net(
        lambda net, x: net.last(net.conv(x) * net.up(F.relu(net.down(net.conv(x).mean((2, 3))))).sigmoid()[:, :, None, None]),
        conv=nn.Conv2d(3, 6, 3),
        down=nn.Linear(6, 2),
        up=nn.Linear(2, 6),
        last=nn.Conv2d(6, 2, 1),
    )
    sides = traced(model, images(2, 3, 5, 5)).sides
    assert free(sides["conv"].outputs) and free(sides["down"].outputs)
    assert sides["up"].outputs == sides["conv"].outputs == sides["last"].inputs


def test_a_spatial_gate_keeps_its_one_channel() -> None:
    model = Net(
        lambda net, x: net.last(net.conv(x) * net.gate(x).sigmoid()),
        conv=nn.Conv2d(3, 6, 1),
        gate=nn.Conv2d(3, 1, 1),
        last=nn.Conv2d(6, 2, 1),
    )
    coupling = traced(model, images(2, 3, 5, 5))
    assert free(coupling.sides["conv"].outputs) and pinned(coupling.sides["gate"].outputs)
    assert coupling.reasons["gate"] == "mul spreads its channels over others"


def test_a_layer_called_twice_is_tied_to_itself() -> None:
    model = Net(
        lambda net, x: net.last(net.shared(F.relu(net.shared(net.front(x))))),
        front=nn.Linear(3, 5),
        shared=nn.Linear(5, 5),
        last=nn.Linear(5, 2),
    )
    sides = traced(model, images(4, 3)).sides
    assert sides["shared"] == Sides((0, 1, 2, 3, 4), (0, 1, 2, 3, 4))
    assert sides["front"].outputs == sides["last"].inputs == (0, 1, 2, 3, 4)


def test_inputs_without_a_batch() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.InstanceNorm2d(4, affine=True), nn.ReLU(), nn.Conv2d(4, 3, 1))
    assert free(traced(model, images(2, 5, 5)).sides["1"].outputs)


@pytest.mark.parametrize(
    ("operation", "layer"),
    [
        ("native_layer_norm", nn.LayerNorm(6)),
        ("native_group_norm", nn.Sequential(nn.Unflatten(0, (2, 1)), nn.Flatten(1, 2), nn.GroupNorm(2, 6))),
        ("_softmax", nn.Softmax(1)),
    ],
)
def test_what_mixes_channels_fixes_them(operation: str, layer: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(3, 6), layer, nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2))
    coupling = traced(model, images(2, 3))
    assert pinned(coupling.sides["0"].outputs) and free(coupling.sides["2"].outputs)
    assert coupling.reasons["0"] == f"its channels pass through {operation}"


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x[:, :3].repeat(1, 2),
        lambda x: x.flip(1),
        lambda x: x.roll(1, 1),
        lambda x: x[:, [5, 4, 3, 2, 1, 0]],
        lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
        lambda x: torch.stack(x.unbind(1), 1),
        lambda x: x - x.mean(1, keepdim=True),
        lambda x: x * torch.arange(6.0, dtype=x.dtype),
        lambda x: F.normalize(x, dim=1),
        lambda x: x.view(-1, 3).view(-1, 6),
        lambda x: x.T.reshape(x.shape),
        lambda x: F.avg_pool1d(x[None], 3, 1, 1)[0],
        lambda x: x * x[0, 0].item(),
        lambda x: x / x.shape[1],
        lambda x: torch.from_numpy(x.numpy().copy()),
    ],
)
def test_code_that_counts_on_its_channels_fixes_them(middle: Callable[[Tensor], Tensor]) -> None:
    model = Net(lambda net, x: net.last(middle(net.first(x))), first=nn.Linear(3, 6), last=nn.Linear(6, 2))
    assert pinned(traced(model, images(4, 3)).sides["first"].outputs)


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (lambda x: x - x.mean(1, keepdim=True), "its channels pass through mean"),
        (lambda x: x * torch.arange(6.0, dtype=x.dtype), "mul joins its channels with values that cannot be pruned"),
        (lambda x: x @ torch.ones(6, 6, dtype=x.dtype), "its channels pass through mm"),
        (lambda x: x.view(-1, 3).view(-1, 6), "its channels pass through view"),
    ],
)
def test_the_reason_names_the_operation(middle: Callable[[Tensor], Tensor], reason: str) -> None:
    model = Net(lambda net, x: net.last(middle(net.first(x))), first=nn.Linear(3, 6), last=nn.Linear(6, 2))
    assert traced(model, images(4, 3)).reasons["first"] == reason


@pytest.mark.parametrize(
    "middle",
    [
        lambda x: x[..., 1:].clamp(min=0),
        lambda x: x.amax(-1, keepdim=True) + x,
        lambda x: x.transpose(1, 2).contiguous().transpose(-1, -2),
        lambda x: x[:, :, [0, 2]],
        lambda x: x.unsqueeze(0).squeeze(0).clone(),
        lambda x: F.pad(x, (1, 0)).relu_().to(torch.float64),
        lambda x: torch.cat([x, 2 * x], -1),
        lambda x: torch.where(x > 0, x, 0.1 * x),
        lambda x: F.max_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 2),
        lambda x: F.interpolate(x, scale_factor=2),
        lambda x: x.data,
        lambda x: x[:, :, 1].unsqueeze(2).expand(-1, -1, 3),
    ],
)
def test_code_that_leaves_channels_alone_leaves_them_free(middle: Callable[[Tensor], Tensor]) -> None:
    model = Net(lambda net, x: net.last(middle(net.first(x))), first=nn.Conv1d(2, 6, 1), last=nn.Conv1d(6, 2, 1))
    coupling = traced(model, images(3, 2, 4))
    assert free(coupling.sides["first"].outputs), coupling.reasons


# --- sizes in the model's code ----------------------------------------------------------------------------------------------


def test_a_view_with_its_size_written_in_is_found() -> None:
    layers = {"conv": nn.Conv2d(3, 4, 3), "hidden": nn.Linear(16, 5), "last": nn.Linear(5, 2)}
    written = Net(lambda net, x: net.last(F.relu(net.hidden(net.conv(x).view(-1, 16)))), **layers)
    computed = Net(lambda net, x: net.last(F.relu(net.hidden(net.conv(x).view(len(x), -1)))), **layers)
    coupling = traced(written, images(2, 3, 4, 4))
    assert pinned(coupling.sides["conv"].outputs) and free(coupling.sides["hidden"].outputs)
    assert coupling.reasons["conv"] == WRITTEN_IN
    assert free(traced(computed, images(2, 3, 4, 4)).sides["conv"].outputs)


def test_only_the_groups_that_fail_are_fixed() -> None:
    def forward(net: Any, x: Tensor) -> Tensor:
        for i in range(6):
            x = F.relu(getattr(net, f"layer{i}")(x))
            if i == 3:
                x = x.view(len(x), 5)
        return net.last(x)

    layers = {f"layer{i}": nn.Linear(5, 5) for i in range(6)}
    coupling = traced(Net(forward, **layers, last=nn.Linear(5, 2)), images(3, 5))
    assert [name for name, reason in coupling.reasons.items() if reason == WRITTEN_IN] == ["layer3"]
    assert all(free(coupling.sides[f"layer{i}"].outputs) for i in (0, 1, 2, 4, 5))


# --- modules that are not what they seem ------------------------------------------------------------------------------------


class Scaled(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return 2 * super().forward(input)


def tied_weights() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].weight = model[0].weight
    return model


def with_hook() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    model[2].register_forward_hook(lambda module, args, output: output * 2)
    return model


def with_patch() -> nn.Module:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.Linear(4, 2))
    layer = model[2]
    layer.forward = lambda x: F.linear(x, layer.weight)
    return model


@pytest.mark.parametrize(
    "model",
    [
        tied_weights(),
        with_hook(),
        with_patch(),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), Scaled(4, 4), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 2)),
    ],
)
def test_altered_layers_are_left_alone(model: nn.Module) -> None:
    sides = traced(model, images(3, 4)).sides
    assert "2" not in sides and pinned(sides["3"].inputs)
    assert all(pinned(side.outputs) for side in sides.values())


def test_a_weight_that_is_used_elsewhere_fixes_its_layer() -> None:
    model = Net(
        lambda net, x: net.last(net.first(x)) + net.first.weight.square().sum(), first=nn.Linear(3, 4), last=nn.Linear(4, 2)
    )
    coupling = traced(model, images(3, 3))
    assert pinned(coupling.sides["first"].outputs)
    assert coupling.reasons["first"] == "the model uses tensors of first outside of it"


def test_layers_that_are_not_reached_are_left_out() -> None:
    model = Net(lambda net, x: net.a(x), a=nn.Linear(3, 2), b=nn.Linear(3, 2))
    assert set(traced(model, images(2, 3)).sides) == {"a"}


# --- the call ---------------------------------------------------------------------------------------------------------------


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 5), nn.Linear(5, 2)).eval()


def test_named_layers_stay() -> None:
    coupling = traced(mlp(), images(4, 3), fixed=("0",))
    assert pinned(coupling.sides["1"].outputs) and free(coupling.sides["3"].outputs)
    assert coupling.reasons["0"] == "skipped on request"


@dataclass
class Answer:
    logits: Tensor
    more: dict[str, list[Tensor]]


class Holder:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.itself = tensor, self


@pytest.mark.parametrize(
    "wrap", [lambda x: (x, None), lambda x: {"a": [x]}, lambda x: Answer(x[:0], {"b": [x]}), lambda x: {"c": Holder(x)}]
)
def test_every_tensor_in_the_output_stays(wrap: Callable[[Tensor], object]) -> None:
    model = Net(lambda net, x: wrap(net.layer(x)), layer=nn.Linear(3, 4))
    assert pinned(traced(model, images(2, 3)).sides["layer"].outputs)


def test_an_output_without_tensors_is_refused() -> None:
    model = mlp()
    with pytest.raises(ValueError, match="no tensor"):
        trace(model, lambda: model(torch.ones(2, 3)).tolist())


def test_what_the_model_raises_is_passed_on_and_leaves_no_trace() -> None:
    model = mlp()
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        trace(model, lambda: model(torch.ones(2, 7)))
    assert torch.equal(torch.get_rng_state(), before)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_model_and_random_state_are_left_as_they_were() -> None:
    model = Net(
        lambda net, x: net.last(F.dropout(net.norm(net.first(x))) + torch.randn(())),
        **dict(mlp().named_children()),
        **{"first": nn.Linear(3, 4), "norm": nn.BatchNorm1d(4), "last": nn.Linear(4, 2)},
    ).eval()
    values, state = copy.deepcopy(model.state_dict()), torch.get_rng_state()
    first = trace(model, lambda: model(torch.ones(2, 3)))
    assert trace(model, lambda: model(torch.ones(2, 3))) == first
    assert torch.equal(torch.get_rng_state(), state)
    torch.testing.assert_close(dict(model.state_dict()), dict(values), rtol=0, atol=0)
    assert not any(module._forward_hooks or module._forward_pre_hooks or module.training for module in model.modules())


# --- Hugging Face -----------------------------------------------------------------------------------------------------------


def test_mobilenet() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.MobileNetV2Config(depth_multiplier=0.25, image_size=32, finegrained_output=False, num_labels=3)
    coupling = traced(transformers.MobileNetV2ForImageClassification(config), pixel_values=images(2, 3, 32, 32))
    assert set(coupling.reasons) == {"classifier"}


def test_resnet() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.ResNetConfig(embedding_size=4, hidden_sizes=[4, 6], depths=[2, 2], layer_type="basic", num_labels=3)
    coupling = traced(transformers.ResNetForImageClassification(config), pixel_values=images(2, 3, 32, 32))
    assert set(coupling.reasons) == {"classifier.1"}


def test_bert_keeps_its_stream_and_frees_what_is_hidden() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, vocab_size=20, num_labels=3
    )
    sides = traced(transformers.BertForSequenceClassification(config), input_ids=torch.arange(10).view(2, 5)).sides
    layer = "bert.encoder.layer.0"
    assert free(sides[f"{layer}.intermediate.dense"].outputs)
    assert sides[f"{layer}.output.dense"].inputs == sides[f"{layer}.intermediate.dense"].outputs
    assert all(pinned(sides[f"{layer}.{name}.dense"].outputs) for name in ("output", "attention.output"))


def test_gpt2_keeps_its_stream_and_frees_what_is_hidden() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=20)
    sides = traced(transformers.GPT2LMHeadModel(config), input_ids=torch.arange(10).view(2, 5)).sides
    assert free(sides["transformer.h.0.mlp.c_fc"].outputs)
    assert all(pinned(sides[f"transformer.h.0.{name}"].outputs) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_proj"))
    assert "lm_head" not in sides, "its weight is that of the embedding"

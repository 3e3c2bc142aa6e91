"""Networks that use their layers in unusual ways: each layer works, or stays dense and says why; never a wrong answer."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import MethodType
from typing import Any

import onnxruntime
import pytest
import torch
from promises import Network, Promises
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import eigendamage as ed

SHARED = "its weight is shared with another module"
COMPUTED = "its weight is computed from other parameters"
TAKEN_HOLD_OF = "the model's code does more with it than call it in its place"
NOT_REACHED = "the batches do not reach it"
NO_GRADIENT = "no gradient of the loss reaches it"


class Wired(nn.Module):
    """Layers by name, and a forward that is written down beside them."""

    def __init__(self, run: Callable[..., Any], **layers: nn.Module) -> None:
        super().__init__()
        self.run = run
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.run(self, *inputs)


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0)).to(dtype)


VECTORS, SEQUENCES, SOUNDS, IMAGES, VOLUMES = draw(6, 8), draw(5, 6, 8), draw(3, 2, 40), draw(4, 3, 8, 8), draw(2, 1, 5, 6, 7)


def perceptron(**tensors: Any) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(8, 8, **tensors), nn.ReLU(), nn.Linear(8, 8, **tensors), nn.ReLU(), nn.Linear(8, 4, **tensors)
    )


# --- transformers and recurrent networks of PyTorch -------------------------------------------------------------------------


def attention() -> nn.Module:
    return Wired(
        lambda m, x: m.head(m.attend(m.front(x), x, x)[0].mean(1)),
        front=nn.Linear(8, 8),
        attend=nn.MultiheadAttention(8, 2, batch_first=True),
        head=nn.Linear(8, 4),
    )


def around(middle: nn.Module, run: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)) -> nn.Module:
    return Wired(
        lambda m, x: m.head(run(m.middle, m.front(x)).mean(1)), front=nn.Linear(8, 8), middle=middle, head=nn.Linear(8, 4)
    )


def encoder_layer() -> nn.Module:
    return nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)


def padded(encoder: nn.Module, x: Tensor) -> Tensor:
    padding = torch.arange(x.shape[1]) >= torch.arange(2, 2 + len(x))[:, None]
    return encoder(x, src_key_padding_mask=padding).masked_fill(padding[..., None], 0)


def in_encoder(*layers: str) -> dict[str, str]:
    """What attention reads the weight of, where it is in `nn.TransformerEncoderLayer`."""
    return {f"{layer}.self_attn.out_proj": TAKEN_HOLD_OF for layer in layers}


# --- weights that are not simply there --------------------------------------------------------------------------------------


def with_first(change: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = perceptron()
    model[0] = change(model[0])
    return model


def tied_to_embedding() -> nn.Module:
    model = Wired(
        lambda m, x: m.out(m.middle(m.embed(x))),
        embed=nn.Embedding(9, 8),
        middle=nn.Linear(8, 8),
        out=nn.Linear(8, 9, bias=False),
    )
    model.out.weight = model.embed.weight
    return model


def sharing_a_weight() -> nn.Module:
    model = perceptron()
    model[2].weight = model[0].weight
    return model


def under_two_names() -> nn.Module:
    layer = nn.Linear(8, 8)
    return Wired(
        lambda m, x: m.out(F.relu(m.b(F.relu(m.a(m.front(x)))))), front=nn.Linear(8, 8), a=layer, b=layer, out=nn.Linear(8, 4)
    )


def decoding_with_the_encoders_weight() -> nn.Module:
    return Wired(lambda m, x: m.out(F.linear(F.relu(m.enc(x)), m.enc.weight.T)), enc=nn.Linear(8, 5), out=nn.Linear(8, 4))


class ReachedPastItsName(nn.Module):
    """The list is not a ModuleList: the same layers, out of sight of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)
        self.order = [self.first, self.second]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.order:
            x = F.relu(layer(x))
        return self.last(x)


def plus_one(layer: nn.Linear, x: Tensor) -> Tensor:
    return F.linear(x, layer.weight, layer.bias) + 1


def with_a_patched_forward() -> nn.Module:
    model = perceptron()
    model[0].forward = MethodType(plus_one, model[0])
    return model


def asking_for_its_class() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(m.a(x)) * (1 if type(m.a) is nn.Linear else 2))

    return Wired(run, a=nn.Linear(8, 8), out=nn.Linear(8, 4))


def asking_for_its_geometry() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = F.pad(x, [m.conv.kernel_size[0] // 2] * 4)
        return m.out(F.relu(m.conv(x)).mean((2, 3)) * m.conv.stride[0] / m.out.in_features)

    return Wired(run, conv=nn.Conv2d(3, 8, 3, stride=2), out=nn.Linear(8, 4))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.front, self.turn, self.last = nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.complex64), nn.Linear(8, 4)
        self.register_buffer("phase", torch.polar(torch.ones(8), torch.arange(8.0)))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.turn(self.front(x) * self.phase).abs())


# --- calls of all kinds -----------------------------------------------------------------------------------------------------


def at_two_sizes() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(sum(F.relu(m.norm(m.conv(y))).mean((2, 3)) for y in (x, F.avg_pool2d(x, 2))))

    return Wired(run, conv=nn.Conv2d(3, 6, 3, padding=1), norm=nn.BatchNorm2d(6), out=nn.Linear(6, 4))


def in_containers() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        for layer in m.many:
            x = x + layer(x)
        return m.heads["left"](x) + m.heads["right"](x)

    many = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
    return Wired(run, many=many, heads=nn.ModuleDict({"left": nn.Linear(8, 4), "right": nn.Linear(8, 4)}))


def with_keywords() -> nn.Module:
    return Wired(lambda m, x: m.out(input=F.relu(m.a(input=x))), a=nn.Linear(8, 8), out=nn.Linear(8, 4))


def with_output_size() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        return m.out(F.relu(m.up(F.relu(m.down(x)), output_size=x.shape[2:])))

    up = nn.ConvTranspose2d(6, 5, 3, 2, 1)
    return Wired(run, down=nn.Conv2d(3, 6, 3, 2, 1), up=up, out=nn.Conv2d(5, 4, 1))


def with_a_branch_not_taken() -> nn.Module:
    return Wired(lambda m, x: m.out(x if len(x) else m.other(x)), other=nn.Linear(8, 8), out=nn.Linear(8, 4))


def partly_without_gradients() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = F.relu(m.frozen(x))
        return m.out(F.relu(m.trained(x)))

    return Wired(run, frozen=nn.Linear(8, 8), trained=nn.Linear(8, 8), out=nn.Linear(8, 4))


def checkpointed(reentrant: bool) -> nn.Module:
    body = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    return Wired(
        lambda m, x: m.out(checkpoint(m.body, m.front(x), use_reentrant=reentrant)),
        front=nn.Linear(8, 8),
        body=body,
        out=nn.Linear(8, 4),
    )


def of_one_batch_size() -> nn.Module:
    return Wired(lambda m, x: m.out(F.relu(m.a(x.reshape(6, 8)))), a=nn.Linear(8, 8), out=nn.Linear(8, 4))


class Counting(nn.Module):
    """Its outputs depend on how often it was called."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.last(F.relu(self.front(x)) * self.calls)


def noisy() -> nn.Module:
    return Wired(lambda m, x: m.out(F.relu(m.a(x)) * torch.rand(len(x), 1)), a=nn.Linear(8, 8), out=nn.Linear(8, 4))


# --- shapes of networks -----------------------------------------------------------------------------------------------------


def unet() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        high = F.relu(m.enc1(x))
        low = F.relu(m.enc2(F.max_pool2d(high, 2)))
        return m.head(F.relu(m.dec(torch.cat([m.up(low), high], 1))))

    return Wired(
        run,
        enc1=nn.Conv2d(3, 6, 3, padding=1),
        enc2=nn.Conv2d(6, 8, 3, padding=1),
        up=nn.ConvTranspose2d(8, 6, 2, stride=2),
        dec=nn.Conv2d(12, 6, 3, padding=1),
        head=nn.Conv2d(6, 4, 1),
    )


def segmentation() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        y = F.relu(m.norm(m.stem(x)))
        y = torch.cat([F.relu(m.wide(y)), m.near(y), F.adaptive_avg_pool2d(y, 1).expand_as(y)], 1)
        return F.interpolate(m.head(y), size=x.shape[2:], mode="bilinear", align_corners=False)

    return Wired(
        run,
        stem=nn.Conv2d(3, 6, 3, 2, 1),
        norm=nn.BatchNorm2d(6),
        wide=nn.Conv2d(6, 6, 3, padding="same", dilation=2, padding_mode="reflect"),
        near=nn.Conv2d(6, 6, 1),
        head=nn.Conv2d(18, 4, 1),
    )


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(8, 24),
        nn.Unflatten(1, (6, 2, 2)),
        nn.ConvTranspose2d(6, 8, 4, 2, 1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.ConvTranspose2d(8, 5, 3, 2, 1, output_padding=1, dilation=2),
        nn.Tanh(),
        nn.Conv2d(5, 4, 3),
    )


def audio() -> nn.Module:
    return nn.Sequential(
        nn.Conv1d(2, 8, 9, stride=4, padding=4),
        nn.BatchNorm1d(8),
        nn.ReLU(),
        nn.Conv1d(8, 8, 3, padding=2, dilation=2, padding_mode="circular"),
        nn.GELU(),
        nn.MaxPool1d(2),
        nn.Flatten(),
        nn.Linear(40, 4),
    )


def volumes() -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(1, 6, 3, padding=1, bias=False),
        nn.BatchNorm3d(6),
        nn.ReLU(),
        nn.Conv3d(6, 6, (1, 3, 2), stride=(2, 1, 1)),
        nn.AdaptiveAvgPool3d(1),
        nn.Flatten(),
        nn.Linear(6, 4),
    )


def bilinear() -> nn.Module:
    return Wired(lambda m, x: m.out(m.pair(m.a(x), x)), a=nn.Linear(8, 8), pair=nn.Bilinear(8, 8, 6), out=nn.Linear(6, 4))


def lazy() -> nn.Sequential:
    return nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4))


def lazy_after_one_batch() -> nn.Module:
    model = lazy()
    model(IMAGES)
    return model


class OnlyInTraining(nn.Module):
    """A second head, and a look at a weight, that evaluation knows nothing of."""

    def __init__(self) -> None:
        super().__init__()
        self.front, self.hidden = nn.Linear(8, 12), nn.Linear(12, 12)
        self.looked_at, self.last, self.aside = nn.Linear(12, 12), nn.Linear(12, 4), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.hidden(self.front(x).relu()).relu()
        y = self.last(self.looked_at(x).relu())
        return y + self.aside(x) + self.looked_at.weight.norm() if self.training else y


def compiled(of: Callable[[], nn.Module], run: bool) -> nn.Module:
    model = torch.compile(of(), backend="eager")
    assert isinstance(model, nn.Module)
    if run:
        model.eval()(VECTORS)
    return model


def compiled_in_place() -> nn.Module:
    model = perceptron()
    model.compile(backend="eager")
    model.eval()(VECTORS)
    return model


def of_several_inputs_and_outputs() -> nn.Module:
    def run(m: Any, x: Tensor, sequence: Tensor) -> dict[str, Tensor]:
        joint = F.relu(m.left(x)) + F.relu(m.right(sequence)).mean(1)
        return {"logits": m.out(joint), "features": joint, "side": m.side(x)}

    layers = {"left": nn.Linear(8, 6), "right": nn.Linear(8, 6), "out": nn.Linear(6, 4), "side": nn.Linear(8, 3)}
    return Wired(run, **layers)


def logits(model: nn.Module, batch: Tensor | tuple[Tensor, ...]) -> Tensor:
    outputs = model(*batch) if isinstance(batch, tuple) else model(batch)
    return outputs["logits"] if isinstance(outputs, dict) else outputs


# A network, its inputs, and which layers stay dense, for which reason.
CASES: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, str]]] = {
    "MultiheadAttention": (attention, SEQUENCES, {"attend.out_proj": TAKEN_HOLD_OF}),
    "TransformerEncoderLayer": (lambda: around(encoder_layer()), SEQUENCES, in_encoder("middle")),
    "TransformerEncoder": (
        lambda: around(nn.TransformerEncoder(encoder_layer(), 2)),
        SEQUENCES,
        in_encoder("middle.layers.0", "middle.layers.1"),
    ),
    "TransformerEncoder with padding": (
        lambda: around(nn.TransformerEncoder(encoder_layer(), 2), padded),
        SEQUENCES,
        in_encoder("middle.layers.0", "middle.layers.1"),
    ),
    "TransformerDecoderLayer": (
        lambda: around(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), lambda m, x: m(x, x)),
        SEQUENCES,
        {"middle.self_attn.out_proj": TAKEN_HOLD_OF, "middle.multihead_attn.out_proj": TAKEN_HOLD_OF},
    ),
    "LSTM": (lambda: around(nn.LSTM(8, 8, batch_first=True), lambda m, x: m(x)[0]), SEQUENCES, {}),
    "GRU": (lambda: around(nn.GRU(8, 8, batch_first=True), lambda m, x: m(x)[0]), SEQUENCES, {}),
    "weight_norm": (lambda: with_first(parametrizations.weight_norm), VECTORS, {"0": COMPUTED}),
    "spectral_norm": (lambda: with_first(parametrizations.spectral_norm), VECTORS, {"0": COMPUTED}),
    "old weight_norm": (lambda: with_first(nn.utils.weight_norm), VECTORS, {"0": COMPUTED}),
    "old spectral_norm": (lambda: with_first(nn.utils.spectral_norm), VECTORS, {"0": COMPUTED}),
    "tied to an embedding": (tied_to_embedding, torch.arange(30).reshape(5, 6) % 9, {"out": SHARED}),
    "two layers share a weight": (sharing_a_weight, VECTORS, {"0": SHARED, "2": SHARED}),
    "a layer under two names": (under_two_names, VECTORS, {}),
    "a weight used twice": (decoding_with_the_encoders_weight, VECTORS, {"enc": TAKEN_HOLD_OF}),
    "reached past its name": (ReachedPastItsName, VECTORS, {"first": TAKEN_HOLD_OF, "second": TAKEN_HOLD_OF}),
    "a patched forward": (with_a_patched_forward, VECTORS, {"0": "Linear has a forward of its own"}),
    "asking for the class": (asking_for_its_class, VECTORS, {"a": TAKEN_HOLD_OF}),
    "asking for the geometry": (asking_for_its_geometry, IMAGES, {}),
    "complex": (Complex, VECTORS, {"turn": "its weight is complex64, not floating point"}),
    "at two sizes": (at_two_sizes, IMAGES, {}),
    "containers": (in_containers, VECTORS, {}),
    "keywords": (with_keywords, VECTORS, {}),
    "output_size": (with_output_size, IMAGES, {"up": TAKEN_HOLD_OF}),
    "a branch not taken": (with_a_branch_not_taken, VECTORS, {"other": NOT_REACHED}),
    "partly without gradients": (partly_without_gradients, VECTORS, {"frozen": NO_GRADIENT}),
    "checkpoint": (lambda: checkpointed(False), VECTORS, {}),
    "reentrant checkpoint": (lambda: checkpointed(True), VECTORS, {}),
    "of one batch size": (of_one_batch_size, VECTORS, {}),
    "counting": (Counting, VECTORS, {}),
    "noisy": (noisy, VECTORS, {}),
    "U-Net": (unet, IMAGES, {}),
    "segmentation": (segmentation, IMAGES, {}),
    "generator": (generator, VECTORS, {}),
    "audio": (audio, SOUNDS, {}),
    "volumes": (volumes, VOLUMES, {}),
    "bilinear": (bilinear, VECTORS, {}),
    "a single linear layer": (lambda: nn.Linear(8, 4), VECTORS, {}),
    "a single convolution": (lambda: nn.Conv2d(3, 4, 3), IMAGES, {}),
    "float64": (lambda: perceptron(dtype=torch.float64), VECTORS.double(), {}),
    "bfloat16": (lambda: perceptron(dtype=torch.bfloat16), VECTORS.bfloat16(), {}),
    "float16": (lambda: perceptron(dtype=torch.float16), VECTORS.half(), {}),
    "batch of one": (perceptron, VECTORS[:1], {}),
    "code that runs only in training": (
        OnlyInTraining,
        VECTORS,
        {"looked_at": TAKEN_HOLD_OF, "aside": NOT_REACHED},
    ),
    "lazy layers after a batch": (lazy_after_one_batch, IMAGES, {}),
    "several inputs and outputs": (of_several_inputs_and_outputs, (VECTORS[:5], SEQUENCES), {"side": NO_GRADIENT}),
    "DataParallel": (lambda: nn.DataParallel(perceptron()), VECTORS, {}),
    "compiled": (lambda: compiled(perceptron, run=False), VECTORS, {}),
    "compiled and run": (lambda: compiled(perceptron, run=True), VECTORS, {}),
    "compiled in place": (compiled_in_place, VECTORS, {}),
}
NETWORKS = {name: Network(build, batch, logits) for name, (build, batch, _) in CASES.items()}


# What torch itself says of such models, in any evaluation.
SAID = {
    "old weight_norm": "ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning",
    "TransformerEncoder with padding": "ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning",
    "reentrant checkpoint": "ignore:None of the inputs have requires_grad=True:UserWarning",
}


@pytest.fixture(
    params=[pytest.param(name, marks=pytest.mark.filterwarnings(SAID[name]) if name in SAID else ()) for name in NETWORKS],
    scope="module",
)
def network(request: pytest.FixtureRequest) -> Network:
    return NETWORKS[request.param]


class TestAnyNetwork(Promises):
    pass


def test_only_these_layers_stay_dense(network: Network, request: pytest.FixtureRequest) -> None:
    name = request.node.callspec.params["network"]
    layers = network.plan("eigendamage", 0.0).layers
    assert {layer: choice.reason for layer, choice in layers.items() if choice.structure == "dense"} == CASES[name][2]


# --- what a model carries with it -------------------------------------------------------------------------------------------


def measured(model: nn.Module, *batches: Tensor) -> ed.Curvature:
    return ed.measure(model, [(inputs, None) for inputs in batches], methods=["eigendamage", "kron-obd"], progress=False)


def changed(small: nn.Module, model: nn.Module) -> bool:
    return [parameter.shape for parameter in small.parameters()] != [parameter.shape for parameter in model.parameters()]


def pruned(model: nn.Module, inputs: Tensor, method: str = "eigendamage") -> nn.Module:
    curvature = measured(model, inputs)
    return ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.5, allow_larger=True), curvature)


def test_batches_may_differ_in_length() -> None:
    network = NETWORKS["LSTM"]
    curvature = measured(network.model, SEQUENCES, SEQUENCES[:2, :4], SEQUENCES[:1, :1])
    plan = ed.plan(network.model, curvature, method="eigendamage", ratio=0.0, allow_larger=True)
    small = ed.apply(network.model, plan, curvature)
    assert curvature.examples == 8
    for inputs in (SEQUENCES, SEQUENCES[:1, :1], SEQUENCES[:0]):
        torch.testing.assert_close(small(inputs), network.model(inputs))


def test_modes_dropout_and_buffers_are_left_as_they_were() -> None:
    model = nn.Sequential(Counting(), nn.Dropout(0.5), nn.BatchNorm1d(4)).train()
    model[2].eval()
    before = copy.deepcopy(model.state_dict())
    small = pruned(model, VECTORS)
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)
    for layers in (model, small):
        assert [layer.training for layer in layers] == [True, True, False]
    assert all(part.training for part in small[0].modules())


@pytest.mark.parametrize("method", ["eigendamage", "kron-obd"])
@pytest.mark.parametrize(("weight", "bias"), [(False, False), (False, True), (True, False)])
def test_frozen_parameters_stay_frozen(weight: bool, bias: bool, method: str) -> None:
    model = NETWORKS["generator"].fresh(seed=0)
    for layer in (model[0], model[5]):
        layer.weight.requires_grad_(weight)
        layer.bias.requires_grad_(bias)
    small = pruned(model, VECTORS, method)
    trained = {name: parameter.requires_grad for name, parameter in small.named_parameters()}
    assert changed(small, model)
    for name, flag in trained.items():
        frozen_layer = name.split(".")[0] in ("0", "5")
        assert flag == (not frozen_layer or (bias if name.endswith("bias") else weight)), name


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
def test_a_weight_in_the_middle_of_being_trained_is_copied(tmp_path: Path) -> None:
    model = with_first(nn.utils.weight_norm).train()
    curvature = measured(model, VECTORS)
    model(VECTORS)  # now the weight is the result of a computation
    plan = ed.plan(model, curvature, method="eigendamage", ratio=0.5, allow_larger=True)
    small = ed.apply(model, plan, curvature)
    ed.save(small, tmp_path / "small.safetensors")
    loaded = ed.load(model, tmp_path / "small.safetensors")
    assert torch.equal(loaded(VECTORS), small(VECTORS))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Flatten(), nn.ReLU()), "the model has no layer that can be compressed"),
        (nn.LSTM(8, 8), "the model has no layer that can be compressed: no convolution or linear layer"),
        (lazy(), "0.weight has no shape yet: run one batch through the model first"),
        (nn.Sequential(nn.Linear(8, 4), nn.LazyBatchNorm1d()), "1.weight has no shape yet"),
    ],
)
def test_a_model_that_cannot_be_measured_is_a_clear_error(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measured(model, VECTORS)


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_a_scripted_model_is_a_clear_error() -> None:
    with pytest.raises(TypeError, match="is compiled by TorchScript, which hides its layers; compress the model first"):
        measured(torch.jit.script(perceptron()), VECTORS)


# --- the result needs nothing of ours ---------------------------------------------------------------------------------------


@pytest.fixture(params=["eigendamage", "kron-obd"], scope="module")
def small(request: pytest.FixtureRequest) -> nn.Module:
    model = NETWORKS["audio"].model
    small = pruned(model, SOUNDS, request.param)
    assert changed(small, model)
    return small


def test_it_is_exported(small: nn.Module) -> None:
    exported = torch.export.export(small, (SOUNDS,))
    torch.testing.assert_close(exported.module()(SOUNDS), small(SOUNDS))


def test_it_is_compiled(small: nn.Module) -> None:
    torch.compiler.reset()  # other tests compile too, and the compiler gives up after so many
    torch.testing.assert_close(torch.compile(small, backend="eager", fullgraph=True)(SOUNDS), small(SOUNDS))


@pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning")
def test_it_is_scripted(small: nn.Module) -> None:
    torch.testing.assert_close(torch.jit.script(small)(SOUNDS), small(SOUNDS))


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor.* are deprecated:UserWarning")
def test_it_is_quantised(small: nn.Module) -> None:
    quantised = torch.ao.quantization.quantize_dynamic(small, {nn.Linear}, dtype=torch.qint8)
    assert "DynamicQuantizedLinear" in str(quantised)
    torch.testing.assert_close(quantised(SOUNDS), small(SOUNDS), rtol=0, atol=0.1)


@pytest.mark.filterwarnings("ignore:`isinstance.treespec, LeafSpec.` is deprecated:FutureWarning")  # torch's exporter itself
def test_it_becomes_onnx(small: nn.Module, tmp_path: Path) -> None:
    torch.onnx.export(small, (SOUNDS,), tmp_path / "small.onnx", verbose=False)
    session = onnxruntime.InferenceSession(tmp_path / "small.onnx")
    (outputs,) = session.run(None, {session.get_inputs()[0].name: SOUNDS.numpy()})
    torch.testing.assert_close(torch.from_numpy(outputs), small(SOUNDS).detach(), rtol=1e-4, atol=1e-5)


def test_it_is_unpickled_where_we_are_not(small: nn.Module, tmp_path: Path) -> None:
    torch.save((small, SOUNDS, small(SOUNDS)), tmp_path / "small.pt")
    code = """
import sys, torch
sys.modules["eigendamage"] = None  # to import it is an error
small, inputs, expected = torch.load(sys.argv[1], weights_only=False)
torch.testing.assert_close(small(inputs), expected)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "small.pt")], check=True, timeout=300)

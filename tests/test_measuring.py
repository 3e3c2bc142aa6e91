"""Curvature against autograd, one example at a time; and a model that is left as it was."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from random_layers import layers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D
from truth import assert_same, calls, channel_form, fisher_block, kfac, state_of, weight_gradients

import eigendamage as ed
from eigendamage import METHODS, Curvature, measure, observing
from eigendamage.curvature import TENSORS
from eigendamage.observing import _return_freed_memory
from eigendamage.passes import layer_by_layer
from eigendamage.standins import ESCAPES

EVERYTHING = list(METHODS)
CLASSES = 5


class Everything(nn.Module):
    """A layer called twice, in-place activations, strides, both kinds of convolution, a layer that nothing reaches and one
    whose output the loss ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.act = nn.ReLU(inplace=True)
        self.again = nn.Conv2d(4, 4, (3, 2), padding="same", dilation=(2, 1), padding_mode="circular")
        self.down = nn.Conv2d(4, 3, 3, stride=2, bias=False)
        self.up = nn.ConvTranspose2d(3, 3, 3, stride=2, padding=1, output_padding=1)
        self.mix = nn.Linear(4, 2)
        self.head = nn.Linear(3 * 4 * 2, CLASSES)
        self.ignored = nn.Linear(3 * 4 * 2, 2)
        self.unreached = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.act(self.norm(self.stem(x)))
        x = self.act(self.again(self.again(x) / 2))
        x = self.act(self.up(self.act(self.down(x))))
        x = self.mix(x).flatten(1)
        self.ignored(x)
        return self.head(x)


@pytest.fixture
def model() -> nn.Module:
    model = Everything().double()
    model.norm(torch.randn(4, 4, 3, 3, dtype=torch.float64))  # statistics that are not the initial ones
    nn.init.uniform_(model.norm.weight, -1, 1)
    return model


def images(examples: int = 7, channels: int = 2, size: int = 6, classes: int = CLASSES) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, channels, size, size, dtype=torch.float64), torch.randint(classes, (examples,))


def vectors(examples: int = 6, size: int = 3, classes: int = 4) -> tuple[Tensor, Tensor]:
    return torch.randn(examples, size, dtype=torch.float64), torch.randint(classes, (examples,))


def mlp(*sizes: int, between: type[nn.Module] = nn.Tanh) -> nn.Module:
    stages = [stage for inputs, outputs in itertools.pairwise(sizes) for stage in (nn.Linear(inputs, outputs), between())]
    return nn.Sequential(*stages[:-1]).double()


def of_tokens(outputs: Any, targets: Tensor) -> Tensor:
    logits = getattr(outputs, "logits", outputs)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")


def in_batches(data: tuple[Tensor, Tensor], size: int) -> list[tuple[Tensor, Tensor]]:
    return list(zip(*(tensor.split(size) for tensor in data), strict=True))


def check_against_autograd(
    curvature: Curvature,
    model: nn.Module,
    data: tuple[Tensor, Tensor],
    loss: Callable[[Any, Tensor], Tensor] = F.cross_entropy,
) -> None:
    """Both forms of A, S and the Fisher of every measured layer, example by example. The model must be in eval mode."""
    examples = in_batches(data, 1)
    assert curvature.examples == len(examples)
    for name, measured in curvature.measured.items():
        layer = model.get_submodule(name)
        over_patches, gradients = kfac(layer, [calls(layer, lambda x=x, y=y: loss(model(x), y)) for x, y in examples])
        squared = weight_gradients(layer, [loss(model(x), y) for x, y in examples]).square().mean(0)
        if isinstance(layer, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d):
            squared = squared.transpose(0, 1).flip(tuple(range(2, squared.dim())))
        if isinstance(layer, Conv1D):
            squared = squared.T
        torch.testing.assert_close(measured.patch_form, over_patches)
        torch.testing.assert_close(measured.channel_form, channel_form(layer, over_patches))
        torch.testing.assert_close(measured.gradients, gradients)
        torch.testing.assert_close(measured.fisher, squared)


# --- against autograd -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1, 3, 7])
def test_all_statistics_equal_autograd_example_by_example(model: nn.Module, batch: int) -> None:
    data = images()
    curvature = measure(model, in_batches(data, batch), methods=EVERYTHING, labels="given")
    assert curvature.reasons == {"ignored": "no gradient of the loss reaches it", "unreached": "the batches do not reach it"}
    check_against_autograd(curvature, model.eval(), data)


@given(layers())
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=40)
def test_a_layer_of_any_kind_and_shape_equals_autograd(drawn: tuple[nn.Module, Tensor]) -> None:
    layer, inputs = drawn
    layer.requires_grad_()
    if inputs.dim() < 2:
        inputs = inputs[None]
    model = nn.Sequential(layer, nn.Tanh(), nn.Flatten())
    data = inputs, torch.randn_like(model(inputs))
    methods = ["kron-obd", "c-obd"]
    curvature = measure(model, [data], methods=methods, labels="given", task="regression")
    check_against_autograd(curvature, model, data, lambda output, target: (output - target).square().sum() / 2)
    alone = measure(model, [data], methods=["eigendamage"], labels="given", task="regression")
    for name in curvature.measured:
        torch.testing.assert_close(alone[name].inputs, curvature[name].channel_form)


def test_the_fisher_does_not_depend_on_how_many_examples_are_taken_at_a_time(model: nn.Module, monkeypatch) -> None:
    batches = [images()]
    whole = measure(model, batches, methods=["c-obd"])
    monkeypatch.setattr(observing, "CHUNK", 1)
    assert_same(measure(model, batches, methods=["c-obd"]), whole)


def test_the_channel_form_is_the_same_whether_patches_are_collected_or_not(model: nn.Module) -> None:
    batches = [images()]
    channels, over_patches = (measure(model, batches, methods=[method]) for method in ("eigendamage", "kron-obd"))
    for name in channels.measured:
        torch.testing.assert_close(channels[name].inputs, over_patches[name].channel_form)


# --- where K-FAC is exact ---------------------------------------------------------------------------------------------------


def kron(curvature: Curvature, name: str) -> Tensor:
    return torch.kron(curvature[name].gradients, curvature[name].patch_form)


def exact_fisher(model: nn.Module, layer: nn.Module, inputs: Tensor) -> Tensor:
    """The Fisher block of a softmax classifier: the expectation over the labels in closed form."""
    log_probabilities = model(inputs).log_softmax(-1)
    gradients = weight_gradients(layer, list(log_probabilities.flatten()))
    return fisher_block(gradients, log_probabilities.detach().exp().flatten() / len(inputs))


@pytest.mark.parametrize("name", ["0", "2"])
def test_kfac_is_the_empirical_fisher_of_a_single_example(name: str) -> None:
    model, (inputs, targets) = mlp(3, 5, 4), vectors(1)
    curvature = measure(model, [(inputs, targets)], labels="given")
    block = fisher_block(weight_gradients(model.get_submodule(name), [F.cross_entropy(model(inputs), targets)]))
    torch.testing.assert_close(kron(curvature, name), block)


def test_kfac_is_the_empirical_fisher_of_constant_inputs() -> None:
    model, (inputs, targets) = mlp(3, 4), vectors(9)
    inputs = inputs[:1].expand_as(inputs)
    curvature = measure(model, in_batches((inputs, targets), 4), labels="given")
    losses = list(F.cross_entropy(model(inputs), targets, reduction="none"))
    torch.testing.assert_close(kron(curvature, "0"), fisher_block(weight_gradients(model[0], losses)))


def test_kfac_is_the_empirical_fisher_of_a_convolution_with_one_position() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, (3, 2)), nn.Flatten()).double()
    inputs, targets = torch.randn(1, 2, 3, 2, dtype=torch.float64), torch.tensor([1])
    curvature = measure(model, [(inputs, targets)], labels="given")
    block = fisher_block(weight_gradients(model[0], [F.cross_entropy(model(inputs), targets)]))
    torch.testing.assert_close(kron(curvature, "0"), block)


@pytest.mark.parametrize("name", ["0", "1", "2"])
def test_sampled_kfac_nears_the_exact_fisher_of_a_deep_linear_network(name: str) -> None:
    """Regression with a linear network: the gradients do not depend on the inputs, so that K-FAC is exact."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(3, 2)).double()
    inputs, _ = vectors(8)
    jacobian = weight_gradients(model.get_submodule(name), list(model(inputs).flatten()))
    exact = fisher_block(jacobian, torch.full((jacobian.shape[0],), 1 / len(inputs), dtype=torch.float64))
    curvature = measure(model, [(inputs.repeat(4000, 1), None)], task="regression")
    assert float((kron(curvature, name) - exact).norm() / exact.norm()) < 0.02


def test_sampled_kfac_nears_the_exact_fisher_of_a_softmax_classifier() -> None:
    """One example a time, many seeds: what the labels are drawn from is the model's own prediction."""
    model, (inputs, _) = mlp(3, 4), vectors(1)
    exact = exact_fisher(model, model[0], inputs)
    batches = [(inputs.repeat(400, 1), None)]
    mean = torch.stack([kron(measure(model, batches, methods=["eigendamage"], seed=seed), "0") for seed in range(50)]).mean(0)
    assert float((mean - exact).norm() / exact.norm()) < 0.02


def test_sampled_labels_do_not_follow_the_given_ones() -> None:
    model, (inputs, targets) = mlp(3, 4), vectors(50)
    sampled = [measure(model, [(inputs, given)]) for given in (targets, None, (targets + 1) % 4)]
    for other in sampled[1:]:
        assert_same(other, sampled[0], rtol=0, atol=0)
    empirical = measure(model, [(inputs, targets)], labels="given")
    assert not torch.allclose(empirical["0"].gradients, sampled[0]["0"].gradients)


# --- against curvlinops -----------------------------------------------------------------------------------------------------


def convolutions() -> nn.Module:
    body = nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 3, (3, 2), stride=2, dilation=2), nn.Flatten()
    return nn.Sequential(*body, nn.Linear(6, CLASSES)).double()


@pytest.mark.parametrize(
    ("build", "data"),
    [
        (lambda: mlp(3, 6, 5, 4), vectors),
        (lambda: mlp(3, 6, 4, between=nn.ReLU), vectors),
        (convolutions, images),
    ],
    ids=["tanh", "relu", "convolutions"],
)
def test_factors_equal_those_of_curvlinops(build, data) -> None:
    """Its factors of a mean loss have no extra power of the number of positions, and neither have ours: the scale is one."""
    curvlinops = pytest.importorskip("curvlinops")
    model, (inputs, targets) = build(), data()
    batches = in_batches((inputs, targets), 3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        oracle = curvlinops.KFACLinearOperator(
            model, nn.CrossEntropyLoss(), list(model.parameters()), batches, fisher_type="empirical", check_deterministic=False
        )
        oracle.compute_kronecker_factors()
    curvature = measure(model, batches, labels="given")
    assert curvature.measured.keys() == oracle._input_covariances.keys()
    for name, layer in curvature.measured.items():
        torch.testing.assert_close(layer.patch_form, oracle._input_covariances[name])
        torch.testing.assert_close(layer.gradients, oracle._gradient_covariances[name])


# --- the paper's figure 2 ---------------------------------------------------------------------------------------------------


def off_diagonal_share(matrix: Tensor) -> float:
    return 1 - float(matrix.diagonal().square().sum() / matrix.square().sum())


def test_the_exact_fisher_is_nearer_to_diagonal_in_the_eigenbasis() -> None:
    datasets = pytest.importorskip("sklearn.datasets")
    digits, targets = (torch.from_numpy(array) for array in datasets.load_digits(return_X_y=True))
    model = mlp(64, 12, 12, 10)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(digits / 16), targets).backward()
        optimizer.step()
    inputs = digits[:200] / 16
    layer = measure(model, [(inputs, None)], methods=["eigendamage"])["2"]
    exact = exact_fisher(model, model[2], inputs)
    basis = torch.kron(layer.eigen_gradients[1], layer.eigen_channels[1])
    in_parameters, in_eigenbasis = off_diagonal_share(exact), off_diagonal_share(basis.T @ exact @ basis)
    assert in_eigenbasis < 0.7 * in_parameters, (in_eigenbasis, in_parameters)


# --- what must not matter ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("labels", ["given", "sampled"])
@pytest.mark.parametrize("batch", [1, 3, 5])
def test_the_batch_size_does_not_matter(model: nn.Module, labels: str, batch: int) -> None:
    data = images()
    whole = measure(model, [data], methods=EVERYTHING, labels=labels)
    assert_same(measure(model, in_batches(data, batch), methods=EVERYTHING, labels=labels), whole)


def test_sampled_regression_targets_do_not_depend_on_the_batch_size() -> None:
    model, data = mlp(3, 4, 2), vectors()
    whole = measure(model, [data], task="regression", labels="sampled")
    assert_same(measure(model, in_batches(data, 2), task="regression", labels="sampled"), whole)


def test_the_same_seed_gives_the_same_bits_and_another_seed_does_not(model: nn.Module) -> None:
    batches = in_batches(images(), 3)
    first = measure(model, batches, methods=EVERYTHING, seed=3)
    torch.manual_seed(99)
    assert_same(measure(model, batches, methods=EVERYTHING, seed=3), first, rtol=0, atol=0)
    assert not torch.equal(measure(model, batches, seed=4)["head"].gradients, first["head"].gradients)


def test_the_mode_of_the_model_does_not_matter(model: nn.Module) -> None:
    batches = [images()]
    assert_same(measure(model.train(), batches), measure(model.eval(), batches), rtol=0, atol=0)


def test_frozen_weights_do_not_matter(model: nn.Module) -> None:
    batches = [images()]
    assert_same(measure(copy.deepcopy(model).requires_grad_(False), batches), measure(model, batches), rtol=0, atol=0)


def test_an_activation_in_place_does_not_matter() -> None:
    data = images()
    layers = [nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, CLASSES)]
    in_place, apart = (nn.Sequential(layers[0], nn.ReLU(inplace=inplace), *layers[1:]).double() for inplace in (True, False))
    assert_same(*(measure(model, [data], methods=["c-obd", "kron-obd"]) for model in (in_place, apart)), rtol=0, atol=0)


class Checkpointed(nn.Sequential):
    """Runs its layers a second time on the way back."""

    def __init__(self, *layers: nn.Module, use_reentrant: bool) -> None:
        super().__init__(*layers)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_does_not_matter(use_reentrant: bool) -> None:
    plain, data = mlp(3, 4, 4, 4), vectors()
    body = Checkpointed(*plain[1:4], use_reentrant=use_reentrant)
    expected = measure(plain, [data], methods=["c-obd", "eigendamage"])
    curvature = measure(nn.Sequential(plain[0], body, plain[4]), [data], methods=["c-obd", "eigendamage"])
    for name, other in {"0": "0", "1.1": "2", "2": "4"}.items():
        assert curvature[name].shape == expected[other].shape
        for key in ("inputs", "gradients", "fisher"):
            torch.testing.assert_close(getattr(curvature[name], key), getattr(expected[other], key))


def test_layers_inside_a_transformer_are_measured_although_torch_has_a_kernel_for_all_of_them() -> None:
    stage = nn.TransformerEncoderLayer(4, 2, 6, batch_first=True)
    model = nn.Sequential(nn.TransformerEncoder(stage, 1), nn.Linear(4, 3)).double()
    data = torch.randn(5, 7, 4, dtype=torch.float64), torch.randint(3, (5, 7))
    curvature = measure(model, [data], methods=["c-obd", "kron-obd"], labels="given")
    assert curvature.measured.keys() == {"0.layers.0.linear1", "0.layers.0.linear2", "1"}
    with layer_by_layer():
        check_against_autograd(curvature, model.eval(), data, of_tokens)


class InPlaceBefore(nn.Module):
    """Changes the input of a layer after the layer has seen it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(x) + x.mul_(2)


def test_an_input_changed_afterwards_counts_as_the_layer_saw_it() -> None:
    model, data = InPlaceBefore().double().requires_grad_(False), vectors()
    curvature = measure(model, [data], methods=["c-obd", "kron-obd"], labels="given")
    seen = calls(model.second, lambda: F.cross_entropy(model(data[0]), data[1], reduction="sum"))
    (inputs, gradients), n = seen[0], len(data[0])
    torch.testing.assert_close(curvature["second"].inputs, inputs.T @ inputs / n)
    torch.testing.assert_close(curvature["second"].fisher, gradients.square().T @ inputs.square() / n)


def test_autocast_is_near_single_precision() -> None:
    model = Everything()
    inputs, targets = images(32)
    batches = [(inputs.float(), targets)]
    options = {"methods": EVERYTHING, "labels": "given"}
    exact, half = (measure(model, batches, autocast=dtype, **options) for dtype in (None, torch.bfloat16))
    assert half.reasons == exact.reasons
    for name, layer in exact.measured.items():
        for key in TENSORS:
            one, other = getattr(half[name], key), getattr(layer, key)
            assert (one is None) == (other is None)
            if other is not None:
                assert one.dtype == torch.float32
                assert float((one - other).norm() / other.norm()) < 0.05, (name, key)


def test_a_model_in_half_precision_is_summed_in_single_precision() -> None:
    model, (inputs, targets) = mlp(3, 4, 2).bfloat16(), vectors(classes=2)
    curvature = measure(model, [(inputs.bfloat16(), targets)])
    assert {curvature["0"].inputs.dtype, curvature["0"].gradients.dtype} == {torch.float32}


# --- tasks and losses -------------------------------------------------------------------------------------------------------


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square().sum(-1) / 2


def test_regression_is_a_gaussian_of_unit_variance() -> None:
    model, (inputs, _) = mlp(3, 5, 2), vectors()
    data = inputs, torch.randn(len(inputs), 2, dtype=torch.float64)
    curvature = measure(model, [data], methods=["c-obd", "kron-obd"], task="regression", labels="given")
    check_against_autograd(curvature, model, data, lambda *pair: half_square(*pair).sum())


@pytest.mark.parametrize("loss", [half_square, lambda *pair: half_square(*pair).mean()], ids=["per example", "mean"])
@pytest.mark.parametrize("labels", ["given", "sampled"])
def test_a_loss_of_the_users_own(loss, labels: str) -> None:
    model, (inputs, _) = mlp(3, 5, 2), vectors()
    data = inputs, torch.randn(len(inputs), 2, dtype=torch.float64)
    curvature = measure(model, [data], methods=["c-obd", "kron-obd"], labels=labels, loss=loss)
    check_against_autograd(curvature, model, data, lambda *pair: half_square(*pair).sum())


class Weighted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(4, dtype=torch.float64))

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs * self.weight, targets, reduction="none")


def test_a_loss_with_weights_of_its_own_is_left_as_it_was() -> None:
    model, loss, data = mlp(3, 5, 4), Weighted(), vectors()
    curvature = measure(model, [data], methods=["c-obd", "kron-obd"], loss=loss)
    assert loss.weight.grad is None
    assert loss.weight.requires_grad
    check_against_autograd(curvature, model, data, lambda *pair: loss(*pair).sum())


def test_where_both_would_fit_the_classes_are_where_torch_has_them() -> None:
    model, inputs = nn.Sequential(nn.Conv1d(3, 5, 1)).double(), torch.randn(4, 3, 5, dtype=torch.float64)
    data = inputs, torch.randint(5, (4, 5))
    curvature = measure(model, [data], methods=["kron-obd", "c-obd"], labels="given")
    check_against_autograd(curvature, model, data, lambda *pair: F.cross_entropy(*pair, reduction="sum"))


def test_segmentation_sums_over_the_pixels_of_an_example() -> None:
    model = nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, CLASSES, 1)).double()
    data = images()[0], torch.randint(CLASSES, (7, 6, 6))
    data[1][:, 2] = -100
    curvature = measure(model, in_batches(data, 3), methods=["c-obd", "kron-obd"], labels="given")
    check_against_autograd(curvature, model, data, lambda *pair: F.cross_entropy(*pair, reduction="sum"))


class LanguageModel(nn.Module):
    def __init__(self, tokens: int = 11, width: int = 6) -> None:
        super().__init__()
        self.embedding, self.body, self.head = nn.Embedding(tokens, width), nn.Linear(width, width), nn.Linear(width, tokens)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(self.body(self.embedding(input_ids)).tanh()), loss=None)


def sentences() -> tuple[Tensor, Tensor]:
    targets = torch.randint(11, (4, 5))
    targets[0, 3:] = targets[2, 1:] = -100
    return torch.randint(11, (4, 5)), targets


def test_a_language_model_sums_over_the_tokens_that_count() -> None:
    model, data = LanguageModel().double(), sentences()
    curvature = measure(model, [data], methods=["c-obd", "kron-obd"], labels="given")
    check_against_autograd(curvature, model, data, of_tokens)


def test_tokens_that_do_not_count_have_no_sampled_label_either() -> None:
    model, (inputs, targets) = LanguageModel().double(), sentences()
    curvature = measure(model, [(inputs, targets)])
    kept = targets != -100
    with torch.no_grad():
        probabilities = model(inputs).logits.softmax(-1)
    most = (1 - probabilities.min(-1).values)[kept].sum() / len(inputs)  # the trace if the least likely class came each time
    assert 0 < float(curvature["head"].gradients.trace()) < 2 * float(most)
    nothing = measure(model, [(inputs, torch.full_like(targets, -100))])
    assert set(nothing.reasons.values()) == {"no gradient of the loss reaches it"}


def test_batches_that_are_not_pairs_go_through_forward() -> None:
    model, (inputs, targets) = LanguageModel().double(), sentences()
    batches = [{"input_ids": inputs, "labels": targets}]
    through = measure(model, batches, labels="given", forward=lambda model, batch: model(**batch))
    assert_same(through, measure(model, [(inputs, targets)], labels="given"), rtol=0, atol=0)


# --- how much is measured ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3, 4, 7, 100])
def test_a_limit_on_examples_is_exact(model: nn.Module, limit: int) -> None:
    inputs, targets = images()
    limited = measure(model, in_batches((inputs, targets), 3), methods=EVERYTHING, examples=limit)
    assert limited.examples == min(limit, 7)
    assert_same(limited, measure(model, [(inputs[:limit], targets[:limit])], methods=EVERYTHING))


def test_no_more_batches_are_loaded_than_the_limit_needs(model: nn.Module) -> None:
    loaded = []

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        while True:
            loaded.append(1)
            yield images(3)

    measure(model, batches(), examples=7)
    assert len(loaded) == 3


def test_a_limit_cuts_batches_that_are_mappings() -> None:
    model, (inputs, targets) = LanguageModel().double(), sentences()
    batches = [{"input_ids": inputs, "labels": targets, "scale": torch.tensor(1.0)}]
    limited = measure(model, batches, examples=2, forward=lambda model, batch: model(batch["input_ids"]))
    assert_same(limited, measure(model, [(inputs[:2], targets[:2])]))


@pytest.mark.parametrize(
    ("methods", "present"),
    [
        (["eigendamage"], {"inputs", "gradients"}),
        (["eigendamage-depthwise"], {"inputs", "gradients"}),
        (["kron-obd"], {"patches", "gradients"}),
        (["kron-obs", "c-obs"], {"patches", "gradients"}),
        (["c-obd"], {"fisher"}),
        (["slimming"], {"scale"}),
        (["slimming", "eigendamage"], {"inputs", "gradients", "scale"}),
        (["cp"], set()),
    ],
)
def test_only_what_the_methods_need_is_collected(model: nn.Module, methods: list[str], present: set[str]) -> None:
    curvature = measure(model, [images()], methods=methods)
    assert {key for key in TENSORS if getattr(curvature["stem"], key) is not None} == present
    assert curvature.collected == present
    assert (curvature.coupling is not None) == any(METHODS[method].removes == "channels" for method in methods)


def test_a_pointwise_layer_has_one_covariance_for_both_forms(model: nn.Module) -> None:
    layer = measure(model, [images()], methods=["kron-obd", "eigendamage"])["head"]
    assert layer.patches is None
    assert layer.patch_form is layer.channel_form is layer.inputs


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Conv2d(2, 3, 1)
        self.norm = nn.BatchNorm2d(3)
        self.alone = nn.Conv2d(3, 3, 1)
        self.later = nn.BatchNorm2d(3)
        self.plain = nn.Conv2d(3, 3, 1)
        self.unlearned = nn.BatchNorm2d(3, affine=False)
        self.head = nn.Linear(3, CLASSES)
        self.last = nn.BatchNorm1d(CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.before(x))
        x = self.later(self.alone(x).tanh())
        return self.last(self.head(self.unlearned(self.plain(x)).mean((2, 3))))


def test_the_scale_is_that_of_the_batch_norm_right_after_the_layer() -> None:
    model = Normed().double()
    for norm in (model.norm, model.later, model.last):
        nn.init.uniform_(norm.weight, -1, 1)
    curvature = measure(model, [images()], methods=["slimming"])
    assert torch.equal(curvature["before"].scale, model.norm.weight.detach().abs())
    assert torch.equal(curvature["head"].scale, model.last.weight.detach().abs())
    assert curvature["alone"].scale is None
    assert curvature["plain"].scale is None


def test_shapes_add_up_to_the_cost_of_the_model(model: nn.Module) -> None:
    curvature = measure(model, [images(4)])
    assert sum(layer.shape.macs for layer in curvature.layers.values()) == curvature.macs
    again = curvature["again"].shape
    assert (again.input_positions, again.output_positions) == (2 * 36, 2 * 36)
    assert curvature["down"].shape.axis_positions == (2 * 6, 2 * 2)
    assert curvature["up"].shape.axis_positions == (2 * 2, 4 * 2)
    assert curvature["unreached"].shape.output_positions == 0


def test_layers_come_in_the_order_in_which_they_run() -> None:
    class Backwards(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last, self.never, self.first = nn.Linear(3, 4), nn.Linear(1, 1), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))

    curvature = measure(Backwards().double(), [vectors()])
    assert list(curvature.layers) == ["first", "last", "never"]
    assert curvature.last_linear == "last"


# --- layers that stay -------------------------------------------------------------------------------------------------------


class Called(nn.Module):
    """One layer, called as a test wants it, between two others."""

    def __init__(self, call: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.layer, self.after, self.call = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 4), call

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.call(self.layer, self.before(x)))


def without_gradient(layer: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        return layer(x)


@pytest.mark.parametrize(
    ("call", "reasons"),
    [
        (lambda layer, x: x, {"layer": "the batches do not reach it"}),
        (lambda layer, x: x + 0 * layer(x), {"layer": "no gradient of the loss reaches it"}),
        (lambda layer, x: layer(x).detach(), dict.fromkeys(("before", "layer"), "no gradient of the loss reaches it")),
        (without_gradient, dict.fromkeys(("before", "layer"), "no gradient of the loss reaches it")),
    ],
)
@pytest.mark.parametrize("method", ["eigendamage", "c-obd"])
def test_a_layer_that_cannot_be_measured_says_why(call, reasons: dict[str, str], method: str) -> None:
    curvature = measure(Called(call).double(), [vectors()], methods=[method])
    assert curvature.reasons == reasons
    assert all(getattr(curvature[name], key) is None for name in reasons for key in TENSORS)


def test_an_input_given_by_name_is_an_input() -> None:
    named, plain = Called(lambda layer, x: layer(input=x)).double(), Called(lambda layer, x: layer(x)).double()
    plain.load_state_dict(named.state_dict())
    data = vectors()
    assert_same(*(measure(model, [data], methods=EVERYTHING) for model in (named, plain)), rtol=0, atol=0)


@pytest.mark.parametrize(
    "call", [lambda layer, x: x + layer(torch.ones(1, 3).to(x)), lambda layer, x: layer(x.expand(5, *x.shape)).mean(0)]
)
def test_no_fisher_where_examples_cannot_be_told_apart(call) -> None:
    model, data = Called(call).double(), vectors()
    curvature = measure(model, [data], methods=["c-obd", "eigendamage"])
    assert curvature["layer"].fisher is None and curvature["after"].fisher is not None
    assert curvature.reasons == {} and curvature["layer"].gradients is not None  # the other methods do without
    plan = ed.plan(model, curvature, method="c-obd", ratio=0.0)
    assert plan["layer"].reason == "examples cannot be told apart in its inputs"


class TokensFirst(nn.Module):
    """Its layers see ``[tokens, examples, channels]``."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.transpose(0, 1)).tanh().mean(0))


@pytest.mark.parametrize(("examples", "tokens"), [(4, 8), (4, 4), (4, 3), (1, 4)])
def test_no_fisher_where_examples_are_the_second_dimension(examples: int, tokens: int) -> None:
    model, data = TokensFirst().double(), (torch.randn(examples, tokens, 3).double(), torch.randint(4, (examples,)))
    curvature = measure(model, [data], methods=EVERYTHING, labels="given")
    assert (curvature["body"].fisher is None) == (examples > 1)
    for name in ("body", "head"):
        layer = model.get_submodule(name)
        _, gradients = kfac(layer, [calls(layer, lambda: F.cross_entropy(model(data[0]), data[1], reduction="sum"))])
        torch.testing.assert_close(curvature[name].gradients, gradients / examples)


def test_outputs_flattened_over_tokens_are_still_so_many_examples() -> None:
    tokens, labels = sentences()
    apart = nn.Sequential(nn.Embedding(11, 6), nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 6), nn.Linear(6, 11)).double()
    flat = nn.Sequential(*apart, nn.Flatten(0, 1))
    one = measure(apart, [(tokens, labels)], methods=EVERYTHING, labels="given")
    other = measure(flat, [(tokens, labels.flatten())], methods=EVERYTHING, labels="given")
    assert_same(other, one)
    for budget in (0.99, 0.9):
        small = ed.apply(flat, ed.plan(flat, other, macs=budget), other)
        assert ed.count(small, tokens).macs <= budget * ed.count(flat, tokens).macs


def test_a_layer_that_a_copy_would_not_call_stays() -> None:
    class Closure(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.head = nn.Linear(3, 8), nn.Linear(8, 8), nn.Linear(8, 4)
            self.call = lambda x: self.outer(self.inner(x).relu())

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.call(x).relu())

    model, data = Closure().double(), vectors()
    curvature = measure(model, [data])
    assert curvature.reasons == dict.fromkeys(("inner", "outer"), ESCAPES)
    closed = measure(model, [data], forward=lambda _, batch: model(batch[0]))  # it measures what it is told to call
    assert closed.reasons == {}


@pytest.mark.parametrize("scale", [1e-24, 1e24])
def test_gradients_whose_squares_are_out_of_range_are_measured(model: nn.Module, scale: float) -> None:
    model, (x, y) = model.float(), images()

    def loss(factor: float) -> Callable[[Tensor, Tensor], Tensor]:
        return lambda outputs, targets: factor * F.cross_entropy(outputs, targets, reduction="none")

    plain, scaled = (
        measure(model, in_batches((x.float(), y), 3), loss=loss(factor), methods=EVERYTHING) for factor in (1.0, scale)
    )
    assert plain.reasons == scaled.reasons
    for name, layer in plain.measured.items():
        for key in ("gradients", "fisher"):
            expected = getattr(layer, key).double()
            torch.testing.assert_close(getattr(scaled[name], key) / scale**2, expected, rtol=1e-4, atol=1e-9)
    for budget in ({"macs": 0.6}, {"method": "kron-obs", "ratio": 0.5}):
        ed.apply(model, ed.plan(model, scaled, **budget), scaled)


def test_nothing_but_the_statistics_gets_a_gradient() -> None:
    class Attribute(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.scale = nn.Linear(3, 4), torch.ones(4, requires_grad=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.scale

    model, criterion = Attribute(), nn.Linear(4, 4)
    criterion.weight.grad = kept = torch.ones(4, 4)
    inputs, targets = vectors()
    measure(model, [(inputs.float(), targets)], loss=lambda outputs, y: F.cross_entropy(criterion(outputs), y))
    assert model.scale.grad is None and criterion.bias.grad is None
    assert criterion.weight.grad is kept and bool((kept == 1).all())


def test_windows_folded_into_the_batch_belong_to_their_example() -> None:
    windows = nn.Sequential(nn.Unflatten(1, (4, 3)), nn.Flatten(0, 1)), nn.Sequential(nn.Unflatten(0, (-1, 4)), nn.Flatten())
    model, data = nn.Sequential(windows[0], nn.Linear(3, 2), nn.Tanh(), windows[1]).double(), vectors(5, size=12, classes=8)
    curvature = measure(model, [data], methods=["c-obd", "kron-obd"], labels="given")
    check_against_autograd(curvature, model, data)


def test_skipped_layers_are_not_measured(model: nn.Module) -> None:
    curvature = measure(model, [images()], skip=["stem"])
    assert curvature.reasons["stem"] == "skipped on request"
    assert curvature["stem"].inputs is None
    assert curvature.measured.keys() == measure(model, [images()]).measured.keys() - {"stem"}


# --- the model is left as it was --------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


def failing_loader(error: type[BaseException], after: int) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(after):
        torch.rand(3)  # a loader that shuffles
        yield images(3)
    raise error


@pytest.fixture
def used(model: nn.Module) -> nn.Module:
    """A model in the middle of something: gradients, hooks, frozen weights and mixed modes."""
    inputs, targets = images()
    F.cross_entropy(model.train()(inputs), targets).backward()
    model.norm.eval()
    model.down.weight.requires_grad_(False)
    model.norm.register_forward_hook(lambda *args: None)
    model.register_forward_pre_hook(lambda *args: None)
    return model


def unchanged(model: nn.Module, run: Callable[[], object], error: type[BaseException] | None = None) -> None:
    before = state_of(model)
    gradients = {name: gradient if gradient is None else gradient.clone() for name, gradient in before["gradients"].items()}
    if error:
        with pytest.raises(error):
            run()
    else:
        run()
    after = state_of(model)
    assert all(after["gradients"][name] is gradient for name, gradient in before["gradients"].items())
    torch.testing.assert_close(after["gradients"], gradients, rtol=0, atol=0)
    torch.testing.assert_close(after["tensors"], before["tensors"], rtol=0, atol=0)
    assert torch.equal(after["random"], before["random"])
    assert all(after[key] == before[key] for key in ("trainable", "modes", "hooks"))


@pytest.mark.parametrize("methods", [EVERYTHING, ["eigendamage"]], ids=["everything", "eigendamage"])
def test_the_model_is_left_as_it_was(used: nn.Module, methods: list[str]) -> None:
    batches = in_batches(images(), 3)
    unchanged(used, lambda: measure(used, batches, methods=methods))


@pytest.mark.parametrize("after", [0, 1, 2])
@pytest.mark.parametrize("error", [KeyboardInterrupt, Stop])
def test_the_model_is_left_as_it_was_when_the_loader_fails(used: nn.Module, error: type[BaseException], after: int) -> None:
    unchanged(used, lambda: measure(used, failing_loader(error, after), methods=EVERYTHING), error)


class Failing(nn.Module):
    """An activation that gives up after a number of calls."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after, self.calls = after, 0

    def forward(self, x: Tensor) -> Tensor:
        torch.rand(1)
        self.calls += 1
        if self.calls > self.after:
            raise Stop
        return x.relu()


def test_the_model_is_left_as_it_was_wherever_its_forward_fails(used: nn.Module) -> None:
    batches = in_batches(images(), 3)

    def run() -> Curvature:
        return measure(used, batches, methods=EVERYTHING)

    used.act = Failing(10**6)
    unchanged(used, run)
    times = used.act.calls
    for after in {0, 2, times // 3, times // 2, times - 11, times - 5, times - 1}:
        used.act = Failing(after)
        unchanged(used, run, Stop)


def test_the_model_is_left_as_it_was_when_a_loss_fails(used: nn.Module) -> None:
    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        raise Stop

    batches = [images()]
    unchanged(used, lambda: measure(used, batches, loss=loss), Stop)


# --- bad input --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batches", [[], iter([])])
def test_an_empty_loader_is_an_error(batches: Iterable[Any]) -> None:
    with pytest.raises(ValueError, match="batches: the loader is empty"):
        measure(mlp(3, 4), batches)


def test_a_batch_without_examples_is_an_error() -> None:
    inputs, targets = vectors()
    with pytest.raises(ValueError, match=r"outputs have shape \(0, 4\); the first dimension must be the examples"):
        measure(mlp(3, 4), [(inputs[:0], targets[:0])])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("batch", [0, 1])
@pytest.mark.parametrize("options", [{}, {"methods": ["c-obd"]}, {"methods": EVERYTHING}, {"skip": "0"}], ids=str)
def test_inputs_that_are_not_finite_are_an_error_that_names_the_layer(bad: float, batch: int, options: dict[str, Any]) -> None:
    batches = in_batches(vectors(), 3)
    batches[batch][0][1, 2] = bad
    with pytest.raises(ValueError, match=r"outputs are not finite; the first layer with .* not finite is 0$"):
        measure(mlp(3, 4, 4, between=nn.Identity), batches, **options)


def test_the_layer_after_the_mishap_is_named() -> None:
    spoil = nn.Threshold(1e9, float("nan"))
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3), spoil, nn.Linear(3, 4)).double()
    with pytest.raises(ValueError, match=r"inputs that are not finite is 4$"):
        measure(model, [vectors()])


def test_gradients_that_are_not_finite_are_an_error_that_names_the_layer() -> None:
    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * 0).sqrt()  # an infinite slope, times zero

    model = nn.Sequential(nn.Linear(3, 8), Root(), nn.Linear(8, 4)).double()
    with pytest.raises(ValueError, match="0: its gradients are not finite; look for NaN or overflow"):
        measure(model, [vectors()])


@pytest.mark.parametrize("error", [OSError, TypeError, AttributeError])
def test_a_c_library_that_gives_nothing_back_is_no_hindrance(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: None) -> None:
        raise error

    monkeypatch.setattr("ctypes.CDLL", missing)
    _return_freed_memory()


@pytest.mark.parametrize("labels", ["given", "sampled"])
@pytest.mark.parametrize("wrong", [4, -1, 255])
def test_a_label_out_of_range_is_an_error(labels: str, wrong: int) -> None:
    inputs, targets = vectors()
    targets[2] = wrong
    with pytest.raises(ValueError, match=f"targets: label {wrong} is out of range; the model has 4 classes, 0 to 3"):
        measure(mlp(3, 4), [(inputs, targets)], labels=labels)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"labels": "true"}, "labels: must be one of 'sampled', 'given'; got 'true'"),
        ({"task": "ranking"}, "task: must be one of 'classification', 'regression'; got 'ranking'"),
        ({"methods": ["eigendamage", "magnitude"]}, "method 'magnitude' is unknown; the methods are c-obd, "),
        ({"skip": ["nine"]}, "skip: the model has no module 'nine'; its layers are 0, 2"),
        ({"examples": 0}, "examples: must be at least 1; got 0"),
        ({"examples": -3}, "examples: must be at least 1; got -3"),
    ],
)
def test_a_wrong_argument_is_an_error_that_says_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(mlp(3, 4, 4), [vectors()], **options)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.BatchNorm1d(3)), "no convolution or linear layer"),
        (nn.Identity(), "no convolution or linear layer"),
        (nn.Sequential(nn.Conv2d(4, 4, 3, groups=4)), r"0: it is grouped \(groups=4\)"),
        (nn.Linear(3, 4, device="meta"), "weight is on the meta device and has no values"),
    ],
)
def test_a_model_that_cannot_be_measured_is_an_error(model: nn.Module, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        measure(model, [vectors()])


def test_a_model_that_is_all_skipped_is_an_error() -> None:
    with pytest.raises(ValueError, match="no layer that can be compressed: 0: skipped on request"):
        measure(mlp(3, 4), [vectors()], skip=lambda name, module: True)


@pytest.mark.parametrize("batch", [torch.ones(2, 3), {"inputs": torch.ones(2, 3)}, (torch.ones(2, 3),), 3])
def test_batches_that_are_not_pairs_need_a_forward(batch: object) -> None:
    with pytest.raises(TypeError, match=r"batches: each must be a pair \(inputs, targets\).*forward="):
        measure(nn.Linear(3, 4), [batch])


def test_inputs_on_another_device_are_an_error() -> None:
    with pytest.raises(ValueError, match="batches: the inputs are on meta, the model is on cpu; move one to the other"):
        measure(nn.Linear(3, 4), [(torch.ones(2, 3, device="meta"), torch.zeros(2))])


def test_outputs_that_are_not_a_tensor_need_a_forward() -> None:
    class Pair(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x), x

    with pytest.raises(TypeError, match="the model returned tuple, not a tensor; pass forward="):
        measure(nn.Sequential(nn.Linear(3, 3), Pair(3, 4)).double(), [vectors()])


@pytest.mark.parametrize(
    ("targets", "options", "message"),
    [
        (None, {}, r"targets: must be integer classes for outputs of shape \(6, 4\); got NoneType"),
        (torch.zeros(6), {}, r"targets: must be integer classes for outputs of shape \(6, 4\); got \(6,\)"),
        (torch.zeros(5, dtype=torch.long), {}, r"outputs of shape \(6, 4\); got \(5,\)"),
        (torch.zeros(6), {"task": "regression"}, r"targets: have shape \(6,\), the model's outputs \(6, 4\)"),
        ([1, 2], {"task": "regression"}, 'targets: labels="given" needs a tensor; got list'),
        (None, {"loss": lambda outputs, targets: 1.0}, "loss: must return a tensor, one value per .* mean; got float"),
        (None, {"loss": lambda outputs, targets: outputs.sum(0)}, r"loss: must return one value per .*; got \(4,\) for 6"),
        (None, {"loss": lambda outputs, targets: outputs.argmax(1)}, "loss: must return real numbers; got torch.int64"),
    ],
)
def test_targets_that_do_not_fit_are_an_error(targets: object, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        measure(mlp(3, 4), [(vectors()[0], targets)], labels="given", **options)


def test_outputs_without_classes_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"classification needs logits \[examples, classes\]; .* shape \(6,\)"):
        measure(nn.Sequential(nn.Linear(3, 1), nn.Flatten(0)).double(), [vectors()])

"""Curvature as a value: what it holds, where it belongs, and the file it comes back from."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn
from truth import assert_same

from eigendamage import METHODS, Curvature, measure, save


def network(width: int = 4) -> nn.Module:
    stages = nn.Conv2d(2, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 3, 3, groups=1), nn.Flatten()
    return nn.Sequential(*stages, nn.Linear(12, 3), nn.Linear(3, 3))


@pytest.fixture
def model() -> nn.Module:
    return network()


@pytest.fixture
def curvature(model: nn.Module) -> Curvature:
    batch = torch.randn(6, 2, 4, 4), torch.randint(3, (6,))
    return measure(model, [batch], methods=METHODS, skip=["6"])


# --- the value --------------------------------------------------------------------------------------------------------------


def test_decompositions_are_of_the_factors_and_are_kept(curvature: Curvature) -> None:
    layer = curvature["0"]
    factors = {"eigen_channels": layer.channel_form, "eigen_patches": layer.patch_form, "eigen_gradients": layer.gradients}
    for name, factor in factors.items():
        values, vectors = getattr(layer, name)
        torch.testing.assert_close(vectors * values @ vectors.T, factor.double(), rtol=1e-6, atol=1e-7)
        assert getattr(layer, name) is getattr(layer, name)


def test_a_statistic_that_was_not_collected_is_an_error_that_says_how_to_collect_it(model: nn.Module) -> None:
    curvature = measure(model, [(torch.randn(2, 2, 4, 4), None)], methods=["eigendamage"])
    with pytest.raises(ValueError, match=r"input covariance over patches was not collected; .*methods="):
        _ = curvature["0"].eigen_patches
    with pytest.raises(ValueError, match=r"kron-obd needs patches, not in this curvature; .*methods="):
        curvature.require(METHODS["kron-obd"].needs, "kron-obd")
    curvature.require(METHODS["eigendamage"].needs, "eigendamage")


def test_patches_serve_where_channels_are_needed(model: nn.Module) -> None:
    curvature = measure(model, [(torch.randn(2, 2, 4, 4), None)], methods=["kron-obd"])
    curvature.require(METHODS["eigendamage"].needs, "eigendamage")


def test_measured_layers_are_those_that_may_change(curvature: Curvature) -> None:
    assert list(curvature.layers) == ["0", "3", "5", "6"]
    assert list(curvature.measured) == ["0", "3", "5"]
    assert curvature.last_linear == "6"
    assert repr(curvature) == "Curvature(3 of 4 layers, 6 examples)"


def test_an_unknown_layer_is_an_error_that_lists_the_layers(curvature: Curvature) -> None:
    with pytest.raises(ValueError, match=r"no layer 'head'; the layers are 0, 3, 5, 6"):
        _ = curvature["head"]


# --- the model it belongs to ------------------------------------------------------------------------------------------------


def test_a_model_of_the_same_layers_will_do(curvature: Curvature) -> None:
    curvature.require_model(network())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            lambda: network(5),
            r"measured with 0 as conv 2→4 kernel 3×3, with bias, the model has conv 2→5 kernel 3×3, with bias",
        ),
        (lambda: network()[:6], r"it knows a layer '6', the model has 0, 3, 5"),
        (lambda: network().append(nn.Linear(3, 3)), r"it does not know 7"),
        (lambda: nn.Sequential(nn.ReLU()), r"it knows a layer '0', the model has none"),
        (lambda: network().insert(6, nn.Identity()), r"it knows a layer '6', the model has 0, 3, 5, 7"),
    ],
)
def test_another_model_is_an_error_that_names_the_layer(curvature: Curvature, other, message: str) -> None:
    with pytest.raises(ValueError, match="the curvature is of another model: .*" + message):
        curvature.require_model(other())


@pytest.mark.parametrize("layer", [nn.ConvTranspose2d(2, 4, 3, padding=1), nn.Conv2d(2, 4, (3, 1)), nn.Linear(2, 4)], ids=str)
def test_a_layer_of_another_kind_or_kernel_is_another_model(curvature: Curvature, model: nn.Module, layer: nn.Module) -> None:
    model[0] = layer
    with pytest.raises(ValueError, match=r"measured with 0 as conv 2→4 kernel 3×3"):
        curvature.require_model(model)


# --- the file ---------------------------------------------------------------------------------------------------------------


def test_a_curvature_comes_back_bit_for_bit(curvature: Curvature, tmp_path: Path) -> None:
    curvature.save(tmp_path / "curvature.safetensors")
    assert_same(Curvature.load(tmp_path / "curvature.safetensors"), curvature, rtol=0, atol=0)


def test_an_empty_curvature_comes_back(tmp_path: Path) -> None:
    Curvature({}).save(tmp_path / "curvature.safetensors")
    assert_same(Curvature.load(tmp_path / "curvature.safetensors"), Curvature({}))


def test_other_precisions_come_back(curvature: Curvature, tmp_path: Path) -> None:
    layers = {name: replace(layer, scale=torch.randn(3, dtype=torch.bfloat16)) for name, layer in curvature.layers.items()}
    replace(curvature, layers=layers).save(tmp_path / "curvature.safetensors")
    assert_same(Curvature.load(tmp_path / "curvature.safetensors"), replace(curvature, layers=layers), rtol=0, atol=0)


@pytest.mark.parametrize("place", [0.01, 0.3, 0.6, 0.99])
@pytest.mark.parametrize("damage", ["cut", "changed"])
def test_a_damaged_file_is_an_error_that_names_it(curvature: Curvature, tmp_path: Path, place: float, damage: str) -> None:
    path = tmp_path / "curvature.safetensors"
    curvature.save(path)
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if damage == "cut":
        del content[at:]
    else:
        content[at] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match=str(path)):
        Curvature.load(path)


def test_another_file_is_an_error_that_says_what_it_is(model: nn.Module, tmp_path: Path) -> None:
    save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"holds a model, not a curvature"):
        Curvature.load(tmp_path / "model.safetensors")
    (tmp_path / "text").write_text("not tensors")
    with pytest.raises(ValueError, match=r"is not a safetensors file"):
        Curvature.load(tmp_path / "text")
    with pytest.raises(FileNotFoundError):
        Curvature.load(tmp_path / "nowhere")

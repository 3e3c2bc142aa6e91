"""The lab's networks: the paper's counts of parameters, names, and pre-activation networks that lose channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import eigendamage as ed
from eigendamage.lab.networks import NETWORKS, PreResNet, build
from eigendamage.reading import reading_scores
from eigendamage.streams import ChannelSelection

WEIGHTS = Path(__file__).parents[2] / "shared" / "weights"

COUNTS = [  # shared/method.md, section 2
    ("vgg19", 10, 20_035_018),
    ("vgg19", 100, 20_081_188),
    ("vgg19", 200, 20_132_488),
    ("resnet32x4", 10, 7_427_914),
    ("resnet32x4", 100, 7_451_044),
    ("preresnet29", 10, 2_237_258),
]


@pytest.mark.parametrize(("name", "classes", "parameters"), COUNTS)
def test_the_paper_s_counts(name: str, classes: int, parameters: int) -> None:
    assert sum(parameter.numel() for parameter in build(name, classes).parameters()) == parameters


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_takes_images_of_every_data_set(name: str) -> None:
    model = build(name, 7).eval()
    with torch.no_grad():
        for size in (16, 32, 64):
            assert model(torch.randn(1, 3, size, size)).shape == (1, 7)


def test_other_names_are_refused() -> None:
    with pytest.raises(ValueError, match=r"network: must be one of 'vgg19', 'vgg19-thin', .*; got 'alexnet'"):
        build("alexnet", 10)


def test_the_scales_of_preresnets_start_at_a_half() -> None:
    norms = [module for module in build("preresnet29-thin", 10).modules() if isinstance(module, nn.BatchNorm2d)]
    assert len(norms) == 28 and all(bool((norm.weight == 0.5).all()) for norm in norms)


@pytest.mark.parametrize("name", ["resnet20", "resnet32"])
def test_trained_weights_fit(name: str) -> None:
    path = WEIGHTS / f"{name}_cifar10.safetensors"
    if not path.is_file():
        pytest.skip("the trained weights are not here")
    build(name, 10).load_state_dict(load_file(path))


# --- channels that pre-activation blocks no longer read ---------------------------------------------------------------------


def preresnet() -> nn.Module:
    """Small, in double precision, and as after training: no batch norm is alike in all of its channels."""
    model = PreResNet(2, 4, width=0.125).double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor, low, high in ((module.weight, 0.2, 1.5), (module.running_var, 0.5, 2.0)):
                nn.init.uniform_(tensor, low, high)
            for tensor in (module.bias, module.running_mean):
                nn.init.normal_(tensor, std=0.5)
    return model


def images() -> Tensor:
    return torch.randn(6, 3, 12, 12, dtype=torch.float64)


def masked(model: nn.Module, plan: ed.Plan, inputs: Tensor) -> Tensor:
    """What the dense model makes of the inputs if no layer listens to the channels that the plan takes from it."""
    handles = []
    for name, kept in plan.kept.items():
        module = model.get_submodule(name)
        if isinstance(module, nn.Conv2d | nn.Linear):
            mask = torch.zeros(module.weight[:1].shape[:2], dtype=torch.float64)
            mask[:, kept.inputs] = 1
            mask = mask[:, :, None, None] if isinstance(module, nn.Conv2d) else mask
            handles.append(module.register_forward_pre_hook(lambda _, args, mask=mask: (args[0] * mask,)))
    with torch.no_grad():
        outputs = model(inputs)
    for handle in handles:
        handle.remove()
    return outputs


def selections(model: nn.Module) -> dict[str, ChannelSelection]:
    return {name: module for name, module in model.named_modules() if isinstance(module, ChannelSelection)}


@pytest.mark.parametrize("method", ["slimming", "c-obd", "kron-obd"])
def test_a_pruned_network_is_the_dense_one_with_the_same_channels_masked(method: str, tmp_path: Path) -> None:
    model, inputs = preresnet(), images()
    batches = [(inputs, torch.arange(6) % 4)]
    for _ in range(3):  # in later rounds the selections start from a part of the stream
        curvature = ed.measure(model, batches, methods=[method], progress=False)
        plan = ed.plan(model, curvature, method=method, ratio=0.4)
        pruned = ed.apply(model, plan, curvature)
        with torch.no_grad():
            torch.testing.assert_close(pruned(inputs), masked(model, plan, inputs), rtol=1e-9, atol=1e-9)
        before, after = selections(model), selections(pruned)
        assert sum(module.channels for module in after.values()) < sum(module.channels for module in before.values())
        for name, module in after.items():
            assert torch.equal(module.index, before[name].index[plan.kept[name].outputs] if name in plan.kept else module.index)
        model = pruned
    for name in ("conv1", "layer1.0.conv3", "layer2.0.downsample"):  # they write to the stream
        assert model.get_submodule(name).out_channels == preresnet().get_submodule(name).out_channels
    ed.save(model, tmp_path / "model")
    with torch.no_grad():
        assert torch.equal(ed.load(preresnet(), tmp_path / "model")(inputs), model(inputs))


@pytest.mark.parametrize("method", ["c-obs", "kron-obs"])
def test_methods_that_compensate_prune_what_is_read_too(method: str) -> None:
    model, inputs = preresnet(), images()
    curvature = ed.measure(model, [(inputs, torch.arange(6) % 4)], methods=[method], progress=False)
    pruned = ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.5), curvature)
    assert any(module.channels < len(selections(model)[name].index) for name, module in selections(pruned).items())
    assert pruned(inputs).isfinite().all()


def test_what_is_read_is_scored_by_the_loss_of_its_reader() -> None:
    """Kron-OBD's score of an input of a 1×1 convolution is its loss ½ vec(D)ᵀ (S ⊗ A) vec(D) for the column D it takes away."""
    model, inputs = preresnet(), images()
    curvature = ed.measure(model, [(inputs, torch.arange(6) % 4)], methods=["kron-obd"], progress=False)
    scores = reading_scores(model, curvature, ed.METHODS["kron-obd"])
    layer, weight = curvature["layer2.1.conv1"], model.get_submodule("layer2.1.conv1").weight.detach()[:, :, 0, 0]
    expected = []
    for channel in range(weight.shape[1]):
        column = torch.zeros_like(weight)
        column[:, channel] = weight[:, channel]
        expected.append(0.5 * torch.trace(layer.gradients @ column @ layer.patch_form @ column.T))
    torch.testing.assert_close(scores["layer2.1.select"], torch.stack(expected))


def test_the_directions_of_eigendamage_leave_selections_alone() -> None:
    model, inputs = preresnet(), images()
    curvature = ed.measure(model, [(inputs, torch.arange(6) % 4)], progress=False)
    for knob in ({"method": "eigendamage", "ratio": 0.5}, {"macs": 0.6}):
        small = ed.apply(model, ed.plan(model, curvature, **knob), curvature)
        assert all(module.channels == len(selections(model)[name].index) for name, module in selections(small).items())
        assert small(inputs).isfinite().all()

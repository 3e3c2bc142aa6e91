"""The lab's networks: the paper's counts of parameters, names, and pre-activation networks that lose channels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from eigendamage.lab.networks import NETWORKS, build

WEIGHTS = Path("/work/shared/weights")

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

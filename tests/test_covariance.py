"""The fast sums of outer products equal the Gram matrix of all patches."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import KINDS, layers
from torch import Tensor, nn
from truth import channel_form

from eigendamage import covariance
from eigendamage.covariance import ChannelSum, PatchSum
from eigendamage.layers import kind_of, patches, prepare
from eigendamage.passes import tensors_in

pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")


def gram(module: nn.Module, batches: list[Tensor]) -> Tensor:
    seen = torch.cat([patches(module, prepare(module, inputs)).flatten(0, 1) for inputs in batches])
    return seen.T @ seen


def check(module: nn.Module, batches: list[Tensor], **tolerance: float) -> None:
    expected = gram(module, batches)
    over_patches, over_channels = PatchSum(module), ChannelSum(module)
    for inputs in batches:
        over_patches.add(inputs)
        over_channels.add(inputs)
    torch.testing.assert_close(over_patches.total(), expected, **tolerance)
    torch.testing.assert_close(over_channels.total(), channel_form(module, expected), **tolerance)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=60)
def test_sums_equal_the_gram_matrix_of_the_patches(kind: str, data: st.DataObject) -> None:
    """Over several batches whose maps differ in size."""
    module, inputs = data.draw(layers([kind]))
    batches = [inputs, torch.randn_like(inputs)]
    if kind_of(module) != "linear":
        larger = [size + data.draw(st.integers(0, 2)) for size in inputs.shape[2:]]
        batches.append(torch.randn(2, inputs.shape[1], *larger, dtype=torch.float64))
    check(module, batches)


@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(2, 3, 5, padding=2),
        nn.Conv2d(2, 3, 5, padding="same", dilation=2),
        nn.Conv2d(2, 3, 7, padding=6, stride=3),
        nn.Conv2d(2, 3, 5, padding=2, padding_mode="replicate"),
        nn.ConvTranspose2d(2, 3, 5, padding=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("size", [(1, 1), (1, 3), (2, 2)])
def test_maps_smaller_than_the_kernel(module: nn.Module, size: tuple[int, int]) -> None:
    check(module.double(), [torch.randn(3, 2, *size, dtype=torch.float64)])


@given(layers(["conv", "transposed"]))
def test_an_unbatched_map_is_a_batch_of_one(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    check(module, [inputs[0]])


@given(layers())
def test_the_order_of_calls_and_the_size_of_chunks_do_not_matter(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(covariance, "CHUNK", 1)
        check(module, [inputs.flip(0), inputs])


@given(layers())
def test_total_may_be_read_between_calls(drawn: tuple[nn.Module, Tensor]) -> None:
    module, inputs = drawn
    for accumulated in (PatchSum(module), ChannelSum(module)):
        empty = accumulated.total().clone()
        accumulated.add(inputs)
        once = accumulated.total().clone()
        accumulated.add(inputs)
        assert not empty.any()
        torch.testing.assert_close(accumulated.total(), 2 * once)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_single_precision(dtype: torch.dtype) -> None:
    module = nn.Conv2d(2, 3, 3, padding=1, dtype=dtype)
    inputs = torch.randn(4, 2, 6, 6, dtype=dtype)
    over_patches = PatchSum(module)
    over_patches.add(inputs)
    assert over_patches.total().dtype == torch.float32
    torch.testing.assert_close(over_patches.total(), gram(module, [inputs.float()]))


def held(module: nn.Module, size: tuple[int, int]) -> float:
    """How many blocks ``[in, in]`` are kept between two batches."""
    summed = PatchSum(module)
    summed.add(torch.randn(2, 16, *size))
    return (sum(tensor.numel() for tensor in tensors_in(summed)) - summed.zero.numel()) / 16**2


@pytest.mark.parametrize("size", [(1, 5), (5, 5), (6, 9), (8, 8), (12, 12)])
@pytest.mark.parametrize(
    "module",
    [
        nn.Conv2d(16, 3, 3, padding=1),
        nn.Conv2d(16, 3, (1, 3)),
        nn.Conv2d(16, 3, (1, 5)),
        nn.Conv2d(16, 3, 3, padding=2, dilation=2),
    ],
    ids=str,
)
def test_no_more_is_held_than_the_blocks_on_and_above_the_diagonal(module: nn.Conv2d, size: tuple[int, int]) -> None:
    taps = math.prod(module.kernel_size)
    assert held(module, size) <= taps * (taps + 1) / 2


@pytest.mark.parametrize(("side", "products"), [(1, 1), (2, 10), (4, 29)])
def test_on_small_maps_less_is_held(side: int, products: int) -> None:
    """As of four positions there are ten pairs, when the order does not count."""
    assert held(nn.Conv2d(16, 3, 3, padding=1), (side, side)) == products

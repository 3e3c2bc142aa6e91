"""Parameters and multiply-accumulates against what one counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from eigendamage import Cost, count


@pytest.mark.parametrize(
    ("model", "shape", "params", "macs"),
    [
        (nn.Linear(5, 3), (1, 5), 5 * 3 + 3, 5 * 3),
        (nn.Linear(5, 3, bias=False), (2, 7, 5), 5 * 3, 2 * 7 * 5 * 3),
        (nn.Conv2d(2, 4, 3, padding=1), (1, 2, 8, 6), 2 * 4 * 9 + 4, 2 * 4 * 9 * 48),
        (nn.Conv2d(2, 4, 3, stride=2, bias=False), (3, 2, 9, 9), 2 * 4 * 9, 3 * 2 * 4 * 9 * 16),
        (nn.Conv1d(6, 4, 5, groups=2, dilation=2), (1, 6, 10), 6 * 4 // 2 * 5 + 4, 6 * 4 // 2 * 5 * 2),
        (nn.ConvTranspose2d(2, 4, 3, stride=2), (1, 2, 5, 5), 2 * 4 * 9 + 4, 2 * 4 * 9 * 25),
        (nn.BatchNorm2d(4), (1, 4, 3, 3), 8, 0),
        (nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3)), (1, 1, 4, 4), 20 + 27, 2 * 9 * 4 + 24),
    ],
    ids=str,
)
def test_counts_are_those_one_makes_by_hand(model: nn.Module, shape: tuple[int, ...], params: int, macs: int) -> None:
    assert count(model, torch.randn(shape)) == Cost(params, macs)


def test_a_shared_layer_has_its_parameters_once_and_works_each_time() -> None:
    layer = nn.Linear(4, 4)
    assert count(nn.Sequential(layer, nn.ReLU(), layer), torch.randn(1, 4)) == Cost(20, 32)


def test_tied_weights_count_once() -> None:
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight
    assert count(nn.Sequential(first, second), torch.randn(1, 4)) == Cost(16, 32)


def test_attention_counts_however_torch_computes_it() -> None:
    length, width, inner = 7, 4, 6
    layer = nn.TransformerEncoderLayer(width, 2, inner, batch_first=True)
    projections, products = 4 * width * width * length, 2 * width * length * length
    assert count(layer, torch.randn(1, length, width)).macs == projections + products + 2 * width * inner * length


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 2), nn.Linear(4, 2)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.left(x) @ self.right(y).T


@pytest.mark.parametrize("wrap", [tuple, list, lambda pair: dict(zip("xy", pair, strict=True))])
def test_several_inputs_come_in_a_tuple_or_by_name(wrap) -> None:
    inputs = wrap([torch.randn(1, 3), torch.randn(1, 4)])
    assert count(Two(), inputs) == Cost(3 * 2 + 2 + 4 * 2 + 2, 3 * 2 + 4 * 2 + 2)


@pytest.mark.parametrize("shape", [(2, 2, 4, 4), (2, 5)], ids=["works", "fails"])
def test_the_model_is_left_as_it_was(shape: tuple[int, ...]) -> None:
    model = nn.Sequential(nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.Dropout(), nn.Sequential(nn.ReLU()))
    model[3].eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    try:
        count(model, torch.ones(shape))
    except ValueError as error:
        assert len(shape) == 2 and str(error).startswith("example_inputs: the model cannot be called with them")
    assert [module.training for module in model.modules()] == [True, True, True, True, False, False]
    assert torch.equal(torch.get_rng_state(), random)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)

import pytest
import torch
from torch import nn

import eigendamage as ed


def line(count: int = 64) -> list[tuple[torch.Tensor, torch.Tensor]]:
    x = torch.randn(count, 4)
    return list(zip(x.split(16), (x.sum(1) > 0).long().split(16), strict=True))


def test_training_lowers_the_loss_and_leaves_the_mode_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2)).eval()
    history = ed.finetune(model, line(), epochs=20, learning_rate=0.1, progress=False)
    assert history[-1].loss < history[0].loss / 2
    assert not any(module.training for module in model.modules())


def test_the_steps_divide_the_rate_by_ten_after_a_half_and_three_quarters() -> None:
    history = ed.finetune(nn.Linear(4, 2), line(), epochs=8, learning_rate=1.0, progress=False)
    assert [epoch.learning_rate for epoch in history] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_cosine_falls_to_nothing() -> None:
    rates = [e.learning_rate for e in ed.finetune(nn.Linear(4, 2), line(), epochs=10, schedule="cosine", progress=False)]
    assert rates[0] == pytest.approx(1e-3) and rates == sorted(rates, reverse=True) and rates[-1] < 1e-4


def test_frozen_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    before = model[0].weight.clone()
    ed.finetune(model, line(), epochs=1, learning_rate=0.1, progress=False)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": -1}, "epochs: must be at least 0; got -1"),
        ({"learning_rate": 0.0}, "learning_rate: must be above 0; got 0.0"),
        ({"schedule": "linear"}, "schedule: must be one of 'steps', 'cosine'; got 'linear'"),
        ({"batches": []}, "batches: the loader is empty"),
        ({"batches": iter(line())}, "batches: an iterator ends after one epoch; 150 epochs need a list"),
        ({"learning_rate": 1e30, "epochs": 3}, "the loss became .* a smaller learning_rate"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ed.finetune(nn.Linear(4, 2), **{"batches": line(), "progress": False, **arguments})

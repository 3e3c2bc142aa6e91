"""What runs are about: on which examples of a user's own loaders a network is measured, and on which it is judged."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from eigendamage.lab.runs import Training
from eigendamage.lab.subjects import Loaders


class Noting(nn.Module):
    """Two logits of one number, which is noted down."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(1, 2)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen += x.flatten().int().tolist()
        return self.head(x)


def loader(count: int, batch: int, shuffle: bool = False) -> DataLoader:
    numbers = torch.arange(count, dtype=torch.float32)[:, None]
    return DataLoader(TensorDataset(numbers, torch.zeros(count).long()), batch, shuffle=shuffle)


def used(training: DataLoader, measured: int | None, examples: int) -> tuple[list[int], list[int]]:
    """The examples to measure on, and those that a network is judged on."""
    subject, model = Loaders(training, training, "cpu"), Noting()
    statistics = [int(value) for inputs, _ in subject.statistics(measured, 3) for value in inputs]
    subject.judged(model, examples, measured, Training(), 3)
    return statistics, model.seen


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("measured", [8, 10, 20, 3])
@pytest.mark.parametrize("examples", [4, 9, 20])
def test_own_batches_are_judged_on_others_than_were_measured(shuffle: bool, measured: int, examples: int) -> None:
    statistics, judged = used(loader(40, 8, shuffle), measured, examples)
    assert len(statistics) == measured and len(judged) == len(set(judged)) == examples
    assert not set(statistics) & set(judged)
    assert shuffle or judged == list(range(measured, measured + examples))


@pytest.mark.parametrize(("measured", "examples", "shared"), [(10, 10, 4), (10, 16, 10), (None, 5, 5), (16, 100, 16)])
def test_where_there_are_not_enough_they_are_judged_on_as_many_others_as_there_are(measured, examples, shared) -> None:
    statistics, judged = used(loader(16, 5), measured, examples)
    assert len(judged) == min(examples, 16) and len(set(statistics) & set(judged)) == shared


def test_random_numbers_stay_as_they_were() -> None:
    subject, before = Loaders(loader(20, 4, True), [], "cpu"), torch.get_rng_state()
    subject.statistics(5, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_loader_is_named() -> None:
    with pytest.raises(ValueError, match="data: a loader is empty"):
        Loaders([], [], "cpu").judged(Noting(), 5, 5, Training(), 0)

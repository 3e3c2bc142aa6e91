"""What runs are about: on which examples of a user's own loaders a network is measured, and on which it is judged."""

from __future__ import annotations

import hashlib
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from eigendamage.lab import data as data_sets
from eigendamage.lab import downloads, steps
from eigendamage.lab.downloads import Archive
from eigendamage.lab.runs import Training
from eigendamage.lab.settings import Site
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


def loader(count: int, batch: int, shuffle: bool = False, generator: torch.Generator | None = None) -> DataLoader:
    numbers = torch.arange(count, dtype=torch.float32)[:, None]
    return DataLoader(TensorDataset(numbers, torch.zeros(count).long()), batch, shuffle=shuffle, generator=generator)


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


def test_a_loader_with_a_generator_of_its_own_is_in_the_same_order_too() -> None:
    generator = torch.Generator().manual_seed(1)
    before = generator.get_state()
    statistics, judged = used(loader(40, 8, True, generator), 12, 20)
    assert not set(statistics) & set(judged) and torch.equal(generator.get_state(), before)


def test_random_numbers_stay_as_they_were() -> None:
    subject, before = Loaders(loader(20, 4, True), [], "cpu"), torch.get_rng_state()
    subject.statistics(5, 0)
    assert torch.equal(torch.get_rng_state(), before)


def test_an_empty_loader_is_named() -> None:
    with pytest.raises(ValueError, match="data: a loader is empty"):
        Loaders([], [], "cpu").judged(Noting(), 5, 5, Training(), 0)


@pytest.mark.parametrize("progress", [False, True])
def test_a_quiet_site_downloads_without_bars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, progress: bool) -> None:
    packed, shown = io.BytesIO(), []
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        archive.addfile(tarfile.TarInfo("set/a"))
    (tmp_path / "set.tar.gz").write_bytes(packed.getvalue())
    served = Archive((tmp_path / "set.tar.gz").as_uri(), hashlib.md5(packed.getvalue()).hexdigest(), "set")

    def noted(items: Iterator[Any], description: str, enabled: bool = True, total: int | None = None) -> Iterator[Any]:
        shown.append(enabled)
        return items

    monkeypatch.setattr(data_sets, "CIFAR10", served)
    monkeypatch.setattr(downloads, "track", noted)
    with pytest.raises(FileNotFoundError, match="data_batch_1"):  # it is an archive of something else
        steps.subject_of("cifar10", Site(tmp_path / "runs", data=tmp_path / "data", progress=progress))
    assert shown == [progress, progress]

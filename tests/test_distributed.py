"""Processes that each see a share of the batches end up with the curvature that one process has of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from truth import assert_same

from eigendamage import METHODS, Curvature, measure

PROCESSES = 2


class Branching(nn.Module):
    """Negative sums go one way and the others another, so that a share of the batches may not reach a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(2, 3, 3, padding=1)
        self.norm = nn.BatchNorm2d(3)
        self.down = nn.Conv2d(3, 4, 2, stride=2)
        self.above, self.below = nn.Linear(4, 4), nn.Linear(4, 4)
        self.above_norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        sign = float(x.sum())
        x = self.down(self.norm(self.stem(x)).tanh()).mean((2, 3))
        return self.head(self.above_norm(self.above(x)) if sign > 0 else self.below(x))


def network() -> nn.Module:
    torch.manual_seed(0)
    return Branching().double()


def batches(share: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Batches of unequal sizes; the first process has those that go below."""
    generator = torch.Generator().manual_seed(1)
    shares = []
    for sign in (-1, 1):
        inputs = [sign * torch.rand(size, 2, 6, 6, generator=generator, dtype=torch.float64) for size in (3, 2 + sign)]
        shares.append([(x, torch.randint(3, (len(x),), generator=generator)) for x in inputs])
    return shares[0] + shares[1] if share is None else shares[share]


def curvatures(share: int | None = None) -> dict[str, Curvature]:
    return {labels: measure(network(), batches(share), methods=METHODS, labels=labels) for labels in ("given", "sampled")}


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    try:
        for labels, curvature in curvatures(rank).items():
            curvature.save(f"{folder}/{labels}-{rank}")
    finally:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def together(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Curvature]]:
    """For both kinds of labels, what each process has."""
    folder: Path = tmp_path_factory.mktemp("processes")
    mp.spawn(process, (str(folder),), nprocs=PROCESSES)
    ranks = range(PROCESSES)
    return {labels: [Curvature.load(folder / f"{labels}-{rank}") for rank in ranks] for labels in ("given", "sampled")}


@pytest.mark.parametrize("labels", ["given", "sampled"])
def test_every_process_has_the_same_curvature(together: dict[str, list[Curvature]], labels: str) -> None:
    first, second = together[labels]
    assert_same(first, second, rtol=0, atol=0)


def test_all_processes_together_have_the_curvature_of_one(together: dict[str, list[Curvature]]) -> None:
    assert_same(together["given"][0], curvatures()["given"])


def test_each_process_samples_labels_of_its_own(together: dict[str, list[Curvature]]) -> None:
    """As with seeds that count up with the process."""
    shares = [measure(network(), batches(share), methods=METHODS, seed=share) for share in range(PROCESSES)]
    shared = together["sampled"][0]
    assert shared.examples == sum(share.examples for share in shares)
    for name in ("stem", "head"):
        expected = sum(share[name].gradients * share.examples for share in shares) / shared.examples
        torch.testing.assert_close(shared[name].gradients, expected)

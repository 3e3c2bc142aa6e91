"""``python -m eigendamage.bench_time``: whether budgets of time hold, by a comparison of its own with the dense model."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from safetensors.torch import load_file
from torch import Tensor, nn

import eigendamage as ed
from eigendamage.bench import machine
from eigendamage.cost import called
from eigendamage.files import write_text
from eigendamage.lab.networks import NETWORKS
from eigendamage.passes import evaluating
from eigendamage.text import render
from eigendamage.timing import interleaved

# A time may be so much over its budget, and so much of what is saved of the MACs is to be saved of the time.
OVER, SAVED = 1.05, 0.8


@dataclass(frozen=True)
class Setup:
    networks: tuple[str, ...] = ("resnet20", "resnet32x4", "vgg19")
    threads: tuple[int, ...] = (1, 2)
    batch_sizes: tuple[int, ...] = (1, 128)
    latency: float = 0.6
    macs: Mapping[str, float] | None = None  # by network: with a budget of MACs, at the largest batch
    examples: int = 512  # random images, for the statistics
    seconds: float = 10.0  # of the comparison, about
    seed: int = 0


FULL = Setup(macs={"vgg19": 0.3})
QUICK = Setup(networks=("resnet20",), threads=(1,), batch_sizes=(2,), macs={"resnet20": 0.5}, examples=8, seconds=0.1)


@dataclass(frozen=True)
class Row:
    """One plan. Times are shares of the dense model's; None is what a plan that cannot be made does not have."""

    network: str
    threads: int
    batch_size: int
    budget: str
    asked: float
    target: float
    macs: float | None = None
    predicted: float | None = None
    planned: float | None = None  # measured while planning
    ratio: float | None = None  # measured afterwards: medians of both models taking turns
    dense_seconds: float | None = None
    error: str = ""

    @property
    def met(self) -> bool:
        return self.ratio is not None and self.ratio <= self.target


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eigendamage.bench_time", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("latency.json"), metavar="FILE", help="default: ./latency.json")
    parser.add_argument("--weights", type=Path, metavar="FOLDER", help="with NETWORK_cifar10.safetensors; else random weights")
    parser.add_argument("--networks", nargs="+", choices=sorted(NETWORKS), metavar="NAME", help=f"default: {FULL.networks}")
    parser.add_argument("--quick", action="store_true", help="one small network, to see that the benchmark runs")
    options = parser.parse_args(arguments)
    setup = QUICK if options.quick else FULL
    setup = replace(setup, networks=tuple(options.networks)) if options.networks else setup
    content: dict[str, Any] = {
        "command": " ".join(["python -m eigendamage.bench_time", *(sys.argv[1:] if arguments is None else arguments)]),
        "machine": machine(),
        "setup": asdict(setup),
        "rows": [],
    }
    rows: list[Row] = []
    before = torch.get_num_threads()
    try:
        for network in setup.networks:
            torch.set_num_threads(before)
            model, curvature = _measured(network, setup, options.weights)
            for threads in setup.threads:
                torch.set_num_threads(threads)
                for budget, asked, size in _asked(network, setup):
                    rows.append(row(network, model, curvature, budget, asked, size, setup))
                    content["rows"] = [{**asdict(row), "met": row.met} for row in rows]
                    write_text(options.out, json.dumps(content, indent=1) + "\n")  # what was measured so far
    finally:
        torch.set_num_threads(before)
    print(render(_table(rows)))
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))


def _asked(network: str, setup: Setup) -> list[tuple[str, float, int]]:
    of_time = [("latency", setup.latency, size) for size in setup.batch_sizes]
    macs = setup.macs or {}
    return [*of_time, *([("macs", macs[network], max(setup.batch_sizes))] if network in macs else [])]


def _measured(network: str, setup: Setup, weights: Path | None) -> tuple[nn.Module, ed.Curvature]:
    torch.manual_seed(setup.seed)
    model = NETWORKS[network](10).eval()
    file = weights / f"{network}_cifar10.safetensors" if weights else None
    if file is not None and file.exists():
        model.load_state_dict(load_file(file))
    sizes = [min(128, setup.examples - start) for start in range(0, setup.examples, 128)]
    batches = [(torch.randn(size, 3, 32, 32), torch.randint(10, (size,))) for size in sizes]
    return model, ed.measure(model, batches, methods=["best"], progress=False)


def row(network: str, model: nn.Module, curvature: ed.Curvature, budget: str, asked: float, size: int, setup: Setup) -> Row:
    """One plan, made and compared."""
    inputs = torch.randn(size, 3, 32, 32, generator=torch.Generator().manual_seed(setup.seed))
    target = OVER * asked if budget == "latency" else 1 - SAVED * (1 - asked)
    made = Row(network, torch.get_num_threads(), size, budget, asked, target)
    try:
        given = {"latency": asked, "example_inputs": inputs} if budget == "latency" else {budget: asked}
        plan = ed.plan(model, curvature, **given)
    except ValueError as error:
        return replace(made, error=str(error))
    if plan.latency is not None:
        shares = plan.latency.predicted / plan.latency.dense, plan.latency.measured / plan.latency.dense
        made = replace(made, predicted=shares[0], planned=shares[1])
    small = ed.apply(model, plan, curvature)
    ratio, dense = compared(model, small, inputs, setup.seconds)
    macs = ed.count(small, inputs).macs / ed.count(model, inputs).macs
    return replace(made, macs=macs, ratio=ratio, dense_seconds=dense)


def compared(model: nn.Module, small: nn.Module, inputs: Tensor, seconds: float) -> tuple[float, float]:
    """The time of the one as a share of the other's, and the other's in seconds."""
    with torch.no_grad(), evaluating(model), evaluating(small):
        tasks = [partial(called, each, inputs) for each in (model, small)]
        once = sum(taken[0] for taken in interleaved(tasks, 1))
        dense, other = interleaved(tasks, min(max(9, round(seconds / once)), 500))
    return statistics.median(other) / statistics.median(dense), statistics.median(dense)


def _table(rows: Sequence[Row]) -> Table:
    title = "Time as a share of the dense model's (float32, both models taking turns)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("network", "budget"):
        table.add_column(header, no_wrap=True)
    for header in ("threads", "batch", "MACs", "predicted", "planned", "measured", "target"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        shares = ["" if value is None else f"{value:.3f}" for value in (row.macs, row.predicted, row.planned, row.ratio)]
        budget, verdict = f"{row.budget}={row.asked:g}", "met" if row.met else "missed"
        table.add_row(
            row.network, budget, str(row.threads), str(row.batch_size), *shares, f"≤ {row.target:.2f}", row.error or verdict
        )
    return table


if __name__ == "__main__":
    main()

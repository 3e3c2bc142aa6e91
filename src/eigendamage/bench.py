"""``python -m eigendamage.bench``: what measuring and planning cost, beside plain training passes over the same batches."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

import eigendamage as ed
from eigendamage.files import write_text
from eigendamage.lab.networks import NETWORKS
from eigendamage.progress import track
from eigendamage.text import render

MEASURED = {"channel form": ("eigendamage",), "patch form": ("kron-obd", "kron-obs")}
TIME_TARGETS = {"channel form": 1.2, "patch form": 2.5, "plan + apply": 1.0}
MEMORY_TARGET = 1.5


@dataclass(frozen=True)
class Setup:
    """The work that both sides of every ratio do."""

    networks: tuple[str, ...] = ("resnet32x4", "vgg19")
    batches: int = 4
    batch_size: int = 128
    repetitions: int = 5
    seed: int = 0


QUICK = Setup(networks=("resnet20",), batches=1, batch_size=4, repetitions=3)


@dataclass(frozen=True)
class Row:
    """One ratio, of time or of peak memory, to that of the training pass."""

    network: str
    task: str
    unit: str  # "s" of time or "MiB" of peak memory
    training: float
    value: float
    ratio: float
    target: float
    cpu_ratio: float | None = None  # the same ratio of processor time: a second opinion on a busy machine

    @property
    def met(self) -> bool:
        return self.ratio <= self.target


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eigendamage.bench", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench.json"), metavar="FILE", help="default: ./bench.json")
    parser.add_argument("--quick", action="store_true", help="one small network, to see that the benchmark runs")
    parser.add_argument("--batches", type=int, default=Setup.batches, help="of 128 images; %(default)s by default")
    parser.add_argument("--repetitions", type=int, default=Setup.repetitions, help="%(default)s by default")
    options = parser.parse_args(arguments)
    setup = QUICK if options.quick else Setup(batches=options.batches, repetitions=options.repetitions)
    command = " ".join(["python -m eigendamage.bench", *(sys.argv[1:] if arguments is None else arguments)])
    rows = [row for network in setup.networks for row in (*memory_rows(network, setup), *time_rows(network, setup))]
    content = {
        "command": command,
        "machine": machine(),
        "setup": asdict(setup),
        "rows": [{**asdict(row), "met": row.met} for row in rows],
    }
    write_text(options.out, json.dumps(content, indent=1) + "\n")
    print(render(_table(rows, setup)))
    print(", ".join(f"{key}: {value}" for key, value in machine().items()))


# --- the tasks --------------------------------------------------------------------------------------------------------------

Batches = list[tuple[Tensor, Tensor]]


def _random(network: str, setup: Setup) -> tuple[nn.Module, Batches]:
    torch.manual_seed(setup.seed)
    model = NETWORKS[network](10)
    size = setup.batch_size
    return model, [(torch.randn(size, 3, 32, 32), torch.randint(10, (size,))) for _ in range(setup.batches)]


def train(model: nn.Module, batches: Batches) -> None:
    """Forward and backward as in training, without the optimiser's step."""
    model.train()
    for inputs, targets in batches:
        F.cross_entropy(model(inputs), targets).backward()
        model.zero_grad()


def measure(model: nn.Module, batches: Batches, form: str) -> ed.Curvature:
    return ed.measure(model, batches, methods=MEASURED[form], progress=False)


def plan_and_apply(model: nn.Module, curvature: ed.Curvature) -> nn.Module:
    fresh = replace(
        curvature, layers={name: replace(layer) for name, layer in curvature.layers.items()}
    )  # nothing decomposed yet
    return ed.apply(model, ed.plan(model, fresh, method="eigendamage", ratio=0.6), fresh)


# --- time -------------------------------------------------------------------------------------------------------------------

Seconds = tuple[float, float]  # of the clock, of the processor


def time_rows(network: str, setup: Setup) -> list[Row]:
    model, batches = _random(network, setup)
    curvature = measure(model, batches, "channel form")
    tasks: dict[str, Callable[[], object]] = {
        "channel form": lambda: measure(model, batches, "channel form"),
        "patch form": lambda: measure(model, batches, "patch form"),
        "plan + apply": lambda: plan_and_apply(model, curvature),
    }
    rows = []
    for name, task in tasks.items():
        pairs = _interleaved(lambda: train(model, batches), task, setup.repetitions, f"{network}: {name}")
        clock, processor = ([(a[i], b[i]) for a, b in pairs] for i in (0, 1))
        training, value = (statistics.median(side) for side in zip(*clock, strict=True))
        rows.append(
            Row(network, name, "s", training, value, _median_ratio(clock), TIME_TARGETS[name], _median_ratio(processor))
        )
    return rows


def _interleaved(
    ours: Callable[[], object], theirs: Callable[[], object], repetitions: int, description: str
) -> list[tuple[Seconds, Seconds]]:
    """A B A B …, after a warm-up: what slows the machine down slows both sides."""
    ours(), theirs()
    return [(_seconds(ours), _seconds(theirs)) for _ in track(range(repetitions), description)]


def _seconds(task: Callable[[], object]) -> Seconds:
    clock, processor = time.perf_counter(), time.process_time()
    task()
    return time.perf_counter() - clock, time.process_time() - processor


def _median_ratio(pairs: Sequence[tuple[float, float]]) -> float:
    return statistics.median(b / a for a, b in pairs)


# --- memory -----------------------------------------------------------------------------------------------------------------


def memory_rows(network: str, setup: Setup) -> list[Row]:
    """Peak memory over that of an idle process, each task in a process of its own; none where there is no /proc."""
    if not Path("/proc/self/status").exists():
        return []
    peaks = {task: _peak_elsewhere(network, task, setup) for task in track(("train", *MEASURED), f"{network}: peak memory")}
    training = peaks.pop("train")
    return [Row(network, task, "MiB", training, peak, peak / training, MEMORY_TARGET) for task, peak in peaks.items()]


def _peak_elsewhere(network: str, task: str, setup: Setup) -> float:
    code = f"from eigendamage import bench; bench.print_peak({network!r}, {task!r}, bench.{setup!r})"
    threads = {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **threads}, stdout=subprocess.PIPE, text=True, check=True
    )
    return float(done.stdout)


def print_peak(network: str, task: str, setup: Setup) -> None:
    """Run the task on two batches, after which it holds no more than after many; print MiB over those of the idle process."""
    idle = _peak()
    model, batches = _random(network, replace(setup, batches=2))
    train(model, batches) if task == "train" else measure(model, batches, task)
    print(_peak() - idle)


def _peak() -> float:
    """Peak memory of this process in MiB. Unlike getrusage's, Linux's own number does not include the parent's before exec."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) / 1024


# --- what is printed and written --------------------------------------------------------------------------------------------


def machine() -> Mapping[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.platform(),
    }


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _table(rows: Sequence[Row], setup: Setup) -> Table:
    images, of = setup.batches * setup.batch_size, f"median of {setup.repetitions}, batch {setup.batch_size}"
    title = f"Against a training pass over the same {images} images ({of})"
    table = Table(title=title, title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    for header in ("network", "task"):
        table.add_column(header, no_wrap=True)
    for header in ("training", "ours", "ratio", "by CPU", "target"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("")
    for row in rows:
        table.add_row(
            row.network,
            row.task,
            f"{row.training:.3g} {row.unit}",
            f"{row.value:.3g} {row.unit}",
            f"{row.ratio:.2f}",
            "" if row.cpu_ratio is None else f"{row.cpu_ratio:.2f}",
            f"≤ {row.target}",
            "met" if row.met else "missed",
        )
    return table


if __name__ == "__main__":
    main()

"""The command line: train, prune, finetune, evaluate, iterate, reproduce and more."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.table import Table
from tyro.conf import OmitArgPrefixes, Positional, arg

from eigendamage import bench as benchmark
from eigendamage import demo as demonstration
from eigendamage.checks import require_folder
from eigendamage.figures import TableData
from eigendamage.lab import projects
from eigendamage.lab.data import DATA
from eigendamage.lab.engine import CellsFailed, Engine
from eigendamage.lab.experiments import EXPERIMENTS
from eigendamage.lab.networks import NETWORKS
from eigendamage.lab.projects import Source
from eigendamage.lab.reproduce import reproduce as run_experiment
from eigendamage.lab.reproduce import write_docs, write_report
from eigendamage.lab.runs import Training
from eigendamage.lab.scales import SCALES, Changes
from eigendamage.lab.settings import Pruning
from eigendamage.methods import METHODS, method_named
from eigendamage.options import RUNS, Goal, Place, Start, Statistics, Tuning, WrongUsage, check
from eigendamage.processes import joined

DONE, FAILED, WRONG, INTERRUPTED = 0, 1, 2, 130


# --- commands ---------------------------------------------------------------------------------------------------------------


def train(
    model: str = "resnet20",
    data: str = "digits",
    out: Path | None = None,
    epochs: int | None = None,
    batch_size: int = 128,
    learning_rate: float = 0.1,
    momentum: float = 0.9,
    weight_decay: float = 2e-4,
    schedule: Literal["steps", "cosine"] = "steps",
    warmup: float = 0.0,
    l1: float = 0.0,
    precision: Literal["float32", "bfloat16"] = "float32",
    channels_last: bool = False,
    augment: bool = True,
    seed: int = 0,
    *,
    place: Place,
) -> None:
    """Train a network from scratch, by default as the paper does.

    Args:
        model: a network of the lab, or package.module:function.
        data: a data set of the lab, or package.module:function.
        out: the folder of the run. Default: runs/DATA-MODEL.
        epochs: default: 150, 300 for Tiny-ImageNet, 15 for digits.
        batch_size: over all processes together.
        learning_rate: where the schedule starts.
        momentum: of SGD.
        weight_decay: on every parameter.
        schedule: a tenth after 1/2 and after 3/4 of the epochs, or a cosine.
        warmup: in epochs.
        l1: on the scales of batch norm, as NN Slimming needs it.
        precision: bfloat16 is faster where the machine has it.
        channels_last: the memory format of images.
        augment: random crops and mirror images.
        seed: of weights, order and augmentation.
        place: where.
    """
    usual = {"digits": 15, "tiny-imagenet": 300}.get(data, 150)
    training = Training(
        epochs=usual if epochs is None else epochs,
        batch_size=batch_size,
        learning_rate=learning_rate,
        momentum=momentum,
        weight_decay=weight_decay,
        schedule=schedule,
        warmup=warmup,
        l1=l1,
        precision=precision,
        channels_last=channels_last,
        augment=augment,
        seed=seed,
    )
    folder = out or RUNS / f"{data}-{model}".replace(":", "-")
    _trained(folder, projects.train_in(folder, Source(model, data), training, place.site(), _commands()))


def finetune(start: Start, tuning: Tuning, place: Place, out: Path | None = None) -> None:
    """Train the model of a run further.

    Args:
        start: the model.
        tuning: how.
        place: where.
        out: the folder of the new run. Default: that of the old one with "-finetuned".
    """
    source = start.source()
    folder = out or RUNS / f"{start.label}-finetuned"
    training = tuning.training(source.data)
    if training.distill:
        raise WrongUsage("distill: is for prune and iterate, which know the dense model")
    _trained(folder, projects.train_in(folder, source, training, place.site(), _commands()))


def _trained(folder: Path, epochs: Sequence[dict[str, Any]]) -> None:
    last = f"accuracy {epochs[-1]['test_accuracy']:.2%} after {len(epochs)} epochs" if epochs else "no epochs"
    print(f"{last}; the run is in {folder}")


def evaluate(start: Start, place: Place, precision: Literal["float32", "bfloat16"] = "float32") -> None:
    """Accuracy and cost of the model of a run.

    Args:
        start: the model.
        place: where.
        precision: of the passes.
    """
    score, cost = projects.evaluate_run(start.source(), place.site(), precision)
    print(f"accuracy {score.accuracy:.2%}, loss {score.loss:.4f}, {cost['params']} parameters, {cost['macs']} MACs")


def prune(
    start: Start, goal: Goal, statistics: Statistics, tuning: Tuning, place: Place, refit: bool = True, out: Path | None = None
) -> None:
    """Make a model smaller, fine-tune it, and write the model, results as JSON and a report.

    Args:
        start: the model.
        goal: how small.
        statistics: what is measured.
        tuning: of the smaller model.
        place: where.
        refit: under a budget without a method: fit each layer again on the smaller model's own inputs.
        out: the folder of the run. Default: named after the model and the goal.
    """
    planning = goal.planning()
    _prune(start, planning, statistics, tuning, place, refit and "method" not in planning, 1, out)


def iterate(
    start: Start,
    statistics: Statistics,
    tuning: Tuning,
    place: Place,
    method: Annotated[str, arg(metavar="NAME")] = "eigendamage",
    ratio: float = 0.5,
    cap: float = 0.5,
    rounds: int = 6,
    out: Path | None = None,
) -> None:
    """Prune a little, fine-tune, and again; the defaults are the paper's.

    Args:
        start: the model.
        statistics: what is measured in each round.
        tuning: in each round.
        place: where.
        method: eigendamage, or one that removes channels.
        ratio: of each round.
        cap: of each round.
        rounds: how many.
        out: the folder of the run.
    """
    planning = {"method": method, "ratio": ratio, "cap": cap}
    check(planning)
    if method_named(method).removes != "channels" and method != "eigendamage":
        raise ValueError(f"method: rounds are of eigendamage or of methods that remove channels; got {method!r}")
    _prune(start, planning, statistics, tuning, place, False, rounds, out)


def _prune(
    start: Start,
    planning: dict[str, Any],
    statistics: Statistics,
    tuning: Tuning,
    place: Place,
    refit: bool,
    rounds: int,
    out: Path | None,
) -> None:
    source = start.source()
    training = tuning.training(source.data)
    cell = Pruning(
        source.dense,
        planning,
        training,
        examples=statistics.examples,
        labels=statistics.labels,
        refit=refit,
        rounds=rounds,
        seed=tuning.seed,
    )
    asked = "-".join(str(value) if key == "method" else f"{key}{value}" for key, value in planning.items())
    folder = out or RUNS / f"{start.label}-{asked}{f'-{rounds}rounds' if rounds > 1 else ''}"
    result = projects.prune_in(folder, source, cell, place.site(), _commands())
    _print_table(projects.summary_table(result))
    print(f"the run is in {folder}, its report is {folder / projects.REPORT}")


def reproduce(
    name: Annotated[Positional[str | None], arg(metavar="NAME")] = None,
    scale: Literal["small", "paper", "digits"] = "small",
    seeds: int | None = None,
    epochs: int | None = None,
    training_epochs: int | None = None,
    examples: int | None = None,
    networks: tuple[str, ...] = (),
    only: tuple[str, ...] = (),
    weights: Path | None = None,
    precision: Literal["float32", "bfloat16"] | None = None,
    runs: Path = RUNS / "cells",
    results: Path = Path("results"),
    from_results: tuple[Path, ...] = (),
    docs: Path | None = None,
    engine: Literal["serial", "ray"] = "serial",
    jobs: int = 1,
    address: str | None = None,
    gpus_per_cell: float = 0.0,
    *,
    place: Place,
) -> None:
    """Run an experiment of the paper, and draw its tables and figures from the results.

    Args:
        name: of the experiment; see `eigendamage list`.
        scale: small is for two CPU cores, paper has the paper's settings, digits shows within minutes that it works.
        seeds: how many, instead of the scale's.
        epochs: of fine-tuning, instead of the scale's.
        training_epochs: of dense networks, instead of the scale's.
        examples: for the statistics, instead of the scale's.
        networks: run only these.
        only: run only cells whose names match one of these patterns, such as 'cifar10-vgg19-*-ratio0.9-*'.
        weights: a file NETWORK_DATA.safetensors, or a folder of such files, instead of training.
        precision: instead of the scale's.
        runs: a folder for each cell; cells that experiments share are run once.
        results: the folder of NAME.json and NAME.html.
        from_results: draw from these files without running anything.
        docs: write results.md with its pictures here.
        engine: cells one after another, or on Ray.
        jobs: processes on this machine; with Ray, the CPUs of a local cluster.
        address: of an existing Ray cluster.
        gpus_per_cell: on Ray, such as 0.25 for four cells on a GPU.
        place: where.
    """
    files = list(from_results)
    if (name is None) == (not files):
        raise WrongUsage("name: give the name of an experiment, or --from-results, and not both")
    if name is not None:
        changes = Changes(seeds, epochs, training_epochs, examples, precision, networks, weights)
        for argument, folder in (("runs", runs), ("results", results), ("docs", docs or results)):
            require_folder(argument, folder)
        site = place.site(runs)
        how = Engine(engine, jobs, address, gpus_per_cell)
        files = [
            run_experiment(
                name,
                scale,
                changes,
                only,
                root=runs,
                data=site.data,
                results=results,
                device=site.device,
                engine=how,
                commands=_commands(),
                progress=site.progress,
            )
        ]
    for file in files:
        report = file.with_suffix(".html")
        write_report(file, report)
        print(f"the report is {report}, the results are {file}")
    if docs is not None:
        print(f"the page is {write_docs(files, docs)}")


def bench(out: Path = Path("bench.json"), quick: bool = False) -> None:
    """Measure against plain training passes.

    Args:
        out: the file of results.
        quick: one small network, to see that the benchmark runs.
    """
    benchmark.main(["--out", str(out), *(["--quick"] if quick else [])])


def demo(out: Path = Path("demo")) -> None:
    """Train, prune, fine-tune and compare a small network on digits.

    Args:
        out: where files go.
    """
    require_folder("out", out)
    demonstration.main(["--out", str(out)])


def list_all() -> None:
    """The methods, networks, data sets and experiments there are."""
    tables = [
        TableData("Methods", ["--method", "title", "removes"], [[key, m.title, m.removes] for key, m in METHODS.items()]),
        TableData("Networks", ["--model"], [[key] for key in NETWORKS]),
        TableData("Data sets", ["--data"], [[key] for key in DATA]),
        TableData("Experiments", ["reproduce", "what"], [[key, row.title] for key, row in EXPERIMENTS.items()]),
        TableData("Scales", ["--scale"], [[key] for key in SCALES]),
    ]
    for table in tables:
        _print_table(table)


COMMANDS: dict[str, Callable[..., None]] = {
    "train": train,
    "prune": prune,
    "finetune": finetune,
    "evaluate": evaluate,
    "iterate": iterate,
    "bench": bench,
    "reproduce": reproduce,
    "demo": demo,
    "list": list_all,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is 0, 1 for a failure, 2 for wrong usage, 130 after Ctrl-C."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    _GIVEN[:] = given
    try:
        with joined():
            tyro.extras.subcommand_cli_from_dict(
                COMMANDS, prog="eigendamage", description=__doc__, args=given, config=(OmitArgPrefixes,), sort_subcommands=False
            )
    except SystemExit as stop:  # tyro's, for --help and wrong usage; the demo's, for what is not installed
        if isinstance(stop.code, str):
            return _complain(stop.code)
        return DONE if stop.code is None else stop.code
    except WrongUsage as error:
        return _complain(str(error), WRONG)
    except (ValueError, TypeError, OSError, ImportError, CellsFailed) as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        goes_on = given[:1] not in (["bench"], ["evaluate"], ["demo"], ["list"])
        print(f"\nInterrupted.{' The same command goes on from where it stopped.' if goes_on else ''}", file=sys.stderr)
        return INTERRUPTED
    return DONE


_GIVEN: list[str] = []


def _commands() -> list[str]:
    return [shlex.join(["eigendamage", *_GIVEN])]


def _complain(message: str, code: int = FAILED) -> int:
    print(f"eigendamage: {message}", file=sys.stderr)
    return code


def _print_table(data: TableData) -> None:
    table = Table(title=data.title, title_justify="left")
    for header in data.header:
        table.add_column(header)
    for row in data.rows:
        table.add_row(*("–" if cell is None else str(cell) for cell in row))
    Console(highlight=False, width=None if os.isatty(1) else 120).print(table)


if __name__ == "__main__":
    sys.exit(main())

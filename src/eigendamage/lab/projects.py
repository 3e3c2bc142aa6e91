"""Runs in a folder each, as the command line makes them: train, prune, fine-tune, iterate, evaluate."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import nn

from eigendamage.checks import require_folder
from eigendamage.compress import Report
from eigendamage.cost import Cost
from eigendamage.figures import Code, Figure, Section, Series, TableData
from eigendamage.lab.cells import final_model, run, versions, write_json
from eigendamage.lab.folders import MODEL
from eigendamage.lab.runs import Score, Training
from eigendamage.lab.settings import Dense, Pruning, Site, as_data, checksum
from eigendamage.lab.steps import Content, cost_of, subject_of, with_weights
from eigendamage.lab.subjects import is_own, network_named
from eigendamage.lab.tables import percent
from eigendamage.plan_report import plan_section
from eigendamage.plans import Plan
from eigendamage.report import write_page
from eigendamage.storage import save

RUN, REPORT = "run.json", "report.html"


@dataclass(frozen=True)
class Source:
    """A model to start from: that of a run, or a user's own, with weights of a file where they do not come with it."""

    model: str
    data: str
    weights: Path | None = None

    def __post_init__(self) -> None:
        if self.weights is not None and not self.weights.is_file():
            raise FileNotFoundError(f"weights: there is no file {self.weights}")

    @classmethod
    def of(cls, folder: Path) -> Source:
        """The model that a run left behind."""
        record = folder / RUN
        if not record.is_file():
            raise FileNotFoundError(f"run: {folder} holds no run; `eigendamage train` makes one")
        content = _record(record)
        if not (folder / MODEL).is_file():
            raise FileNotFoundError(f"run: {folder} has not come to its end; the command that began it goes on with it")
        return cls(content["model"], content["data"], folder / MODEL)

    def load(self, site: Site) -> nn.Module:
        model = network_named(self.model, subject_of(self.data, site).classes, 0).to(site.device)
        return model if self.weights is None else with_weights(model, self.weights)

    @property
    def dense(self) -> Dense:
        if self.weights is None:
            return Dense(self.data, self.model)
        return Dense(self.data, self.model, weights=self.weights.name, sha256=checksum(self.weights))

    def site(self, site: Site) -> Site:
        return Site(site.root, site.data, self.weights.parent if self.weights else Path(), site.device, site.progress)


def _record(path: Path) -> Content:
    """What a run was begun with. Raises ValueError for a file of something else."""
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error})") from None
    if not isinstance(content, dict) or not {"kind", "model", "data", "settings"} <= content.keys():
        raise ValueError(f"{path} is not the record of a run")
    return content


def claim(folder: Path, kind: str, source: Source, settings: Mapping[str, Any], commands: Sequence[str]) -> None:
    """Make the folder that of this run. Raises ValueError where another one is in it that has come to something."""
    asked = json.loads(json.dumps({"kind": kind, "model": source.model, "data": source.data, "settings": settings}))
    require_folder("out", folder)
    path = folder / RUN
    if path.is_file():
        held = _record(path)
        differing = [key for key in asked if held.get(key) != asked[key]]
        if differing and [file for file in folder.iterdir() if file != path]:
            raise ValueError(f"out: {folder} holds another run (its {' and '.join(differing)} differ); give another --out")
        if not differing:
            return
    folder.mkdir(parents=True, exist_ok=True)
    write_json(path, {**asked, "versions": versions(), "commands": list(commands)})


def train_in(folder: Path, source: Source, training: Training, site: Site, commands: Sequence[str]) -> list[Content]:
    """Train a network, with fresh weights or from those of the source; the metrics of its epochs."""
    weights = checksum(source.weights) if source.weights else ""
    subject = subject_of(source.data, site)
    model = source.load(site) if source.weights else network_named(source.model, subject.classes, training.seed).to(site.device)
    claim(folder, "train", source, {"training": asdict(training), "weights": weights}, commands)
    return subject.tune(model, training, folder, None, site.progress)


def evaluate_run(source: Source, site: Site, precision: str = "float32") -> tuple[Score, Content]:
    subject, model = subject_of(source.data, site), source.load(site).eval()
    return subject.test(model, Training(precision=precision)), cost_of(model, subject.inputs())


def prune_in(folder: Path, source: Source, cell: Pruning, site: Site, commands: Sequence[str]) -> Content:
    """Prune, in one round or several, fine-tune and write the model, the result and its report."""
    place = source.site(site)
    claim(folder, "prune", source, as_data(cell), commands)
    result = run(cell, place, folder)
    save(final_model(cell, place, folder), folder / MODEL)
    write_page(folder / REPORT, *_report(result, cell, commands))
    return result


def _report(result: Content, cell: Pruning, commands: Sequence[str]) -> tuple[str, str, list[Section]]:
    rounds, dense = result["rounds"], result["dense"]
    table = summary_table(result)
    parts: list[Figure | TableData | str | Code] = [table]
    for number, entry in enumerate(rounds, 1):
        if entry["epochs"]:
            epochs = [float(row["epoch"]) for row in entry["epochs"]]
            curve = Series("test accuracy", epochs, [row["test_accuracy"] for row in entry["epochs"]])
            title = "Fine-tuning" if len(rounds) == 1 else f"Fine-tuning of round {number}"
            parts.append(Figure(title, "epoch", "test accuracy", [curve], percent_y=True))
    sections = [Section("What came of it", parts)]
    for number, entry in enumerate(rounds, 1):
        plan = Plan.from_json(json.dumps(entry["plan"]))
        before = dense if number == 1 else rounds[number - 2]
        dense_cost, cost = (Cost(found["params"], found["macs"]) for found in (before, entry))
        section = plan_section(plan, Report(dense_cost, cost, plan))
        sections.append(section if len(rounds) == 1 else Section(f"Round {number}: {section.title}", section.parts))
    sections.append(Section("Commands", [Code(list(commands))]))
    left = rounds[-1]["params"] / dense["params"], rounds[-1]["macs"] / dense["macs"]
    title = f"{'own model' if is_own(cell.dense.network) else cell.dense.network} on {cell.dense.data}, pruned"
    return title, f"{left[0]:.1%} of the parameters and {left[1]:.1%} of the multiply-accumulates are left.", sections


def summary_table(result: Content) -> TableData:
    """The dense network and each round."""
    dense, rounds = result["dense"], result["rounds"]
    rows: list[list[str | float | int | None]] = [
        ["dense", percent([dense["accuracy"]]), percent([dense["accuracy"]]), "100.0%", "100.0%", "1.00×"]
    ]
    for number, entry in enumerate(rounds, 1):
        rows.append(
            [
                "pruned" if len(rounds) == 1 else f"round {number}",
                percent([entry["before"]["accuracy"]]),
                percent([entry["last"]]) if "last" in entry else None,
                f"{entry['params'] / dense['params']:.1%}",
                f"{entry['macs'] / dense['macs']:.1%}",
                f"{entry['speedup']:.2f}×",
            ]
        )
    header = ["", "accuracy", "after fine-tuning", "parameters left", "MACs left", "faster"]
    return TableData("Accuracy on the test set, in percent, and cost", header, rows)

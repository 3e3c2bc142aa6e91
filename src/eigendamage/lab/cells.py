"""A cell is run: a complete resumable run in a folder of its own, which ends with its result as JSON."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch
from torch import nn

from eigendamage.files import write_text
from eigendamage.lab.fisher import fisher_blocks
from eigendamage.lab.folders import MODEL
from eigendamage.lab.settings import Cell, Dense, Fisher, Pruning, Site, as_data, name_of
from eigendamage.lab.steps import (
    Content,
    cost_of,
    dense_model,
    described,
    folder_of,
    scores,
    smaller,
    subject_of,
    untrained,
)
from eigendamage.lab.subjects import Prepared
from eigendamage.storage import load, save

RESULT, PRUNED, TUNING = "result.json", "pruned.safetensors", "finetuning"


def run(cell: Cell, site: Site, folder: Path | None = None) -> Content:
    """The result of a cell, from its folder where it has been run before; otherwise it goes on from where it stopped.

    The folder is named after the cell unless another one is given.

    Raises:
        FileNotFoundError: The dense network of the cell has not been trained yet.
    """
    folder = folder or site.root / name_of(cell)
    found = result_in(folder, cell)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        match cell:
            case Dense():
                content = _train(cell, site)
            case Pruning():
                content = _prune(cell, site, folder)
            case Fisher():
                subject = subject_of(cell.data, site)
                assert isinstance(subject, Prepared)
                content = fisher_blocks(cell, subject.data.to("cpu"))
        found = {"cell": as_data(cell), **content, "versions": versions(), "command": command()}
        write_json(folder / RESULT, found)
    return found


def result_in(folder: Path, cell: Cell) -> Content | None:
    """The result that a folder holds, if it is of this very configuration."""
    path = folder / RESULT
    if not path.exists():
        return None
    found: Content = json.loads(path.read_text())
    return found if found.get("cell") == as_data(cell) else None


def write_json(path: Path, content: Content) -> None:
    write_text(path, json.dumps(content, indent=1) + "\n")


def versions() -> dict[str, str]:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"python": platform.python_version(), "torch": torch.__version__, "device": device}


def command() -> str:
    """How this program was called, without the folder it lies in."""
    return " ".join([Path(sys.argv[0]).name, *sys.argv[1:]])


# --- the kinds of cells -----------------------------------------------------------------------------------------------------


def _train(dense: Dense, site: Site) -> Content:
    subject = subject_of(dense.data, site)
    if dense.training is None:
        model, epochs = dense_model(dense, site), []
    else:
        model = untrained(dense, site)
        epochs = subject.tune(model, dense.training, folder_of(dense, site), None, site.progress)
    return {**cost_of(model, subject.inputs()), "epochs": epochs}


def _prune(cell: Pruning, site: Site, folder: Path) -> Content:
    dense = dense_model(cell.dense, site)
    cost = cost_of(dense, subject_of(cell.dense.data, site).inputs())
    model, rounds = dense, []
    for number in range(1, cell.rounds + 1):
        where = folder if cell.rounds == 1 else folder / f"round{number}"
        where.mkdir(exist_ok=True)
        model, content = _round(model, dense, cell, site, where)
        rounds.append(content)
    return {"dense": {**cost, **scores(dense, cell, site)}, "rounds": rounds}


def _round(model: nn.Module, dense: nn.Module, cell: Pruning, site: Site, folder: Path) -> tuple[nn.Module, Content]:
    """One round: the fine-tuned model and what there is to say of it. What a folder holds already is not made again."""
    pruned, note = folder / PRUNED, folder / "pruned.json"
    if not (pruned.exists() and note.exists()):
        small, chosen = smaller(model, cell, site)
        save(small, pruned)
        write_json(note, described(small, dense, cell, site, chosen))
    small = load(dense, pruned)
    content: Content = json.loads(note.read_text())
    subject = subject_of(cell.dense.data, site)
    if not cell.finetuning.epochs:
        return small.eval(), content | {"epochs": []}
    teacher = dense if cell.finetuning.distill else None
    epochs = subject.tune(small, cell.finetuning, folder / TUNING, teacher, site.progress)
    best = max(row["test_accuracy"] for row in epochs)
    return small.eval(), content | {"epochs": epochs, "last": epochs[-1]["test_accuracy"], "best": best}


def final_model(cell: Pruning, site: Site, folder: Path) -> nn.Module:
    """The model that a finished cell left in its folder."""
    last = folder if cell.rounds == 1 else folder / f"round{cell.rounds}"
    return load(dense_model(cell.dense, site), last / TUNING / MODEL if cell.finetuning.epochs else last / PRUNED)

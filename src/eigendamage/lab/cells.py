"""A cell is run: a complete resumable run in a folder of its own, which ends with its result as JSON."""

from __future__ import annotations

import json
import platform
import sys
from pathlib import Path

import torch
from torch import nn

from eigendamage.cost import count
from eigendamage.files import write_text
from eigendamage.lab.fisher import fisher_blocks
from eigendamage.lab.runs import train
from eigendamage.lab.settings import Cell, Dense, Fisher, Pruning, Site, as_data, name_of
from eigendamage.lab.steps import (
    Content,
    data_of,
    dense_model,
    described,
    folder_of,
    inputs_of,
    judge,
    scores,
    smaller,
    untrained,
)
from eigendamage.storage import load, save

RESULT = "result.json"


def run(cell: Cell, site: Site) -> Content:
    """The result of a cell, from its folder where it has been run before; otherwise it goes on from where it stopped.

    Raises:
        FileNotFoundError: The dense network of the cell has not been trained yet.
    """
    folder = site.root / name_of(cell)
    found = result_in(folder, cell)
    if found is None:
        folder.mkdir(parents=True, exist_ok=True)
        match cell:
            case Dense():
                content = _train(cell, site)
            case Pruning():
                content = _prune(cell, site, folder)
            case Fisher():
                content = fisher_blocks(cell, data_of(cell.data, site))
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
    data = data_of(dense.data, site)
    model = untrained(dense, data, site)
    if dense.training is None:
        model, epochs = dense_model(dense, site), []
    else:
        epochs = train(model, data, dense.training, folder_of(dense, site), progress=site.progress)
    return {**_cost(model, site, dense), "epochs": epochs}


def _cost(model: nn.Module, site: Site, dense: Dense) -> Content:
    cost = count(model, inputs_of(data_of(dense.data, site))[:1])
    return {"params": cost.params, "macs": cost.macs}


def _prune(cell: Pruning, site: Site, folder: Path) -> Content:
    dense = dense_model(cell.dense, site)
    model, rounds = dense, []
    for number in range(1, cell.rounds + 1):
        where = folder if cell.rounds == 1 else folder / f"round{number}"
        where.mkdir(exist_ok=True)
        model, content = _round(model, dense, cell, site, where)
        rounds.append(content)
    return {"dense": {**_cost(dense, site, cell.dense), **scores(dense, cell, site)}, "rounds": rounds}


def _round(model: nn.Module, dense: nn.Module, cell: Pruning, site: Site, folder: Path) -> tuple[nn.Module, Content]:
    """One round: the fine-tuned model and what there is to say of it. What a folder holds already is not made again."""
    pruned, note = folder / "pruned.safetensors", folder / "pruned.json"
    if not note.exists():
        small, chosen = smaller(model, cell, site, str(folder) if cell.rounds > 1 else name_of(cell.dense))
        save(small, pruned)
        write_json(note, described(small, dense, cell, site, chosen))
    small = load(dense, pruned)
    content: Content = json.loads(note.read_text())
    data = data_of(cell.dense.data, site)
    if not cell.finetuning.epochs:
        return small.eval(), content | {"epochs": []}
    epochs = train(small, data, cell.finetuning, folder / "finetuning", progress=site.progress)
    small.eval()
    last = judge(small, data.test, cell)
    best = max(row["test_accuracy"] for row in epochs)
    return small, content | {"epochs": epochs, "last": last.accuracy, "best": best}

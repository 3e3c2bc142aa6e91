"""Experiments: which cells they list, and what is drawn from results alone, with the paper's numbers beside."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eigendamage.figures import Figure, TableData
from eigendamage.lab.engine import CellsFailed
from eigendamage.lab.experiments import EXPERIMENTS, sections_of
from eigendamage.lab.grids import TEN
from eigendamage.lab.published import dense_accuracy, published
from eigendamage.lab.reproduce import reproduce, write_docs, write_report
from eigendamage.lab.results import read_results, write_results
from eigendamage.lab.scales import SCALES, Changes, scaled
from eigendamage.lab.settings import Fisher, Pruning, as_data, name_of

pytest.importorskip("sklearn")

SIZES = {
    "small": {"table1": 2 * 6 * 3 * 4, "loss": 7 * 10 * 2, "iterative": 3 * 2, "fisher": 1, "curves": 6},
    "paper": {
        "table1": 2 * 6 * 5 * 4 * 2,
        "table2": 6 * 5,
        "table3": 3 * 6 * 5 * 2,
        "table7": 4 * 6 * 5,
        "iterative": 5 * 5 * 4,
    },
}


def result_of(cell: Pruning, accuracy: float = 0.9) -> dict[str, Any]:
    """What a run of the cell could have left."""
    before = {"train_loss": 0.5, "accuracy": 0.5, "loss": 0.6}
    epochs = [
        {"epoch": n + 1, "train_loss": 0.4 / (n + 1), "test_accuracy": accuracy, "test_loss": 0.3, "seconds": 1.0}
        for n in range(2)
    ]
    kept = 1 - cell.planning.get("ratio", 0.5) / 2
    ends = [
        {
            "params": int(1000 * kept**n),
            "macs": int(5000 * kept**n),
            "before": before,
            "layers": {"conv1": 0.5, "conv2": 0.25},
            "plan": {},
            "speedup": 1.5,
            "predicted": 0.1,
            "epochs": epochs,
            "last": accuracy,
            "best": accuracy + 0.01,
        }
        for n in range(1, cell.rounds + 1)
    ]
    dense = {"params": 1000, "macs": 5000, **before, "accuracy": 0.93}
    return {"cell": as_data(cell), "dense": dense, "rounds": ends, "versions": {"device": "cpu"}, "command": "test"}


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_lists_cells_and_draws_them(name: str, scale: str, tmp_path: Path) -> None:
    cells = EXPERIMENTS[name].cells(scaled(scale))
    assert len({name_of(cell) for cell in cells}) == len(cells) == SIZES.get(scale, {}).get(name, len(cells))
    if scale == "digits":
        return
    results = [result_of(cell) for cell in cells if isinstance(cell, Pruning)]
    if name == "fisher":
        matrix = {"share": 0.25, "matrix": [[1.0, 0.5], [0.5, 1.0]]}
        results = [{"cell": as_data(Fisher()), "parameters": matrix, "kfe": matrix, "versions": {"device": "cpu"}}]
    path = tmp_path / f"{name}.json"
    write_results(path, name, ["eigendamage reproduce"], results)
    write_report(path, tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text()
    assert EXPERIMENTS[name].title in page and "eigendamage reproduce" in page
    parts = [part for section in sections_of(name, read_results(path)["cells"]) for part in section.parts]
    assert any(isinstance(part, Figure | TableData) for part in parts)


def test_cells_are_shared_between_experiments() -> None:
    scale = scaled("paper")
    names = {
        key: {name_of(cell) for cell in EXPERIMENTS[key].cells(scale)} for key in ("layers", "curves", "tradeoff", "table1")
    }
    assert names["curves"] < names["layers"] < names["tradeoff"]
    assert names["table1"] & names["tradeoff"]


def test_the_paper_s_settings() -> None:
    vgg, *_ = EXPERIMENTS["table1"].cells(scaled("paper"))
    resnet = next(cell for cell in EXPERIMENTS["table5"].cells(scaled("paper")) if isinstance(cell, Pruning))
    assert isinstance(vgg, Pruning) and vgg.dense.training is not None
    assert (vgg.finetuning.epochs, vgg.finetuning.learning_rate, vgg.finetuning.weight_decay) == (150, 1e-3, 1e-4)
    assert (vgg.dense.training.epochs, vgg.dense.training.learning_rate, vgg.dense.training.weight_decay) == (150, 0.1, 2e-4)
    assert (vgg.finetuning.batch_size, resnet.finetuning.batch_size) == (128, 64)
    tiny = next(cell for cell in EXPERIMENTS["table2"].cells(scaled("paper")) if isinstance(cell, Pruning))
    assert tiny.dense.training is not None and tiny.dense.training.epochs == 300 and tiny.dense.training.l1 > 0
    assert len(TEN) == 10


def test_the_paper_s_numbers() -> None:
    row = published()["VGG19", False, "cifar100", "eigendamage", 0.9]
    assert (row.accuracy, row.weights, row.flops) == ((65.18, 0.1), (97.31, 0.01), (88.63, 0.12))
    assert published()["VGG19", True, "tiny-imagenet", "slimming", 0.8].accuracy is None
    assert dense_accuracy("ResNet32", False, "cifar10") == 95.30
    assert len(published()) == 260
    for key in published():
        assert 0 < key[4] < 1


def test_a_table_has_means_deviations_and_the_paper_s_numbers() -> None:
    scale = scaled("small", Changes(seeds=2))
    cells = [cell for cell in EXPERIMENTS["table1"].cells(scale) if isinstance(cell, Pruning)]
    cells = [cell for cell in cells if cell.dense.network == "resnet20" and cell.planning["ratio"] == 0.9]
    better = {"eigendamage": 0.02}
    results = [result_of(cell, 0.9 + better.get(cell.planning["method"], 0.0) + cell.seed / 100) for cell in cells]
    (section,) = sections_of("table1", results)
    (table,) = section.parts
    assert isinstance(table, TableData)
    row = next(row for row in table.rows if row[0] == "EigenDamage")
    assert row[1] == "92.50 ± 0.71"
    assert table.header[2] == "paper (ResNet32)" and row[2] == "93.05 ± 0.23"
    assert table.bold == {(5, 1)}
    assert "Seeds: 2" in table.note and "95.30" in table.note


def test_files_of_results_are_merged(tmp_path: Path) -> None:
    one, two = (cell for cell in EXPERIMENTS["curves"].cells(scaled("small"))[:2] if isinstance(cell, Pruning))
    path = tmp_path / "new" / "curves.json"
    write_results(path, "curves", ["first"], [result_of(one), result_of(two)])
    again = replace(one, examples=7)
    content = write_results(path, "curves", ["second"], [result_of(again)])
    assert content["commands"] == ["first", "second"]
    assert [cell["cell"]["examples"] for cell in content["cells"]] == [7, 2000]
    assert read_results(path) == json.loads(json.dumps(content))
    assert "plan" not in content["cells"][0]["rounds"][0]


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"experiment": "x", "cells": [{"cell": {"kind": "cake"}}]}'])
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="not"):
        read_results(path)


def test_from_a_command_to_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = EXPERIMENTS["curves"]
    monkeypatch.setitem(EXPERIMENTS, "curves", replace(whole, cells=lambda scale: whole.cells(scale)[3:4]))
    changes = Changes(seeds=1, epochs=1, training_epochs=1, examples=40, networks=("resnet20",))
    place = {"root": tmp_path / "runs", "data": tmp_path / "data", "results": tmp_path / "results", "progress": False}
    path = reproduce("curves", "digits", changes, commands=["eigendamage reproduce curves"], **place)
    before = path.read_bytes()
    assert reproduce("curves", "digits", changes, commands=["eigendamage reproduce curves"], **place).read_bytes() == before
    page = write_docs([path], tmp_path / "docs").read_text()
    pictures = re.findall(r"\((\S+\.svg)\)", page)
    assert len(pictures) == 2 and all((tmp_path / "docs" / name).read_text().startswith("<svg") for name in pictures)
    assert "eigendamage reproduce curves" in page and str(tmp_path) not in page


def test_failures_keep_the_results_of_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*arguments: Any) -> None:
        raise CellsFailed("1 of 2 cells failed", [])

    monkeypatch.setattr("eigendamage.lab.reproduce.run_cells", fail)
    with pytest.raises(CellsFailed):
        reproduce("fisher", "digits", root=tmp_path, results=tmp_path)
    assert read_results(tmp_path / "fisher.json")["cells"] == []


@pytest.mark.parametrize(
    ("scale", "changes", "message"),
    [
        ("huge", Changes(), "scale: must be one of 'small', 'paper', 'digits'"),
        ("small", Changes(seeds=0), "seeds: must be at least 1"),
        ("small", Changes(networks=("alexnet",)), "networks: must be one of"),
        ("small", Changes(weights=Path("nowhere")), "weights: there is no nowhere"),
        ("small", Changes(weights=Path(__file__)), "weights, the name of the file"),
        ("small", Changes(precision="int4"), "precision: must be one of"),
    ],
)
def test_changes_that_do_not_fit(scale: str, changes: Changes, message: str) -> None:
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        scaled(scale, changes)


@pytest.mark.parametrize("name", ["budgets", "promises", "rates"])
def test_budgets_run_only_the_networks_asked_for(name: str) -> None:
    cells = EXPERIMENTS[name].cells(scaled("small", Changes(networks=("resnet32",))))
    assert {cell.dense.network for cell in cells if isinstance(cell, Pruning)} == {"resnet32"}
    assert not EXPERIMENTS[name].cells(scaled("small", Changes(networks=("vgg19-thin",))))


def test_tables_of_part_of_the_runs_have_gaps() -> None:
    cells = [cell for cell in EXPERIMENTS["budgets"].cells(scaled("small")) if isinstance(cell, Pruning)]
    untuned = [result_of(cell) for cell in cells if not cell.finetuning.epochs]
    tables = [part for section in sections_of("budgets", untuned) for part in section.parts if isinstance(part, TableData)]
    assert all(table.header == ["method", "pruned", "refitted", "MACs left", "weights left"] for table in tables)
    assert all(row[2] == "–" for table in tables for row in table.rows)
    some = [result_of(cell) for cell in cells if cell.finetuning.epochs and cell.finetuning.learning_rate > 0.002][:1]
    ((table,),) = [section.parts[1:] for section in sections_of("budgets", [*untuned[:1], *some])]
    assert isinstance(table, TableData) and table.header[3] == "2 epochs at 0.005" and "–" not in table.rows[0]
    one_seed = [result_of(cell) for cell in cells if cell.seed == 0 and cell.finetuning.epochs]
    tables = [part for section in sections_of("budgets", one_seed) for part in section.parts if isinstance(part, TableData)]
    assert all("±" not in entry for table in tables for row in table.rows for entry in row)  # at two rates, of one seed
    rates = EXPERIMENTS["rates"].cells(scaled("small"))
    (section,) = sections_of("rates", [result_of(rates[0]), result_of(rates[-1])])  # type: ignore[arg-type]
    table = section.parts[0]
    assert isinstance(table, TableData) and [row.count("–") for row in table.rows] == [1, 1]

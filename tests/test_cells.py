"""Cells: complete runs from plain data, not run twice, interrupted and gone on with."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import eigendamage as ed
from eigendamage.lab import cells, runs, steps
from eigendamage.lab.cells import final_model, run
from eigendamage.lab.networks import build
from eigendamage.lab.runs import Training
from eigendamage.lab.settings import Cell, Dense, Fisher, Pruning, Site, as_data, from_data, given, name_of

pytest.importorskip("sklearn")

TRAINING = Training(epochs=2, learning_rate=0.05, batch_size=64)
TUNING = Training(epochs=2, learning_rate=0.01, batch_size=64)
DENSE = Dense("digits", "resnet20", TRAINING)
PRUNING = Pruning(DENSE, {"method": "eigendamage", "ratio": 0.6}, TUNING, examples=100, judged=100)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Site:
    place = Site(tmp_path_factory.mktemp("runs"), progress=False)
    run(DENSE, place)
    return place


@pytest.fixture(scope="module")
def result(site: Site) -> dict[str, Any]:
    return run(PRUNING, site)


def elsewhere(site: Site, folder: Path) -> Site:
    """The same dense network, and none of the other runs."""
    (folder / name_of(DENSE)).symlink_to(site.root / name_of(DENSE))
    return replace(site, root=folder)


def without_times(content: Any) -> Any:
    """All that must be the same however often a run was interrupted."""
    if isinstance(content, dict):
        return {key: without_times(v) for key, v in content.items() if key not in ("seconds", "speedup", "command")}
    return [without_times(entry) for entry in content] if isinstance(content, list) else content


@pytest.mark.parametrize("cell", [DENSE, PRUNING, Fisher(), replace(PRUNING, planning={"method": "cp", "ranks": 4}, rounds=3)])
def test_cells_are_plain_data(cell: Cell) -> None:
    assert from_data(json.loads(json.dumps(as_data(cell)))) == cell


def test_every_setting_is_in_the_name() -> None:
    others = [replace(PRUNING, seed=1), replace(PRUNING, examples=99), replace(PRUNING, finetuning=TRAINING)]
    assert len({name_of(cell) for cell in (PRUNING, *others)}) == 4
    assert name_of(PRUNING).startswith("digits-resnet20-eigendamage-ratio0.6-lr0.01-seed0-")


@pytest.mark.parametrize("content", [{}, {"kind": "cake"}, {"kind": "fisher", "sugar": 1}])
def test_other_data_is_refused(content: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not the configuration of a run"):
        from_data(content)


def test_a_result_says_what_became_of_the_network(site: Site, result: dict[str, Any]) -> None:
    (end,) = result["rounds"]
    assert result["cell"] == as_data(PRUNING)
    assert 0 < end["params"] < result["dense"]["params"]
    assert 0 < end["macs"] < result["dense"]["macs"]
    assert [row["epoch"] for row in end["epochs"]] == [1, 2]
    assert end["last"] == end["epochs"][-1]["test_accuracy"] <= end["best"] <= 1
    assert end["before"]["train_loss"] > result["dense"]["train_loss"]
    assert set(end["layers"]) == set(ed.Plan.from_json(json.dumps(end["plan"])).layers)
    assert end["speedup"] > 0
    small = final_model(PRUNING, site, site.root / name_of(PRUNING))
    assert ed.count(small, torch.zeros(1, 3, 16, 16)).params == end["params"]
    assert steps.subject_of("digits", site).test(small, TUNING).accuracy == end["last"]


def test_a_cell_is_run_once(site: Site, result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cells, "_prune", lambda *_: pytest.fail("run again"))
    assert run(PRUNING, site) == json.loads(json.dumps(result))


@pytest.mark.parametrize("epoch", [1, 2])
def test_an_interrupted_cell_comes_to_the_same_result(
    site: Site, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, epoch: int
) -> None:
    place = elsewhere(site, tmp_path)
    write = runs._Journal.__call__

    def interrupted(journal: Any, at: Any, model: torch.nn.Module) -> None:
        if at.number == epoch:
            raise KeyboardInterrupt
        write(journal, at, model)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(runs._Journal, "__call__", interrupted)
        run(PRUNING, place)
    assert not (tmp_path / name_of(PRUNING) / "result.json").exists()
    monkeypatch.setattr(cells, "smaller", lambda *_: pytest.fail("pruned again"))
    assert without_times(run(PRUNING, place)) == without_times(result)


def test_rounds_go_on_where_they_stopped(site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = replace(TUNING, epochs=1)
    planning = {"method": "kron-obd", "ratio": 0.5, "cap": 0.5}
    cell = Pruning(DENSE, planning, tuning, examples=60, judged=60, rounds=2)
    whole = run(cell, site)
    first, second = whole["rounds"]
    assert second["params"] < first["params"] < whole["dense"]["params"]
    place, made = elsewhere(site, tmp_path), []

    def once(*arguments: Any) -> Any:
        if made:
            raise KeyboardInterrupt
        made.append(True)
        return steps.smaller(*arguments)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(cells, "smaller", once)
        run(cell, place)
    assert without_times(run(cell, place)) == without_times(whole)
    small = final_model(cell, place, place.root / name_of(cell))
    assert ed.count(small, torch.zeros(1, 3, 16, 16)).params == second["params"]


def test_without_fine_tuning_and_with_given_ranks(site: Site) -> None:
    cell = Pruning(DENSE, {"method": "cp", "ranks": 4}, replace(TUNING, epochs=0), examples=60, judged=60)
    (end,) = run(cell, site)["rounds"]
    assert end["epochs"] == [] and "last" not in end


def test_given_weights(tmp_path: Path) -> None:
    state = build("resnet20", 10).state_dict()
    path = tmp_path / "resnet20_digits.safetensors"
    save_file({name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}, path)
    dense = given("digits", "resnet20", path)
    place = Site(tmp_path / "runs", weights=tmp_path, progress=False)
    assert str(tmp_path) not in json.dumps(as_data(dense))
    loaded = steps.dense_model(dense, place)
    assert all(torch.equal(value, state[name]) for name, value in loaded.state_dict().items())
    with pytest.raises(ValueError, match="does not fit the network"):
        steps.dense_model(replace(dense, network="resnet32"), place)
    save_file({"other": torch.zeros(1)}, path)
    with pytest.raises(ValueError, match="checksum"):
        steps.dense_model(dense, place)
    path.unlink()
    with pytest.raises(FileNotFoundError, match="no such file of weights"):
        steps.dense_model(dense, place)


def test_the_fisher_is_more_diagonal_in_the_kfe(tmp_path: Path) -> None:
    found = run(Fisher(width=6), Site(tmp_path, progress=False))
    assert found["kfe"]["share"] < found["parameters"]["share"] / 2
    matrix = torch.tensor(found["kfe"]["matrix"])
    assert matrix.shape == (36, 36)
    assert torch.equal(matrix, matrix.T)
    assert set(matrix.diagonal().tolist()) <= {0.0, 1.0}


def test_statistics_on_disk_are_those_of_the_weights(tmp_path: Path) -> None:
    """Measured once for the same weights; other weights under the same name are measured anew."""
    site = Site(tmp_path, progress=False)
    cell = Pruning(DENSE, {"macs": 0.5}, replace(TUNING, epochs=0), examples=8)

    def statistics(seed: int) -> torch.Tensor:
        torch.manual_seed(seed)
        layers = [nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 10)]
        steps._LAST.clear()
        patches = steps.measured(nn.Sequential(*layers).eval(), cell, site)["2"].patches
        assert patches is not None
        return patches

    first, other, again = (statistics(seed) for seed in (0, 1, 0))
    assert len(list(tmp_path.glob("statistics-*"))) == 2
    assert torch.equal(first, again) and not torch.equal(first, other)

"""Cells one after another, in processes and on Ray, where a worker is killed in the middle of one."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_cells import without_times

from eigendamage.lab import engine
from eigendamage.lab.engine import CellsFailed, Engine, on_ray, run_cells, run_data
from eigendamage.lab.runs import Training
from eigendamage.lab.settings import Dense, Fisher, Pruning, Site, as_data, name_of

pytest.importorskip("sklearn")

TRAINING = Training(epochs=1, learning_rate=0.05, batch_size=64)
DENSE = Dense("digits", "resnet20", TRAINING)
PRUNING = Pruning(DENSE, {"method": "kron-obd", "ratio": 0.5}, replace(TRAINING, epochs=0), examples=60, judged=60)
CELLS = [PRUNING, replace(PRUNING, planning={"method": "kron-obd", "ratio": 0.7})]
BAD = replace(PRUNING, planning={"method": "kron-obd", "ratio": 1.5})


def test_dense_networks_are_trained_once_and_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []

    def note(content: dict[str, Any], site: Site) -> dict[str, Any]:
        order.append(content["kind"])
        return run_data(content, site)

    monkeypatch.setattr(engine, "run_data", note)
    site = Site(tmp_path, progress=False)
    results = run_cells(CELLS, site)
    assert order == ["dense", "pruning", "pruning"]
    assert [result["cell"] for result in results] == [as_data(cell) for cell in CELLS]
    assert run_cells(CELLS, site) == results
    assert len(order) == 3


def test_a_failed_cell_leaves_the_others_their_results(tmp_path: Path) -> None:
    with pytest.raises(CellsFailed, match=r"(?s)1 of 4 cells failed.*ratio1.5.*ratio must|ratio: must") as caught:
        run_cells([CELLS[0], BAD, CELLS[1]], Site(tmp_path, progress=False))
    assert [result["cell"] for result in caught.value.results] == [as_data(cell) for cell in CELLS]


def test_a_dense_network_that_fails_keeps_nothing_else_from_running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = replace(DENSE, training=replace(TRAINING, seed=1))

    def run_all_but_one(content: dict[str, Any], site: Site) -> dict[str, Any]:
        if content == as_data(broken):
            raise ValueError("it fell over")
        return run_data(content, site)

    monkeypatch.setattr(engine, "run_data", run_all_but_one)
    with pytest.raises(CellsFailed, match=r"(?s)1 of 4 cells failed:\ndigits-resnet20-\w+: it fell over$") as caught:
        run_cells([replace(PRUNING, dense=broken), PRUNING], Site(tmp_path, progress=False))
    assert [result["cell"] for result in caught.value.results] == [as_data(PRUNING)]


def test_processes(tmp_path: Path) -> None:
    site = Site(tmp_path, progress=False)
    cells = [Fisher(epochs=1, width=2), Fisher(epochs=1, width=3)]
    results = run_cells(cells, site, Engine(jobs=2))
    assert [result["cell"] for result in results] == [as_data(cell) for cell in cells]


@pytest.mark.parametrize("arguments", [{"name": "bicycle"}, {"jobs": 0}])
def test_bad_engines(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="must be"):
        Engine(**arguments)


def test_a_killed_worker_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    dense = Dense("digits", "resnet20", replace(TRAINING, epochs=3))
    whole = run_cells([dense], Site(tmp_path / "whole", progress=False))
    killed, resumed = tmp_path / "killed", tmp_path / "resumed"

    def run_and_be_killed(content: dict[str, Any], site: Site) -> dict[str, Any]:
        from eigendamage import checkpoints
        from eigendamage.lab.engine import run_data

        write, resume = checkpoints.write, checkpoints.resume

        def write_and_die(path: Path, *arguments: Any) -> None:
            write(path, *arguments)
            if not killed.exists():
                killed.touch()
                os.kill(os.getpid(), signal.SIGKILL)

        def note(*arguments: Any) -> Any:
            rows = resume(*arguments)
            if rows:
                resumed.write_text(str(len(rows)))
            return rows

        checkpoints.write, checkpoints.resume = write_and_die, note
        try:
            return run_data(content, site)
        finally:
            checkpoints.write, checkpoints.resume = write, resume

    site = Site(tmp_path / "ray", progress=False)
    outcomes = dict(on_ray(run_and_be_killed, {name_of(dense): as_data(dense)}, site, Engine("ray")))
    assert killed.exists()
    assert resumed.read_text() == "1"
    assert without_times(outcomes[name_of(dense)]) == without_times(whole[0])

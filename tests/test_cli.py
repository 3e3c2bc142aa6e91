"""The command line: what it writes, its exit codes, errors in a line, and going on after Ctrl-C."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import eigendamage as ed

pytest.importorskip("sklearn")
pytest.importorskip("tyro")

from eigendamage.cli import COMMANDS, main
from eigendamage.lab.networks import build

OWN = """
import torch
from torch.utils.data import DataLoader, TensorDataset

def network():
    torch.manual_seed(0)
    layers = [torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Conv2d(8, 8, 3), torch.nn.ReLU(), torch.nn.Flatten()]
    return torch.nn.Sequential(*layers, torch.nn.Linear(32, 3))

def loaders():
    x = torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(0))
    data = TensorDataset(x, (x.mean((1, 2, 3)) > 0).long())
    return DataLoader(data, 20), DataLoader(data, 30)

def nothing():
    return None

def fails():
    raise RuntimeError("no such thing\\nand more")

def needs(argument):
    return None

def without_parameters():
    return torch.nn.Flatten()

def empty():
    return [], []

def labelled(labels):
    batches = [(torch.zeros(4, 1, 6, 6), labels)] * 2
    return batches, batches

def real_labels():
    return labelled(torch.zeros(4))

def labels_out_of_range():
    return labelled(torch.tensor([0, 1, 2, 7]))
"""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained run."""
    folder = tmp_path_factory.mktemp("work")
    before = os.getcwd()
    os.chdir(folder)
    try:
        assert main(["train", "--epochs", "2", "--quiet"]) == 0
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def inside(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(work)
    (work / "own_things.py").write_text(OWN)
    (work / "broken.py").write_text("def f(:\n")
    (work / "raising.py").write_text("\n1 / 0\n")
    (work / "lacking.py").write_text("\n\nimport not_installed\n")
    (work / "bytes.json").write_bytes(b"\xff")
    (work / "odd.json").write_text('{"experiment": "table1", "commands": [], "cells": [{"cell": {"kind": "odd"}}]}')
    (work / "bare.json").write_text('{"experiment": "table1", "cells": []}')
    for name, content in (("damaged", "{"), ("foreign", "[]")):
        (work / name).mkdir(exist_ok=True)
        (work / name / "run.json").write_text(content)
    monkeypatch.syspath_prepend(work)


@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*([command] if command else []), "--help"]) == 0
    assert "usage: eigendamage" in capsys.readouterr().out


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in ("kron-obs", "preresnet29", "tiny-imagenet", "table7", "paper"))


def test_prune_within_a_budget_evaluate_and_finetune(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prune", "--macs", "0.5", "--epochs", "1", "--examples", "100", "--quiet"]) == 0
    folder = work / "runs" / "digits-resnet20-macs0.5"
    assert "after fine-tuning" in capsys.readouterr().out
    result = json.loads((folder / "result.json").read_text())
    assert result["rounds"][0]["macs"] <= 0.5 * result["dense"]["macs"]
    assert "eigendamage prune --macs 0.5" in (folder / "report.html").read_text()
    ed.load(build("resnet20", 10), folder / "model.safetensors")
    assert main(["evaluate", "--run", str(folder), "--quiet"]) == 0
    shown = capsys.readouterr().out
    assert f"accuracy {result['rounds'][0]['last']:.2%}" in shown and f"{result['rounds'][0]['macs']} MACs" in shown
    assert main(["finetune", "--run", str(folder), "--epochs", "1", "--quiet"]) == 0
    assert (work / "runs" / "digits-resnet20-macs0.5-finetuned" / "model.safetensors").is_file()


def test_iterate(work: Path) -> None:
    arguments = ["--rounds", "2", "--method", "kron-obd", "--epochs", "0", "--examples", "50", "--quiet", "--out", "it"]
    assert main(["iterate", *arguments]) == 0
    assert len(json.loads((work / "it" / "result.json").read_text())["rounds"]) == 2
    assert "Round 2" in (work / "it" / "report.html").read_text()


def test_a_user_s_own_model_and_data(work: Path) -> None:
    own = ["--model", "own_things:network", "--data", "own_things:loaders"]
    assert main(["prune", *own, "--macs", "0.6", "--epochs", "2", "--quiet", "--out", "own"]) == 0
    result = json.loads((work / "own" / "result.json").read_text())
    assert len(result["rounds"][0]["epochs"]) == 2
    assert main(["evaluate", "--run", "own", "--quiet"]) == 0


def test_reproduce_and_draw_again(work: Path) -> None:
    assert main(["reproduce", "fisher", "--scale", "digits", "--quiet"]) == 0
    page = (work / "results" / "fisher.html").read_bytes()
    (work / "results" / "fisher.html").unlink()
    assert main(["reproduce", "--from-results", "results/fisher.json", "--docs", "docs"]) == 0
    assert (work / "results" / "fisher.html").read_bytes() == page
    assert (work / "docs" / "fisher-1.svg").is_file() and (work / "docs" / "results.md").is_file()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("", 2, "Missing subcommand"),
        ("fly", 2, "fly"),
        ("prune --bogus", 2, "--bogus"),
        ("prune", 2, "how small?"),
        ("prune --macs lots", 2, "lots"),
        ("prune --ratio 0.5", 2, "need a --method"),
        ("prune --macs 0.5 --ratio 0.5 --method eigendamage", 2, "and not several"),
        ("prune --method eigendamage --ranks 0.5", 2, "are for cp"),
        ("prune --macs 0.5 --data digits", 2, "go with --model"),
        ("prune --macs 0.5 --model own_things:network", 2, "--model needs --data"),
        ("prune --macs 0.5 --model resnet20 --data digits", 2, "needs --weights"),
        ("reproduce", 2, "give the name of an experiment"),
        ("prune --macs 0.5 --run nowhere", 1, "nowhere holds no run"),
        ("prune --macs 0.5 --run damaged", 1, "run.json is not JSON"),
        ("prune --macs 0.5 --run foreign", 1, "run.json is not the record of a run"),
        ("prune --macs 1.5 --out wrong", 1, "macs: must be"),
        ("prune --method magic --ratio 0.5 --out wrong2", 1, "method 'magic' is unknown"),
        ("prune --macs 0.5 --model absent:network --data digits --out w3", 1, "model: 'absent:network' cannot be imported"),
        ("prune --macs 0.5 --model own_things:absent --data digits --out w4", 1, "own_things has no 'absent'"),
        ("prune --macs 0.5 --model own_things:nothing --data digits --out w5", 1, "must return a torch.nn.Module"),
        ("prune --macs 0.5 --model own_things:network --data own_things:nothing --out w6", 1, "must return two loaders"),
        (
            "evaluate --model broken:f --data digits",
            1,
            "model: 'broken:f' cannot be imported: SyntaxError: invalid syntax (broken",
        ),
        (
            "evaluate --model raising:f --data digits",
            1,
            "cannot be imported: ZeroDivisionError: division by zero (raising.py, line 2)",
        ),
        (
            "evaluate --model lacking:f --data digits",
            1,
            "cannot be imported: ModuleNotFoundError: No module named 'not_installed' (lacking.py, line 3)",
        ),
        ("evaluate --model ..x:f --data digits", 1, "model: '..x:f' cannot be imported"),
        (
            "evaluate --model own_things:fails --data digits",
            1,
            "model: own_things:fails failed: RuntimeError: no such thing (own_things.py, line 19)",
        ),
        ("evaluate --model own_things:needs --data digits", 1, "model: own_things:needs failed: TypeError: needs() missing 1"),
        ("evaluate --model own_things:network --data own_things:needs", 1, "data: own_things:needs failed: TypeError: needs()"),
        ("evaluate --model own_things:without_parameters --data own_things:loaders", 1, "model: has no parameters"),
        ("evaluate --model own_things:network --data own_things:real_labels", 1, "targets: torch.float32 (4,) do not fit"),
        ("evaluate --model own_things:network --data own_things:labels_out_of_range", 1, "Target 7 is out of bounds"),
        (
            "finetune --model own_things:network --data own_things:real_labels --epochs 1 --out w7",
            1,
            "do not fit outputs (4, 3)",
        ),
        ("prune --macs 0.5 --model own_things:network --data own_things:empty --out w8", 1, "data: a loader is empty"),
        ("train --out own_things.py", 1, "out: must be a folder, or one that can be made; own_things.py is a file"),
        ("train --out own_things.py/deep/er", 1, "out: must be a folder, or one that can be made; own_things.py is a file"),
        ("train --out w9 --data-root own_things.py", 1, "data_root: must be a folder"),
        ("train --out w9 --device meta", 1, "device: 'meta' cannot be used"),
        ("train --out w9 --seed 99999999999999999999", 1, "seed: must be below 2**63; got 99999999999999999999"),
        ("demo --out own_things.py", 1, "out: must be a folder"),
        ("reproduce fisher --scale digits --results own_things.py", 1, "results: must be a folder"),
        ("reproduce fisher --scale digits --runs own_things.py", 1, "runs: must be a folder"),
        ("reproduce fisher --scale digits --docs own_things.py", 1, "docs: must be a folder"),
        ("reproduce fisher --scale digits --gpus-per-cell -1", 1, "gpus_per_cell: must be at least 0; got -1.0"),
        ("reproduce table1 --scale digits --weights foreign", 1, "weights: foreign has no file NETWORK_DATA.safetensors"),
        ("reproduce --from-results bare.json", 1, "bare.json is not a file of results: there is no 'commands'"),
        ("reproduce --from-results bytes.json", 1, "bytes.json is not a file of results"),
        ("reproduce --from-results odd.json", 1, "odd.json is not a file of results: this is not the configuration of a run"),
        ("reproduce --from-results foreign/run.json", 1, "run.json is not a file of results: it holds a list"),
        ("evaluate --model resnet20 --data digits --weights foreign", 1, "weights: there is no file foreign"),
        ("evaluate --model own_things.network --data digits", 1, "package.module:function; got 'own_things.network'"),
        ("prune --macs 0.5 --examples 0 --out w9", 1, "examples: must be at least 1; got 0"),
        ("prune --macs 0.5 --examples -5 --out w9", 1, "examples: must be at least 1; got -5"),
        ("prune --macs 0.5 --cap 0.5 --out w9", 2, "cap: goes with a --method"),
        ("prune --method cp --rank 0 --out w9", 1, "rank: must be at least 1; got 0"),
        ("prune --method cp --ranks 0 --out w9", 1, "ranks: must be above 0; got 0.0"),
        ("prune --method cp --ranks 0.5 --rank 3 --out w9", 2, "Give --ranks or --rank, and not both"),
        ("iterate --rounds 0 --out w9", 1, "rounds: must be at least 1; got 0"),
        ("prune --macs 0.5 --model resnet20 --data digits --weights absent.safetensors", 1, "there is no file"),
        ("train --model alexnet", 1, "network: must be one of"),
        ("train --data mnist --out m", 1, "data: must be one of"),
        ("train --epochs 3", 1, "holds another run"),
        ("train --device tpu9 --out m2", 1, "device: 'tpu9'"),
        ("reproduce table9", 1, "experiment: must be one of"),
        ("reproduce --from-results absent.json", 1, "absent.json"),
    ],
)
def test_wrong_usage_and_failures_take_a_line(line: str, code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*line.split(), *(["--quiet"] if line.startswith("train") else [])]) == code
    shown = capsys.readouterr().err
    assert message in shown and "Traceback" not in shown
    if code == 1:
        assert shown.startswith("eigendamage: ") and shown.count("\n") == 1


def test_a_command_that_came_to_nothing_does_not_hold_its_folder(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "own_things:network", "--quiet", "--out", "second-try", "--epochs", "1"]
    assert main(["prune", "--macs", "0.6", "--data", "own_things:nothing", *own]) == 1
    assert "must return two loaders" in capsys.readouterr().err
    assert main(["prune", "--macs", "0.6", "--data", "own_things:loaders", *own]) == 0
    assert main(["prune", "--macs", "0.7", "--data", "own_things:loaders", *own]) == 1
    assert "holds another run" in capsys.readouterr().err


def test_l1_is_on_a_user_s_own_training_too(capsys: pytest.CaptureFixture[str]) -> None:
    own = ["--model", "own_things:network", "--data", "own_things:loaders", "--quiet", "--epochs", "1", "--out", "own-l1"]
    assert main(["train", "--l1", "0.1", *own]) == 1
    assert "l1: is on the scales of batch norm" in capsys.readouterr().err


def test_interrupted_by_ctrl_c_and_gone_on_with(tmp_path: Path) -> None:
    """A real process; the model at the end is that of a run that was not interrupted."""
    arguments = ["train", "--epochs", "4", "--quiet", "--out"]
    assert main([*arguments, str(tmp_path / "whole")]) == 0
    # What runs the tests in the background may have Ctrl-C ignored, which processes inherit.
    heeding = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    begin = f"{heeding}; import sys; from eigendamage.cli import main; sys.exit(main(sys.argv[1:]))"
    command = [sys.executable, "-c", begin, *arguments, str(tmp_path / "stopped")]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "stopped" / "checkpoint.safetensors").exists():
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "goes on from where it stopped" in shown and "Traceback" not in shown
    assert not (tmp_path / "stopped" / "model.safetensors").exists()
    assert main([*arguments, str(tmp_path / "stopped")]) == 0
    whole, stopped = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "stopped"))
    assert all(torch.equal(value, stopped[name]) for name, value in whole.items())

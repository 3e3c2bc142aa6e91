"""The benchmark of budgets of time runs, and what it writes can be read by a program."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from eigendamage import bench_time, timing


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "SECONDS", 0.0)
    monkeypatch.setattr(timing, "TOGETHER", 0.1)
    path, threads = tmp_path / "latency.json", torch.get_num_threads()
    bench_time.main(["--quick", "--out", str(path)])
    assert torch.get_num_threads() == threads
    content = json.loads(path.read_text())
    assert content["command"].startswith("python -m eigendamage.bench_time --quick")
    assert content["machine"]["torch"] == torch.__version__
    latency, macs = content["rows"]
    assert (latency["budget"], latency["target"]) == ("latency", pytest.approx(0.63))
    assert (macs["budget"], macs["target"]) == ("macs", pytest.approx(0.6))
    assert macs["macs"] <= 0.5 and macs["ratio"] > 0
    assert latency["ratio"] or "cannot be reached" in latency["error"]
    for row in content["rows"]:
        assert row["met"] == (row["ratio"] is not None and row["ratio"] <= row["target"])
    printed = capsys.readouterr().out
    assert "resnet20" in printed and "macs=0.5" in printed


def test_a_model_takes_as_long_as_itself_and_longer_than_one_of_fewer_layers() -> None:
    inputs = torch.randn(64, 256)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    ratio, dense = bench_time.compared(model, model[:1], inputs, 0.2)
    assert 0 < ratio < 0.6 and dense > 0

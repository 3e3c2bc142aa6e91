"""The benchmark runs, and what it writes can be read by a program; its numbers are for quiet machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from eigendamage import bench, measure


def test_quick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "bench.json"
    bench.main(["--quick", "--out", str(path)])
    content = json.loads(path.read_text())
    assert content["command"].startswith("python -m eigendamage.bench --quick")
    assert content["setup"]["seed"] == 0
    assert content["machine"]["torch"] == torch.__version__
    assert content["machine"]["cores"] >= 1 and content["machine"]["cpu"]
    rows = {(row["task"], row["unit"]): row for row in content["rows"]}
    timed = {("channel form", "s"), ("patch form", "s"), ("plan + apply", "s")}
    assert timed <= rows.keys() <= timed | {("channel form", "MiB"), ("patch form", "MiB")}
    for row in rows.values():
        assert row["ratio"] > 0
        assert row["met"] == (row["ratio"] <= row["target"])
    printed = capsys.readouterr().out
    assert "channel form" in printed and "plan + apply" in printed
    assert "met" in printed or "missed" in printed


def test_plan_and_apply_decompose_anew_each_time() -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))
    curvature = measure(model, [(torch.randn(8, 16), torch.zeros(8, dtype=torch.long))], methods=["eigendamage"])
    bench.plan_and_apply(model, curvature)
    assert not any("eigen_gradients" in vars(layer) for layer in curvature.layers.values())


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_peak_memory_sees_what_is_allocated() -> None:
    before = bench._peak()
    held = torch.ones(64, 1024, 1024)
    assert bench._peak() - before > 0 and held[0, 0, 0] == 1

"""Every example runs as it stands, in an empty folder, without a warning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("sklearn")

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )


def test_there_are_examples() -> None:
    assert [path.stem for path in EXAMPLES] == ["01_budget", "02_ratio", "03_edit_a_plan", "04_iterate"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_runs(example: Path, tmp_path: Path) -> None:
    done = run(["-W", "error", str(example)], tmp_path)
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    assert ": what each layer becomes" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_is_short(example: Path) -> None:
    assert len(example.read_text().splitlines()) <= 45

"""The folder of a run: what was asked, the metrics of its epochs, its checkpoint and its model."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from eigendamage.files import write_text
from eigendamage.lab.data import Data
from eigendamage.processes import place

CONFIG, METRICS, CHECKPOINT, MODEL = "config.json", "metrics.jsonl", "checkpoint.safetensors", "model.safetensors"


def configuration_of(model: nn.Module, data: Data, training: Any, teacher: nn.Module | None) -> dict[str, Any]:
    """What must be the same for a run to go on, and beside it what it was made with."""
    return {
        "training": asdict(training),
        "data": {"name": data.name, "classes": data.classes, "train": len(data.train), "test": len(data.test)},
        "parameters": _parameters(model),
        "teacher": None if teacher is None else _parameters(teacher),
        "made with": {
            "eigendamage": _version(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "processes": place()[1],
            "device": str(next(model.parameters()).device),
            "command": shlex.join(sys.argv),
        },
    }


def _version() -> str:
    try:
        return importlib.metadata.version("eigendamage")
    except importlib.metadata.PackageNotFoundError:  # it runs from its sources
        return "unknown"


def _parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def prepare(folder: Path, configuration: dict[str, Any], resume: bool) -> None:
    """See that the folder is this run's, new or to go on with. Raises ValueError if it holds another."""
    path = folder / CONFIG
    present = [name for name in (MODEL, CHECKPOINT, METRICS) if (folder / name).exists()]
    if present and not path.is_file():
        raise ValueError(f"{folder} has a {present[0]} but no {CONFIG}, so it is no run's folder; give another one")
    if resume and path.is_file():
        try:
            before = json.loads(path.read_text())
        except json.JSONDecodeError as error:
            raise ValueError(f"{path} is not JSON ({error}); a run of eigendamage needs a folder of its own") from None
        if differing := _differences(before, configuration):
            raise ValueError(f"{folder} holds another training: {'; '.join(differing)}. Give another folder, or resume=False")
        for leftover in folder.glob(f".{'[0-9a-f]' * 16}.tmp"):  # of a process that was killed while it wrote
            leftover.unlink(missing_ok=True)
        return
    for name in present:
        (folder / name).unlink()
    write_text(path, json.dumps(configuration, indent=2) + "\n")


def _differences(before: Any, now: dict[str, Any], within: str = "") -> list[str]:
    found = []
    for key, value in now.items():
        held = before.get(key) if isinstance(before, dict) else None
        if isinstance(value, dict) and key != "made with":
            found += _differences(held, value, f"{key}.")
        elif held != value and key != "made with":
            found.append(f"{within}{key} is {held!r} there and {value!r} here")
    return found


def metrics_in(folder: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """What the epochs of a run left, in order; nothing where there is no such file."""
    path = Path(folder) / METRICS
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []

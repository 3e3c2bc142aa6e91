"""The demo in a reduced form: what it writes, what it prints, and that its pruned models are smaller."""

from __future__ import annotations

import struct
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import eigendamage as ed
from eigendamage import demo
from eigendamage.methods import BEST

pytest.importorskip("matplotlib")
pytest.importorskip("sklearn")


ASKED = {"kron-obd": ("ratio", (0.7,)), "eigendamage": ("ratio", (0.4, 0.7)), BEST: ("macs", (0.6, 0.2))}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo") / "new" / "folder"


@pytest.fixture(scope="module")
def results(folder: Path) -> list[demo.Result]:
    return demo.demo(folder, asked=ASKED, epochs=2, finetuning=1, timings=3)


def test_pruned_models_are_smaller(results: list[demo.Result]) -> None:
    dense, *pruned = results
    assert dense.plan is None
    asked = [(method, f"{knob}={value}") for method, (knob, values) in ASKED.items() for value in values]
    assert [(r.plan.method, r.asked) for r in pruned if r.plan] == asked
    for result in pruned:
        assert result.cost.params < dense.cost.params
        assert result.cost.macs < dense.cost.macs
    assert dense.after > 0.8


def test_the_picture_is_one(results: list[demo.Result], folder: Path) -> None:
    picture = (folder / "demo.png").read_bytes()
    assert picture[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", picture[16:24])
    assert width > height > 600


def test_the_file_holds_the_chosen_model(results: list[demo.Result], folder: Path) -> None:
    chosen, _ = demo.choose(results)
    images = torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        assert torch.equal(ed.load(demo.network(), folder / "pruned.safetensors").eval()(images), chosen.model.eval()(images))


def test_the_same_seed_gives_the_same_network(
    results: list[demo.Result], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fewer = {method: (knob, values[-1:]) for method, (knob, values) in ASKED.items()}
    again = demo.demo(tmp_path, asked=fewer, epochs=2, finetuning=1, timings=1)
    assert [r.after for r in again] == [results[i].after for i in (0, 1, 3, 5)]
    printed = capsys.readouterr().out
    assert "Dense against pruned" in printed
    assert "Best structures: what each layer becomes" in printed
    assert "the same outputs" in printed.replace("\n", " ")


def test_chooses_the_cheapest_good_model_and_its_nearest_rival(results: list[demo.Result]) -> None:
    def with_accuracies(*accuracies: float) -> list[demo.Result]:
        return [replace(result, after=after) for result, after in zip(results, accuracies, strict=True)]

    dense, other, rival_large, rival_small, large, small = with_accuracies(0.99, 0.99, 0.99, 0.99, 0.985, 0.981)
    assert demo.choose([dense, other, rival_large, rival_small, large, small]) == (small, rival_small)
    dense, other, rival_large, rival_small, large, small = with_accuracies(0.99, 0.99, 0.99, 0.99, 0.985, 0.979)
    assert demo.choose([dense, other, rival_large, rival_small, large, small]) == (large, rival_large)
    dense, other, rival_large, rival_small, large, small = with_accuracies(0.99, 0.99, 0.99, 0.99, 0.5, 0.6)
    assert demo.choose([dense, other, rival_large, rival_small, large, small])[0] is small


@pytest.mark.parametrize("package", ["matplotlib", "sklearn"])
def test_says_what_to_install(package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(SystemExit, match=r'pip install "eigendamage\[demo\]"'):
        demo.main(["--out", str(tmp_path / "never")])
    assert not (tmp_path / "never").exists()

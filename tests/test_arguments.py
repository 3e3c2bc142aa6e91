"""Arguments of the wrong kind or out of range name themselves.

In a process of its own: here beartype would complain before the library does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"

CALLS = """
import numpy, torch, eigendamage as ed
from torch import nn

model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.Flatten(), nn.Linear(32, 4))
x, y = torch.randn(6, 3, 6, 6), torch.randint(4, (6,))
batches, nan = [(x, y)], [(x * torch.nan, y)]
curvature = ed.measure(model, batches, methods=ed.METHODS, progress=False)
plan, channels = ed.plan(model, curvature, macs=0.6), ed.plan(model, curvature, method="kron-obd", ratio=0.5)
small = ed.apply(model, plan, curvature)


def measure(data=batches, **arguments): return ed.measure(model, data, progress=False, **arguments)
def planned(**arguments): return ed.plan(model, curvature, **arguments)
def ratio(**arguments): return planned(**{"method": "eigendamage", "ratio": 0.5, **arguments})
def cp(ranks): return planned(method="cp", ranks=ranks)
def applied(chosen=plan, **arguments): return ed.apply(model, chosen, curvature, **arguments)
def compress(data=batches, **arguments): return ed.compress(model, data, progress=False, **{"macs": 0.6, **arguments})
def tuned(data=batches, **arguments): return ed.finetune(small, data, progress=False, **{"epochs": 1, **arguments})
def rounds(**arguments): return ed.iterate(model, batches, **arguments)
def frozen(): ed.finetune(nn.Linear(2, 2).requires_grad_(False), batches, epochs=1)
def text(old, new): return lambda: ed.Plan.from_json(cp(0.5).to_json().replace(old, new))


CALLS = [
    ("model", lambda: ed.measure(None, batches)),
    ("model", lambda: ed.plan(None, curvature, macs=0.5)),
    ("model", lambda: ed.apply("model", plan, curvature)),
    ("model", lambda: ed.count(None, x)),
    ("model", lambda: ed.finetune(None, batches)),
    ("model", lambda: ed.iterate(None, batches)),
    ("model", frozen),
    ("curvature", lambda: ed.plan(model, batches, macs=0.5)),
    ("curvature", lambda: ed.apply(model, plan, None)),
    ("plan", lambda: ed.apply(model, curvature, plan)),
    ("plan", lambda: applied(plan.to_json())),
    ("batches", lambda: measure(None)),
    ("batches", lambda: measure(5)),
    ("batches", lambda: measure("train")),
    ("batches", lambda: measure([None])),
    ("batches", lambda: measure([(x.numpy(), y)])),
    ("batches", lambda: measure([(x.double(), y)])),
    ("batches", lambda: measure([])),
    ("batches", lambda: compress(None)),
    ("batches", lambda: compress([])),
    ("batches", lambda: tuned(None)),
    ("batches", lambda: tuned([{"x": x}])),
    ("batches", lambda: ed.iterate(model, None)),
    ("methods", lambda: measure(methods=None)),
    ("method", lambda: measure(methods=[["cp"]])),
    ("method", lambda: measure(methods="kfac")),
    ("method", lambda: ratio(method=["cp"])),
    ("examples", lambda: measure(examples="5")),
    ("examples", lambda: measure(examples=2.5)),
    ("examples", lambda: measure(examples=True)),
    ("examples", lambda: compress(examples=0)),
    ("seed", lambda: measure(seed=None)),
    ("seed", lambda: measure(seed=1.5)),
    ("autocast", lambda: measure(autocast="bf16")),
    ("autocast", lambda: measure(autocast=torch.int8)),
    ("forward", lambda: measure(forward="model")),
    ("loss", lambda: measure(loss=1)),
    ("skip", lambda: measure(skip=3)),
    ("skip", lambda: ratio(skip=None)),
    ("labels", lambda: measure(labels="real")),
    ("task", lambda: measure(task=None)),
    ("ratio", lambda: ratio(ratio="0.5")),
    ("ratio", lambda: ratio(ratio=[0.5])),
    ("ratio", lambda: ratio(ratio=-0.1)),
    ("cap", lambda: ratio(cap=None)),
    ("cap", lambda: ratio(cap=True)),
    ("macs", lambda: planned(macs="half")),
    ("params", lambda: planned(params=0)),
    ("multiple", lambda: planned(macs=0.5, multiple=1.5)),
    ("multiple", lambda: planned(macs=0.5, multiple=0)),
    ("ranks", lambda: cp("4")),
    ("ranks", lambda: cp(True)),
    ("0", lambda: cp({"0": 2.5})),
    ("basis", lambda: ratio(basis=None)),
    ("refit", lambda: applied(refit=5)),
    ("refit", lambda: applied(refit=[])),
    ("refit", lambda: applied(refit=nan)),
    ("refit", lambda: applied(channels, refit=nan)),
    ("forward", lambda: applied(refit=batches, forward=lambda _, batch: model(batch[0]))),
    ("epochs", lambda: tuned(epochs="1")),
    ("learning_rate", lambda: tuned(learning_rate=float("inf"))),
    ("momentum", lambda: tuned(momentum=1)),
    ("weight_decay", lambda: tuned(weight_decay="none")),
    ("optimizer", lambda: tuned(optimizer="adam")),
    ("warmup", lambda: tuned(warmup="1")),
    ("teacher", lambda: tuned(teacher="dense")),
    ("teacher", lambda: tuned(teacher=small)),
    ("distill", lambda: tuned(distill=1.5)),
    ("temperature", lambda: tuned(temperature=0)),
    ("autocast", lambda: tuned(autocast="bf16")),
    ("penalty", lambda: tuned(penalty=0.1)),
    ("checkpoint", lambda: tuned(checkpoint=3)),
    ("forward", lambda: tuned(forward="model")),
    ("loss", lambda: tuned(loss=1)),
    ("each_epoch", lambda: tuned(each_epoch=1)),
    ("rounds", lambda: rounds(rounds="2")),
    ("rounds", lambda: rounds(rounds=0)),
    ("method", lambda: rounds(method="cp")),
    ("method", lambda: rounds(method="eigendamage-depthwise")),
    ("ratio", lambda: rounds(ratio=2)),
    ("cap", lambda: rounds(cap=3)),
    ("finetune", lambda: rounds(finetune="yes")),
    ("measuring", lambda: rounds(measuring={"epochs": 1})),
    ("iterate", lambda: rounds(percentile=1)),
    ("path", lambda: ed.save(small, None)),
    ("path", lambda: ed.load(model, 3)),
    ("this is not the JSON of a plan", text('"cp": ', '"rank": ')),
    ("this is not the JSON of a plan", text('"reason": ""', '"reason": 3')),
    ("this is not the JSON of a plan", text('"kind": "conv"', '"kind": 4')),
    ("this is not the JSON of a plan", text('"inputs": 8', '"inputs": "8"')),
    ("this is not the JSON of a plan", text('"method": "cp"', '"method": []')),
]

for number, (name, call) in enumerate(CALLS):
    try:
        call()
    except (ValueError, TypeError) as error:
        words = str(error)
        if not words.startswith((f"{name}:", f"{name} ", f"method {name}")):
            print(number, f"should name {name}:", words)
    except Exception as error:
        print(number, f"{name}: {type(error).__name__} from deep inside:", error)
    else:
        print(number, f"{name}: no error")
"""


def test_every_wrong_call_is_an_error_that_names_what_is_wrong() -> None:
    done = subprocess.run(
        [sys.executable, "-c", CALLS],
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert (done.stdout, done.stderr) == ("", "")

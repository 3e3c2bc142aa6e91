"""A plan is plain data: write it as JSON, change a rank by hand, and apply it."""

import json
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn

import eigendamage as ed

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
batches = list(zip(images[:1200].split(64), labels[:1200].split(64), strict=True))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
ed.finetune(model, batches, epochs=10, learning_rate=0.1, schedule="cosine")
curvature = ed.measure(model, batches)
plan = ed.plan(model, curvature, method="eigendamage", ratio=0.7)
print(plan)

# The file can be edited with any editor or by a program: the layer "2" gets more room than the method gave it.
path = Path("plan.json")
path.write_text(plan.to_json())
content = json.loads(path.read_text())
content["layers"]["2"]["ranks"]["in"] = 40
path.write_text(json.dumps(content, indent=1))

# In Python it is an attribute.
edited = ed.Plan.from_json(path.read_text())
edited["2"].ranks["out"] = 24
print(edited)

# The factors are computed from the weights and the curvature, for whatever ranks the plan has.
for name, chosen in (("dense", None), ("as planned", plan), ("edited", edited)):
    small = model if chosen is None else ed.apply(model, chosen, curvature)
    right = float((small(images[1200:]).argmax(1) == labels[1200:]).double().mean())
    print(f"{name}: {ed.count(small, images[:1]).params} parameters, accuracy {right:.1%}")

"""A plan is plain data: write it as JSON, change a rank by hand, and apply it."""

import json
from pathlib import Path

import torch
from torch import nn

import eigendamage as ed

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))
inputs = torch.randn(256, 64)
batches = [(inputs, torch.randint(10, (256,)))]
curvature = ed.measure(model, batches)
plan = ed.plan(model, curvature, method="eigendamage", ratio=0.7)
print(plan)

# The file can be edited with any editor or by a program: the layer "2" gets more room than the method gave it.
path = Path("plan.json")
path.write_text(plan.to_json())
content = json.loads(path.read_text())
content["layers"]["2"]["ranks"]["in"] = 48
path.write_text(json.dumps(content, indent=1))

# In Python it is an attribute.
edited = ed.Plan.from_json(path.read_text())
edited["2"].ranks["out"] = 32
print(edited)

# The factors are computed from the weights and the curvature, for whatever ranks the plan has.
for name, chosen in (("as planned", plan), ("edited", edited)):
    small = ed.apply(model, chosen, curvature)
    with torch.no_grad():
        change = float((small(inputs) - model(inputs)).norm() / model(inputs).norm())
    print(f"{name}: {ed.count(small, inputs[:1]).params} parameters, the outputs change by {change:.0%}")

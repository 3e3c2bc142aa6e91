"""Prune a network at the paper's ratio: measure once, plan, look at the plan, apply, count, save and load."""

import torch
from torch import nn

import eigendamage as ed


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


# Your trained network and your data go here: any iterable of (inputs, targets), such as a DataLoader.
torch.manual_seed(0)
model = network()
batches = [(torch.randn(32, 3, 16, 16), torch.randint(10, (32,))) for _ in range(4)]

# One pass over the data serves any number of plans.
curvature = ed.measure(model, batches)
for ratio in (0.3, 0.5, 0.7):
    plan = ed.plan(model, curvature, method="eigendamage", ratio=ratio)
    print(f"ratio {ratio}: {plan.params / plan.dense_params:.0%} of parameters, {plan.macs / plan.dense_macs:.0%} of MACs")
print(plan)

# The model stays as it is; the smaller one is made of stock torch.nn modules. Fine-tune it as you trained the first.
small = ed.apply(model, plan, curvature)
print("dense: ", ed.count(model, batches[0][0][:1]))
print("pruned:", ed.count(small, batches[0][0][:1]))

# The file rebuilds the pruned network from a new dense one.
ed.save(small, "small.safetensors")
again = ed.load(network(), "small.safetensors").eval()
print("same outputs:", torch.equal(again(batches[0][0]), small.eval()(batches[0][0])))

"""The paper's methods at the paper's ratio, from one measurement: what each leaves, and how accurate it is untuned."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import eigendamage as ed

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
batches = list(zip(images[:1200].split(64), labels[:1200].split(64), strict=True))


def accuracy(model: nn.Module) -> float:
    return float((model.eval()(images[1200:]).argmax(1) == labels[1200:]).double().mean())


torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
    nn.Flatten(), nn.Linear(256, 10),
)  # fmt: skip
ed.finetune(model, batches, epochs=6, learning_rate=0.05, schedule="cosine")
print(f"dense: accuracy {accuracy(model):.1%}")

# One pass over the data, with what all these methods need.
curvature = ed.measure(model, batches, methods=ed.METHODS)
for method in ed.METHODS:
    plan = ed.plan(model, curvature, method=method, ratio=0.4)
    small = ed.apply(model, plan, curvature)
    left = f"{plan.params / plan.dense_params:.0%} of the parameters, {plan.macs / plan.dense_macs:.0%} of the MACs"
    print(f"{ed.METHODS[method].title:22} {left}, accuracy {accuracy(small):.1%}")

# The plan says what became of each layer. Fine-tune what you apply as you trained the dense model.
print(ed.plan(model, curvature, method="eigendamage", ratio=0.4))

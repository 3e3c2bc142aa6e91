"""Half the multiply-accumulates of a trained network: measure, plan, apply with refit, fine-tune, save and load."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import eigendamage as ed


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy(model: nn.Module) -> float:
    return float((model.eval()(images[1200:]).argmax(1) == labels[1200:]).double().mean())


# Your trained network and your data go here: any iterable of (inputs, targets), such as a DataLoader.
digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
batches = list(zip(images[:1200].split(64), labels[:1200].split(64), strict=True))
torch.manual_seed(0)
model = network()
ed.finetune(model, batches, epochs=6, learning_rate=0.05, schedule="cosine")
print(f"dense: accuracy {accuracy(model):.1%}, {ed.count(model, images[:1])}")

# One measurement serves any number of plans; the model stays as it is.
curvature = ed.measure(model, batches)
plan = ed.plan(model, curvature, macs=0.3)
print(plan)
small = ed.apply(model, plan, curvature, refit=batches)
print(f"compressed: accuracy {accuracy(small):.1%}, {ed.count(small, images[:1])}")
ed.finetune(small, batches, epochs=2, learning_rate=0.01, schedule="cosine")
print(f"fine-tuned: accuracy {accuracy(small):.1%}")

# The file rebuilds the small network from a new dense one, without pickle.
ed.save(small, "small.safetensors")
again = ed.load(network(), "small.safetensors")
print("same outputs after loading:", torch.equal(again.eval()(images), small.eval()(images)))

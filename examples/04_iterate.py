"""Prune in rounds with fine-tuning in between (section 4.4 of the paper), until the network is small enough."""

import torch
from sklearn.datasets import load_digits
from torch import nn

import eigendamage as ed

digits = load_digits()
images, labels = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16, torch.tensor(digits.target)
batches = list(zip(images[:1200].split(64), labels[:1200].split(64), strict=True))


def accuracy(model: nn.Module) -> float:
    return float((model.eval()(images[1200:]).argmax(1) == labels[1200:]).double().mean())


def train(model: nn.Module) -> None:
    ed.finetune(model, batches, epochs=4, learning_rate=0.03, schedule="cosine")


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


torch.manual_seed(0)
model = nn.Sequential(*convolution(1, 32), *convolution(32, 64), nn.Flatten(), nn.Linear(256, 10))
train(model)
dense = ed.count(model, images[:1]).params
print(f"dense:   {dense} parameters, accuracy {accuracy(model):.1%}")

for round in ed.iterate(model, batches, finetune=train, rounds=6, ratio=0.4):
    params = ed.count(round.model, images[:1]).params
    print(f"round {round.number}: {params} parameters, accuracy {accuracy(round.model):.1%}")
    if params < dense / 4:
        break
print(round.plan)  # the last round shrinks the cores of the bottlenecks that the first one built

"""Prune in rounds with fine-tuning in between (section 4.4 of the paper), until the network is small enough."""

import torch
from torch import nn

import eigendamage as ed
from eigendamage.finetune import finetune
from eigendamage.rounds import iterate

# Eight patterns in noise, half of them to train on.
torch.manual_seed(0)
targets = torch.randint(8, (2048,))
images = torch.randn(8, 1, 8, 8)[targets] + 2 * torch.randn(2048, 1, 8, 8)
batches = list(zip(images[:1024].split(64), targets[:1024].split(64), strict=True))


def accuracy(model: nn.Module) -> float:
    return float((model.eval()(images[1024:]).argmax(1) == targets[1024:]).double().mean())


def train(model: nn.Module) -> None:
    finetune(model, batches, epochs=4, learning_rate=0.03, schedule="cosine")


def convolution(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(), nn.MaxPool2d(2)]


model = nn.Sequential(*convolution(1, 32), *convolution(32, 64), nn.Flatten(), nn.Linear(256, 8))
train(model)
dense = ed.count(model, images[:1]).params
print(f"dense:   {dense} parameters, accuracy {accuracy(model):.1%}")

for round in iterate(model, batches, finetune=train, rounds=6, ratio=0.4):
    params = ed.count(round.model, images[:1]).params
    print(f"round {round.number}: {params} parameters, accuracy {accuracy(round.model):.1%}")
    if params < dense / 4:
        break
print(round.plan)  # the last round shrinks the cores of the bottlenecks that the first one built

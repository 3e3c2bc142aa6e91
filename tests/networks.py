"""Small random networks of many shapes, and channels made truly zero in them.

Everything between layers maps zero to zero, save for sigmoids, which only ever gate. So a channel whose producers are zeroed is
zero wherever it goes, and the network computes what it would compute without that channel.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eigendamage.coupling import FIXED, Coupling
from eigendamage.layers import deep_copy, kind_of

CONV: dict[int, Any] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, Any] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}
BATCH_NORM: dict[int, Any] = {1: nn.BatchNorm1d, 2: nn.BatchNorm2d, 3: nn.BatchNorm3d}
INSTANCE_NORM: dict[int, Any] = {1: nn.InstanceNorm1d, 2: nn.InstanceNorm2d, 3: nn.InstanceNorm3d}
MAX_POOL: dict[int, Any] = {1: nn.MaxPool1d, 2: nn.MaxPool2d, 3: nn.MaxPool3d}
AVERAGE_POOL: dict[int, Any] = {1: nn.AvgPool1d, 2: nn.AvgPool2d, 3: nn.AvgPool3d}
ADAPTIVE_POOL: dict[int, Any] = {1: nn.AdaptiveAvgPool1d, 2: nn.AdaptiveAvgPool2d, 3: nn.AdaptiveAvgPool3d}


# --- pieces -----------------------------------------------------------------------------------------------------------------


def convolution(rng: random.Random, dims: int, inputs: int, outputs: int) -> nn.Module:
    """A convolution that keeps the spatial size."""
    kernel, dilation = rng.choice([(1, 1), (3, 1), (3, 1), (3, 2)])
    mode = rng.choice(["zeros", "zeros", "circular", "replicate"])
    padding = dilation * (kernel // 2)
    bias = rng.random() < 0.5
    return CONV[dims](inputs, outputs, kernel, padding=padding, dilation=dilation, padding_mode=mode, bias=bias)


def normalisation(rng: random.Random, dims: int, channels: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        lambda: BATCH_NORM[dims](channels),
        lambda: BATCH_NORM[dims](channels),
        lambda: BATCH_NORM[dims](channels, affine=False),
        lambda: BATCH_NORM[dims](channels, track_running_stats=False),
        lambda: INSTANCE_NORM[dims](channels, affine=True),
        lambda: INSTANCE_NORM[dims](channels),
        lambda: nn.GroupNorm(1, channels),
        nn.Identity,
    ]
    return rng.choice(kinds)()


def activation(rng: random.Random, channels: int) -> nn.Module:
    kinds: list[Callable[[], nn.Module]] = [
        nn.ReLU,
        lambda: nn.ReLU(inplace=True),
        nn.GELU,
        lambda: nn.SiLU(inplace=True),
        lambda: nn.Hardswish(inplace=True),
        nn.Tanh,
        lambda: nn.LeakyReLU(0.1),
        lambda: nn.PReLU(channels),
        nn.PReLU,
        lambda: nn.Dropout(0.5),
        nn.Identity,
    ]
    return rng.choice(kinds)()


class Plain(nn.Sequential):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        norm = normalisation(rng, dims, outputs)
        super().__init__(convolution(rng, dims, inputs, outputs), norm, activation(rng, outputs))


class Residual(nn.Module):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        hidden = rng.randint(2, 6)
        self.body = nn.Sequential(Plain(rng, dims, inputs, hidden), convolution(rng, dims, hidden, outputs))
        self.norm = normalisation(rng, dims, outputs)
        self.shortcut = nn.Identity() if inputs == outputs else CONV[dims](inputs, outputs, 1)
        self.inplace = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.body(x))
        if self.inplace:
            y += self.shortcut(x)
            return F.relu_(y)
        return F.relu(y + self.shortcut(x))


class Inverted(nn.Module):
    """Expand, filter each channel by itself, project."""

    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        hidden, times = rng.randint(2, 6), rng.choice([1, 1, 2])
        self.expand = Plain(rng, dims, inputs, hidden)
        around = {"padding": 1, "groups": hidden}
        kind = rng.choice([CONV, CONV, TRANSPOSED])
        self.depthwise = kind[dims](hidden, hidden * times, 3, **around)
        self.norm = BATCH_NORM[dims](hidden * times)
        self.project = CONV[dims](hidden * times, outputs, 1)
        self.residual = inputs == outputs

    def forward(self, x: Tensor) -> Tensor:
        y = self.project(F.relu6(self.norm(self.depthwise(self.expand(x)))))
        return x + y if self.residual else y


class Squeeze(nn.Module):
    """Gates from the mean of each channel, by convolutions or by linear layers."""

    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = convolution(rng, dims, inputs, outputs)
        self.linear = rng.random() < 0.5
        layer = nn.Linear if self.linear else lambda i, o: CONV[dims](i, o, 1)
        self.gate = nn.Sequential(layer(outputs, 3), nn.ReLU(), layer(3, outputs), nn.Sigmoid())
        self.pool = ADAPTIVE_POOL[dims](1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        if self.linear:
            return x * self.gate(x.flatten(2).mean(2)).view(x.shape[0], x.shape[1], *(1,) * (x.dim() - 2))
        return x * self.gate(self.pool(x))


class Dense(nn.Module):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.first = Plain(rng, dims, inputs, 3)
        self.second = Plain(rng, dims, inputs + 3, 2)
        self.norm = BATCH_NORM[dims](inputs + 5)
        self.last = convolution(rng, dims, inputs + 5, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([x, self.first(x)], 1)
        x = torch.cat((self.second(x), x), dim=-x.dim() + 1)
        return self.last(F.relu(self.norm(x)))


class Branches(nn.Module):
    """Branches of different kinds next to each other, and one more added on top."""

    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        left = rng.randint(1, outputs - 1)
        self.left, self.right = Plain(rng, dims, inputs, left), Plain(rng, dims, inputs, outputs - left)
        self.pool = AVERAGE_POOL[dims](3, stride=1, padding=1)
        self.top = convolution(rng, dims, inputs, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.left(x), self.right(self.pool(x))], 1) + self.top(x)


class Twice(nn.Module):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.front = convolution(rng, dims, inputs, outputs)
        self.shared = convolution(rng, dims, outputs, outputs)
        self.norm = BATCH_NORM[dims](outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.shared(F.relu(self.norm(self.shared(self.front(x)))))


class Hourglass(nn.Module):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        hidden = rng.randint(2, 5)
        self.down = CONV[dims](inputs, hidden, 3, stride=2, padding=1)
        self.up = TRANSPOSED[dims](hidden, outputs, 3, stride=2, padding=1, output_padding=1, bias=rng.random() < 0.5)
        self.side = CONV[dims](inputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(F.relu(self.down(x)))
        return F.interpolate(y, size=x.shape[2:]) + self.side(x)


class SpatialGate(nn.Module):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.gate = convolution(rng, dims, inputs, outputs), CONV[dims](outputs, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return x * torch.sigmoid(self.gate(x))


class Chunked(nn.Module):
    """Halves that the code takes apart, one of them with its size written in."""

    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.outputs, self.written = convolution(rng, dims, inputs, 2 * outputs), outputs, rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        a, b = x.split(self.outputs, 1) if self.written else x.chunk(2, 1)
        return a * torch.tanh(b)


class Shuffle(nn.Module):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.last = convolution(rng, dims, inputs, 4), CONV[dims](4, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        return self.last(x.reshape(len(x), 2, 2, *x.shape[2:]).transpose(1, 2).flatten(1, 2))


class Grouped(nn.Module):
    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.front, self.grouped = convolution(rng, dims, inputs, 4), CONV[dims](4, 6, 3, padding=1, groups=2)
        self.last = Plain(rng, dims, 6, outputs)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.grouped(F.relu(self.front(x))))


class Windows(nn.Module):
    """The spatial axes cut, padded, moved and merged, the channels left alone."""

    def __init__(self, rng: random.Random, dims: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv, self.last = convolution(rng, dims, inputs, outputs), CONV[dims](outputs, outputs, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x)
        x = F.pad(x[..., 1:], (1, 0))
        return self.last(x.flatten(2).transpose(1, 2).contiguous().permute(0, 2, 1).view(x.shape))


BLOCKS: list[Callable[[random.Random, int, int, int], nn.Module]] = [
    Plain,
    Residual,
    Residual,
    Inverted,
    Inverted,
    Squeeze,
    Dense,
    Branches,
    Twice,
    Hourglass,
    SpatialGate,
    Chunked,
    Shuffle,
    Grouped,
    Windows,
]


class Attention(nn.Module):
    """A transformer block on ``[batch, tokens, channels]``."""

    def __init__(self, rng: random.Random, channels: int, hidden: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(channels), nn.LayerNorm(channels)
        self.query, self.key, self.value = (nn.Linear(channels, channels) for _ in range(3))
        self.out = nn.Linear(channels, channels)
        self.up, self.down = nn.Linear(channels, hidden), nn.Linear(hidden, channels)
        self.gate = nn.Linear(channels, hidden) if rng.random() < 0.5 else None

    def forward(self, x: Tensor) -> Tensor:
        y = self.before(x)
        x = x + self.out(F.scaled_dot_product_attention(self.query(y), self.key(y), self.value(y)))
        y = self.between(x)
        hidden = F.gelu(self.up(y)) if self.gate is None else F.silu(self.gate(y)) * self.up(y)
        return x + self.down(hidden)


class Tokens(nn.Module):
    def __init__(self, rng: random.Random, channels: int, classes: int) -> None:
        super().__init__()
        self.embed, self.block = nn.Linear(channels, 4), Attention(rng, 4, rng.randint(3, 7))
        self.last = nn.Linear(4, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.block(self.embed(x.flatten(2).transpose(1, 2))).mean(1))


class View(nn.Module):
    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = features

    def forward(self, x: Tensor) -> Tensor:
        return x.contiguous().view(-1, self.features)


class Perceptron(nn.Module):
    def __init__(self, rng: random.Random, inputs: int, outputs: int) -> None:
        super().__init__()
        width = rng.randint(3, 8)
        self.front, self.norm = nn.Linear(inputs, width), nn.BatchNorm1d(width)
        self.body = nn.Sequential(nn.Linear(width, 5), activation(rng, 5), nn.Linear(5, width))
        self.last = nn.Linear(width, outputs, bias=False)
        self.residual = rng.random() < 0.5

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm(self.front(x)))
        return self.last(x + self.body(x) if self.residual else self.body(x))


class Network(nn.Module):
    """``named``: the features too are given back, in a dictionary."""

    def __init__(self, features: nn.Module, head: nn.Module, named: bool) -> None:
        super().__init__()
        self.features, self.head, self.named = features, head, named

    def forward(self, x: Tensor) -> Any:
        x = self.features(x)
        return {"logits": self.head(x), "features": [x]} if self.named else self.head(x)


# --- networks ---------------------------------------------------------------------------------------------------------------


def random_network(seed: int) -> tuple[nn.Module, Tensor]:
    """A network in eval mode and a batch for it; the same for the same seed, and the random state is left alone."""
    rng = random.Random(seed)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        model, inputs = _perceptrons(rng) if rng.random() < 0.1 else _convolutional(rng)
        for module in model.modules():
            _unsettle(module)
    return model.eval(), inputs


def _perceptrons(rng: random.Random) -> tuple[nn.Module, Tensor]:
    inputs = torch.randn(*rng.choice([(3, 6), (4, 6)]))
    return Network(Perceptron(rng, 6, 5), Perceptron(rng, 5, 3), named=False), inputs


def _convolutional(rng: random.Random) -> tuple[nn.Module, Tensor]:
    dims = rng.choice([1, 2, 2, 2, 3])
    inputs = torch.randn(rng.randint(2, 3), rng.randint(1, 4), *(rng.randint(4, 9 - 2 * (dims == 3)) for _ in range(dims)))
    features, shape = nn.Sequential(), inputs.shape
    for _ in range(rng.randint(1, 4)):
        channels = rng.choice([shape[1], rng.randint(2, 8)]) if features else rng.randint(2, 8)
        features.append(rng.choice(BLOCKS)(rng, dims, shape[1], max(2, channels)))
        if rng.random() < 0.3:
            features.append(
                rng.choice([MAX_POOL, AVERAGE_POOL])[dims](2) if min(shape[2:]) >= 6 else nn.Upsample(scale_factor=2)
            )
        shape = _shape_after(features, inputs)
    return Network(features, _head(rng, dims, shape), named=rng.random() < 0.1), inputs


def _head(rng: random.Random, dims: int, shape: torch.Size) -> nn.Module:
    features, channels = shape[1:].numel(), shape[1]
    kind = rng.choice(["flat", "pooled", "perceptron", "tokens", "view", "dense"])
    if kind == "flat":
        return nn.Sequential(nn.Flatten(), nn.Linear(features, 5), nn.ReLU(), nn.Linear(5, 3))
    if kind == "pooled":
        return nn.Sequential(ADAPTIVE_POOL[dims](1), nn.Flatten(), nn.Dropout(0.5), nn.Linear(channels, 3))
    if kind == "perceptron":
        return nn.Sequential(ADAPTIVE_POOL[dims](2), nn.Flatten(), Perceptron(rng, channels * 2**dims, 3))
    if kind == "tokens":
        return Tokens(rng, channels, 3)
    if kind == "view":
        return nn.Sequential(View(features), nn.Linear(features, 3))
    return CONV[dims](channels, 3, 1)


def _shape_after(features: nn.Module, inputs: Tensor) -> torch.Size:
    with torch.no_grad():
        return copy.deepcopy(features).eval()(inputs).shape


def _unsettle(module: nn.Module) -> None:
    """Normalisation as after training: nothing is 0 or 1."""
    for name, tensor in [*module.named_parameters(recurse=False), *module.named_buffers(recurse=False)]:
        if name in ("weight", "running_var") and tensor.dim() == 1:
            nn.init.uniform_(tensor, 0.5, 1.5)
        elif name in ("bias", "running_mean"):
            nn.init.normal_(tensor, std=0.5)


# --- channels ---------------------------------------------------------------------------------------------------------------


def random_units(rng: random.Random, coupling: Coupling) -> set[int]:
    """About half the units that can be removed, at least one left on each side of each module."""
    sides = [units for side in coupling.sides.values() for units in (side.inputs, side.outputs)]
    free = sorted({unit for units in sides for unit in units} - {FIXED})
    kept = {rng.choice(units) for units in sides if FIXED not in units}
    return {unit for unit in free if unit not in kept and rng.random() < 0.5}


def zero_units(model: nn.Module, coupling: Coupling, units: Collection[int]) -> nn.Module:
    """A copy in which everything that produces these units gives zeros."""
    model = deep_copy(model)
    with torch.no_grad():
        for name, side in coupling.sides.items():
            _silence(model.get_submodule(name), [i for i, unit in enumerate(side.outputs) if unit in units])
    return model


def _silence(module: nn.Module, channels: list[int]) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in ("bias", "running_mean") or (name == "weight" and tensor.dim() == 1):
            tensor[channels] = 0
        elif name == "weight":
            _by_output(module, tensor)[channels] = 0


def _by_output(module: nn.Module, weight: Tensor) -> Tensor:
    """A view of the weight with its outputs first."""
    if kind_of(module) == "transposed":
        return weight.transpose(0, 1) if module.groups == 1 else weight.flatten(0, 1)
    return weight.T if type(module).__name__ == "Conv1D" else weight

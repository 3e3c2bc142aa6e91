"""The networks of the paper (section 5.1), and the CIFAR ResNets of He et al."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from eigendamage.checks import require_choice
from eigendamage.streams import ChannelSelection

VGG19 = (64, 64, "pool", 128, 128, "pool", *(256,) * 4, "pool", *(512,) * 4, "pool", *(512,) * 4)


class VGG(nn.Module):
    """3×3 convolutions without bias and batch norm, an average pool and one linear layer."""

    def __init__(self, classes: int, width: float = 1.0) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        inputs = 3
        for entry in VGG19:
            if isinstance(entry, str):
                layers.append(nn.MaxPool2d(2))
                continue
            outputs = round(entry * width)
            layers += [nn.Conv2d(inputs, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
            inputs = outputs
        self.features = nn.Sequential(*layers)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.classifier = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(self.pool(self.features(x)).flatten(1))


class BasicBlock(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        return self.relu(self.bn2(self.conv2(out)) + self.downsample(x))


class ResNet(nn.Module):
    """Three stages of basic blocks; ``width`` 1 has 16, 32 and 64 channels."""

    def __init__(self, blocks: int, classes: int, width: int = 1) -> None:
        super().__init__()
        channels = [16 * width, 32 * width, 64 * width]
        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels[0])
        self.relu = nn.ReLU(inplace=True)
        self.layer1 = self._stage(blocks, channels[0], channels[0], 1)
        self.layer2 = self._stage(blocks, channels[0], channels[1], 2)
        self.layer3 = self._stage(blocks, channels[1], channels[2], 2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels[2], classes)

    @staticmethod
    def _stage(blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        return nn.Sequential(BasicBlock(inputs, outputs, stride), *(BasicBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.layer3(self.layer2(self.layer1(out)))
        return self.fc(self.pool(out).flatten(1))


class PreActivationBlock(nn.Module):
    """1×1, 3×3, 1×1, each behind a batch norm and ReLU; the last of them is the one that widens."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.select = ChannelSelection(inputs)
        self.bn1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, inputs, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inputs)
        self.conv2 = nn.Conv2d(inputs, inputs, 3, stride, padding=1, bias=False)
        self.bn3 = nn.BatchNorm2d(inputs)
        self.conv3 = nn.Conv2d(inputs, outputs, 1, bias=False)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv1(self.relu(self.bn1(self.select(x))))
        out = self.conv2(self.relu(self.bn2(out)))
        out = self.conv3(self.relu(self.bn3(out)))
        return out + self.downsample(x)


class PreResNet(nn.Module):
    """Three stages of pre-activation blocks; ``width`` 1 has 64, 128 and 256 channels."""

    def __init__(self, blocks: int, classes: int, width: float = 1.0) -> None:
        super().__init__()
        channels = [round(64 * width), round(128 * width), round(256 * width)]
        self.conv1 = nn.Conv2d(3, channels[0], 3, padding=1, bias=False)
        self.layer1 = self._stage(blocks, channels[0], channels[0], 1)
        self.layer2 = self._stage(blocks, channels[0], channels[1], 2)
        self.layer3 = self._stage(blocks, channels[1], channels[2], 2)
        self.select = ChannelSelection(channels[2])
        self.bn = nn.BatchNorm2d(channels[2])
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(channels[2], classes)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            elif isinstance(module, nn.BatchNorm2d):
                nn.init.constant_(module.weight, 0.5)

    @staticmethod
    def _stage(blocks: int, inputs: int, outputs: int, stride: int) -> nn.Sequential:
        first = PreActivationBlock(inputs, outputs, stride)
        return nn.Sequential(first, *(PreActivationBlock(outputs, outputs, 1) for _ in range(blocks - 1)))

    def forward(self, x: Tensor) -> Tensor:
        out = self.layer3(self.layer2(self.layer1(self.conv1(x))))
        out = self.relu(self.bn(self.select(out)))
        return self.fc(self.pool(out).flatten(1))


NETWORKS: dict[str, Callable[[int], nn.Module]] = {
    "vgg19": VGG,
    "vgg19-thin": partial(VGG, width=0.25),
    "resnet32x4": partial(ResNet, 5, width=4),
    "preresnet29": partial(PreResNet, 3),
    "preresnet29-thin": partial(PreResNet, 3, width=0.25),
    "resnet20": partial(ResNet, 3),
    "resnet32": partial(ResNet, 5),
    "resnet44": partial(ResNet, 7),
    "resnet56": partial(ResNet, 9),
}


def build(name: str, classes: int) -> nn.Module:
    """A network of the table, with fresh weights. Raises ValueError for any other name."""
    require_choice("network", name, tuple(NETWORKS))
    return NETWORKS[name](classes)

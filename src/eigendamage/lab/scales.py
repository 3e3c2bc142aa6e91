"""How large the experiments are run: networks, training, seeds; and what a user may change of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from eigendamage.checks import require_choice, require_whole
from eigendamage.lab.networks import NETWORKS
from eigendamage.lab.runs import Training
from eigendamage.lab.settings import Dense, given

# The paper's networks and what Liu et al. (2017) weigh the L1 norm of their batch-norm scales with.
VGG, RESNET, PRERESNET = "VGG19", "ResNet32", "PreResNet29"
L1 = {VGG: 1e-4, RESNET: 1e-5, PRERESNET: 1e-5}


@dataclass(frozen=True)
class Scale:
    """One size of all experiments. ``networks`` and ``data`` say what stands for those of the paper."""

    name: str
    networks: dict[str, str]
    batch_sizes: dict[str, int]
    data: dict[str, str]
    table1: tuple[str, ...]  # the data sets of table 1
    training: Training
    finetuning: Training
    seeds: int
    examples: int | None
    training_epochs: dict[str, int]  # of data sets that are trained on longer
    fractions: tuple[float, ...]  # of CP's ranks
    ranks: tuple[int, ...]
    ratios: tuple[float, ...]  # of trade-off curves and the low-rank comparison
    curve_seeds: int  # for curves over many ratios
    iterated: tuple[str, ...]  # methods of the iterative experiment
    only: tuple[str, ...] = ()  # networks to run, where not all
    weights: Path | None = None  # a file, or a folder of files, named NETWORK_DATA.safetensors

    def dense(self, network: str, data: str, l1: bool = False) -> Dense | None:
        """What stands for a network of the paper on a data set; None where it is not among those to run."""
        ours, on = self.networks[network], self.data[data]
        if self.only and ours not in self.only:
            return None
        if not l1 and (path := self._weights(f"{ours}_{on}")) is not None:
            return given(on, ours, path)
        epochs = self.training_epochs.get(data, self.training.epochs)
        strength = L1[network] if l1 else 0.0
        return Dense(on, ours, replace(self.training, epochs=epochs, batch_size=self.batch_sizes[network], l1=strength))

    def given(self, network: str, data: str) -> Dense:
        """One of our networks on one of our data sets: with given weights, or else trained as the paper's ResNets are."""
        path = self._weights(f"{network}_{data.removesuffix('-split')}")
        training = replace(self.training, batch_size=self.batch_sizes[RESNET])
        return given(data, network, path) if path is not None else Dense(data, network, training)

    def tuning(self, network: str, seed: int) -> Training:
        return replace(self.finetuning, batch_size=self.batch_sizes[network], seed=seed)

    def _weights(self, stem: str) -> Path | None:
        if self.weights is None:
            return None
        path = self.weights / f"{stem}.safetensors" if self.weights.is_dir() else self.weights
        return path if path.stem == stem and path.is_file() else None


FINETUNING = Training()  # the paper's
TRAINING = Training(epochs=150, learning_rate=0.1, weight_decay=2e-4)
EVERY = {name: name for name in ("cifar10", "cifar100", "tiny-imagenet")}

PAPER = Scale(
    name="paper",
    networks={VGG: "vgg19", RESNET: "resnet32x4", PRERESNET: "preresnet29"},
    batch_sizes={VGG: 128, RESNET: 64, PRERESNET: 64},
    data=EVERY,
    table1=("cifar10", "cifar100"),
    training=TRAINING,
    finetuning=FINETUNING,
    seeds=5,
    examples=None,
    training_epochs={"tiny-imagenet": 300},
    fractions=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.25, 1.5, 2.0),
    ranks=(4, 8, 16, 32, 64, 128, 256, 512),
    ratios=(0.4, 0.5, 0.6, 0.7, 0.8, 0.9),
    curve_seeds=5,
    iterated=("eigendamage", "kron-obs", "kron-obd", "c-obs", "c-obd"),
)
SMALL = replace(
    PAPER,
    name="small",
    networks={VGG: "vgg19-thin", RESNET: "resnet20", PRERESNET: "preresnet29-thin"},
    batch_sizes=dict.fromkeys((VGG, RESNET, PRERESNET), 128),
    table1=("cifar10",),
    training=replace(TRAINING, epochs=20, precision="bfloat16", channels_last=True),
    finetuning=replace(FINETUNING, epochs=5, learning_rate=0.01),
    seeds=3,
    examples=2000,
    training_epochs={},
    fractions=(0.1, 0.25, 0.5, 1.0),
    ranks=(4, 16, 64),
    ratios=(0.4, 0.6, 0.8, 0.9),
    curve_seeds=1,
    iterated=("eigendamage", "kron-obs", "kron-obd"),
)
# Not an experiment of the paper: everything on the embedded digits, to see within minutes that it works.
DIGITS = replace(
    SMALL,
    name="digits",
    batch_sizes=dict.fromkeys((VGG, RESNET, PRERESNET), 64),
    data=dict.fromkeys(EVERY, "digits"),
    training=replace(TRAINING, epochs=8),
    finetuning=replace(FINETUNING, epochs=2, learning_rate=0.01),
    seeds=2,
    examples=500,
)
SCALES = {scale.name: scale for scale in (SMALL, PAPER, DIGITS)}


@dataclass(frozen=True)
class Changes:
    """What a user changes of a scale; None keeps it."""

    seeds: int | None = None
    epochs: int | None = None  # of fine-tuning
    training_epochs: int | None = None  # of dense networks
    examples: int | None = None  # for the statistics
    precision: str | None = None
    networks: Sequence[str] = ()  # run only these
    weights: Path | None = None  # a file, or a folder of files, named NETWORK_DATA.safetensors


def scaled(name: str, changes: Changes | None = None) -> Scale:
    """The scale with these changes. Raises ValueError for what does not fit."""
    require_choice("scale", name, tuple(SCALES))
    changes = changes or Changes()
    for key, least in (("seeds", 1), ("epochs", 0), ("training_epochs", 0), ("examples", 1)):
        if getattr(changes, key) is not None:
            require_whole(key, getattr(changes, key), least)
    scale = SCALES[name]
    for network in changes.networks:
        require_choice("networks", network, tuple(NETWORKS))
    if changes.weights is not None and not changes.weights.exists():
        raise FileNotFoundError(f"weights: there is no {changes.weights}")
    if changes.weights is not None:
        stems = list(dict.fromkeys(f"{network}_{data}" for network in NETWORKS for data in scale.data.values()))
        if changes.weights.is_file():
            require_choice("weights, the name of the file without its ending,", changes.weights.stem, stems)
        elif not any((changes.weights / f"{stem}.safetensors").is_file() for stem in stems):
            raise FileNotFoundError(f"weights: {changes.weights} has no file NETWORK_DATA.safetensors, such as {stems[0]}")
    training, finetuning = scale.training, scale.finetuning
    if changes.precision is not None:
        layout = changes.precision == "bfloat16"  # in which it is faster
        training, finetuning = (replace(t, precision=changes.precision, channels_last=layout) for t in (training, finetuning))
    if changes.training_epochs is not None:
        training = replace(training, epochs=changes.training_epochs)
        scale = replace(scale, training_epochs={})
    if changes.epochs is not None:
        finetuning = replace(finetuning, epochs=changes.epochs)
    seeds = scale.seeds if changes.seeds is None else changes.seeds
    return replace(
        scale,
        training=training,
        finetuning=finetuning,
        seeds=seeds,
        curve_seeds=min(seeds, scale.curve_seeds),
        examples=scale.examples if changes.examples is None else changes.examples,
        only=tuple(changes.networks),
        weights=changes.weights,
    )

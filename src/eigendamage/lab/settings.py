"""What a cell of an experiment is: a complete run as plain data, and where runs happen."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eigendamage.checks import require_whole
from eigendamage.lab.runs import Training
from eigendamage.refitting import PARTS


@dataclass(frozen=True)
class Site:
    """Where cells run; nothing of it changes their results."""

    root: Path  # a folder for each run
    data: Path = Path("data")
    weights: Path = Path(".")  # the folder of given weights
    device: str = "cpu"
    progress: bool = True


@dataclass(frozen=True)
class Dense:
    """A dense network: trained here, or with given weights, which are known by the name and checksum of their file."""

    data: str
    network: str
    training: Training | None = None
    weights: str = ""
    sha256: str = ""

    def __post_init__(self) -> None:
        own = ":" in self.network  # a user's own comes with its weights
        if (self.training is not None and self.weights) or not (own or self.training or self.weights):
            raise ValueError("a dense network needs a training or weights, and not both")

    @property
    def label(self) -> str:
        l1 = "-l1" if self.training is not None and self.training.l1 else ""
        return f"{self.data}-{self.network}{l1}"


@dataclass(frozen=True)
class Pruning:
    """A dense network made smaller, in one round or several, each fine-tuned."""

    dense: Dense
    planning: Mapping[str, Any]  # arguments of `plan`
    finetuning: Training
    examples: int | None = 2000  # for the statistics of each round; None: the whole training set
    labels: str = "sampled"
    refit: bool = False
    refitted: tuple[str, ...] = PARTS
    rounds: int = 1
    judged: int = 2000  # training images on which the loss is judged before fine-tuning
    seed: int = 0

    def __post_init__(self) -> None:
        if self.examples is not None:
            require_whole("examples", self.examples, least=1)
        require_whole("rounds", self.rounds, least=1)
        require_whole("judged", self.judged, least=1)

    @property
    def label(self) -> str:
        tuning = self.finetuning
        words = {
            self.dense.label: True,
            self.planning.get("method") or "best": True,
            **{f"{key}{_word(value)}": True for key, value in self.planning.items() if key != "method"},
            f"{self.rounds}rounds": self.rounds > 1,
            "refit": self.refit and set(self.refitted) == set(PARTS),
            f"refit{_word(self.refitted)}": self.refit and set(self.refitted) != set(PARTS),
            f"lr{tuning.learning_rate:g}" if tuning.epochs else "untuned": True,
            f"distill{tuning.distill:g}": tuning.distill > 0,
            f"seed{self.seed}": True,
        }
        return "-".join(word for word, applies in words.items() if applies)


def _word(value: object) -> str:
    return "+".join(value) if isinstance(value, list | tuple) else str(value)


@dataclass(frozen=True)
class Fisher:
    """The Fisher information of a small network's second layer, in the coordinates of its weights and in the KFE.

    Trained briefly: once it fits its training data, few examples carry all of the information, and K-FAC's assumption of
    independence fails, by a relative error above 1, so that neither basis is near diagonal.
    """

    data: str = "digits"
    width: int = 8
    epochs: int = 10
    learning_rate: float = 0.01
    seed: int = 0

    @property
    def label(self) -> str:
        return f"fisher-{self.data}-{self.width}-seed{self.seed}"


Cell = Dense | Pruning | Fisher
KINDS: dict[str, type[Any]] = {"dense": Dense, "pruning": Pruning, "fisher": Fisher}


def as_data(cell: Cell) -> dict[str, Any]:
    """A cell as JSON data, just as it comes back from a file."""
    kind = next(name for name, cls in KINDS.items() if type(cell) is cls)
    return json.loads(json.dumps({"kind": kind, **asdict(cell)}))


def from_data(content: Mapping[str, Any]) -> Cell:
    """Raises ValueError for data that is no cell."""
    try:
        values = dict(content)
        cls = KINDS[values.pop("kind")]
        if cls is Pruning:
            values |= {"dense": _dense(values["dense"]), "finetuning": Training(**values["finetuning"])}
            values["refitted"] = tuple(values.get("refitted", PARTS))
        cell: Cell = _dense(values) if cls is Dense else cls(**values)
        return cell
    except (KeyError, TypeError) as error:
        raise ValueError(f"this is not the configuration of a run: {error}") from error


def _dense(values: Mapping[str, Any]) -> Dense:
    training = values.get("training")
    return Dense(**{**values, "training": Training(**training) if training else None})


def name_of(cell: Cell) -> str:
    """The name of the cell's folder: what it is, and a digest of its whole configuration."""
    digest = hashlib.sha256(json.dumps(as_data(cell), sort_keys=True).encode()).hexdigest()
    return f"{cell.label}-{digest[:8]}"


def given(data: str, network: str, path: Path) -> Dense:
    """A dense network with the weights of a file."""
    return Dense(data, network, weights=path.name, sha256=checksum(path))


def checksum(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()

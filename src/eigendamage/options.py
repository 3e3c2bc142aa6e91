"""What commands can be told: where, from which model, how small, how it is fine-tuned."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from tyro.conf import arg

from eigendamage.checks import require_folder, require_number, require_whole
from eigendamage.lab.networks import NETWORKS
from eigendamage.lab.projects import Source
from eigendamage.lab.runs import Training
from eigendamage.lab.settings import Site
from eigendamage.lab.subjects import FUNCTION, is_own
from eigendamage.methods import method_named
from eigendamage.planning import check_budgets, check_cap, check_ratio


class WrongUsage(ValueError):
    """Arguments that do not go together."""


RUNS = Path("runs")
FIRST = RUNS / "digits-resnet20"  # what `train` makes when it is told nothing


@dataclass(frozen=True)
class Place:
    """Where things are, and where the work is done."""

    data_root: Path = Path("data")
    """The folder that holds the data sets."""
    device: str = "auto"
    """As torch names it; auto takes an accelerator where there is one."""
    quiet: bool = False
    """Show no progress."""

    def site(self, root: Path = RUNS) -> Site:
        device = self.device
        if device == "auto":
            device = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            torch.empty(0, device=device).cpu()  # which the meta device cannot
        except (RuntimeError, AssertionError) as error:
            raise ValueError(f"device: {device!r} cannot be used: {str(error).splitlines()[0]}") from None
        require_folder("data_root", self.data_root)
        return Site(root, self.data_root, device=device, progress=not self.quiet)


@dataclass(frozen=True)
class Start:
    """The model to start from: that of a run, or your own."""

    run: Path = FIRST
    """The folder of a run."""
    model: str | None = None
    """Instead of a run: a function that returns your model, as package.module:function, or a network of the lab."""
    data: str | None = None
    """With --model: a function that returns batches to train and to test on, as package.module:function, or a data set."""
    weights: Path | None = None
    """With --model: a safetensors file, where the model does not come with its weights."""

    def source(self) -> Source:
        if self.model is None:
            if self.data is not None or self.weights is not None:
                raise WrongUsage("data, weights: go with --model; a run knows its own")
            return Source.of(self.run)
        if self.data is None:
            raise WrongUsage("data: --model needs --data, a data set or package.module:function")
        if not is_own(self.model) and self.model not in NETWORKS:
            raise ValueError(f"model: must be one of {', '.join(NETWORKS)}, or {FUNCTION}; got {self.model!r}")
        if self.weights is None and not is_own(self.model):
            raise WrongUsage(f"weights: {self.model} needs --weights, or train it and give its --run")
        return Source(self.model, self.data, self.weights)

    @property
    def label(self) -> str:
        return self.run.name if self.model is None else self.model.replace(":", "-")


@dataclass(frozen=True)
class Tuning:
    """Fine-tuning; the defaults are the paper's."""

    epochs: int | None = None
    """None: 150 as in the paper, but 10 on digits, and none on data of your own."""
    batch_size: int = 128
    learning_rate: float = 1e-3
    momentum: float = 0.9
    weight_decay: float = 1e-4
    schedule: Literal["steps", "cosine"] = "steps"
    warmup: float = 0.0
    """In epochs."""
    optimizer: Literal["sgd", "adamw"] = "sgd"
    precision: Literal["float32", "bfloat16"] = "float32"
    channels_last: bool = False
    augment: bool = True
    distill: float = 0.0
    """The share of the dense model's predictions in the loss."""
    seed: int = 0

    def training(self, data: str) -> Training:
        usual = 0 if is_own(data) else 10 if data == "digits" else 150
        values = vars(self) | {"epochs": usual if self.epochs is None else self.epochs}
        return Training(**values)


@dataclass(frozen=True)
class Goal:
    """How small: a method with its ratio or ranks, or budgets, for which every layer gets the structure that suits it."""

    method: Annotated[str | None, arg(metavar="NAME")] = None
    """See `eigendamage list`."""
    ratio: float | None = None
    """The paper's knob: the share of all channels or directions that goes."""
    macs: float | None = None
    """A budget: the share of the multiply-accumulates that stays."""
    params: float | None = None
    """A budget: the share of the parameters that stays."""
    latency: float | None = None
    """A budget: the share of the time of a pass that stays, as measured here and now."""
    loss: float | None = None
    """A budget: by how much the loss may grow."""
    ranks: float | None = None
    """For cp: a multiple of each layer's rank."""
    rank: int | None = None
    """For cp: one rank for all layers."""
    cap: float | None = None
    """With a method: at most this share of a layer goes. 0.95 where it is not given."""

    def planning(self) -> dict[str, Any]:
        given = {key: value for key, value in vars(self).items() if value is not None and key != "rank"}
        if self.rank is not None:
            if self.ranks is not None:
                raise WrongUsage("how small? Give --ranks or --rank, and not both")
            given["ranks"] = self.rank
        if not given.keys() & {"ratio", "macs", "params", "latency", "loss", "ranks"}:
            raise WrongUsage("how small? Give a budget, such as --macs 0.5, or a --method with its --ratio")
        check(given)
        return given


def check(planning: dict[str, Any]) -> None:
    """Before minutes are spent on measuring."""
    budgets = [key for key in ("macs", "params", "latency", "loss") if key in planning]
    if sum((bool(budgets), "ratio" in planning, "ranks" in planning)) > 1:
        raise WrongUsage("how small? Give one of --ratio, --ranks or --rank, or budgets, and not several of these")
    if "method" in planning:
        removes = method_named(planning["method"]).removes
        if "ranks" in planning and removes != "rank":
            raise WrongUsage(f"ranks, rank: are for cp; {planning['method']} finds its own ranks from --ratio")
    elif budgets and "cap" in planning:
        raise WrongUsage("cap: goes with a --method; budgets without one have no cap")
    elif not budgets:
        raise WrongUsage("method: --ratio, --ranks and --rank need a --method; see `eigendamage list`")
    if "ratio" in planning:
        check_ratio(planning["ratio"])
    if isinstance(planning.get("ranks"), int):
        require_whole("rank", planning["ranks"], least=1)
    elif "ranks" in planning:
        require_number("ranks", planning["ranks"], "above 0", lambda x: x > 0)
    check_cap(planning.get("cap", 0.95))
    check_budgets({key: planning[key] for key in budgets}, planning.get("method"))


@dataclass(frozen=True)
class Statistics:
    """What is measured before pruning."""

    examples: int = 2000
    """How many of the training examples."""
    labels: Literal["sampled", "given"] = "sampled"
    """Labels for the gradients: drawn from the model's own prediction, or those of the data."""

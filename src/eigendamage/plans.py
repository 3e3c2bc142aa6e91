"""What each layer becomes, as plain data."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, field

from jaxtyping import Bool
from rich.table import Table
from torch import Tensor

from eigendamage import structures
from eigendamage.coupling import Coupling
from eigendamage.layers import LayerShape, some
from eigendamage.methods import BEST, METHODS
from eigendamage.text import render, si

FORMAT = 1
COSTS = ("parameters", "MACs", "time", "predicted loss")


@dataclass
class Choice:
    """What one layer becomes. ``ranks`` may be edited by hand; the factors are computed when the plan is applied."""

    shape: LayerShape
    structure: str = "dense"
    ranks: dict[str, int] = field(default_factory=dict)
    loss: float | None = 0.0  # increase of the loss that the method predicts; None if it predicts none
    reason: str = ""  # why it stays dense
    loss_of: str = ""  # what loss and time were predicted for; an edited layer is something else
    seconds: float | None = None  # predicted time of a pass through it, where a budget was one of time
    dense_seconds: float | None = None

    @property
    def params(self) -> int:
        return structures.params(self.structure, self.shape, self.ranks)

    @property
    def macs(self) -> int:
        return structures.macs(self.structure, self.shape, self.ranks)

    @property
    def predicted_loss(self) -> float | None:
        """The loss, unless the layer has been edited since it was predicted."""
        if self.structure == "dense":
            return 0.0
        return self.loss if self.loss_of in ("", self.description) else None

    @property
    def description(self) -> str:
        return " ".join([self.structure, *(f"{key} {rank}" for key, rank in self.ranks.items())])


@dataclass
class Kept:
    """The channels of one module that stay, by index."""

    inputs: list[int]
    outputs: list[int]


@dataclass(frozen=True)
class Latency:
    """Seconds of one pass through the whole model: as it was, and as it was predicted and then measured to become."""

    dense: float
    predicted: float
    measured: float


@dataclass
class Plan:
    """A choice for every layer; ``print(plan)`` is a table, `to_json` and `from_json` keep everything."""

    method: str
    layers: dict[str, Choice]
    kept: dict[str, Kept] = field(default_factory=dict)  # where channels go, also in batch norm and depthwise convolutions
    latency: Latency | None = None

    def check(self) -> None:
        """Raise ValueError, naming the layer, for a structure or ranks that cannot be; a plan may have been edited."""
        for name, choice in self.layers.items():
            structures.check_ranks(name, choice.structure, choice.shape, choice.ranks)

    @property
    def params(self) -> int:
        """Parameters of the layers after the plan."""
        self.check()
        return sum(choice.params for choice in self.layers.values())

    @property
    def macs(self) -> int:
        """Multiply-accumulates of the layers for one example, after the plan."""
        self.check()
        return sum(choice.macs for choice in self.layers.values())

    @property
    def dense_params(self) -> int:
        return sum(choice.shape.params for choice in self.layers.values())

    @property
    def dense_macs(self) -> int:
        return sum(choice.shape.macs for choice in self.layers.values())

    @property
    def loss(self) -> float | None:
        """Predicted increase of the loss; None where some layer has no prediction."""
        losses = [choice.predicted_loss for choice in self.layers.values()]
        known = [loss for loss in losses if loss is not None]
        return math.fsum(known) if len(known) == len(losses) else None

    def __getitem__(self, name: str) -> Choice:
        if name not in self.layers:
            raise ValueError(f"the plan has no layer {name!r}; its layers are {some(self.layers)}")
        return self.layers[name]

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> Plan:
        """Raises ValueError for text that is no plan, or one of structures and ranks that cannot be."""
        try:
            content = json.loads(text)
            if content.pop("format") != FORMAT:
                raise ValueError(f"its format is not {FORMAT}")
            layers = {
                name: Choice(**{**row, "shape": LayerShape.from_dict(row["shape"])}) for name, row in content["layers"].items()
            }
            kept = {name: Kept(**row) for name, row in content["kept"].items()}
            latency = Latency(**content["latency"]) if content["latency"] else None
            plan = cls(_text(content["method"]), layers, kept, latency)
            for choice in layers.values():
                _text(choice.structure), _text(choice.reason), _text(choice.loss_of)
            for name, sides in kept.items():
                if any(type(index) is not int for index in (*sides.inputs, *sides.outputs)):
                    raise ValueError(f"{name}: kept channels must be whole numbers")
            plan.check()
            return plan
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"this is not the JSON of a plan: {error}") from error

    @property
    def title(self) -> str:
        return f"{method_title(self.method)}: what each layer becomes"

    def rows(self) -> tuple[list[str], list[list[str]]]:
        """A header and a row of texts for every layer; the last row is all of them together."""
        self.check()
        timed = any(choice.dense_seconds is not None for choice in self.layers.values())
        header = [
            "layer",
            "becomes",
            "ranks",
            "parameters",
            "MACs",
            *(["time"] if timed else []),
            "predicted loss",
            "why dense",
        ]
        rows = []
        for name, choice in self.layers.items():
            time = [_time(choice)] if timed else []
            rows.append([name, choice.structure, _ranks(choice), *_costs(choice), *time, _loss(choice), choice.reason])
        cost = _cost(self.params, self.dense_params), _cost(self.macs, self.dense_macs)
        return header, [*rows, ["all layers", "", "", *cost, *([""] if timed else []), loss_text(self.loss), ""]]

    @property
    def pass_text(self) -> str:
        """What one pass takes, where a budget was one of time."""
        return _latency(self.latency) if self.latency else ""

    def __str__(self) -> str:
        table = Table(title=self.title, title_justify="left")
        header, rows = self.rows()
        for name in header:
            table.add_column(name, justify="right" if name in COSTS else "left")
        for row in rows[:-1]:
            table.add_row(*row)
        table.add_section()
        table.add_row(*rows[-1])
        return "\n".join([render(table), *([self.pass_text] if self.latency else [])])


def kept_where(coupling: Coupling, kept: Bool[Tensor, " units"]) -> dict[str, Kept]:
    """The indices that stay in every module that loses any, given which units stay."""
    stays = [*kept.tolist(), True]  # FIXED is −1: the last entry

    def indices(units: tuple[int, ...]) -> list[int]:
        return [index for index, unit in enumerate(units) if stays[unit]]

    sides = {name: (side, Kept(indices(side.inputs), indices(side.outputs))) for name, side in coupling.sides.items()}
    return {n: k for n, (s, k) in sides.items() if len(k.inputs) < len(s.inputs) or len(k.outputs) < len(s.outputs)}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"there is {value!r} where a text should be")
    return value


def method_title(name: str) -> str:
    if name == BEST:
        return "Best structures"
    return METHODS[name].title if name in METHODS else name


def _ranks(choice: Choice) -> str:
    limits = structures.STRUCTURES[choice.structure].limits(choice.shape) if choice.structure in structures.STRUCTURES else {}
    return ", ".join(f"{key} {rank}/{limits.get(key, '?')}" for key, rank in choice.ranks.items())


def _costs(choice: Choice) -> tuple[str, str]:
    return _cost(choice.params, choice.shape.params), _cost(choice.macs, choice.shape.macs)


def _cost(after: int, before: int) -> str:
    return si(after) if after == before else f"{si(before)} → {si(after)}"


def _time(choice: Choice) -> str:
    if choice.seconds is None or choice.dense_seconds is None:
        return ""
    now, before = f"{1e3 * choice.seconds:.3g} ms", f"{1e3 * choice.dense_seconds:.3g}"
    if choice.loss_of not in ("", choice.description):
        return "unknown"
    return now if choice.structure == "dense" else f"{before} → {now}"


def _latency(latency: Latency) -> str:
    shares = [
        f"{what} {1e3 * seconds:.3g} ms ({seconds / latency.dense:.0%})"
        for what, seconds in (("predicted", latency.predicted), ("measured", latency.measured))
    ]
    return f"one pass: dense {1e3 * latency.dense:.3g} ms, {', '.join(shares)}"


def _loss(choice: Choice) -> str:
    return "" if choice.structure == "dense" else loss_text(choice.predicted_loss)


def loss_text(loss: float | None) -> str:
    return "unknown" if loss is None else f"{loss:.3g}"

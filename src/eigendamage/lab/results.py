"""Results of cells in one file per experiment, and as rows for tables and figures."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from eigendamage.files import write_text
from eigendamage.lab.scales import PAPER, SMALL
from eigendamage.lab.settings import Pruning, from_data
from eigendamage.lab.steps import Content

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")

DATA_TITLES = {
    "cifar10": "CIFAR-10",
    "cifar10-split": "a part of CIFAR-10 held out",
    "cifar100": "CIFAR-100",
    "tiny-imagenet": "Tiny-ImageNet",
    "digits": "digits",
}
NETWORK_TITLES = {
    "vgg19": "VGG19",
    "vgg19-thin": "thin VGG19",
    "resnet32x4": "ResNet32 (×4)",
    "preresnet29": "PreResNet29",
    "preresnet29-thin": "thin PreResNet29",
    "resnet20": "ResNet-20",
    "resnet32": "ResNet-32",
    "resnet44": "ResNet-44",
    "resnet56": "ResNet-56",
}
# The network of the paper whose numbers stand beside ours.
STANDS_FOR = {ours: paper for scale in (PAPER, SMALL) for paper, ours in scale.networks.items()}


@dataclass(frozen=True, eq=False)
class Row:
    """The result of one pruning cell."""

    cell: Pruning
    content: Content

    @property
    def place(self) -> tuple[str, str, bool]:
        """Network, data set and whether it was trained with L1."""
        dense = self.cell.dense
        return dense.network, dense.data, dense.training is not None and dense.training.l1 > 0

    @property
    def title(self) -> str:
        network, data, l1 = self.place
        return f"{NETWORK_TITLES[network]}{' + L1' if l1 else ''} on {DATA_TITLES[data]}"

    @property
    def method(self) -> str:
        return self.cell.planning.get("method") or "best"

    @property
    def ratio(self) -> float | None:
        return self.cell.planning.get("ratio")

    @property
    def end(self) -> Content:
        """What there is to say of the last round."""
        last: Content = self.content["rounds"][-1]
        return last

    def removed(self, what: str, round_number: int = -1) -> float:
        """The share of ``"params"`` or ``"macs"`` that went."""
        left: float = self.content["rounds"][round_number][what] / self.content["dense"][what]
        return 1 - left

    @property
    def accuracy(self) -> float:
        """After the last epoch of fine-tuning; before it where there was none."""
        return float(self.end.get("last", self.end["before"]["accuracy"]))

    @property
    def best(self) -> float:
        return float(self.end.get("best", self.end["before"]["accuracy"]))


def rows_of(results: Iterable[Content]) -> list[Row]:
    rows = []
    for content in results:
        cell = from_data(content["cell"])
        if isinstance(cell, Pruning):
            rows.append(Row(cell, content))
    return rows


def grouped(items: Iterable[T], key: Callable[[T], K]) -> dict[K, list[T]]:
    """Items by a key, keys in the order in which they first came."""
    groups: dict[K, list[T]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean, and standard deviation where there are several."""
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


# --- files ------------------------------------------------------------------------------------------------------------------


def read_results(path: Path) -> dict[str, Any]:
    """What `write_results` wrote. Raises ValueError for anything else."""
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__}")
        for key, kind in (("experiment", str), ("commands", list), ("cells", list)):
            if not isinstance(content[key], kind):
                raise TypeError(f"{key} must be a {kind.__name__}")
        for cell in content["cells"]:
            from_data(cell["cell"]), cell["versions"]["device"]
    except KeyError as error:
        raise ValueError(f"{path} is not a file of results: there is no {error}") from None
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path} is not a file of results: {error}") from None
    return content


def write_results(path: Path, experiment: str, commands: Sequence[str], cells: Iterable[Content]) -> dict[str, Any]:
    """Add cells to a file of results; one with the same label as before takes its place. Plans are left out: they are long."""
    before = read_results(path) if path.exists() else {"cells": [], "commands": []}
    found = {from_data(content["cell"]).label: content for content in before["cells"]}
    found |= {from_data(content["cell"]).label: _shortened(content) for content in cells}
    known = [*before["commands"], *(command for command in commands if command not in before["commands"])]
    content = {"experiment": experiment, "commands": known, "cells": list(found.values())}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, _lines(content))
    return content


def _shortened(content: Content) -> Content:
    if "rounds" not in content:
        return content
    return content | {"rounds": [{key: v for key, v in entry.items() if key != "plan"} for entry in content["rounds"]]}


def _lines(content: dict[str, Any]) -> str:
    """A cell a line: small, and a change of one cell is a change of one line."""
    head = {key: value for key, value in content.items() if key != "cells"}
    cells = ",\n".join(json.dumps(_rounded(cell)) for cell in content["cells"])
    return f'{json.dumps(head, indent=1)[:-2]},\n "cells": [\n{cells}\n]}}\n'


def _rounded(value: Any) -> Any:
    """Six digits are more than any of these numbers is good for."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(entry) for key, entry in value.items()}
    return [_rounded(entry) for entry in value] if isinstance(value, list) else value

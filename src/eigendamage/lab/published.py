"""The paper's numbers: tables 1 and 2 and those of its appendix (3 to 7), as they are printed there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources


@dataclass(frozen=True)
class Published:
    """One row at one ratio; means with their deviations, in percent. None where the network failed to converge."""

    network: str
    l1: bool
    data: str
    ratio: float
    method: str
    accuracy: tuple[float, ...] | None
    weights: tuple[float, ...]  # the reduction
    flops: tuple[float, ...]


@lru_cache(maxsize=1)
def _content() -> dict[str, list[dict[str, object]]]:
    text = resources.files(__package__).joinpath("published.json").read_text()
    content: dict[str, list[dict[str, object]]] = json.loads(text)
    return content


@lru_cache(maxsize=1)
def published() -> dict[tuple[str, bool, str, str, float], Published]:
    """By network, L1, data set, method and ratio."""
    rows = [
        Published(**{key: tuple(v) if isinstance(v, list) else v for key, v in row.items() if key != "table"})  # type: ignore[arg-type]
        for row in _content()["pruned"]
    ]
    return {(row.network, row.l1, row.data, row.method, row.ratio): row for row in rows}


def dense_accuracy(network: str, l1: bool, data: str) -> float | None:
    rows = _content()["dense"]
    found = [row["accuracy"] for row in rows if (row["network"], row["l1"], row["data"]) == (network, l1, data)]
    return float(str(found[0])) if found else None

"""The paper's global percentile: what stays, given scores of all layers in one list (algorithms 1 and 2, section 5.2)."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from eigendamage.methods.eigendamage import strongest

Key = TypeVar("Key", bound=Hashable)


def threshold(scores: Float[Tensor, " n"], ratio: float) -> float:
    """The score at or below which a share ``ratio`` of the list lies: its ⌊ratio · n⌋-th smallest entry."""
    count = math.floor(ratio * len(scores) + 1e-9)  # 0.29 · 100 is 28.999…
    return float(scores.sort().values[count - 1]) if count else -math.inf


def fewest(size: int, cap: float) -> int:
    """How many of ``size`` must stay when at most a share ``cap`` may go; never none."""
    return max(1, size - math.floor(cap * size + 1e-9))


def keep_by_percentile(scores: Mapping[Key, Float[Tensor, " n"]], ratio: float, cap: float) -> dict[Key, Bool[Tensor, " n"]]:
    """What stays of each list: all that is strictly above the global threshold, and in any case its best few (``cap``)."""
    limit = threshold(torch.cat(list(scores.values())), ratio) if scores else -math.inf
    return {key: _with_best(values > limit, values, cap) for key, values in scores.items()}


def _with_best(kept: Tensor, scores: Tensor, cap: float) -> Tensor:
    least = fewest(len(scores), cap)
    if int(kept.sum()) < least:
        kept = torch.zeros_like(kept)
        kept[strongest(scores, least)] = True
    return kept


def keep_units(
    scores: Float[Tensor, " units"],
    removable: Bool[Tensor, " units"],
    also_listed: Iterable[Tensor],
    layers: Iterable[Tensor],
    ratio: float,
    cap: float,
) -> Bool[Tensor, " units"]:
    """What stays of channels that several layers may share.

    ``also_listed`` are scores that move the percentile though their channels stay. ``layers`` are the units of each layer's
    outputs, in which at most a share ``cap`` may go.
    """
    limit = threshold(torch.cat([scores[removable], *also_listed]), ratio)
    kept = (scores > limit) | ~removable
    for units in layers:
        least = fewest(len(units), cap)
        # A unit can stand for several rows of a layer: count rows, add the best missing units until enough rows stay.
        for unit in scores[units].argsort(descending=True, stable=True):
            if int(kept[units].sum()) >= least:
                break
            kept[units[unit]] = True
    return kept

"""From the quadratic by which structures are chosen to the increase of the loss that users see, as trials showed it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

# A quadratic cannot become a smaller power than the first in the long run, and errors do not compound faster than this.
SLOPES = (1.0, 3.0)


@dataclass(frozen=True)
class Calibration:
    """Pairs of a quadratic and the increase that was measured; both grow, and a power law leads from each to the next.

    The quadratic of every layer, and of the channels between two (by the layer in front), has a scale of its own. Without
    trials, quadratics are taken at their word.
    """

    trials: tuple[tuple[float, float], ...] = ()
    layers: Mapping[str, float] = field(default_factory=dict)
    links: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, trials: Iterable[tuple[float, float]]) -> Calibration:
        """From trials in any order; those that show no increase, or less than a smaller change did, say nothing."""
        kept: list[tuple[float, float]] = []
        for quadratic, increase in sorted(trials):
            if quadratic > 0 and increase > 0 and all(a < quadratic and b < increase for a, b in kept):
                kept.append((quadratic, increase))
        return cls(tuple(kept))

    def increase(self, quadratic: float) -> float:
        """The increase of the loss to expect."""
        return _along(self.trials, quadratic)

    def quadratic(self, increase: float) -> float:
        """The inverse: how large the quadratic may be for this increase."""
        return _along(tuple((b, a) for a, b in self.trials), increase, inverse=True)


def _along(points: tuple[tuple[float, float], ...], at: float, inverse: bool = False) -> float:
    if not points or at <= 0:
        return max(at, 0.0)
    logs = [(math.log(a), math.log(b)) for a, b in points]
    segment = next((pair for pair in pairwise(logs) if math.log(at) <= pair[1][0]), tuple(logs[-2:]))
    x, y = segment[0]
    slope = 1.0
    if len(segment) == 2:
        slope = (segment[1][1] - y) / (segment[1][0] - x)
    outside = not logs[0][0] <= math.log(at) <= logs[-1][0]
    if outside:
        low, high = (1 / SLOPES[1], 1 / SLOPES[0]) if inverse else SLOPES
        slope = min(max(slope, low), high)
        x, y = logs[0] if math.log(at) < logs[0][0] else logs[-1]
    return math.exp(y + slope * (math.log(at) - x))

"""Axes: few round ticks that cover the values, their names, and where a value lies between them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal

from eigendamage.charts.drawing import text_width
from eigendamage.figures import Number, Real, Series, known

SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
UNITS = ((1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Scale:
    """From the first tick to the last one. Values that it cannot show (unknown, or not positive on a log scale) are None."""

    ticks: tuple[Real, ...]
    log: bool = False
    percent: bool = False

    def share(self, value: Number) -> Real | None:
        """How far along the axis: 0 at the first tick, 1 at the last."""
        if value is None or not _shown(value, self.log):
            return None
        low, high, value = (math.log10(v) if self.log else float(v) for v in (self.ticks[0], self.ticks[-1], value))
        return (value - low) / (high - low)

    @property
    def labels(self) -> list[str]:
        return tick_labels(self.ticks, self.log, self.percent)

    def marks(self) -> list[tuple[Real, str]]:
        """How far along each tick is, and its name."""
        return [(self.share(tick) or 0.0, text) for tick, text in zip(self.ticks, self.labels, strict=True)]


def scale_for(
    values: Sequence[Number], *, log: bool = False, percent: bool = False, about: int = 6, zero: bool = False
) -> Scale:
    """A scale that shows all of ``values``, with about so many ticks; from zero on if bars stand on it."""
    shown = [float(v) for v in values if v is not None and _shown(v, log)]
    if zero and not log:
        shown.append(0.0)
    low, high = (min(shown), max(shown)) if shown else (1.0, 10.0) if log else (0.0, 1.0)
    return Scale(tuple(log_ticks(low, high, about) if log else nice_ticks(low, high, about)), log, percent)


def _shown(value: Real, log: bool) -> bool:
    """Powers of ten at the very ends of what floats can hold would make ticks beyond."""
    return known(value) and abs(value) < 1e290 and (not log or value > 1e-290)


def fitting(
    values: Sequence[Number], room: Real, *, log: bool = False, percent: bool = False, most: int = 8, zero: bool = False
) -> Scale:
    """A scale with as many ticks as have room beside each other."""
    for about in range(most, 1, -1):
        scale = scale_for(values, log=log, percent=percent, about=about, zero=zero)
        if max(text_width(text, 12) for text in scale.labels) + 12 <= room / max(1, len(scale.ticks) - 1):
            break
    return scale


def nice_ticks(low: Real, high: Real, about: int = 6) -> list[Real]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten, from at most ``low`` to at least ``high``."""
    size = max(abs(low), abs(high))
    if high - low <= max(1e-9 * size, 1e-300):  # one value: a scale around it
        spread = 0.05 * size or 0.5
        low, high = low - spread, high + spread
    exponent = math.floor(math.log10((high - low) / max(1, about - 1)))
    for power in (exponent, exponent + 1):
        for factor in (1, 2, 2.5, 5):
            first, last = _cover(low, high, factor, power)
            if last - first < about:
                return [_multiple(number, factor, power) for number in range(first, last + 1)]
    first, last = _cover(low, high, 1, exponent + 2)
    return [_multiple(number, 1, exponent + 2) for number in range(first, last + 1)]


def _cover(low: Real, high: Real, factor: Real, power: int) -> tuple[int, int]:
    """The multiples of a step around a range; what is off by rounding alone needs no further one."""
    step = _multiple(1, factor, power)
    first, last = math.floor(low / step), math.ceil(high / step)
    if math.isclose((first + 1) * step, low, rel_tol=1e-9, abs_tol=1e-9 * step):
        first += 1
    if math.isclose((last - 1) * step, high, rel_tol=1e-9, abs_tol=1e-9 * step):
        last -= 1
    return first, max(last, first + 1)


def _multiple(number: int, factor: Real, power: int) -> Real:
    return float((Decimal(number) * Decimal(factor)).scaleb(power))  # decimal, so that 3 × 0.1 is 0.3


def log_ticks(low: Real, high: Real, about: int = 6) -> list[Real]:
    """Powers of ten, every so many if there are a lot; 1, 2 and 5 times them where there are few."""
    below, above = math.floor(math.log10(low)), math.ceil(math.log10(high))
    if above - below <= 2:
        fine = [float(f"{factor}e{power}") for power in range(below - 1, above + 2) for factor in (1, 2, 5)]
        first = max(number for number, tick in enumerate(fine) if tick <= low)
        last = min(number for number, tick in enumerate(fine) if tick >= high)
        if last == first:
            first, last = first - 1, last + 1
        if last - first < about:
            return fine[max(0, first) : last + 1]
    every = max(1, math.ceil((above - below) / max(1, about - 1)))
    first, last = math.floor(below / every), math.ceil(above / every)
    return [float(f"1e{number * every}") for number in range(first, max(last, first + 1) + 1)]


def tick_labels(ticks: Sequence[Real], log: bool = False, percent: bool = False) -> list[str]:
    """Texts that tell the ticks apart, all with the same unit and number of decimals on a linear scale."""
    if log:
        return [_log_label(tick, percent) for tick in ticks]
    size = max(abs(tick) for tick in ticks)
    if percent:
        return [text + "%" for text in _decimals([100 * tick for tick in ticks])]
    if size < 1e-3:
        return [_scientific(tick) for tick in ticks]
    factor, unit = next(((f, u) for f, u in UNITS if size >= 10 * f or (size >= f and f > 1e3)), (1.0, ""))
    texts = _decimals([tick / factor for tick in ticks])
    return [text + unit if tick else text for text, tick in zip(texts, ticks, strict=True)]


def _decimals(values: Sequence[Real]) -> list[str]:
    for decimals in range(13):
        texts = [f"{value:.{decimals}f}" for value in values]
        step = abs(values[1] - values[0]) if len(values) > 1 else abs(values[0])
        if all(abs(float(text) - value) <= 1e-3 * step for text, value in zip(texts, values, strict=True)):
            break
    return [text.replace("-", "−") if value else "0" for text, value in zip(texts, values, strict=True)]


def _log_label(tick: Real, percent: bool) -> str:
    if percent and tick >= 1e-5:
        return f"{100 * tick:.10g}%"
    if 1e-3 <= tick < 1e4:
        return f"{tick:.10g}"
    if tick < 1e7 and tick > 1:
        return next(f"{tick / factor:.10g}{unit}" for factor, unit in UNITS if tick >= factor)
    return _scientific(tick)


def _scientific(value: Real) -> str:
    if not value:
        return "0"
    mantissa, power = f"{value:.3e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".").replace("-", "−")
    ten = "10" + str(int(power)).translate(SUPERSCRIPTS)
    return ten if mantissa == "1" else f"{mantissa}×{ten}"


def value_text(value: Real, percent: bool = False, digits: int = 4) -> str:
    """One value as a tooltip shows it."""
    if percent:
        return f"{100 * value:.{digits}g}%".replace("-", "−")
    if value and (abs(value) < 1e-3 or abs(value) >= 1e7):
        return _scientific(value)
    text = f"{value:,.2f}".rstrip("0").rstrip(".") if abs(value) >= 1000 else f"{value:.{digits}g}"
    return text.replace("-", "−")


def span_text(series: Series, at: int, percent: bool = False) -> str:
    """One value of a series, with its bounds where it has them."""
    value, low, high = (None if values is None else values[at] for values in (series.y, series.low, series.high))
    text = "–" if value is None or not known(value) else value_text(value, percent)
    if low is None or high is None or not known(low) or not known(high):
        return text
    return f"{text} ({value_text(low, percent)} to {value_text(high, percent)})"

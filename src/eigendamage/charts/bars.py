"""Horizontal bars, grouped by category: the names may be long, and there may be many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eigendamage.charts.drawing import (
    GRID,
    INK,
    SOFT,
    Drawn,
    Hover,
    Room,
    colour_of,
    element,
    escaped,
    label,
    number,
    series_group,
    shortened,
    style_of,
    text_width,
    tint,
)
from eigendamage.charts.scales import Scale, fitting, span_text, value_text
from eigendamage.figures import Figure, Number, Real, Series

GAP = 8.0  # between categories


@dataclass(frozen=True)
class Rows:
    """A scale from left to right, and a row below the other for each category, with room for a bar of each series."""

    scale: Scale
    left: Real
    right: Real
    top: Real
    thick: Real
    step: Real

    def across(self, value: Number) -> Real | None:
        share = self.scale.share(value)
        return None if share is None else self.left + share * (self.right - self.left)

    @property
    def start(self) -> Real:
        """Where bars stand; on a logarithmic scale, which has no zero, at its first tick."""
        zero = self.across(0.0)
        return self.left if zero is None else zero

    def middle(self, row: int) -> Real:
        return self.top + self.step * (row + 0.5)


def bars(figure: Figure, room: Room, embedded: bool) -> Drawn:
    """Alone in their category, bars say their value at their end."""
    names = [shortened(name, 0.42 * room.width, 12) for name in figure.categories]
    rows = _rows(figure, room, names)
    bottom = rows.top + rows.step * len(names)
    parts = [label(room.left, room.top + 14, figure.x_label, 13, colour=SOFT), *_grid(rows, bottom)]
    for row, (short, name) in enumerate(zip(names, figure.categories, strict=True)):
        whole = element("title", escaped(name)) if short != name else ""
        parts.append(element("g", label(rows.left - 8, rows.middle(row) + 4, short, 12, anchor="end") + whole))
    parts += [_series(figure, place, rows, embedded) for place in range(len(figure.series))]
    parts.append(element("path", d=_upright(rows.start, rows.top, bottom), **tint(SOFT, "stroke")))
    parts.append(label((rows.left + rows.right) / 2, bottom + 40, figure.y_label, 13, anchor="middle", colour=SOFT))
    return parts, bottom + 44


def _rows(figure: Figure, room: Room, names: Sequence[str]) -> Rows:
    count = max(1, len(figure.series))
    thick = {1: 15.0, 2: 10.0}.get(count, 8.0)
    left = room.left + max((text_width(name, 12) for name in names), default=0) + 10
    right = room.right - (58 if count == 1 else 14)
    values = [v for series in figure.series for some in (series.y, series.low or (), series.high or ()) for v in some]
    scale = fitting(values, right - left, log=figure.log_y, percent=figure.percent_y, most=5 if room.narrow else 9, zero=True)
    return Rows(scale, left, right, room.top + (30 if figure.x_label else 6), thick, max(count * thick, 12.0) + GAP)


def _series(figure: Figure, place: int, rows: Rows, embedded: bool) -> str:
    series = figure.series[place]
    first = -rows.thick * len(figure.series) / 2 + rows.thick * place
    drawn, hovers = [], []
    for at, (row, value) in enumerate(zip(series.x, series.y, strict=True)):
        end = rows.across(value)
        if end is None or row is None or value is None:
            continue
        y = rows.middle(int(row)) + first
        drawn.append(_bar(rows.start, end, y, rows.thick, colour_of(style_of(series, place))))
        drawn += _whisker(series, at, rows, y + rows.thick / 2)
        if len(figure.series) == 1:
            text = value_text(value, figure.percent_y, digits=3)
            drawn.append(label(_furthest(series, at, rows, end) + 6, y + rows.thick / 2 + 4, text, 11))
        said = span_text(series, at, figure.percent_y)
        hovers.append(Hover(end, y + rows.thick / 2, figure.categories[int(row)], said))
    return series_group(drawn, place, series, hovers if embedded else None)


def _furthest(series: Series, at: int, rows: Rows, end: Real) -> Real:
    """Right of a bar and its whisker."""
    whisker = None if series.high is None else rows.across(series.high[at])
    return max(rows.start, end, end if whisker is None else whisker)


def _grid(rows: Rows, bottom: Real) -> list[str]:
    parts = []
    for share, text in rows.scale.marks():
        x = rows.left + share * (rows.right - rows.left)
        parts.append(element("path", d=_upright(x, rows.top, bottom), **tint(GRID, "stroke")))
        parts.append(label(x, bottom + 18, text, 12, anchor="middle", colour=SOFT))
    return parts


def _upright(x: Real, top: Real, bottom: Real) -> str:
    return f"M{number(x)} {number(top)}V{number(bottom)}"


def _bar(start: Real, end: Real, y: Real, thick: Real, colour: str) -> str:
    # Thinner than its place, so that neighbours stay apart; a trace of a bar where the value is zero.
    width = max(abs(end - start), 1.0)
    return element("rect", x=min(start, end), y=y + 0.5, width=width, height=thick - 1, rx=1.5, fill=colour)


def _whisker(series: Series, at: int, rows: Rows, y: Real) -> list[str]:
    if series.low is None or series.high is None:
        return []
    first, last = rows.across(series.low[at]), rows.across(series.high[at])
    if first is None or last is None:
        return []
    line = f"M{number(first)} {number(y - 2.5)}v5m0-2.5H{number(last)}m0-2.5v5"
    return [element("path", d=line, fill="none", stroke_width=1.3, **tint(INK, "stroke"))]

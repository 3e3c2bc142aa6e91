"""Curves in a plane: axes, error bands, lines with gaps, markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eigendamage.charts.drawing import (
    GRID,
    SOFT,
    Drawn,
    Hover,
    Room,
    colour_of,
    element,
    label,
    marker_of,
    number,
    series_group,
    style_of,
    text_width,
    tint,
)
from eigendamage.charts.scales import Scale, fitting, scale_for, span_text, value_text
from eigendamage.figures import Figure, Number, Real, Series

# Where points lie closer together, only every so many carries a marker.
BETWEEN_MARKERS = 30.0
Spot: TypeAlias = tuple[Real, Real]


@dataclass(frozen=True)
class Plane:
    """Two scales and the rectangle they span."""

    across: Scale
    up: Scale
    left: Real
    right: Real
    top: Real
    bottom: Real

    def spot(self, x: Number, y: Number) -> Spot | None:
        """Where a point lies; None if it is unknown."""
        along, height = self.across.share(x), self.up.share(y)
        if along is None or height is None:
            return None
        return self.left + along * (self.right - self.left), self.bottom - height * (self.bottom - self.top)


def curves(figure: Figure, room: Room, embedded: bool) -> Drawn:
    plane = _plane(figure, room)
    parts = [label(room.left, room.top + 14, figure.y_label, 13, colour=SOFT), *_axes(plane)]
    parts.append(label((plane.left + plane.right) / 2, plane.bottom + 42, figure.x_label, 13, anchor="middle", colour=SOFT))
    # The first series is the one that the others are compared with: it lies on top.
    for place, series in reversed(list(enumerate(figure.series))):
        hovers = _hovers(figure, series, plane) if embedded else None
        parts.append(series_group(_curve(series, style_of(series, place), plane), place, series, hovers))
    return parts, plane.bottom + 46


def _plane(figure: Figure, room: Room) -> Plane:
    values = [v for series in figure.series for some in (series.y, series.low or (), series.high or ()) for v in some]
    up = scale_for(values, log=figure.log_y, percent=figure.percent_y, about=6 if room.narrow else 8)
    left = room.left + max(text_width(text, 12) for text in up.labels) + 10
    right = room.right - 14
    all_x = [x for series in figure.series for x in series.x]
    across = fitting(all_x, right - left, log=figure.log_x, percent=figure.percent_x, most=6 if room.narrow else 11)
    top = room.top + 30
    return Plane(across, up, left, right, top, top + (230 if room.narrow else 330))


def _axes(plane: Plane) -> list[str]:
    parts = []
    for share, text in plane.up.marks():
        y = plane.bottom - share * (plane.bottom - plane.top)
        parts.append(element("path", d=f"M{number(plane.left)} {number(y)}H{number(plane.right)}", **tint(GRID, "stroke")))
        parts.append(label(plane.left - 8, y + 4, text, 12, anchor="end", colour=SOFT))
    parts.append(
        element("path", d=f"M{number(plane.left)} {number(plane.bottom)}H{number(plane.right)}", **tint(SOFT, "stroke"))
    )
    for share, text in plane.across.marks():
        x = plane.left + share * (plane.right - plane.left)
        parts.append(element("path", d=f"M{number(x)} {number(plane.bottom)}v5", **tint(SOFT, "stroke")))
        parts.append(label(x, plane.bottom + 20, text, 12, anchor="middle", colour=SOFT))
    return parts


def _hovers(figure: Figure, series: Series, plane: Plane) -> list[Hover]:
    found = []
    for at, (x, y) in enumerate(zip(series.x, series.y, strict=True)):
        spot = plane.spot(x, y)
        if spot is not None and x is not None:
            of = f"{figure.x_label} {value_text(x, figure.percent_x)}".strip()
            found.append(Hover(*spot, of, span_text(series, at, figure.percent_y)))
    return found


def _curve(series: Series, style: int, plane: Plane) -> list[str]:
    spots = [plane.spot(x, y) for x, y in zip(series.x, series.y, strict=True)]
    runs = _runs(spots)
    colour = colour_of(style)
    parts = []
    if outline := _band(series, plane):
        parts.append(element("path", d=outline, fill=colour, fill_opacity="0.16", stroke="none", class_="band"))
    if line := "".join(_path(run) for run in runs if len(run) > 1):
        dash: dict[str, str | Real] = {"stroke_dasharray": "6 5"} if series.dashed else {}
        parts.append(element("path", d=line, fill="none", stroke=colour, stroke_width=2.2, stroke_linejoin="round", **dash))
    every = max(1, round(len(spots) * BETWEEN_MARKERS / (plane.right - plane.left)))
    alone = {run[0] for run in runs if len(run) == 1}  # no line shows it
    # Each series starts somewhere else, so that curves which coincide show several markers.
    seen = [spot for at, spot in enumerate(spots) if spot is not None and (at % every == style % every or spot in alone)]
    parts += [_marker(spot, style) for spot in seen]
    return parts


def _marker(spot: Spot, style: int) -> str:
    where = f"translate({number(spot[0])} {number(spot[1])})"
    return element("path", d=marker_of(style), transform=where, fill=colour_of(style), stroke="none")


def _band(series: Series, plane: Plane) -> str:
    """The outline of the error band, in one piece between gaps."""
    if series.low is None or series.high is None:
        return ""
    lows = [plane.spot(x, low) for x, low in zip(series.x, series.low, strict=True)]
    highs = [plane.spot(x, high) for x, high in zip(series.x, series.high, strict=True)]
    both = [None if low is None or high is None else (*low, *high) for low, high in zip(lows, highs, strict=True)]
    outlines, run = [], []
    for corner in [*both, None]:
        if corner is not None:
            run.append(corner)
        elif run:
            outlines.append(_path([c[2:] for c in run] + [c[:2] for c in reversed(run)]) + "z")
            run = []
    return "".join(outlines)


def _runs(spots: Sequence[Spot | None]) -> list[list[Spot]]:
    """The pieces between gaps."""
    runs: list[list[Spot]] = [[]]
    for spot in spots:
        if spot is not None:
            runs[-1].append(spot)
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _path(spots: Sequence[Spot]) -> str:
    return "M" + "L".join(f"{number(x)} {number(y)}" for x, y in spots)

"""Matrices side by side in one scale of colours, drawn as one path a colour."""

from __future__ import annotations

import json
import math
from collections import defaultdict

from eigendamage.charts.drawing import GRID, INK, SOFT, Drawn, Room, element, label, number, shortened, tint
from eigendamage.charts.scales import Scale, fitting, value_text
from eigendamage.figures import Figure, Matrix, Real

# Viridis at ten places: even to the eye, and to the colour-blind.
ANCHORS = ("440154", "482878", "3e4a89", "31688e", "26828e", "1f9e89", "35b779", "6ece58", "b5de2b", "fde725")
LEVELS = 72
GAP = 28.0


def heatmap(figure: Figure, room: Room, embedded: bool) -> Drawn:
    columns = 1 if room.narrow else min(len(figure.matrices), 3)
    size = min((room.width - GAP * (columns - 1)) / columns, 420.0)
    values = [value for matrix in figure.matrices for row in matrix.values for value in row]
    bar_width = min(room.width - 30, 420.0)
    scale = fitting(values, bar_width, log=figure.log_y, most=6)
    parts, top, tallest = [], room.top, 0.0
    for place, matrix in enumerate(figure.matrices):
        if place % columns == 0 and place:
            top, tallest = top + tallest, 0.0
        left = room.left + (place % columns) * (size + GAP)
        parts.append(_panel(matrix, place, figure, scale, Room(left, left + size, top), embedded))
        tallest = max(tallest, 54 + _height(matrix, size))
    bar, bottom = _colour_bar(scale, figure.y_label, Room(room.left + 14, room.left + 14 + bar_width, top + tallest + 6))
    return [*parts, *bar], bottom


def _height(matrix: Matrix, width: Real) -> Real:
    return min(width * len(matrix.values) / len(matrix.values[0]), 1.6 * width)


def _panel(matrix: Matrix, place: int, figure: Figure, scale: Scale, room: Room, embedded: bool) -> str:
    rows, columns = len(matrix.values), len(matrix.values[0])
    height = _height(matrix, room.width)
    top = room.top + 26
    cells = element("rect", width=columns, height=rows, **tint(GRID)) + _cells(matrix, scale)
    frame = f"translate({number(room.left)} {number(top)}) scale({room.width / columns:.6g} {height / rows:.6g})"
    data: dict[str, str | Real] = {}
    if embedded:
        texts = [["–" if scale.share(v) is None else value_text(float(v or 0)) for v in row] for row in matrix.values]
        box = [room.left, top, room.width, height]
        data = {"data_label": matrix.label, "data_box": json.dumps([round(side, 2) for side in box])}
        data["data_cells"] = json.dumps(texts, ensure_ascii=False, separators=(",", ":"))
    title = label(room.left, room.top + 16, shortened(matrix.label, room.width, 13), 13, colour=INK, bold=True)
    body = element("g", cells, transform=frame, shape_rendering="crispEdges", stroke="none")
    below = label(room.left + room.width / 2, top + height + 17, figure.x_label, 12, anchor="middle", colour=SOFT)
    return element("g", title + body + below, class_="panel", data_series=str(place), **data)


def _cells(matrix: Matrix, scale: Scale) -> str:
    """Neighbours in a row of the same colour are one rectangle."""
    paths: dict[int, list[str]] = defaultdict(list)
    for y, row in enumerate(matrix.values):
        levels = [_level(scale.share(value)) for value in row] + [None]
        start = 0
        for x in range(1, len(levels)):
            if levels[x] != levels[start]:
                level = levels[start]
                if level is not None:
                    paths[level].append(f"M{start} {y}h{x - start}v1h{start - x}z")
                start = x
    return "".join(element("path", d="".join(path), fill=_colour(level)) for level, path in sorted(paths.items()))


def _level(share: Real | None) -> int | None:
    return None if share is None else min(LEVELS - 1, max(0, math.floor(share * LEVELS)))


def _colour(level: int) -> str:
    at = level / (LEVELS - 1) * (len(ANCHORS) - 1)
    low = min(int(at), len(ANCHORS) - 2)
    pair = [[int(anchor[i : i + 2], 16) for i in (0, 2, 4)] for anchor in ANCHORS[low : low + 2]]
    return "#" + "".join(f"{round(a + (b - a) * (at - low)):02x}" for a, b in zip(*pair, strict=True))


def _colour_bar(scale: Scale, name: str, room: Room) -> Drawn:
    step = room.width / LEVELS
    strips = [
        element("rect", x=room.left + step * level, y=room.top, width=step + 0.5, height=12, fill=_colour(level))
        for level in range(LEVELS)
    ]
    parts = [element("g", "".join(strips), shape_rendering="crispEdges")]
    for share, text in scale.marks():
        x = room.left + share * room.width
        parts.append(element("path", d=f"M{number(x)} {number(room.top + 12)}v4", **tint(SOFT, "stroke")))
        parts.append(label(x, room.top + 30, text, 12, anchor="middle", colour=SOFT))
    parts.append(label(room.left + room.width / 2, room.top + 50, name, 13, anchor="middle", colour=SOFT))
    return parts, room.top + 58

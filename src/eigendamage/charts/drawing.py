"""The pieces of a vector picture: elements, text of estimated width, colours, markers and the legend."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from eigendamage.figures import Real, Series

FONT = "system-ui,-apple-system,'Segoe UI',Roboto,Helvetica,Arial,sans-serif"
INK, SOFT, GRID, PAPER = "#1b1f24", "#57606a", "#e4e7eb", "#ffffff"

# Okabe and Ito's colours, which the colour-blind tell apart, without the yellow that vanishes on white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", INK)
# Each within about four pixels around its middle.
MARKERS = (
    "M-3.6 0a3.6 3.6 0 1 0 7.2 0a3.6 3.6 0 1 0-7.2 0z",
    "M-3.3-3.3h6.6v6.6h-6.6z",
    "M0-4.3L4.1 3.1H-4.1z",
    "M0-4.6L4.6 0L0 4.6L-4.6 0z",
    "M0 4.3L4.1-3.1H-4.1z",
    "M-1.4-4.2h2.8v2.8h2.8v2.8h-2.8v2.8h-2.8v-2.8h-2.8v-2.8h2.8z",
    "M0-4.6L1.3-1.5L4.5-1.4L2-.6L2.8 3.8L0 1.6L-2.8 3.8L-2-.6L-4.5-1.4L-1.3-1.5z",
)
# What XML cannot hold, even escaped.
ILLEGAL = re.compile("[^\t\n\r -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


@dataclass(frozen=True)
class Room:
    """Where to draw: between two columns, from a top downwards."""

    left: Real
    right: Real
    top: Real

    @property
    def width(self) -> Real:
        return self.right - self.left

    @property
    def narrow(self) -> bool:
        return self.width < 500

    def below(self, top: Real) -> Room:
        return Room(self.left, self.right, top)


@dataclass(frozen=True)
class Hover:
    """A point as a page hovers over it: where it is, what it belongs to and how much it is."""

    x: Real
    y: Real
    of: str
    value: str


Drawn: TypeAlias = tuple[list[str], Real]  # elements, and where the next thing below may start


def escaped(text: str) -> str:
    """As HTML and XML may hold it, in an attribute too."""
    return html.escape(ILLEGAL.sub("\ufffd", text))


def number(value: Real) -> str:
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else str(int(value))


def element(name: str, content: str = "", /, **attributes: str | Real) -> str:
    """``class_`` and ``stroke_width`` stand for ``class`` and ``stroke-width``; the content is XML already."""
    parts = [name]
    for key, value in attributes.items():
        parts.append(f'{key.rstrip("_").replace("_", "-")}="{escaped(value) if isinstance(value, str) else number(value)}"')
    return f"<{' '.join(parts)}>{content}</{name}>" if content else f"<{' '.join(parts)}/>"


def label(x: Real, y: Real, text: str, size: Real = 13, *, anchor: str = "start", colour: str = INK, bold: bool = False) -> str:
    weight: dict[str, str | Real] = {"font_weight": "600"} if bold else {}
    return element("text", escaped(text), x=x, y=y, font_size=size, text_anchor=anchor, **tint(colour), **weight)


def tint(colour: str, attribute: str = "fill") -> dict[str, str | Real]:
    """The colour, and a class by which a page may give it another one, as dark pages do."""
    return {attribute: colour, "class_": {INK: "ink", SOFT: "soft", GRID: "grid", PAPER: "paper"}.get(colour, "")}


def text_width(text: str, size: Real = 13) -> Real:
    """Generous, for whatever sans serif there is."""
    narrow, wide = sum(c in " .,:;|!'il()[]-jtf" for c in text), sum(c in "mwMW%@→×" or c > "\u2e80" for c in text)
    capital = sum("A" <= c <= "Z" and c not in "MW" for c in text)
    return size * (0.58 * (len(text) - narrow - wide - capital) + 0.36 * narrow + 0.95 * wide + 0.7 * capital)


def shortened(text: str, room: Real, size: Real = 13) -> str:
    """Without its middle, if it is wider than there is room: what tells names apart stands at their ends."""
    if text_width(text, size) <= room:
        return text
    for kept in range(len(text) - 1, 0, -1):
        head = kept // 3
        short = text[:head] + "…" + text[len(text) - (kept - head) :]
        if text_width(short, size) <= room:
            return short
    return "…"


def wrapped(text: str, room: Real, size: Real = 13) -> list[str]:
    lines: list[str] = []
    for word in text.split():
        if lines and text_width(f"{lines[-1]} {word}", size) <= room:
            lines[-1] += f" {word}"
        else:
            lines.append(shortened(word, room, size))
    return lines


def colour_of(style: int) -> str:
    return COLOURS[style % len(COLOURS)]


def marker_of(style: int) -> str:
    """After one round of colours the markers are shifted, so that every pair is another one."""
    return MARKERS[(style + style // len(COLOURS)) % len(MARKERS)]


def style_class(style: int) -> str:
    return f"s{style % len(COLOURS)}"


def paragraph(text: str, room: Room, size: Real, colour: str, bold: bool = False) -> Drawn:
    lines = wrapped(text, room.width, size)
    step = 1.4 * size
    parts = [label(room.left, room.top + step * n + size, line, size, colour=colour, bold=bold) for n, line in enumerate(lines)]
    return parts, room.top + step * len(lines) + 8


def series_group(parts: Sequence[str], place: int, series: Series, hovers: Sequence[Hover] | None) -> str:
    """All of one series, in its colour, with what a page needs to hover over it."""
    data: dict[str, str | Real] = {"data_series": str(place)}
    if hovers is not None:
        points = [(round(hover.x, 1), round(hover.y, 1), hover.of, hover.value) for hover in hovers]
        data |= {"data_label": series.label, "data_points": json.dumps(points, ensure_ascii=False, separators=(",", ":"))}
    return element("g", "".join(parts) or "<g/>", class_=f"series {style_class(style_of(series, place))}", **data)


def style_of(series: Series, place: int) -> int:
    return place if series.style is None else series.style


def legend(all_series: Sequence[Series], room: Room, bars: bool) -> Drawn:
    """A key for each series, in rows."""
    parts, at, y, size, row = [], room.left, room.top, 13.0, 26.0
    for place, series in enumerate(all_series):
        style = style_of(series, place)
        indent = 22 if bars else 34
        short = shortened(series.label, room.width - indent - 10, size)
        width = indent + 14 + text_width(short, size)
        if at > room.left and at + width > room.right + 12:
            at, y = room.left, y + row
        hit = element("rect", x=-6, width=width, height=row, y=-row / 2, fill="transparent", rx=5, class_="hit")
        sample = _bar_sample(style) if bars else _line_sample(style, series.dashed)
        name = label(indent, 4.5, short, size) + (element("title", escaped(series.label)) if short != series.label else "")
        spot = f"translate({number(at)} {number(y + row / 2)})"
        parts.append(element("g", hit + sample + name, class_="key", data_series=str(place), transform=spot))
        at += width
    return parts, y + row + 6


def _line_sample(style: int, dashed: bool) -> str:
    dash: dict[str, str | Real] = {"stroke_dasharray": "5 4"} if dashed else {}
    line = element("path", d="M2 0H28", stroke_width=2.2, fill="none", stroke=colour_of(style), **dash)
    marker = element("path", d=marker_of(style), transform="translate(15 0)", fill=colour_of(style), stroke="none")
    return element("g", line + marker, class_=style_class(style))


def _bar_sample(style: int) -> str:
    box = element("rect", x=0, y=-7, width=15, height=14, rx=2.5, fill=colour_of(style))
    return element("g", box, class_=style_class(style))

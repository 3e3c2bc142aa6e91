"""Figures as SVG: pictures that stand alone, on white; or parts of a page, which colours them and hovers over their data."""

from __future__ import annotations

from collections.abc import Callable

from eigendamage.charts.bars import bars
from eigendamage.charts.curves import curves
from eigendamage.charts.drawing import FONT, INK, PAPER, SOFT, Drawn, Room, element, escaped, legend, number, paragraph
from eigendamage.charts.heatmaps import heatmap
from eigendamage.figures import Figure, Real

WIDE, NARROW = 860, 360
DRAW: dict[str, Callable[[Figure, Room, bool], Drawn]] = {"lines": curves, "bars": bars, "heatmap": heatmap}


def svg(figure: Figure, width: int = WIDE, embedded: bool = False) -> str:
    """The picture of a figure; ``embedded`` in a page, which itself says title and note, it has no background either."""
    margin = 0.0 if embedded else 22.0
    top, parts = margin, []
    if not embedded:
        found, top = paragraph(figure.title, Room(margin, width - margin, top), 17, INK, bold=True)
        parts += found
    if len(figure.series) > 1:
        found, top = legend(figure.series, Room(margin, width - margin, top), figure.kind == "bars")
        parts += found
    found, bottom = DRAW[figure.kind](figure, Room(margin, width - margin, top), embedded)
    parts += found
    if not embedded and figure.note:
        found, bottom = paragraph(figure.note, Room(margin, width - margin, bottom + 8), 12, SOFT)
        parts += found
    height = bottom + margin
    size: dict[str, str | Real] = {} if embedded else {"width": width, "height": height}
    # In a page a title would cover the page's own tooltips.
    around = (
        []
        if embedded
        else [element("title", escaped(figure.title)), element("rect", width=width, height=height, rx=10, fill=PAPER)]
    )
    return element(
        "svg",
        "\n".join([*around, *parts]),
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width} {number(height)}",
        **size,
        role="img",
        aria_label=figure.title,
        class_=f"chart {figure.kind}",
        font_family=FONT,
    )


__all__ = ["NARROW", "WIDE", "svg"]

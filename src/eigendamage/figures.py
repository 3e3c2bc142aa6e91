"""Figures, tables and sections of a report, as plain data."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from eigendamage.checks import require, require_choice

# A value that is None, NaN or infinite is unknown: a gap in a curve, a dash in a table.
Number: TypeAlias = float | int | None
Real: TypeAlias = float | int
Values: TypeAlias = Sequence[Number]
Cell: TypeAlias = str | float | int | None
KINDS = ("lines", "bars", "heatmap")


@dataclass(frozen=True)
class Series:
    """One curve, or one group of bars. ``low`` and ``high`` bound an error band. ``style`` numbers colour and marker, so that
    a method can look the same in every figure; without it they follow from the place in the figure."""

    label: str
    x: Values
    y: Values
    low: Values | None = None
    high: Values | None = None
    dashed: bool = False
    style: int | None = None

    def __post_init__(self) -> None:
        for name in ("y", "low", "high"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.x):
                raise ValueError(
                    f"{name} of series {self.label!r}: must have as many values as x ({len(self.x)}); got {len(values)}"
                )
        if (self.low is None) != (self.high is None):
            raise ValueError(f"low and high of series {self.label!r}: must be given together")


@dataclass(frozen=True)
class Matrix:
    """One panel of a heatmap: rows of values, the first on top."""

    label: str
    values: Sequence[Values]

    def __post_init__(self) -> None:
        if not self.values or not len(self.values[0]):
            raise ValueError(f"values of matrix {self.label!r}: must have a row and a column at least")
        for number, row in enumerate(self.values):
            if len(row) != len(self.values[0]):
                raise ValueError(
                    f"values of matrix {self.label!r}: row {number} must have {len(self.values[0])} values; got {len(row)}"
                )


@dataclass(frozen=True)
class Figure:
    """Curves (``lines``), horizontal bars (``bars``) or matrices in a common scale of colours (``heatmap``).

    Bars: ``categories`` are the names from top to bottom, ``x`` of a series indices into them, and ``y`` how long the bars are.
    Heatmaps: ``matrices`` instead of ``series``; ``log_y`` makes the colours logarithmic.
    """

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series] = ()
    log_x: bool = False
    log_y: bool = False
    percent_x: bool = False
    percent_y: bool = False
    kind: str = "lines"
    note: str = ""
    categories: Sequence[str] = ()
    matrices: Sequence[Matrix] = ()

    def __post_init__(self) -> None:
        require_choice("kind", self.kind, KINDS)
        if (self.kind == "heatmap") != bool(self.matrices) or (self.kind == "heatmap" and self.series):
            raise ValueError(
                f"matrices: a heatmap has matrices and no series, and nothing else has matrices; kind is {self.kind!r}"
            )
        if self.kind == "bars":
            for series in self.series:
                for x in series.x:
                    if not isinstance(x, int) or not 0 <= x < len(self.categories):
                        raise ValueError(
                            f"x of series {series.label!r}: must be indices of the {len(self.categories)} categories; got {x!r}"
                        )


@dataclass(frozen=True)
class TableData:
    """Cells are texts or numbers; ``bold`` are the best ones, as pairs of row and column, both from 0."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    note: str = ""
    bold: Collection[tuple[int, int]] = field(default_factory=frozenset)

    def __post_init__(self) -> None:
        for number, row in enumerate(self.rows):
            if len(row) != len(self.header):
                raise ValueError(
                    f"rows of table {self.title!r}: row {number} must have {len(self.header)} cells; got {len(row)}"
                )


@dataclass(frozen=True)
class Code:
    """Commands as they are typed, one a line."""

    commands: str | Sequence[str]

    @property
    def text(self) -> str:
        return self.commands if isinstance(self.commands, str) else "\n".join(self.commands)


@dataclass(frozen=True)
class Section:
    """A paragraph of text, a figure, a table or commands, one after another."""

    title: str
    parts: Sequence[Figure | TableData | str | Code]

    def __post_init__(self) -> None:
        for part in self.parts:
            require(f"parts of section {self.title!r}", part, Figure | TableData | str | Code, "figures, tables, texts or code")


def known(value: Number) -> bool:
    return value is not None and math.isfinite(value)

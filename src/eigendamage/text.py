"""Numbers and tables as text."""

from __future__ import annotations

import io

from rich.console import Console, RenderableType


def si(number: int | float) -> str:
    """Three digits and a unit: 1234567 is ``1.23M``."""
    for factor, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= factor:
            return f"{number / factor:.3g}{unit}"
    return f"{number:.3g}"


def render(table: RenderableType) -> str:
    """A table as plain text, as wide as it needs to be."""
    console = Console(file=io.StringIO(), width=10_000, color_system=None, markup=False, emoji=False)
    console.print(table)
    output = console.file
    assert isinstance(output, io.StringIO)
    return "\n".join(line.rstrip() for line in output.getvalue().splitlines())

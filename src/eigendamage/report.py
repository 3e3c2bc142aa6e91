"""A report: one HTML page that needs nothing else, or its tables as Markdown."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from importlib.resources import files as resources

from eigendamage.charts import NARROW, svg
from eigendamage.charts.drawing import escaped
from eigendamage.figures import Cell, Code, Figure, Matrix, Section, Series, TableData
from eigendamage.files import write_text

DASH = "–"
# The browser itself holds the page to it: nothing from elsewhere.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"
# Numbers with their signs, units and what else stands around them: such columns are aligned to the right.
NUMERIC = re.compile(r"([-−+±~≤≥<>×→\s.,:;%()/–]|\d(e[-+]\d|([kMGT]B?|B)\b| ?(ms|s|h|x)\b)?)*")
# Texts longer than this, in letters, may take several lines.
LONG = 24


def page(title: str, summary: str, sections: Sequence[Section]) -> str:
    """One HTML page without any reference to the outside: it may be mailed, and opened without a network."""
    assets = resources("eigendamage") / "assets"
    contents = "".join(f'<li><a href="#part-{n}">{escaped(part.title)}</a></li>' for n, part in enumerate(sections, start=1))
    body = "\n".join(_section(part, number) for number, part in enumerate(sections, start=1))
    navigation = f'<nav aria-label="Contents"><ul>{contents}</ul></nav>' if len(sections) > 1 else ""
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="color-scheme" content="light dark">
<link rel="icon" href="data:,">
<title>{escaped(title)}</title>
<style>
{(assets / "report.css").read_text("utf-8")}</style>
</head>
<body>
<header>
<h1>{escaped(title)}</h1>
{_paragraphs(summary, "summary")}
</header>
<div class="{"columns" if navigation else "column"}">
{navigation}
<main>
{body}
</main>
</div>
<div id="tip" role="status" hidden></div>
<script>
{(assets / "report.js").read_text("utf-8")}</script>
</body>
</html>
"""


def write_page(path: str | os.PathLike[str], title: str, summary: str, sections: Sequence[Section]) -> None:
    """Write a page: all of it, or nothing when anything fails."""
    write_text(path, page(title, summary, sections))


def markdown(table: TableData) -> str:
    """A table for Markdown files, its title above and its note below."""

    def line(cells: Sequence[str]) -> str:
        return f"| {' | '.join(cells)} |"

    rows = [
        [
            f"**{text}**" if (number, column) in table.bold and text else text
            for column, text in enumerate(map(_in_markdown, row))
        ]
        for number, row in enumerate(table.rows)
    ]
    rules = ["---:" if numeric else ":---" for numeric in _numeric_columns(table)]
    grid = [line([_in_markdown(text) for text in table.header]), line(rules), *(line(row) for row in rows)]
    above, below = ([_in_markdown(text)] if text else [] for text in (table.title, table.note))
    return "\n\n".join([*(f"**{text}**" for text in above), "\n".join(grid), *below]) + "\n"


def _in_markdown(cell: Cell) -> str:
    text = " ".join(cell_text(cell).split())
    return re.sub(r"([\\`*_|\[\]<>])", r"\\\1", text).replace("&", "&amp;")


def cell_text(cell: Cell) -> str:
    """Texts as they are, numbers with four digits, and a dash for what is unknown."""
    if cell is None or (isinstance(cell, float) and not math.isfinite(cell)):
        return DASH
    return cell if isinstance(cell, str) else str(cell) if isinstance(cell, int) else f"{cell:.4g}"


def _numeric_columns(table: TableData) -> list[bool]:
    """The first column is of names, whatever they look like."""
    columns = [[cell_text(row[column]) for row in table.rows] for column in range(len(table.header))]
    found = [all(NUMERIC.fullmatch(text) for text in texts) and any(texts) for texts in columns]
    return [False, *found[1:]]


def _section(section: Section, number: int) -> str:
    parts = "\n".join(_part(part) for part in section.parts)
    return f'<section id="part-{number}">\n<h2>{escaped(section.title)}</h2>\n{parts}\n</section>'


def _part(part: Figure | TableData | str | Code) -> str:
    if isinstance(part, Figure):
        return _figure(part)
    if isinstance(part, TableData):
        return _table(part)
    if isinstance(part, Code):
        return f'<div class="code"><pre tabindex="0"><code>{escaped(part.text)}</code></pre></div>'
    return _paragraphs(part)


def _paragraphs(text: str, kind: str = "") -> str:
    attribute = f' class="{kind}"' if kind else ""
    return "\n".join(f"<p{attribute}>{escaped(some)}</p>" for some in re.split(r"\n\s*\n", text.strip()) if some)


def _figure(figure: Figure) -> str:
    """Drawn twice, for wide and for narrow windows: one picture in two sizes would have letters too small for a phone."""
    caption = f"<figcaption>{escaped(figure.note)}</figcaption>" if figure.note else ""
    drawings = [
        f'<div class="{kind}" tabindex="0" role="group" aria-label="{escaped(figure.title)}">{drawing}</div>'
        for kind, drawing in (("wide", svg(figure, embedded=True)), ("narrow", svg(figure, NARROW, embedded=True)))
    ]
    return f"<figure>\n{_heading(figure.title)}\n" + "\n".join(drawings) + f"\n{caption}</figure>"


def _heading(title: str) -> str:
    return f"<h3>{escaped(title)}</h3>" if title else ""


def _table(table: TableData) -> str:
    numeric = _numeric_columns(table)

    def cell(number: int, column: int, content: Cell) -> str:
        plain = cell_text(content)
        text = f"<strong>{escaped(plain)}</strong>" if (number, column) in table.bold else escaped(plain)
        kind = ' class="number"' if numeric[column] else ' class="text"' if len(plain) > LONG else ""
        return f"<td{kind}>{text}</td>" if column else f'<th scope="row"><div>{text}</div></th>'

    header = "".join(
        f'<th scope="col"{" class=number" if right else ""}><div>{escaped(text)}</div></th>'
        for text, right in zip(table.header, numeric, strict=True)
    )
    rows = "\n".join(
        "<tr>" + "".join(cell(number, column, content) for column, content in enumerate(row)) + "</tr>"
        for number, row in enumerate(table.rows)
    )
    name = escaped(table.title)
    note = f'<p class="note">{escaped(table.note)}</p>' if table.note else ""
    return f"""<div class="table">
{_heading(table.title)}
<div class="scroll" tabindex="0" role="region" aria-label="{name}">
<table>
<thead><tr>{header}</tr></thead>
<tbody>
{rows}
</tbody>
</table>
</div>
{note}</div>"""


__all__ = ["Code", "Figure", "Matrix", "Section", "Series", "TableData", "markdown", "page", "svg", "write_page"]

"""A plan as a section of a report: what each layer becomes, what is left of it, and its ranks."""

from __future__ import annotations

from eigendamage import structures
from eigendamage.compress import Report
from eigendamage.figures import Figure, Section, Series, TableData
from eigendamage.plans import Choice, Plan
from eigendamage.text import si


def plan_section(plan: Plan, report: Report | None = None) -> Section:
    """Tables and bars of a plan; with the ``report`` of `compress` also the cost of the whole model."""
    header, rows = plan.rows()
    last = len(rows) - 1
    table = TableData("All layers", header, rows, note=plan.pass_text, bold={(last, column) for column in range(len(header))})
    figures = [_weights(plan), *_ranks(plan)] if plan.layers else []
    return Section(plan.title, [*([_totals(report)] if report else []), *figures, table])


def _totals(report: Report) -> TableData:
    rows = [
        [name, si(before), si(after), f"{after / max(1, before):.1%}"]
        for name, before, after in (
            ("parameters", report.before.params, report.after.params),
            ("MACs per example", report.before.macs, report.after.macs),
        )
    ]
    return TableData("The whole model", ["", "dense", "compressed", "left"], rows)


def _weights(plan: Plan) -> Figure:
    choices = list(plan.layers.values())
    shares = [choice.params / max(1, choice.shape.params) for choice in choices]
    total = f"{plan.params / max(1, plan.dense_params):.1%}"
    note = f"All layers together: {si(plan.params)} of {si(plan.dense_params)} parameters, {total}."
    return _shares(
        plan, "Weights left in each layer", "weights left", [Series("weights left", range(len(choices)), shares)], note
    )


def _ranks(plan: Plan) -> list[Figure]:
    """Each kind of rank as a share of the most it could be, where there are ranks at all."""
    choices = list(plan.layers.values())
    series = []
    for kind in dict.fromkeys(kind for choice in choices for kind in choice.ranks):
        rows = [row for row, choice in enumerate(choices) if kind in choice.ranks]
        series.append(Series(kind, rows, [_share(choices[row], kind) for row in rows]))
    note = "A layer without bars stays dense."
    return [_shares(plan, "Ranks of each layer", "share of the largest rank", series, note)] if series else []


def _share(choice: Choice, kind: str) -> float:
    return choice.ranks[kind] / structures.STRUCTURES[choice.structure].limits(choice.shape)[kind]


def _shares(plan: Plan, title: str, of: str, series: list[Series], note: str) -> Figure:
    return Figure(title, "", of, series, percent_y=True, kind="bars", categories=list(plan.layers), note=note)

"""Tables of results with the paper's numbers beside them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from eigendamage.figures import TableData
from eigendamage.lab.published import Published, dense_accuracy, published
from eigendamage.lab.results import DATA_TITLES, STANDS_FOR, Row, grouped, spread
from eigendamage.lab.rivals import RIVALS
from eigendamage.plans import method_title

NOTHING = "–"


def one_pass_tables(rows: Iterable[Row]) -> list[TableData]:
    """A table for each network, data set and ratio: a row for each method, means and deviations over seeds."""
    cells = [row for row in rows if row.ratio is not None and row.cell.rounds == 1]
    groups = grouped(cells, lambda row: (row.title, row.place, row.ratio or 0.0))
    return [_one_pass(title, place, ratio, of_group) for (title, place, ratio), of_group in groups.items()]


def _one_pass(title: str, place: tuple[str, str, bool], ratio: float, rows: Sequence[Row]) -> TableData:
    by_method = grouped(rows, lambda row: row.method)
    paper = {method: _paper(place, method, ratio) for method in by_method}
    beside = any(paper.values())
    header = ["method", "last epoch", "best epoch", "weights removed", "FLOPs removed", "faster", "before fine-tuning"]
    if beside:
        header[2:2] = [f"paper ({STANDS_FOR[place[0]]})"]
        header[5:5] = ["paper"]
        header[7:7] = ["paper"]
    lines = []
    for method, of_method in by_method.items():
        line = [method_title(method), *_measured(of_method)]
        row = paper[method]
        if beside:
            line[2:2] = [_printed(row.accuracy) if row else NOTHING]
            line[5:5] = [_printed(row.weights) if row else NOTHING]
            line[7:7] = [_printed(row.flops) if row else NOTHING]
        lines.append(line)
    means = [spread([row.accuracy for row in of_method])[0] for of_method in by_method.values()]
    best = max(range(len(means)), key=lambda index: means[index])
    return TableData(f"{title}, ratio {ratio:g}", header, lines, _note(place, rows), {(best, 1)})


def _measured(rows: Sequence[Row]) -> list[str]:
    return [
        percent([row.accuracy for row in rows]),
        percent([row.best for row in rows]),
        percent([row.removed("params") for row in rows]),
        percent([row.removed("macs") for row in rows]),
        f"{spread([row.end['speedup'] for row in rows])[0]:.2f}×",
        percent([row.end["before"]["accuracy"] for row in rows]),
    ]


def percent(shares: Sequence[float]) -> str:
    """Mean and deviation of shares, in percent; nothing where some runs are missing."""
    if not shares:
        return NOTHING
    mean, deviation = spread([100 * share for share in shares])
    return f"{mean:.2f}" if deviation is None else f"{mean:.2f} ± {deviation:.2f}"


def _printed(numbers: tuple[float, ...] | None) -> str:
    return "failed" if numbers is None else " ± ".join(f"{number:.2f}" for number in numbers)


def _paper(place: tuple[str, str, bool], method: str, ratio: float) -> Published | None:
    network, data, l1 = place
    return published().get((STANDS_FOR.get(network, ""), l1, data, method, ratio))


def _note(place: tuple[str, str, bool], rows: Sequence[Row]) -> str:
    network, data, l1 = place
    dense = rows[0].content["dense"]["accuracy"]
    theirs = dense_accuracy(STANDS_FOR.get(network, ""), l1, data)
    seeds, epochs = len({row.cell.seed for row in rows}), rows[0].cell.finetuning.epochs
    note = f"In percent. Dense: {100 * dense:.2f}. Seeds: {seeds}. Epochs of fine-tuning: {epochs}."
    if theirs is not None:
        note += f" The paper's {STANDS_FOR[network]} on {DATA_TITLES[data]}: {theirs:.2f}, 5 seeds, 150 epochs, best epoch."
    return note


def round_tables(rows: Iterable[Row]) -> list[TableData]:
    """Rounds of iterative pruning: accuracy, weights and FLOPs removed after each."""
    tables = []
    for title, of_network in grouped(rows, lambda row: row.title).items():
        lines = []
        for method, of_method in grouped(of_network, lambda row: row.method).items():
            for number in range(of_method[0].cell.rounds):
                ends = [row.content["rounds"][number] for row in of_method]
                lines.append(
                    [
                        method_title(method) if not number else "",
                        str(number + 1),
                        percent([end.get("last", end["before"]["accuracy"]) for end in ends]),
                        percent([row.removed("params", number) for row in of_method]),
                        percent([row.removed("macs", number) for row in of_method]),
                        f"{spread([end['speedup'] for end in ends])[0]:.2f}×",
                    ]
                )
        header = ["method", "round", "last epoch", "weights removed", "FLOPs removed", "faster"]
        tables.append(TableData(f"{title}, rounds of ratio {of_network[0].ratio:g}", header, lines, "In percent."))
    return tables


def knob_tables(rows: Iterable[Row]) -> list[TableData]:
    """Methods that are told their ranks beside those that find them."""
    tables = []
    for title, of_network in grouped(rows, lambda row: row.title).items():
        lines = [[method_title(row.method), _asked(row), *_measured([row])] for row in of_network]
        header = [
            "method",
            "asked",
            "last epoch",
            "best epoch",
            "weights removed",
            "FLOPs removed",
            "faster",
            "before fine-tuning",
        ]
        tables.append(
            TableData(title, header, lines, f"In percent. Dense: {percent([of_network[0].content['dense']['accuracy']])}.")
        )
    return tables


def _asked(row: Row) -> str:
    knob, value = next((key, value) for key, value in row.cell.planning.items() if key in ("ratio", "ranks"))
    if knob == "ranks":
        return f"rank {value}" if isinstance(value, int) else f"{value:g} of the rank"
    return f"{knob} {value:g}"


# --- budgets ----------------------------------------------------------------------------------------------------------------


def budget_tables(rows: Iterable[Row]) -> list[TableData]:
    """For each network and budget every method before and after the same short fine-tuning, and ours with less of it."""
    tables = []
    groups = grouped(rows, lambda row: (row.title, float(row.cell.planning["macs"])))
    for (title, macs), of_group in groups.items():
        rates = sorted({_rate(row) for row in of_group if row.cell.finetuning.epochs})
        lines = []
        for way, of_way in grouped(of_group, _way).items():
            plain, refitted = (_of_seeds(row for row in of_way if row.cell.refit == refit) for refit in (False, True))
            tuned = [row for row in of_way if row.cell.finetuning.epochs]
            lines.append(
                [
                    way,
                    percent([row.end["before"]["accuracy"] for row in plain]),
                    percent([row.end["before"]["accuracy"] for row in refitted]),
                    *(percent([row.accuracy for row in tuned if _rate(row) == rate]) for rate in rates),
                    percent([1 - row.removed("macs") for row in _of_seeds(of_way)]),
                    percent([1 - row.removed("params") for row in _of_seeds(of_way)]),
                ]
            )
        header = ["method", "pruned", "refitted", *(f"2 epochs at {rate:g}" for rate in rates), "MACs left", "weights left"]
        dense = of_group[0].content["dense"]["accuracy"]
        note = f"Test accuracy in percent; dense {100 * dense:.2f}. Seeds: {len({row.cell.seed for row in of_group})}."
        tables.append(TableData(f"{title}, {macs:.0%} of the MACs", header, lines, note))
    return tables


def _of_seeds(rows: Iterable[Row]) -> list[Row]:
    """One row a seed: before fine-tuning its runs are the same, and say nothing of how much seeds differ."""
    return list({row.cell.seed: row for row in rows}.values())


TEACHING = {0.5: ", with a teacher", 1.0: ", with a teacher and no labels"}


def _way(row: Row) -> str:
    """What a row of the table is called."""
    kinds = row.cell.planning.get("structures")
    extra = f", only {', '.join(kinds)}" if kinds else TEACHING.get(row.cell.finetuning.distill, "")
    return f"{title_of(row.method)}{extra}"


def title_of(method: str) -> str:
    return RIVALS[method].title if method in RIVALS else method_title(method)


def rate_table(rows: Iterable[Row]) -> TableData:
    """Learning rates against methods."""
    by_rate = grouped(sorted(rows, key=_rate), _rate)
    ways = list(dict.fromkeys(_way(row) for of_rate in by_rate.values() for row in of_rate))
    lines = [
        [f"{rate:g}", *(percent([row.accuracy for row in of_rate if _way(row) == way]) for way in ways)]
        for rate, of_rate in by_rate.items()
    ]
    return TableData("Accuracy on training images held out, after 2 epochs", ["learning rate", *ways], lines, "In percent.")


def _rate(row: Row) -> float:
    return row.cell.finetuning.learning_rate


def promise_table(rows: Iterable[Row]) -> TableData:
    lines = []
    for row in rows:
        asked, predicted = float(row.cell.planning["loss"]), row.end["predicted"]
        seen = row.end["before"]["train_loss"] - row.content["dense"]["train_loss"]
        kept = percent([1 - row.removed("macs")])
        lines.append([row.title, f"{asked:g}", f"{predicted:.3f}", f"{seen:.3f}", f"{seen / predicted:.2f}", kept])
    header = ["network", "asked", "predicted", "measured", "measured / predicted", "MACs left, %"]
    return TableData("Increase of the loss on training images that were not measured", header, lines)


def refit_table(rows: Iterable[Row]) -> TableData:
    """Networks and budgets against what was refitted, before fine-tuning and after."""
    lines = []
    for (title, macs), of_group in grouped(rows, lambda row: (row.title, float(row.cell.planning["macs"]))).items():
        for epochs, of_length in grouped(of_group, lambda row: row.cell.finetuning.epochs).items():
            by_parts = {tuple(row.cell.refitted) if row.cell.refit else (): row for row in of_length}
            seen = (by_parts.get(parts) for parts in REFITTED.values())
            lines.append([f"{title}, {macs:.0%}", str(epochs), *(percent([row.accuracy]) if row else NOTHING for row in seen)])
    return TableData("What was refitted", ["network, MACs", "epochs", *REFITTED], lines, "Test accuracy in percent.")


REFITTED: dict[str, tuple[str, ...]] = {
    "just pruned": (),
    "layers refitted": ("layers",),
    "batch norm refitted": ("norms",),
    "both": ("layers", "norms"),
}

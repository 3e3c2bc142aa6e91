"""Figures of results, each beside the paper's where the paper's numbers are known."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from eigendamage.figures import Figure, Matrix, Series
from eigendamage.lab.published import Published, published
from eigendamage.lab.results import DATA_TITLES, STANDS_FOR, Row, grouped, spread
from eigendamage.lab.steps import Content
from eigendamage.methods import METHODS
from eigendamage.plans import method_title

WEIGHTS, FLOPS, ACCURACY = "weights removed", "FLOPs removed", "test accuracy"
REMOVED = {"params": WEIGHTS, "macs": FLOPS}
# A method looks the same in every figure.
STYLES = {name: number for number, name in enumerate(("eigendamage", *(name for name in METHODS if name != "eigendamage")))}
STYLES["cp"] = STYLES["c-obd"]  # there are no more colours, and the two are never drawn together

Point = tuple[float, Sequence[float]]  # x, and values over seeds


def series(method: str, points: Iterable[Point], label: str = "", dashed: bool = False) -> Series:
    """A curve through the means, with a band of one deviation where there are several seeds."""
    ordered = sorted(points, key=lambda point: point[0])
    middles = [spread(values) for _, values in ordered]
    banded = any(deviation is not None for _, deviation in middles)
    return Series(
        label or method_title(method),
        [x for x, _ in ordered],
        [mean for mean, _ in middles],
        low=[mean - (deviation or 0.0) for mean, deviation in middles] if banded else None,
        high=[mean + (deviation or 0.0) for mean, deviation in middles] if banded else None,
        dashed=dashed,
        style=STYLES.get(method),
    )


def by_ratio(rows: Iterable[Row], what: str, value: Callable[[Row], float]) -> list[Series]:
    """A curve for each method: what is removed at each ratio against a value, both means over seeds."""
    curves = []
    for method, of_method in grouped(rows, lambda row: row.method).items():
        ratios = grouped(of_method, lambda row: row.ratio)
        points = [
            (spread([row.removed(what) for row in of_ratio])[0], [value(row) for row in of_ratio])
            for of_ratio in ratios.values()
        ]
        curves.append(series(method, points))
    return curves


def tradeoff_figures(rows: Iterable[Row]) -> list[Figure]:
    figures = []
    for title, of_network in grouped(rows, lambda row: row.title).items():
        for what, label in REMOVED.items():
            curves = by_ratio(of_network, what, lambda row: row.accuracy)
            figures.append(Figure(f"{title}", label, ACCURACY, curves, percent_x=True, percent_y=True))
        figures += _paper_tradeoff(of_network[0].place)
    return figures


def _paper_tradeoff(place: tuple[str, str, bool]) -> list[Figure]:
    network, data, l1 = place
    rows = [row for row in published().values() if (row.network, row.data, row.l1) == (STANDS_FOR.get(network), data, l1)]
    if not rows:
        return []
    methods = grouped(rows, lambda row: row.method)

    def curves(removed: Callable[[Published], float]) -> list[Series]:
        return [
            series(method, [(removed(row) / 100, [row.accuracy[0] / 100]) for row in of_method if row.accuracy])
            for method, of_method in methods.items()
        ]

    title = f"The paper: {STANDS_FOR[network]}{' + L1' if l1 else ''} on {DATA_TITLES[data]}"
    both = {WEIGHTS: curves(lambda row: row.weights[0]), FLOPS: curves(lambda row: row.flops[0])}
    return [Figure(title, label, ACCURACY, lines, percent_x=True, percent_y=True) for label, lines in both.items()]


def loss_figures(rows: Iterable[Row]) -> list[Figure]:
    """Figure 6 of the paper: the training loss without fine-tuning."""
    return [
        Figure(
            title,
            WEIGHTS,
            "training loss",
            by_ratio(of_network, "params", lambda row: row.end["before"]["train_loss"]),
            percent_x=True,
            log_y=True,
            note="After pruning, without fine-tuning.",
        )
        for title, of_network in grouped(rows, lambda row: row.title).items()
    ]


def layer_figures(rows: Iterable[Row]) -> list[Figure]:
    """Methods in descending order of their accuracy, as in the paper."""
    figures = []
    for title, of_network in grouped(rows, lambda row: row.title).items():
        ordered = sorted(of_network, key=lambda row: -row.accuracy)
        names = list(ordered[0].end["layers"])
        curves = [
            series(row.method, [(number + 1.0, [share]) for number, share in enumerate(row.end["layers"].values())])
            for row in ordered
        ]
        note = f"In the order of test accuracy. Layers: {', '.join(f'{n} {name}' for n, name in enumerate(names, 1))}."
        figures.append(
            Figure(f"{title}, ratio {ordered[0].ratio:g}", "layer", "weights left", curves, percent_y=True, note=note)
        )
    return figures


def epoch_figures(rows: Iterable[Row]) -> list[Figure]:
    figures = []
    for title, of_network in grouped(rows, lambda row: row.title).items():
        tuned = [row for row in of_network if row.end["epochs"]]
        for key, label in (("train_loss", "training loss"), ("test_accuracy", ACCURACY)):
            curves = [
                series(row.method, [(float(epoch["epoch"]), [epoch[key]]) for epoch in row.end["epochs"]]) for row in tuned
            ]
            figures.append(
                Figure(f"{title}, ratio {of_network[0].ratio:g}", "epoch", label, curves, percent_y=key == "test_accuracy")
            )
    return figures


def round_figures(rows: Iterable[Row]) -> list[Figure]:
    figures = []
    for title, of_network in grouped(rows, lambda row: row.title).items():
        for what, label in REMOVED.items():
            curves = []
            for method, of_method in grouped(of_network, lambda row: row.method).items():
                points: list[Point] = [(0.0, [row.content["dense"]["accuracy"] for row in of_method])]
                for number in range(of_method[0].cell.rounds):
                    ends = [row.content["rounds"][number] for row in of_method]
                    removed = spread([row.removed(what, number) for row in of_method])[0]
                    points.append((removed, [end.get("last", end["before"]["accuracy"]) for end in ends]))
                curves.append(series(method, points))
            figures.append(Figure(title, label, ACCURACY, curves, percent_x=True, percent_y=True))
    return figures


def lowrank_figures(rows: Iterable[Row]) -> list[Figure]:
    figures = []
    for title, of_network in grouped(rows, lambda row: row.title).items():
        groups = grouped(of_network, _rule)
        axes: list[tuple[str, str, Callable[[Row], float], Callable[[Row], float], bool]] = [
            (WEIGHTS, ACCURACY, lambda row: row.removed("params"), lambda row: row.accuracy, True),
            (FLOPS, ACCURACY, lambda row: row.removed("macs"), lambda row: row.accuracy, True),
            ("times faster", ACCURACY, lambda row: row.end["speedup"], lambda row: row.accuracy, True),
            (WEIGHTS, "training loss", lambda row: row.removed("params"), lambda row: row.end["before"]["train_loss"], False),
        ]
        for x_label, y_label, x, y, is_accuracy in axes:
            curves = [
                series(method, [(x(row), [y(row)]) for row in of_rule], label, dashed)
                for (method, label, dashed), of_rule in groups.items()
            ]
            shares = x_label in (WEIGHTS, FLOPS)
            note = "" if is_accuracy else "Before fine-tuning."
            figures.append(
                Figure(
                    title, x_label, y_label, curves, percent_x=shares, percent_y=is_accuracy, log_y=not is_accuracy, note=note
                )
            )
    return figures


def _rule(row: Row) -> tuple[str, str, bool]:
    """Method, label and whether dashed: CP has two rules for its ranks."""
    ranks = row.cell.planning.get("ranks")
    if ranks is None:
        return row.method, method_title(row.method), False
    return row.method, "CP, one rank" if isinstance(ranks, int) else "CP, a fraction of the rank", isinstance(ranks, int)


def fisher_figure(content: Content) -> Figure:
    both = {"parameters": "in the coordinates of the weights", "kfe": "in the KFE"}
    panels = [Matrix(title, [[abs(value) for value in row] for row in content[key]["matrix"]]) for key, title in both.items()]
    shares = [f"{content[key]['share']:.1%} {title}" for key, title in both.items()]
    note = f"Absolute values, diagonals made 1. Share of squared entries off the diagonal: {', '.join(shares)}."
    title = "Fisher information of the second layer of a small network on digits"
    return Figure(title, "weight", "weight", kind="heatmap", matrices=panels, note=note)

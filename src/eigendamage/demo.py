"""``python -m eigendamage.demo``: a small network on handwritten digits, made smaller in three ways from one measurement."""

from __future__ import annotations

import argparse
import importlib
import statistics
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import eigendamage as ed
from eigendamage.finetune import finetune
from eigendamage.methods import BEST
from eigendamage.plans import method_title
from eigendamage.progress import track
from eigendamage.text import si

# Two methods of the paper at its ratios, and budgets, for which every layer gets the structure that suits it.
ASKED: dict[str, tuple[str, tuple[float, ...]]] = {
    "kron-obd": ("ratio", (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)),
    "eigendamage": ("ratio", (0.3, 0.4, 0.5, 0.6, 0.7, 0.8)),
    BEST: ("macs", (0.7, 0.5, 0.3, 0.2, 0.1, 0.05)),
}
LEARNING_RATE = 0.05

# A loss of accuracy that a user would accept: the model to look at closely is the cheapest one within it.
TOLERATED = 0.01


@dataclass(frozen=True)
class Digits:
    """Scikit-learn's 8×8 digits: two thirds to train on, one third to test."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    seed: int

    def batches(self) -> DataLoader[tuple[Tensor, ...]]:
        """The training set; every model that is trained on it sees the same batches in the same order."""
        return DataLoader(TensorDataset(*self.train), 64, shuffle=True, generator=torch.Generator().manual_seed(self.seed))


@dataclass(frozen=True, eq=False)
class Result:
    """One model, dense (without a plan) or pruned, before and after fine-tuning."""

    title: str
    model: nn.Module
    cost: ed.Cost
    before: float
    after: float
    plan: ed.Plan | None = None
    asked: str = ""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m eigendamage.demo", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("demo"), metavar="DIR", help="where files go (default: ./demo)")
    demo(parser.parse_args(arguments).out)


def demo(
    out: Path,
    *,
    asked: Mapping[str, tuple[str, Sequence[float]]] = ASKED,
    epochs: int = 8,
    finetuning: int = 4,
    timings: int = 200,
    seed: int = 0,
) -> list[Result]:
    """Train, measure, prune, fine-tune and compare; the dense model comes first in what is returned."""
    _require_extras()
    console = Console(highlight=False)
    out.mkdir(parents=True, exist_ok=True)
    with _one_thread():
        digits = load_digits(seed)
        dense = _train(digits, epochs, console)
        results = [dense, *_prune(dense.model, digits, asked, finetuning, console)]
        chosen, rival = choose(results)
        console.print(_table(results, chosen, _seconds([result.model for result in results], digits.test[0][:1], timings)))
    assert chosen.plan is not None
    print(f"\n{chosen.plan}\n")
    console.print(_save(chosen.model, out / "pruned.safetensors", digits), soft_wrap=True)
    draw(results, chosen, rival, out / "demo.png")
    console.print(f"The picture is {out / 'demo.png'}", soft_wrap=True)
    return results


def _require_extras() -> None:
    for package, name in (("matplotlib", "matplotlib"), ("sklearn", "scikit-learn")):
        try:
            importlib.import_module(package)
        except ImportError as error:
            raise SystemExit(f'The demo needs {name} ({error}). Install it with: pip install "eigendamage[demo]"') from None


@contextmanager
def _one_thread() -> Iterator[None]:
    """More gain nothing on a network this small, and with one the results are the same whatever the number of cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


# --- train, prune, fine-tune ------------------------------------------------------------------------------------------------


def load_digits(seed: int) -> Digits:
    from sklearn import datasets
    from sklearn.model_selection import train_test_split

    images, labels = datasets.load_digits(return_X_y=True)
    parts = train_test_split(images, labels, test_size=1 / 3, stratify=labels, random_state=seed)
    train, test = (torch.tensor(part, dtype=torch.float32).view(-1, 1, 8, 8) for part in parts[:2])
    mean, deviation = train.mean(), train.std()
    train_labels, test_labels = (torch.tensor(part) for part in parts[2:])
    return Digits(((train - mean) / deviation, train_labels), ((test - mean) / deviation, test_labels), seed)


def network() -> nn.Module:
    """Three convolutions with batch norm, and a linear layer."""
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (inputs, outputs) in enumerate([(1, 32), (32, 64), (64, 64)], start=1):
        layers[f"conv{number}"] = nn.Conv2d(inputs, outputs, 3, padding=1, bias=False)
        layers[f"norm{number}"] = nn.BatchNorm2d(outputs)
        layers[f"relu{number}"] = nn.ReLU()
        if number == 2:
            layers["halve"] = nn.MaxPool2d(2)
    layers |= {"pool": nn.AdaptiveAvgPool2d(1), "flatten": nn.Flatten(), "linear": nn.Linear(64, 10)}
    return nn.Sequential(layers)


def accuracy(model: nn.Module, digits: Digits) -> float:
    images, labels = digits.test
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).double().mean())


def _train(digits: Digits, epochs: int, console: Console) -> Result:
    console.print(f"Training a small convolutional network on {len(digits.train[0])} digits, {epochs} epochs")
    with torch.random.fork_rng():
        torch.manual_seed(digits.seed)
        model = network()
    finetune(model, digits.batches(), epochs=epochs, learning_rate=LEARNING_RATE, schedule="cosine")
    reached = accuracy(model, digits)
    return Result("dense", model, ed.count(model, digits.test[0][:1]), reached, reached)


def _prune(
    model: nn.Module, digits: Digits, asked: Mapping[str, tuple[str, Sequence[float]]], epochs: int, console: Console
) -> list[Result]:
    console.print("Measuring its curvature, once for all plans")
    curvature = ed.measure(model, digits.batches(), seed=digits.seed)
    wanted = [(method, knob, value) for method, (knob, values) in asked.items() for value in values]
    console.print(f"Pruning and fine-tuning it {len(wanted)} times, {epochs} epochs each")
    results = []
    for method, knob, value in track(wanted, "pruning and fine-tuning"):
        budget = method == BEST
        amount: dict[str, Any] = {knob: value}
        plan = ed.plan(model, curvature, method=None if budget else method, **amount)
        small = ed.apply(model, plan, curvature, refit=digits.batches() if budget else None)
        before = accuracy(small, digits)
        finetune(small, digits.batches(), epochs=epochs, learning_rate=LEARNING_RATE, schedule="cosine", progress=False)
        cost = ed.count(small, digits.test[0][:1])
        results.append(
            Result(method_title(plan.method), small, cost, before, accuracy(small, digits), plan, f"{knob}={value:g}")
        )
    return results


def choose(results: Sequence[Result]) -> tuple[Result, Result]:
    """The cheapest model of a budget within the tolerated loss of accuracy, or the best; and EigenDamage's nearest in MACs."""
    dense, ours, theirs = (
        [result for result in results if (result.plan.method if result.plan else "") == method]
        for method in ("", BEST, "eigendamage")
    )
    good = [result for result in ours if result.after >= dense[0].after - TOLERATED]
    chosen = min(good, key=lambda result: result.cost.macs) if good else max(ours, key=lambda result: result.after)
    return chosen, min(theirs, key=lambda result: abs(result.cost.macs - chosen.cost.macs))


def _save(model: nn.Module, path: Path, digits: Digits) -> str:
    ed.save(model, path)
    again = ed.load(network(), path).eval()
    with torch.no_grad():
        same = torch.equal(again(digits.test[0]), model.eval()(digits.test[0]))
    outputs = "the same outputs" if same else "OTHER OUTPUTS"
    return f"{path} ({si(path.stat().st_size)}B), loaded onto a new dense network, gives {outputs}"


# --- what it costs ----------------------------------------------------------------------------------------------------------


def _interleaved(tasks: Sequence[Callable[[], object]], repetitions: int) -> list[list[float]]:
    """Seconds of every repetition of each task, in turns, after one warm-up: what slows the machine down slows all of them."""
    seconds: list[list[float]] = [[] for _ in tasks]
    for repetition in range(repetitions + 1):
        for task, of_task in zip(tasks, seconds, strict=True):
            start = time.perf_counter()
            task()
            if repetition:
                of_task.append(time.perf_counter() - start)
    return seconds


def _seconds(models: Sequence[nn.Module], images: Tensor, repetitions: int) -> list[float]:
    """Median time of one forward pass of each model."""

    def forward(model: nn.Module) -> Callable[[], Tensor]:
        model.eval()
        return lambda: model(images)

    with torch.no_grad():
        return [statistics.median(times) for times in _interleaved([forward(model) for model in models], repetitions)]


def _table(results: Sequence[Result], chosen: Result, seconds: Sequence[float]) -> Table:
    dense = results[0]
    table = Table(
        title="Dense against pruned: accuracy on the test digits, time for one digit",
        box=box.SIMPLE,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        title_justify="left",
    )
    table.add_column("model", no_wrap=True)
    for header in ("asked", "pruned", "tuned", "parameters", "MACs", "ms"):
        table.add_column(header, justify="right", no_wrap=True)
    previous = dense
    for result, time_taken in zip(results, seconds, strict=True):
        if result.title != previous.title:
            table.add_section()
        table.add_row(
            result.title,
            result.asked,
            f"{result.before:.1%}" if result.plan else "",
            f"{result.after:.1%}",
            f"{si(result.cost.params)} {_share(result.cost.params, dense.cost.params)}",
            f"{si(result.cost.macs)} {_share(result.cost.macs, dense.cost.macs)}",
            f"{1e3 * time_taken:.2f} {_share(time_taken, seconds[0])}",
            style="bold" if result is chosen else None,
        )
        previous = result
    return table


def _share(part: int | float, whole: int | float) -> str:
    return f"{part / whole:4.0%}"


# --- the picture ------------------------------------------------------------------------------------------------------------

# Okabe and Ito's colours, which the colour-blind tell apart.
COLOURS = {BEST: "#0072B2", "eigendamage": "#009E73", "kron-obd": "#D55E00"}
INK, GREY, FAINT = "#222222", "#666666", "#E4E4E4"
STYLE: dict[Any, Any] = {
    "font.size": 12,
    "text.color": INK,
    "axes.axisbelow": True,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": GREY,
    "ytick.color": GREY,
}

# matplotlib is optional, so that its names cannot stand in signatures.
Axes = Any


def draw(results: Sequence[Result], chosen: Result, rival: Result, path: Path) -> None:
    """Accuracy against cost, before and after fine-tuning; and what two models of about the same cost keep of each layer."""
    import matplotlib.pyplot as plt
    from matplotlib.layout_engine import ConstrainedLayoutEngine

    with plt.rc_context(STYLE):
        layout = ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.12, wspace=0.06)
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.8), width_ratios=[1.1, 1.1, 1], layout=layout)
        share = f"with {chosen.cost.macs / results[0].cost.macs:.0%} of the MACs"
        names = {result.plan.method: result.title for result in results if result.plan}
        subtitle = [(f"{name}   ", COLOURS[method]) for method, name in reversed(names.items())]
        _draw_accuracy(left, results, chosen, lambda result: result.before)
        _headline(left, f"Just pruned: {chosen.before:.1%} {share}", *subtitle)
        _draw_accuracy(middle, results, chosen, lambda result: result.after)
        _headline(middle, f"Fine-tuned: {chosen.after:.1%} {share}", (f"dense: {results[0].after:.1%}", GREY))
        _draw_layers(right, results[0], chosen, rival)
        figure.savefig(path, dpi=160)
        plt.close(figure)


def _draw_accuracy(axes: Axes, results: Sequence[Result], chosen: Result, of: Callable[[Result], float]) -> None:
    dense = results[0]
    for method, colour in COLOURS.items():
        own = sorted((r for r in results if r.plan and r.plan.method == method), key=lambda r: r.cost.macs)
        shares = [r.cost.macs / dense.cost.macs for r in (*own, dense)]
        axes.plot(shares, [of(r) for r in (*own, dense)], "o-", color=colour, linewidth=2.5, markersize=6)
    axes.plot(1, of(dense), "D", color=INK, markersize=8, zorder=5)
    axes.annotate("dense", (1, of(dense)), (0, 10), textcoords="offset points", ha="center", fontweight="bold")
    axes.plot(chosen.cost.macs / dense.cost.macs, of(chosen), "o", markersize=13, fillstyle="none", color=INK)
    axes.set(xlim=(0, 1.04), ylim=(0, 1.1), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1], xlabel="remaining MACs", ylabel="test accuracy")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(color=FAINT)


def _draw_layers(axes: Axes, dense: Result, chosen: Result, rival: Result) -> None:
    height = 0.38
    words = []
    for result, offset in ((chosen, -height / 2), (rival, height / 2)):
        assert result.plan is not None
        colour = COLOURS[result.plan.method]
        shares = [layer.params / layer.shape.params for layer in result.plan.layers.values()]
        bars = axes.barh([row + offset for row in range(len(shares))], shares, 0.92 * height, color=colour)
        axes.bar_label(bars, [f"{share:.0%}" for share in shares], padding=4, color=INK, fontsize=11)
        words += [(f"{result.title} at {result.cost.macs / dense.cost.macs:.0%}", colour), (", ", GREY)]
        names = [f"{name}\n{si(layer.shape.params)}" for name, layer in result.plan.layers.items()]
    axes.set_yticks(range(len(names)), names, color=INK, fontsize=11)
    axes.invert_yaxis()
    axes.set(xlim=(0, 1.12), xticks=[])
    axes.tick_params(length=0)
    axes.spines["bottom"].set_visible(False)
    _headline(axes, "Weights left in each layer", *words[:-1])


def _headline(axes: Axes, title: str, *subtitle: tuple[str, str]) -> None:
    """A title at the left with a line of coloured text below it."""
    axes.set_title(f"{title}\n", loc="left", fontsize=14, fontweight="bold", linespacing=1.6)
    where: Any = axes.transAxes
    at, shift = (0, 1), (0, 10)
    for text, colour in subtitle:
        weight = "normal" if colour == GREY else "bold"
        where = axes.annotate(
            text,
            at,
            shift,
            xycoords=where,
            textcoords="offset points",
            fontsize=11,
            color=colour,
            fontweight=weight,
            va="bottom",
        )
        at, shift = (1, 0), (0, 0)


if __name__ == "__main__":
    main()

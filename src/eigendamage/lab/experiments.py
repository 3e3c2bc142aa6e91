"""The experiments of the paper, one row each: their cells at a scale, and what is drawn from their results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from eigendamage.checks import require_choice
from eigendamage.figures import Section
from eigendamage.lab import grids, pictures, tables
from eigendamage.lab.results import rows_of
from eigendamage.lab.scales import Scale
from eigendamage.lab.settings import Cell
from eigendamage.lab.steps import Content

Sections = Callable[[str, Sequence[Content]], list[Section]]


@dataclass(frozen=True)
class Experiment:
    title: str
    cells: Callable[[Scale], list[Cell]]
    sections: Sections
    about: str = ""


def _tables(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, tables.one_pass_tables(rows_of(results)))]


def _tradeoff(title: str, results: Sequence[Content]) -> list[Section]:
    rows = rows_of(results)
    return [Section(title, [*pictures.tradeoff_figures(rows), *tables.one_pass_tables(rows)])]


def _loss(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, pictures.loss_figures(rows_of(results)))]


def _layers(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, pictures.layer_figures(rows_of(results)))]


def _curves(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, pictures.epoch_figures(rows_of(results)))]


def _iterative(title: str, results: Sequence[Content]) -> list[Section]:
    rows = rows_of(results)
    return [Section(title, [*pictures.round_figures(rows), *tables.round_tables(rows)])]


def _lowrank(title: str, results: Sequence[Content]) -> list[Section]:
    rows = rows_of(results)
    return [Section(title, [*pictures.lowrank_figures(rows), *tables.knob_tables(rows)])]


def _fisher(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, [pictures.fisher_figure(content) for content in results])]


def _budgets(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, tables.budget_tables(rows_of(results)))]


def _refits(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, [tables.refit_table(rows_of(results))])]


def _rates(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, [tables.rate_table(rows_of(results))])]


def _promises(title: str, results: Sequence[Content]) -> list[Section]:
    return [Section(title, [tables.promise_table(rows_of(results))])]


EXPERIMENTS: dict[str, Experiment] = {
    "table1": Experiment("One-pass pruning on CIFAR (table 1)", grids.table1, _tables),
    "table2": Experiment("One-pass pruning on Tiny-ImageNet (table 2)", grids.table2, _tables),
    "table3": Experiment("VGG19 on CIFAR-10 (table 3)", partial(grids.appendix_vgg, data="cifar10"), _tables),
    "table4": Experiment("VGG19 on CIFAR-100 (table 4)", partial(grids.appendix_vgg, data="cifar100"), _tables),
    "table5": Experiment("ResNets on CIFAR-10 (table 5)", partial(grids.appendix_resnet, data="cifar10"), _tables),
    "table6": Experiment("ResNets on CIFAR-100 (table 6)", partial(grids.appendix_resnet, data="cifar100"), _tables),
    "table7": Experiment("VGG19 on Tiny-ImageNet (table 7)", grids.appendix_tiny, _tables),
    "tradeoff": Experiment("Trade-off curves of one-pass pruning", grids.tradeoff, _tradeoff),
    "iterative": Experiment(
        "Iterative pruning",
        grids.iterative,
        _iterative,
        "Six rounds of ratio 0.5; at most half of a layer goes in each, and each is fine-tuned.",
    ),
    "lowrank": Experiment(
        "Low-rank approximation",
        grids.lowrank,
        _lowrank,
        "CP decomposition with fractions of each layer's rank or one rank for all, beside EigenDamage and its depthwise form.",
    ),
    "loss": Experiment("Training loss after pruning, without fine-tuning", grids.loss, _loss),
    "layers": Experiment("Weights left in each layer", grids.layers, _layers),
    "curves": Experiment("Fine-tuning", grids.curves, _curves),
    "budgets": Experiment(
        "Budgets of multiply-accumulates",
        grids.budgets,
        _budgets,
        "2,000 training images for the statistics, then two epochs with the same learning rates for all. Refitted, on the same "
        "images and without labels, means the layers and batch norm; for Torch-Pruning batch norm.",
    ),
    "refits": Experiment("What refitting is worth", grids.refits, _refits),
    "rates": Experiment("Learning rates of the short fine-tuning", grids.rates, _rates),
    "promises": Experiment("Budgets of loss", grids.promises, _promises),
    "fisher": Experiment("The Fisher information in two bases (figure 2)", grids.fisher, _fisher),
}


def experiment_named(name: str) -> Experiment:
    require_choice("experiment", name, tuple(EXPERIMENTS))
    return EXPERIMENTS[name]


def sections_of(name: str, results: Sequence[Content]) -> list[Section]:
    """Tables and figures of an experiment from its results alone."""
    experiment = experiment_named(name)
    found = experiment.sections(experiment.title, results)
    if experiment.about and found:
        found = [Section(found[0].title, [experiment.about, *found[0].parts]), *found[1:]]
    return found

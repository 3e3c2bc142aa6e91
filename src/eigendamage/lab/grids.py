"""The cells of every experiment at a scale."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from eigendamage.lab.rivals import RIVALS
from eigendamage.lab.runs import Training
from eigendamage.lab.scales import PRERESNET, RESNET, VGG, Scale
from eigendamage.lab.settings import Cell, Dense, Fisher, Pruning
from eigendamage.refitting import PARTS

SIX = ("slimming", "c-obd", "c-obs", "kron-obd", "kron-obs", "eigendamage")
HESSIAN = SIX[1:]
TEN = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95)
ROUNDS = {"ratio": 0.5, "cap": 0.5}

# A network of the paper on a data set, trained with L1 on its batch-norm scales or without.
Place = tuple[str, str, bool]


def one_pass(
    scale: Scale, places: Iterable[Place], ratios: Sequence[float], seeds: int, methods: Sequence[str] = SIX, epochs: int = -1
) -> list[Cell]:
    """Methods at ratios with several seeds; cells that share their statistics follow each other. ``epochs`` −1: the scale's."""
    return [
        pruning(scale, place, {"method": method, "ratio": ratio}, seed, epochs)
        for place in places
        if scale.dense(*place)
        for seed in range(seeds)
        for method in methods
        for ratio in ratios
    ]


def pruning(scale: Scale, place: Place, planning: dict[str, float | int | str], seed: int, epochs: int = -1) -> Pruning:
    dense, tuning = scale.dense(*place), scale.tuning(place[0], seed)
    assert dense is not None
    tuning = tuning if epochs < 0 else replace(tuning, epochs=epochs)
    return Pruning(dense, planning, tuning, examples=scale.examples, seed=seed)


def table1(scale: Scale) -> list[Cell]:
    places = [
        (network, data, l1)
        for network, l1 in ((VGG, False), (VGG, True), (RESNET, False), (PRERESNET, True))
        for data in scale.table1
    ]
    return one_pass(scale, places, (0.6, 0.9), scale.seeds)


def tiny_imagenet(scale: Scale, ratios: Sequence[float]) -> list[Cell]:
    """NN Slimming on the network trained with L1, as it needs, and the others on the one trained without."""
    return [
        *one_pass(scale, [(VGG, "tiny-imagenet", True)], ratios, scale.seeds, SIX[:1]),
        *one_pass(scale, [(VGG, "tiny-imagenet", False)], ratios, scale.seeds, HESSIAN),
    ]


def table2(scale: Scale) -> list[Cell]:
    return tiny_imagenet(scale, (0.5,))


def appendix_vgg(scale: Scale, data: str) -> list[Cell]:
    return one_pass(scale, [(VGG, data, False), (VGG, data, True)], (0.5, 0.7, 0.8), scale.seeds)


def appendix_resnet(scale: Scale, data: str) -> list[Cell]:
    return one_pass(scale, [(RESNET, data, False), (PRERESNET, data, True)], (0.5, 0.7, 0.8), scale.seeds)


def appendix_tiny(scale: Scale) -> list[Cell]:
    return tiny_imagenet(scale, (0.4, 0.6, 0.7, 0.8))


def plain(scale: Scale) -> list[Place]:
    """The networks whose curves the paper draws."""
    return [(network, data, False) for network in (VGG, RESNET) for data in scale.table1]


def tradeoff(scale: Scale) -> list[Cell]:
    return one_pass(scale, plain(scale), scale.ratios, scale.curve_seeds)


def layers(scale: Scale) -> list[Cell]:
    return one_pass(scale, plain(scale), (0.5,), 1)


def curves(scale: Scale) -> list[Cell]:
    return one_pass(scale, [(RESNET, data, False) for data in scale.table1], (0.5,), 1)


def loss(scale: Scale) -> list[Cell]:
    return one_pass(scale, plain(scale), TEN, 1, (*SIX, "eigendamage-depthwise"), epochs=0)


def iterative(scale: Scale) -> list[Cell]:
    return [
        replace(pruning(scale, place, {"method": method, **ROUNDS}, seed), rounds=6)
        for place in plain(scale)
        if scale.dense(*place)
        for seed in range(scale.curve_seeds)
        for method in scale.iterated
    ]


def lowrank(scale: Scale) -> list[Cell]:
    data = ("cifar100", "tiny-imagenet") if scale.name == "paper" else scale.table1
    places = [(VGG, name, False) for name in data]
    places += [(RESNET, name, False) for name in data if scale.name != "paper"]
    cp: list[float | int] = [*scale.fractions, *scale.ranks]
    return [
        pruning(scale, place, planning, 0)
        for place in places
        if scale.dense(*place)
        for planning in (
            *({"method": "cp", "ranks": rank} for rank in cp),
            *({"method": m, "ratio": ratio} for m in ("eigendamage", "eigendamage-depthwise") for ratio in scale.ratios),
        )
    ]


# --- budgets, beyond the paper ----------------------------------------------------------------------------------------------

BUDGETED = ("resnet20", "resnet32")
SHARES = (0.5, 0.33)
RIVALRY: tuple[str | None, ...] = (None, "eigendamage", "kron-obd", *RIVALS)  # None: the best structures
INCREASES = (0.01, 0.03, 0.1, 0.2, 0.3)
# The structures, one kind after the other.
KINDS = (["tucker"], ["svd"], ["rows-columns", "columns-rows"], ["channels"], ["mobile"])
TEACHING = (0.5, 1.0)  # shares of the dense model's predictions in the loss
SHORT = Training(epochs=2, learning_rate=0.005, schedule="cosine")
SHORT_RATES = (0.002, SHORT.learning_rate)  # what suits networks that lost little, and the others
RATES = (0.002, 0.005, 0.01, 0.02, 0.05)


def budgets(scale: Scale) -> list[Cell]:
    """The same budgets and the same short fine-tuning for every method, and what each part of ours is worth."""
    cells: list[Cell] = []
    for network, macs, seed in itertools.product(_budgeted(scale), SHARES, range(scale.seeds)):
        still = replace(SHORT, seed=seed, epochs=0)
        short = [replace(SHORT, seed=seed, learning_rate=rate) for rate in SHORT_RATES]
        for method in RIVALRY:
            cells.append(_budget(scale, network, _within(macs, method), still, refit=False))
            cells += [_budget(scale, network, _within(macs, method), tuning) for tuning in short]
        cells += [
            _budget(scale, network, _within(macs), replace(tuning, distill=share)) for tuning in short for share in TEACHING
        ]
    for network, macs, count in itertools.product(_budgeted(scale), SHARES, range(1, len(KINDS))):
        planning = {**_within(macs), "structures": sorted(itertools.chain(*KINDS[:count]))}
        cells.append(_budget(scale, network, planning, replace(SHORT, epochs=0), refit=False))
        cells.append(_budget(scale, network, planning, SHORT))
    return cells


def refits(scale: Scale) -> list[Cell]:
    """What refitting the layers and following with batch norm are worth, before fine-tuning and after."""
    return [
        replace(_budget(scale, network, _within(macs), tuning, refit=bool(parts)), refitted=parts or PARTS)
        for network, macs in itertools.product(_budgeted(scale), SHARES)
        for tuning in (replace(SHORT, epochs=0), SHORT)
        for parts in ((), ("layers",), ("norms",), PARTS)
    ]


def rates(scale: Scale) -> list[Cell]:
    """Learning rates of the short fine-tuning, on a part of the training set that is held out."""
    ways = [*((method, 0.0) for method in RIVALRY), *((None, share) for share in TEACHING)]
    return [
        _budget(scale, network, _within(SHARES[0], method), replace(SHORT, learning_rate=rate, distill=share), held="-split")
        for network in _budgeted(scale)[:1]
        for rate, (method, share) in itertools.product(RATES, ways)
    ]


def promises(scale: Scale) -> list[Cell]:
    """Budgets of loss, without fine-tuning: what is predicted beside what training images that were not measured show."""
    still = replace(SHORT, epochs=0)
    return [
        replace(_budget(scale, network, {"loss": loss}, still, refit=False), judged=5000)
        for network, loss in itertools.product(_budgeted(scale), INCREASES)
    ]


def _budgeted(scale: Scale) -> list[str]:
    return [network for network in BUDGETED if not scale.only or network in scale.only]


def _within(macs: float, method: str | None = None) -> dict[str, Any]:
    return {"macs": macs} if method is None else {"method": method, "macs": macs}


def _budget(
    scale: Scale, network: str, planning: dict[str, Any], tuning: Training, refit: bool = True, held: str = ""
) -> Pruning:
    tuning = replace(tuning, precision=scale.finetuning.precision)
    return Pruning(scale.given(network, scale.data["cifar10"] + held), planning, tuning, 2000, refit=refit, seed=tuning.seed)


# --- the Fisher itself ------------------------------------------------------------------------------------------------------


def fisher(scale: Scale) -> list[Cell]:
    return [Fisher()]


def dense_of(cells: Iterable[Cell]) -> list[Dense]:
    """The dense networks of these cells, each once."""
    return list(dict.fromkeys(cell.dense for cell in cells if isinstance(cell, Pruning)))

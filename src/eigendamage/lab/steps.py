"""The steps of a run: the dense network, its statistics, the smaller network, what it costs and how good it is."""

from __future__ import annotations

import json
import statistics
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from eigendamage.cost import called, count
from eigendamage.curvature import Curvature
from eigendamage.lab.data import Data, Images, load_data
from eigendamage.lab.networks import build
from eigendamage.lab.runs import Score, evaluate
from eigendamage.lab.settings import Dense, Pruning, Site, checksum, name_of
from eigendamage.measuring import measure
from eigendamage.passes import evaluating
from eigendamage.planning import plan, statistics_for
from eigendamage.plans import Plan
from eigendamage.storage import load
from eigendamage.surgery import apply
from eigendamage.timing import interleaved

# Statistics and evaluation go through the data in batches of this size; times are of one such batch.
BATCH = 128
TURNS = 5

Content = dict[str, Any]


# --- what cells share -------------------------------------------------------------------------------------------------------


def data_of(name: str, site: Site) -> Data:
    return _data(name, site.data, site.device)


@lru_cache(maxsize=2)
def _data(name: str, root: Path, device: str) -> Data:
    return load_data(name, root).to(device)


def folder_of(dense: Dense, site: Site) -> Path:
    return site.root / name_of(dense)


def untrained(dense: Dense, data: Data, site: Site) -> nn.Module:
    """The network as it is before training, on the device; the seed of its training draws the weights."""
    with torch.random.fork_rng():
        torch.manual_seed(dense.training.seed if dense.training else 0)
        return build(dense.network, data.classes).to(site.device)


def dense_model(dense: Dense, site: Site) -> nn.Module:
    """The trained dense network, in eval mode.

    Raises:
        FileNotFoundError: It has not been trained yet, or there is no such file of weights.
        ValueError: The file of weights is another one, or of another network.
    """
    model = untrained(dense, data_of(dense.data, site), site)
    if dense.training is not None:
        return load(model, folder_of(dense, site) / "model.safetensors").eval()
    return _with_weights(model, dense, site.weights / dense.weights).eval()


def _with_weights(model: nn.Module, dense: Dense, path: Path) -> nn.Module:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file of weights for {dense.network}")
    if checksum(path) != dense.sha256:
        raise ValueError(f"{path} is not the file that this run began with: its checksum differs")
    return with_tensors(model, path)


def with_tensors(model: nn.Module, path: Path) -> nn.Module:
    """The model with the weights of a plain safetensors file."""
    state = load_file(path)
    counters = {name: value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")}
    try:
        model.load_state_dict(counters | state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the network: {str(error).splitlines()[1].strip()}") from None
    return model


def measured(model: nn.Module, cell: Pruning, site: Site, key: str) -> Curvature:
    """The statistics that the cell's plan needs; the last ones are kept, because cells that follow each other share them."""
    methods = tuple(statistics_for(cell.planning))
    full = (key, cell.dense.data, methods, cell.examples, cell.labels, cell.seed, site.device)
    if full not in _LAST:
        images = sample(data_of(cell.dense.data, site).train, cell.examples, cell.seed)
        found = measure(
            model, images.batches(BATCH), methods=methods, labels=cell.labels, seed=cell.seed, progress=site.progress
        )
        _LAST.clear()
        _LAST[full] = found
    return _LAST[full]


_LAST: dict[tuple[Any, ...], Curvature] = {}


def sample(images: Images, examples: int | None, seed: int) -> Images:
    return images if examples is None or examples >= len(images) else images.subset(examples, seed)


# --- one network made smaller -----------------------------------------------------------------------------------------------


def smaller(model: nn.Module, cell: Pruning, site: Site, key: str) -> tuple[nn.Module, Plan]:
    """The model after the cell's plan."""
    curvature = measured(model, cell, site, key)
    data = data_of(cell.dense.data, site)
    timed: dict[str, Any] = {"example_inputs": inputs_of(data)} if "latency" in cell.planning else {}
    chosen = plan(model, curvature, **cell.planning, **timed)
    refit = sample(data.train, cell.examples, cell.seed).batches(BATCH) if cell.refit else None
    return apply(model, chosen, curvature, refit=refit), chosen


def inputs_of(data: Data) -> torch.Tensor:
    """A batch of test images, of which times and costs are."""
    inputs, _ = next(iter(data.test.subset(min(BATCH, len(data.test)), 0).batches(BATCH)))
    return inputs


def described(model: nn.Module, dense: nn.Module, cell: Pruning, site: Site, chosen: Plan) -> Content:
    """A smaller network before fine-tuning, as JSON data."""
    data = data_of(cell.dense.data, site)
    cost = count(model, inputs_of(data)[:1])
    return {
        "params": cost.params,
        "macs": cost.macs,
        "before": scores(model, cell, site),
        "layers": {name: choice.params / max(1, choice.shape.params) for name, choice in chosen.layers.items()},
        "plan": json.loads(chosen.to_json()),
        "speedup": speedup(dense, model, inputs_of(data)),
    }


def scores(model: nn.Module, cell: Pruning, site: Site) -> Content:
    """Loss on a fixed part of the training images, as they are, and accuracy and loss on the test images."""
    data = data_of(cell.dense.data, site)
    judged = judge(model, sample(data.train, cell.judged, 0), cell)
    test = judge(model, data.test, cell)
    return {"train_loss": judged.loss, "accuracy": test.accuracy, "loss": test.loss}


def judge(model: nn.Module, images: Images, cell: Pruning) -> Score:
    return evaluate(model, images, precision=cell.finetuning.precision, channels_last=cell.finetuning.channels_last)


def speedup(dense: nn.Module, small: nn.Module, inputs: torch.Tensor) -> float:
    """How many times faster a pass over a batch is: medians of both taking turns."""
    with torch.no_grad(), evaluating(dense), evaluating(small):
        ours, theirs = interleaved([partial(called, model, inputs) for model in (dense, small)], TURNS)
    return statistics.median(ours) / statistics.median(theirs)

"""The steps of a run: the dense network, its statistics, the smaller network, what it costs and how good it is."""

from __future__ import annotations

import hashlib
import json
import statistics
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from eigendamage.cost import called, count
from eigendamage.curvature import Curvature
from eigendamage.lab.rivals import RIVALS, rival
from eigendamage.lab.settings import Dense, Pruning, Site, checksum, name_of
from eigendamage.lab.subjects import Subject, is_own, network_named, subject_named
from eigendamage.measuring import measure
from eigendamage.methods import BEST
from eigendamage.passes import evaluating
from eigendamage.planning import plan, statistics_for
from eigendamage.plans import Plan
from eigendamage.storage import load
from eigendamage.surgery import apply
from eigendamage.timing import interleaved

TURNS = 5

Content = dict[str, Any]


# --- what cells share -------------------------------------------------------------------------------------------------------


def subject_of(name: str, site: Site) -> Subject:
    return subject_named(name, site.data, site.device, site.progress)


def folder_of(dense: Dense, site: Site) -> Path:
    return site.root / name_of(dense)


def untrained(dense: Dense, site: Site) -> nn.Module:
    """The network as it is before training, on the device; the seed of its training draws the weights."""
    seed = dense.training.seed if dense.training else 0
    return network_named(dense.network, subject_of(dense.data, site).classes, seed).to(site.device)


def dense_model(dense: Dense, site: Site) -> nn.Module:
    """The trained dense network, in eval mode.

    Raises:
        FileNotFoundError: It has not been trained yet, or there is no such file of weights.
        ValueError: The file of weights is another one, or of another network.
    """
    model = untrained(dense, site)
    if dense.training is not None:
        return load(model, folder_of(dense, site) / "model.safetensors").eval()
    return _with_weights(model, dense, site.weights / dense.weights).eval() if dense.weights else model.eval()


def _with_weights(model: nn.Module, dense: Dense, path: Path) -> nn.Module:
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file of weights for {dense.network}")
    if checksum(path) != dense.sha256:
        raise ValueError(f"{path} is not the file that this run began with: its checksum differs")
    return with_weights(model, path)


def with_weights(model: nn.Module, path: Path) -> nn.Module:
    """The model with the weights of a file of ours, which may hold a smaller model, or of a plain safetensors file."""
    try:
        with safe_open(path, framework="pt") as file:
            ours = "eigendamage" in (file.metadata() or {})
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file, or is cut short or damaged ({error})") from None
    if ours:
        return load(model, path)
    state = load_file(path)
    counters = {name: value for name, value in model.state_dict().items() if name.endswith("num_batches_tracked")}
    try:
        model.load_state_dict(counters | state)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit the network: {str(error).splitlines()[1].strip()}") from None
    return model


def measured(model: nn.Module, cell: Pruning, site: Site) -> Curvature:
    """The statistics that the cell's plan needs, shared by cells: the last ones, and on disk those whose trials take long.

    They are known by the weights themselves. A user's own batches have no name that says what is in them: those are not kept.
    """
    methods = tuple(statistics_for(cell.planning))
    full = (_digest(model), cell.dense.network, cell.dense.data, methods, cell.examples, cell.labels, cell.seed, site.device)
    if full not in _LAST:
        path = site.root / f"statistics-{hashlib.sha256(repr(full).encode()).hexdigest()[:16]}.safetensors"
        kept = BEST in methods and not is_own(cell.dense.data)
        if kept and path.exists():
            found = Curvature.load(path)
        else:
            batches = subject_of(cell.dense.data, site).statistics(cell.examples, cell.seed)
            found = measure(model, batches, methods=methods, labels=cell.labels, seed=cell.seed, progress=site.progress)
            if kept:
                found.save(path)
        _LAST.clear()
        _LAST[full] = found
    return _LAST[full]


_LAST: dict[tuple[Any, ...], Curvature] = {}


def _digest(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        values = tensor.detach().cpu().contiguous()
        digest.update(f"{name} {values.dtype} {tuple(values.shape)}".encode())
        digest.update(values.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


# --- one network made smaller -----------------------------------------------------------------------------------------------


def smaller(model: nn.Module, cell: Pruning, site: Site) -> tuple[nn.Module, Plan | None]:
    """The model after the cell's plan; another program's is made without one."""
    subject = subject_of(cell.dense.data, site)
    if cell.planning.get("method") in RIVALS:
        batches = subject.statistics(cell.examples, cell.seed)
        heads = [module for module in model.modules() if isinstance(module, nn.Linear)][-1:]
        return rival(cell.planning["method"], model, batches, cell.planning["macs"], heads, cell.refit), None
    curvature = measured(model, cell, site)
    timed: dict[str, Any] = {"example_inputs": subject.inputs()} if "latency" in cell.planning else {}
    chosen = plan(model, curvature, **cell.planning, **timed)
    refit = subject.statistics(cell.examples, cell.seed) if cell.refit else None
    return apply(model, chosen, curvature, refit=refit, refitted=cell.refitted), chosen


def described(model: nn.Module, dense: nn.Module, cell: Pruning, site: Site, chosen: Plan | None) -> Content:
    """A smaller network before fine-tuning, as JSON data."""
    inputs = subject_of(cell.dense.data, site).inputs()
    content = {**cost_of(model, inputs), "before": scores(model, cell, site), "speedup": speedup(dense, model, inputs)}
    if chosen is not None:
        content["layers"] = {name: choice.params / max(1, choice.shape.params) for name, choice in chosen.layers.items()}
        content["plan"] = json.loads(chosen.to_json())
        content["predicted"] = chosen.loss
    return content


def cost_of(model: nn.Module, inputs: Tensor) -> Content:
    cost = count(model, inputs[:1])
    return {"params": cost.params, "macs": cost.macs}


def scores(model: nn.Module, cell: Pruning, site: Site) -> Content:
    """Loss on a fixed part of the training images, as they are, and accuracy and loss on the test images."""
    subject = subject_of(cell.dense.data, site)
    judged = subject.judged(model, cell.judged, cell.examples, cell.finetuning, cell.seed)
    test = subject.test(model, cell.finetuning)
    return {"train_loss": judged.loss, "accuracy": test.accuracy, "loss": test.loss}


def speedup(dense: nn.Module, small: nn.Module, inputs: Tensor) -> float:
    """How many times faster a pass over a batch is: medians of both taking turns."""
    with torch.no_grad(), evaluating(dense), evaluating(small):
        ours, theirs = interleaved([partial(called, model, inputs) for model in (dense, small)], TURNS)
    return statistics.median(ours) / statistics.median(theirs)

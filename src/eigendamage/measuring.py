"""One pass over the data, and what a look at two of its examples tells beforehand."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from eigendamage.batches import (
    Forward,
    Sample,
    batch_size,
    detached,
    examples_in,
    first_examples,
    in_reverse,
    outputs_of,
    targets_of,
)
from eigendamage.budgets import layers_for_budgets
from eigendamage.calibrating import calibrated
from eigendamage.checks import require_batches, require_choice, require_function, require_whole
from eigendamage.cost import forward_macs
from eigendamage.curvature import Curvature
from eigendamage.labels import Loss, Uniforms, change_of_outputs, increased_loss, softened_loss, summed_loss
from eigendamage.layers import (
    Skip,
    candidates,
    reasons_to_stay,
    require_values,
    skipped_layers,
)
from eigendamage.methods import BEST, DEFAULT_METHODS, needs_of
from eigendamage.observing import Observers
from eigendamage.passes import alike, evaluating, layer_by_layer, restoring
from eigendamage.processes import distributed, sum_over_processes
from eigendamage.progress import track
from eigendamage.rehearsal import trace
from eigendamage.standins import escaping, irreplaceable

T = TypeVar("T")
_NOTHING = object()

# How many examples show how a model is wired, and how many what becomes of its outputs when one layer changes.
REHEARSED = 2
FEW = 200


def measure(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    methods: Iterable[str] = DEFAULT_METHODS,
    labels: str = "sampled",
    task: str = "classification",
    loss: Loss | None = None,
    forward: Forward | None = None,
    skip: Skip = (),
    examples: int | None = None,
    autocast: torch.dtype | None = None,
    seed: int = 0,
    progress: bool = True,
) -> Curvature:
    """Collect the curvature of every layer in one pass over ``batches``, and leave the model as it was.

    Args:
        model: any module. It runs in eval mode; its weights, gradients, hooks, modes and the random state stay as they are.
        batches: an iterable of ``(inputs, targets)``, or of anything that ``forward`` understands.
        methods: collect only what these need; see ``METHODS``.
        labels: ``"sampled"`` from the model's own prediction (the Fisher), or ``"given"`` (the empirical Fisher).
        task: ``"classification"`` (outputs are logits) or ``"regression"`` (a Gaussian of unit variance).
        loss: a loss of your own, ``loss(outputs, targets)``: one value per example, or their mean. Uses the given targets.
        forward: ``forward(model, batch)`` returns the outputs, where calling the model with the inputs is not right.
        skip: layers to leave alone: names (of layers or of modules around them), or a predicate of name and module.
        examples: stop after this many.
        autocast: run the model under ``torch.autocast`` with this dtype.
        seed: of the sampled labels.
        progress: show a bar on a terminal.

    Raises:
        ValueError: for an empty loader, values that are not finite, labels out of range, or arguments that don't fit.
    """
    require_values(model)
    require_batches("batches", batches)
    _check_arguments(labels, task, loss, examples, forward, autocast)
    require_whole("seed", seed, least=0)
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError("model: is compiled by TorchScript, which hides its layers; compress the model first, then script it")
    if not isinstance(methods, Iterable):
        raise TypeError(f"methods: must be names of methods; got {methods!r}")
    methods = [methods] if isinstance(methods, str) else list(methods)
    asked = needs = needs_of(methods)
    if "softened" in asked and (loss is not None or task != "classification"):
        needs = asked - {"softened"} | {"gradients"}  # there are no classes to be unsure of
    reasons = reasons_to_stay(model, skip)
    if not candidates(model).keys() - reasons.keys():
        raise ValueError(
            f"the model has no layer that can be compressed: {_listed(reasons) or 'no convolution or linear layer'}"
        )
    run = partial(outputs_of, forward=forward, autocast=autocast)
    data = detached(batches, examples)
    with _as_found(model, loss):
        first = next(data, _NOTHING)
        if first is _NOTHING:
            raise ValueError("batches: the loader is empty")
        few = first_examples(first, REHEARSED, partial(run, model))
        rehearsal = partial(run, model, few)
        reasons |= escaping(model, partial(run, batch=few), sorted(candidates(model).keys() - reasons.keys()))
        whole = irreplaceable(model, rehearsal, candidates(model).keys() - reasons.keys())
        with layer_by_layer():
            coupled = trace(model, rehearsal, fixed=_skipped(reasons)) if "coupling" in needs else None
            with torch.no_grad():
                shown: list[Tensor] = []
                macs = forward_macs(lambda: shown.append(rehearsal())) // max(1, examples_in(few, shown[0]))
            mixed = _mixed(model, partial(run, model), few) if "fisher" in needs else set()
        with layer_by_layer(), Observers(model, needs, reasons, mixed) as observers:
            own_seed = seed + (dist.get_rank() if distributed() else 0)
            uniforms, softening = Uniforms(own_seed), Uniforms(own_seed)
            total = len(batches) if isinstance(batches, Sized) and examples is None else None
            sample = Sample()
            for batch in track(itertools.chain([first], data), "measuring", progress, total):
                with torch.enable_grad():
                    outputs = run(model, batch)
                    sample.keep(batch, outputs)
                    observers.check_finite(outputs, partial(run, model, batch))
                    losses = {}
                    if needs & {"gradients", "fisher"} or "softened" not in needs:
                        losses["gradients"] = summed_loss(outputs, targets_of(batch), labels, task, loss, uniforms)
                    if "softened" in needs:
                        losses["softened"] = softened_loss(outputs, targets_of(batch), softening)
                observers.backward(losses, examples_in(batch, outputs))
        curvature = observers.curvature(coupled, asked | needs, macs, whole)
    if BEST not in methods:
        return curvature
    grown = partial(increased_loss, task=task, loss=loss)
    unit = 1.0 if "softened" in needs else _mean(sample, lambda batch, before: torch.zeros_like(before), grown)

    def judged(judge: Callable[[Tensor, Tensor, Any], Tensor], of: Sample, small: nn.Module) -> float:
        with evaluating(small), layer_by_layer():
            return _mean(of, lambda batch, before: run(small, batch), judge)

    layers = layers_for_budgets(curvature, skipped_layers(model, skip))
    change = partial(judged, partial(change_of_outputs, task=task), sample.part(FEW)) if loss is None else None
    calibration = calibrated(model, curvature, layers, unit, change, partial(judged, grown, sample))
    return dataclasses.replace(curvature, calibration=calibration)


def _mean(
    sample: Sample, outputs_for: Callable[[Any, Tensor], Tensor], judge: Callable[[Tensor, Tensor, Any], Tensor]
) -> float:
    """What a judge makes of other outputs beside those of before, over the examples held, of all processes."""
    total = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad():
        for batch, before in sample.held:
            value = float(judge(outputs_for(batch, before), before, targets_of(batch)))
            total += torch.tensor([value, examples_in(batch, before)], dtype=torch.float64)
    total = sum_over_processes(total, sample.held[0][1].device).cpu()
    return float(total[0] / total[1])


def _check_arguments(
    labels: str,
    task: str,
    loss: Loss | None,
    examples: int | None,
    forward: Forward | None,
    autocast: torch.dtype | None,
) -> None:
    require_choice("labels", labels, ("sampled", "given"))
    require_choice("task", task, ("classification", "regression"))
    if examples is not None:
        require_whole("examples", examples, least=1)
    if forward is not None:
        require_function("forward", forward, "model and batch")
    if autocast is not None:
        require_choice("autocast", autocast, (torch.bfloat16, torch.float16))
    if torch.is_inference_mode_enabled():
        raise ValueError("measure needs gradients: call it outside of torch.inference_mode()")
    if loss is not None:
        require_function("loss", loss, "outputs and targets")


def _listed(reasons: Mapping[str, str]) -> str:
    return "; ".join(f"{name}: {reason}" for name, reason in itertools.islice(reasons.items(), 4))


def _skipped(reasons: Mapping[str, str]) -> list[str]:
    return [name for name, reason in reasons.items() if reason == "skipped on request"]


# --- leaving no trace -------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _as_found(model: nn.Module, loss: Loss | None) -> Iterator[None]:
    """Eval mode and frozen weights inside; everything as before afterwards, whatever happens."""
    modules = [model, loss] if isinstance(loss, nn.Module) else [model]  # a loss may have weights of its own
    flags = [(parameter, parameter.requires_grad) for module in modules for parameter in module.parameters()]
    with evaluating(model):
        try:
            for parameter, _ in flags:
                parameter.requires_grad_(False)  # S needs no weight gradients: half the backward pass
            yield
        finally:
            for parameter, flag in flags:
                parameter.requires_grad_(flag)


# --- telling examples apart -------------------------------------------------------------------------------------------------


def _mixed(model: nn.Module, run: Callable[[Any], object], batch: Any) -> set[str]:
    """Layers whose inputs do not change places, along the first dimension, when the examples of a batch do."""
    count = batch_size(batch)
    if count < 2:
        return set()
    layers = candidates(model)
    seen: list[dict[str, list[Tensor]]] = []
    for given in (batch, in_reverse(batch)):
        seen.append({name: [] for name in layers})
        handles = [
            module.register_forward_hook(partial(_note_inputs, seen[-1][name]), with_kwargs=True)
            for name, module in layers.items()
        ]
        try:
            with torch.no_grad(), restoring(model):
                run(given)
        except Exception:  # the model's code may count on the order of the examples
            return set(layers)
        finally:
            for handle in handles:
                handle.remove()
    there, back = seen
    return {name for name in layers if not alike([_reversed(x, count) for x in back[name]], there[name])}


def _note_inputs(calls: list[Tensor], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    calls += [value.clone() for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]


def _reversed(inputs: Tensor, count: int) -> Tensor:
    """Whole examples in reverse order; each may have several rows, as windows or tokens."""
    if not inputs.dim() or len(inputs) % count:
        return inputs
    return inputs.unflatten(0, (count, len(inputs) // count)).flip(0).flatten(0, 1)

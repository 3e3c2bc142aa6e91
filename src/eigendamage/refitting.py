"""Refit the compressed layers on the compressed network's own inputs, without labels (beyond the paper).

Errors of earlier layers change what a later layer sees. In forward order, each compressed layer is built again from the weight
that maps the compressed network's inputs X to the dense network's outputs Y: ridge regression towards the trained weight,
W̃ = (Y Xᵀ + ρ W)(X Xᵀ + ρ I)⁻¹, in the metric of X. At the end
batch norm follows the compressed network.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage import structures
from eigendamage.batches import Forward, batch_size, detached, outputs_of
from eigendamage.checks import require_batches, require_choice
from eigendamage.covariance import PatchSum, accumulation_dtype
from eigendamage.curvature import Curvature, LayerCurvature
from eigendamage.layers import bias_of, channel_dim, outer_products, rows, set_weight, weight_of
from eigendamage.linalg import exact
from eigendamage.methods import BEST
from eigendamage.passes import evaluating
from eigendamage.plans import Choice, Plan
from eigendamage.progress import track

# Strength of the pull towards the trained weight, relative to the mean square of the inputs.
RIDGE = 1e-2

# What can be refitted.
PARTS = ("layers", "norms")

Replace = Callable[[nn.Module, nn.Module, nn.Module], nn.Module]


def refit(
    dense: nn.Module,
    small: nn.Module,
    plan: Plan,
    curvature: Curvature,
    batches: Iterable[Any],
    forward: Forward | None,
    put: Replace,
    parts: Collection[str] = PARTS,
    progress: bool = True,
) -> nn.Module:
    """``small`` with every compressed layer and batch norm, or one of these `PARTS`, refitted on ``batches``.

    ``put`` replaces a module.
    """
    require_batches("refit", batches)
    for part in [parts] if isinstance(parts, str) else parts:
        require_choice("refitted", part, PARTS)
    data = list(detached(batches, None))
    if not data:
        raise ValueError("refit: the loader is empty")
    names = [name for name, choice in plan.layers.items() if "layers" in parts and _can_be_refitted(name, choice, plan)]
    with evaluating(dense), torch.no_grad():
        with _in_eval(small):
            for name in track(names, "refitting", progress):
                new = _refitted(dense, small, name, plan, curvature[name], data, forward)
                small = put(small, small.get_submodule(name), new)
        if "norms" in parts:
            _refit_norms(dense, small, plan, data, forward)
    return small


def _can_be_refitted(name: str, choice: Choice, plan: Plan) -> bool:
    """Stages can be built again; a layer that lost inputs under a budget can make up for them again."""
    if choice.structure == "channels":
        return plan.method == BEST and name in plan.kept and choice.ranks["in"] < choice.shape.inputs
    return choice.structure != "merged" and structures.STRUCTURES[choice.structure].build is not None


def _refitted(
    dense: nn.Module,
    small: nn.Module,
    name: str,
    plan: Plan,
    layer: LayerCurvature,
    data: list[Any],
    forward: Forward | None,
) -> nn.Module:
    choice, module, own = plan[name], dense.get_submodule(name), small.get_submodule(name)
    kept = torch.tensor(plan.kept[name].outputs) if choice.structure == "channels" else None
    moments = _Moments(module if kept is None else own)
    enough = None
    for batch in data:
        wanted = _calls(dense, module, batch, forward, enough)
        given = _calls(small, own, batch, forward, enough)
        if len(given) != len(wanted):
            raise ValueError(f"forward: must call the model it is given, but {name} ran {len(wanted)} times, not {len(given)}")
        for (x, _), (_, y) in zip(given, wanted, strict=True):
            moments.add(x, y if kept is None else y.index_select(channel_dim(module, y.dim()), kept.to(y.device)))
        enough = enough or len(wanted) or None
    if not moments.seen:
        raise ValueError(f"refit: the batches do not reach {name}")
    if not moments.finite:
        raise ValueError(f"refit: the inputs or outputs of {name} are not finite; look for NaN or overflow in the batches")
    weight, bias = moments.ridge()
    better = copy.deepcopy(module if kept is None else own)
    set_weight(better, weight.to(module.weight), None if bias is None else bias.to(module.weight))
    if kept is not None:
        return better
    covariance = moments.covariance()
    seen = {"inputs": covariance} if choice.shape.taps == 1 else {"inputs": None, "patches": covariance}
    build = structures.STRUCTURES[choice.structure].build
    assert build is not None
    return build(better, replace(layer, **seen), choice.ranks)


class _Moments:
    """X Xᵀ and Y Xᵀ over all positions of all calls; with a bias, X has a row of ones."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.trained, self.bias = weight_of(module).detach(), bias_of(module)
        self.dtype = accumulation_dtype(self.trained)
        self.inputs = PatchSum(module)
        outputs, size = len(self.trained), self.trained[0].numel()
        self.products = torch.zeros(outputs + 1, size, dtype=torch.float64)  # the last row: those of the ones
        self.sums = torch.zeros(outputs + 1, dtype=torch.float64)  # of the outputs, and the number of positions

    def add(self, x: Tensor, y: Tensor) -> None:
        if not x.numel():
            return
        x, y = x.to(self.dtype), y.to(self.dtype)
        dim = channel_dim(self.module, y.dim())
        beside_ones = torch.cat([y, torch.ones_like(y.narrow(dim, 0, 1))], dim)
        self.inputs.add(x)
        self.products += exact(outer_products(self.module, x, beside_ones).flatten(1))
        self.sums += exact(rows(beside_ones, self.module).sum(0))

    @property
    def seen(self) -> bool:
        return bool(self.sums[-1])

    @property
    def finite(self) -> bool:
        return bool(self.products.isfinite().all() and self.inputs.total().isfinite().all())

    def covariance(self) -> Tensor:
        return exact(self.inputs.total()) / self.sums[-1]

    def ridge(self) -> tuple[Tensor, Tensor | None]:
        """The weight and bias that map X to Y, pulled towards the trained ones."""
        inputs, products, trained = exact(self.inputs.total()), self.products[:-1], exact(self.trained).flatten(1)
        if self.bias is not None:
            ones = self.products[-1:]
            inputs = torch.cat([torch.cat([inputs, ones.T], dim=1), torch.cat([ones, self.sums[-1:, None]], dim=1)])
            products = torch.cat([products, self.sums[:-1, None]], dim=1)
            trained = torch.cat([trained, exact(self.bias)[:, None]], dim=1)
        mean = inputs.diagonal().mean()
        pull = RIDGE * (mean if mean > 0 else torch.ones_like(mean))  # inputs of nothing leave the trained weight
        pulled = inputs + pull * torch.eye(len(inputs), dtype=inputs.dtype)
        solved = torch.linalg.solve(pulled, (products + pull * trained).T).T
        size = self.trained[0].numel()
        return solved[:, :size].reshape(self.trained.shape), None if self.bias is None else solved[:, -1]


class _Enough(Exception):
    """What comes behind the layer does not matter."""


def _calls(
    model: nn.Module, layer: nn.Module, batch: Any, forward: Forward | None, enough: int | None
) -> list[tuple[Tensor, Tensor]]:
    """Input and output of every call of a layer in one forward pass, which ends after ``enough`` of them."""
    calls: list[tuple[Tensor, Tensor]] = []

    def saw(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        inputs = next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        calls.append((inputs.clone(), output.clone()))  # the model may go on to change them in place
        if len(calls) == enough:
            raise _Enough

    handle = layer.register_forward_hook(saw, with_kwargs=True)
    try:
        outputs_of(model, batch, forward)
    except _Enough:
        pass
    finally:
        handle.remove()
    return calls


@contextmanager
def _in_eval(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, mode in modes:
            module.training = mode


Norm = nn.modules.batchnorm._BatchNorm


def _refit_norms(dense: nn.Module, small: nn.Module, plan: Plan, data: list[Any], forward: Forward | None) -> None:
    """Move batch norm's running statistics by what compression changed on ``data``.

    The trained statistics come from many more, augmented examples: taking those of ``data`` in their place would hurt a network
    that is hardly compressed.
    """
    after, before = norm_statistics(small, data, forward), norm_statistics(dense, data, forward)
    norms = dict(small.named_modules())
    for name, (mean, variance) in after.items():
        norm = norms[name]
        assert isinstance(norm, Norm) and norm.running_mean is not None and norm.running_var is not None
        if not bool(mean.isfinite().all() and variance.isfinite().all()):
            raise ValueError(f"refit: the inputs of {name} are not finite; look for NaN or overflow in the batches")
        kept = slice(None) if name not in plan.kept else torch.tensor(plan.kept[name].outputs, device=mean.device)
        old_mean, old_variance = (statistic[kept] for statistic in before[name])
        norm.running_mean += mean - old_mean
        norm.running_var *= (variance + norm.eps) / (old_variance + norm.eps)


def norm_statistics(model: nn.Module, data: list[Any], forward: Forward | None = None) -> dict[str, tuple[Tensor, Tensor]]:
    """Mean and variance of what every batch norm sees, averaged over batches; each normalises by its batch meanwhile."""
    norms = {name: m for name, m in model.named_modules() if isinstance(m, Norm) and m.track_running_stats}
    if not norms:
        return {}
    momenta = [norm.momentum for norm in norms.values()]
    several = [batch for batch in data if batch_size(batch) != 1] or data  # of one example there may be no variance
    with evaluating(model):  # which puts buffers back
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # torch's own spelling of a cumulative average
                norm.train()
            for batch in several:
                outputs_of(model, batch, forward)
            return {name: (_copy(norm.running_mean), _copy(norm.running_var)) for name, norm in norms.items()}
        finally:
            for norm, momentum in zip(norms.values(), momenta, strict=True):
                norm.momentum = momentum


def _copy(buffer: Tensor | None) -> Tensor:
    assert buffer is not None
    return buffer.clone()

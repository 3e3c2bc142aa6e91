"""The running sums of a measurement: the only place with hooks for statistics, and where processes put theirs together."""

from __future__ import annotations

import contextlib
import ctypes
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage.coupling import Coupling
from eigendamage.covariance import CHUNK, ChannelSum, PatchSum, accumulation_dtype
from eigendamage.curvature import Curvature, LayerCurvature
from eigendamage.layers import axes_of, candidates, patches, prepare, rows, shape_of, weight_of
from eigendamage.passes import backward
from eigendamage.processes import from_processes, sum_over_processes

# What gradients are of: the loss itself, or that of a softened prediction.
LOSSES = ("gradients", "softened")
# Whose gradients a statistic is made of, and so in whose unit it is summed.
UNITS = {"gradients": "gradients", "fisher": "gradients", "softened": "softened"}


@dataclass
class _Call:
    inputs: Tensor
    gradient: Tensor | None = None


class Observer:
    """Running sums for one layer."""

    def __init__(self, name: str, module: nn.Module, needs: frozenset[str], mixed: bool) -> None:
        self.name, self.module = name, module
        self.weight = weight_of(module)
        self.shape = shape_of(module)
        self.inputs: ChannelSum | PatchSum | None = None
        if "patches" in needs and self.shape.taps > 1:
            self.inputs = PatchSum(module)
        elif needs & {"inputs", "patches"}:
            self.inputs = ChannelSum(module)
        self.gradients = {of: self._zeros(self.shape.outputs, self.shape.outputs) for of in LOSSES if of in needs}
        self.fisher = self._zeros(*self.weight.shape) if "fisher" in needs else None
        self.pending: list[_Call] = []  # of this batch, for the Fisher
        self.mixed = mixed  # whether examples cannot be told apart in the inputs
        self.units: dict[str, float] = {}  # of the gradients: they may be so small that their squares are no numbers
        self.scale: Tensor | None = None
        self.positions = torch.zeros(2 + len(self.shape.kernel), dtype=torch.float64)

    def _zeros(self, *shape: int) -> Tensor:
        return self.weight.new_zeros(*shape, dtype=accumulation_dtype(self.weight))

    def see_inputs(self, inputs: Tensor, outputs: Tensor) -> None:
        prepared_positions = inputs.numel() // self.shape.inputs
        self.positions[:2] += torch.tensor([prepared_positions, outputs.numel() // self.shape.outputs])
        self.positions[2:] += torch.tensor(self._axis_positions(inputs), dtype=torch.float64)
        if self.inputs is not None:
            self.inputs.add(inputs)

    def _axis_positions(self, inputs: Tensor) -> list[int]:
        """Where the kernels run if the layer's axes are walked one after the other."""
        n = len(self.shape.kernel)
        sizes = list(inputs.shape[inputs.dim() - n :])
        examples = inputs.numel() // self.shape.inputs
        for size in sizes:
            examples //= size
        padded = prepare(self.module, inputs[:1] if inputs.dim() == n + 2 else inputs).shape[2:]
        counts = []
        for axis, walk in enumerate(axes_of(self.module)):
            before = examples * torch.Size(sizes).numel()
            sizes[axis] = walk.outputs(padded[axis])
            counts.append(before if self.shape.kind == "transposed" else examples * torch.Size(sizes).numel())
        return counts

    def see_gradient(self, gradient: Tensor, of: str) -> None:
        if of not in self.units:
            unit = _unit_for(gradient)
            self.units |= {} if unit is None else {of: unit}
        if of in self.gradients:
            matrix = self._in_units(rows(gradient, self.module), self.gradients[of].dtype, of)
            self.gradients[of].addmm_(matrix.T, matrix)

    def _in_units(self, gradient: Tensor, dtype: torch.dtype, of: str) -> Tensor:
        unit = self.units.get(of, 1.0)
        return gradient.to(dtype) if unit == 1 else gradient.to(dtype) / unit

    def see_call(self, examples: int) -> None:
        """Once every call of this batch has its gradient, add up the squared gradients of each example (C-OBD)."""
        if self.fisher is None or any(call.gradient is None for call in self.pending):
            return
        self.mixed = self.mixed or any(self._batch(call.inputs) % examples for call in self.pending)
        if self.mixed:
            self.pending = []
            return
        dtype = self.fisher.dtype
        calls = [
            (prepare(self.module, call.inputs.to(dtype)), self._in_units(call.gradient, dtype, "gradients"))
            for call in self.pending
            if call.gradient is not None
        ]
        self.pending = []
        per_example = max(1, self.fisher.numel() + sum(x.numel() * self.shape.taps // max(len(x), 1) for x, _ in calls))
        step = max(1, CHUNK // per_example)
        for start in range(0, examples, step):
            count = min(step, examples - start)
            total = self.fisher.new_zeros(count, *self.fisher.flatten(1).shape)
            for x, g in calls:
                total += self._weight_gradients(x, g, start, count, examples)
            self.fisher += total.square().sum(0).view_as(self.fisher)

    def _batch(self, inputs: Tensor) -> int:
        return len(inputs) if inputs.dim() > len(self.shape.kernel) + 1 else 1

    def _weight_gradients(self, prepared: Tensor, gradient: Tensor, start: int, count: int, examples: int) -> Tensor:
        """Gradient of the weight for each of ``count`` examples."""
        folded = len(prepared) // examples  # windows or tokens folded into the batch dimension, example by example
        part = slice(start * folded, (start + count) * folded)
        seen = patches(self.module, prepared[part]).reshape(count, -1, self.shape.inputs * self.shape.taps)
        pushed = rows(gradient, self.module).reshape(examples, -1, self.shape.outputs)[start : start + count]
        return pushed.transpose(1, 2) @ seen

    def state(self, units: Mapping[str, float]) -> dict[str, Tensor]:
        """Everything that is summed over processes, gradients in these units."""
        tensors = {"positions": self.positions}
        if self.inputs is not None:
            tensors["patches" if isinstance(self.inputs, PatchSum) else "inputs"] = self.inputs.total()
        tensors |= self.gradients if self.fisher is None else {**self.gradients, "fisher": self.fisher}
        for key in tensors.keys() & UNITS.keys():
            unit, wanted = (of.get(UNITS[key], 1.0) for of in (self.units, units))
            tensors[key] = tensors[key] if unit == wanted else tensors[key] * (unit / wanted) ** 2
        return tensors


class Observers:
    """Hooks on every layer for the time of a ``with`` block."""

    def __init__(self, model: nn.Module, needs: frozenset[str], reasons: dict[str, str], mixed: Collection[str]) -> None:
        self.model, self.needs, self.reasons = model, needs, dict(reasons)
        self.by_name = {
            name: Observer(name, module, frozenset() if name in reasons else needs, name in mixed)
            for name, module in candidates(model).items()
        }
        self.order: dict[str, None] = {}  # names in the order of their first call
        self.examples = 0
        self.anchor = torch.zeros((), device=next(model.parameters()).device, requires_grad=True)
        self.latest: dict[int, tuple[Observer, Tensor]] = {}
        self.replaying = False
        self.of = LOSSES[0]  # which loss is being propagated

    def __enter__(self) -> Observers:
        self.handles = [
            observer.module.register_forward_hook(partial(self._saw, observer), with_kwargs=True)
            for observer in self.by_name.values()
        ]
        if "scale" in self.needs:
            norms = [m for m in self.model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm) and m.affine]
            self.handles += [norm.register_forward_pre_hook(self._saw_norm) for norm in norms]
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _saw(
        self, observer: Observer, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
    ) -> Tensor | None:
        self.order.setdefault(observer.name)
        values = [*args, *kwargs.values()]
        inputs = next((value.detach() for value in values if isinstance(value, Tensor)), None)
        if len(values) != 1 or inputs is None or not isinstance(output, Tensor):
            self.reasons.setdefault(observer.name, "it is called with more than its input")
        if inputs is not None and inputs.numel() and isinstance(output, Tensor) and not self.replaying:
            observer.see_inputs(inputs, output.detach())
        if observer.name in self.reasons:
            return None
        assert inputs is not None
        replaced = None
        if not output.requires_grad and torch.is_grad_enabled():
            replaced = output = output + self.anchor  # the graph starts here, although all weights are frozen
        if output.requires_grad:
            if observer.fisher is not None:
                observer.pending.append(_Call(inputs.clone()))  # the model may go on to change its inputs in place
            output.register_hook(partial(self._saw_gradient, observer, len(observer.pending) - 1))
        if "scale" in self.needs:
            self.latest[id(output)] = (observer, output)
        return replaced

    def _saw_gradient(self, observer: Observer, call: int, gradient: Tensor) -> None:
        observer.see_gradient(gradient, self.of)
        if observer.fisher is not None and self.of == "gradients":
            observer.pending[call].gradient = gradient
            observer.see_call(self.batch)

    def _saw_norm(self, norm: nn.Module, args: tuple[Any, ...]) -> None:
        if len(args) == 1 and id(args[0]) in self.latest:
            scale = norm.weight
            assert isinstance(scale, Tensor)
            self.latest[id(args[0])][0].scale = scale.detach().abs()

    def check_finite(self, outputs: Tensor, again: Callable[[], object]) -> None:
        if outputs.dim() == 0 or len(outputs) == 0:
            raise ValueError(f"the model's outputs have shape {tuple(outputs.shape)}; the first dimension must be the examples")
        if not outputs.is_floating_point():
            raise ValueError(f"the model's outputs are {outputs.dtype}; they must be real numbers")
        if not bool(outputs.isfinite().all()):
            raise ValueError(f"the model's outputs are not finite; {self._first_culprit(again)}")

    def _first_culprit(self, again: Callable[[], object]) -> str:
        """Run the batch once more, now with an eye on every layer's inputs."""
        found = []

        def look(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if any(isinstance(value, Tensor) and not bool(value.isfinite().all()) for value in (*args, *kwargs.values())):
                found.append(name)

        for name, observer in self.by_name.items():
            self.handles.append(observer.module.register_forward_pre_hook(partial(look, name), with_kwargs=True))
        again()
        return (
            f"the first layer with inputs that are not finite is {found[0]}"
            if found
            else "the inputs of every layer are finite"
        )

    def backward(self, losses: Mapping[str, Tensor], examples: int) -> None:
        """Propagate the losses of one batch, by what they are called in `LOSSES`."""
        self.batch = examples
        self.examples += examples
        for left, (self.of, loss) in zip(reversed(range(len(losses))), losses.items(), strict=True):
            if loss.requires_grad:
                self.replaying = True  # torch.utils.checkpoint calls layers a second time on the way back
                backward(loss, self.anchor, again=left > 0)
                self.replaying, self.anchor.grad = False, None
        for observer in self.by_name.values():
            if observer.fisher is not None and observer.pending:
                observer.pending = [call for call in observer.pending if call.gradient is not None]
                observer.see_call(examples)  # calls whose output the loss does not depend on count for nothing
            observer.pending = []
        self.latest.clear()

    def curvature(self, coupled: Coupling | None, collected: frozenset[str], macs: int, whole: dict[str, str]) -> Curvature:
        scales = {name: observer.scale.cpu() for name, observer in self.by_name.items() if observer.scale is not None}
        units = {(name, of): unit for name, observer in self.by_name.items() for of, unit in observer.units.items()}
        mixed = {name for name, observer in self.by_name.items() if observer.mixed}
        seen, *elsewhere = from_processes((self.order, self.reasons, scales, mixed, units, coupled, macs, whole))
        self.order, self.reasons, scales, mixed, units, coupled, macs, whole = seen
        for order, reasons, more, others_mixed, others_units, *_ in elsewhere:  # what one process saw, all of them know
            self.order, self.reasons, scales = self.order | order, reasons | self.reasons, more | scales
            mixed, units = mixed | others_mixed, others_units | units
        for name, scale in scales.items():
            self.by_name[name].scale = scale.to(self.anchor.device)
        names = [*self.order, *(name for name in self.by_name if name not in self.order)]
        examples = sum_over_processes(torch.tensor(float(self.examples), dtype=torch.float64), self.anchor.device)
        layers = {}
        for name in self.by_name:  # the same order in every process
            observer = self.by_name[name]
            _return_freed_memory()
            own = {of: units.get((name, of), 1.0) for of in LOSSES}
            sums = {key: sum_over_processes(value, self.anchor.device) for key, value in observer.state(own).items()}
            observer.inputs, observer.gradients, observer.fisher = None, {}, None  # wide layers hold hundreds of megabytes
            if name in mixed:
                sums.pop("fisher", None)
            layers[name] = self._finish(observer, sums, float(examples), own, whole)
        return Curvature(
            {n: layers[n] for n in names}, self.reasons, coupled, int(examples), macs, collected - {"coupling"}, whole
        )

    def _finish(
        self, observer: Observer, sums: dict[str, Tensor], examples: float, units: dict[str, float], whole: dict[str, str]
    ) -> LayerCurvature:
        positions = sums.pop("positions")
        for key, value in sums.items():
            if not all(bool(part.isfinite().all()) for part in value.split(256)):  # not all at once: that takes a copy
                raise ValueError(
                    f"{observer.name}: its {key} are not finite; look for NaN or overflow in the data or the model"
                )
        seen = float(positions[1])
        per_example = [round(float(p) / examples) for p in positions]
        shape = replace(
            observer.shape,
            input_positions=per_example[0],
            output_positions=per_example[1],
            axis_positions=tuple(per_example[2:]),
        )
        if observer.name not in self.reasons:
            if not seen:
                self.reasons[observer.name] = whole.get(observer.name, "the batches do not reach it")
            elif any(key in sums and not bool(sums[key].any()) for key in UNITS):
                self.reasons[observer.name] = "no gradient of the loss reaches it"
        if observer.name in self.reasons:
            return LayerCurvature(shape)
        scaled = {key: value.div_(seen if key in ("inputs", "patches") else examples) for key, value in sums.items()}
        for key in scaled.keys() & UNITS.keys():
            unit = units[UNITS[key]]
            scaled[key] = scaled[key] if unit == 1 else scaled[key].double() * unit**2
        return LayerCurvature(shape, scale=observer.scale, **scaled)


def _return_freed_memory() -> None:
    """What the pass has freed goes back to the system; glibc would keep it, in pieces into which no wide layer's sums fit."""
    with contextlib.suppress(OSError, TypeError, AttributeError):  # systems with another C library
        ctypes.CDLL(None).malloc_trim(0)


def _unit_for(gradient: Tensor) -> float | None:
    """A power of two near the largest entry, where squares of such entries could leave the range of single precision."""
    peak = float(gradient.abs().max()) if gradient.numel() else 0.0
    if not 0 < peak < math.inf:
        return None
    return 1.0 if 1e-8 < peak < 1e8 else 2.0 ** round(math.log2(peak))

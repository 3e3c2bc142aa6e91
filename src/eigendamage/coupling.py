"""Which channels of a network stand and fall together, for channel pruning.

One real forward pass is watched, operation by operation. Each layer numbers its output channels with fresh *units*, and the
operations between layers carry them along: an addition joins units, a concatenation lines them up, a flattening repeats them.
What is not understood fixes the units it meets, so a gap in this knowledge costs freedom and never correctness.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from eigendamage.layers import channel_dim, kind_of, reasons_to_stay
from eigendamage.operations import Label, carried, is_elementwise
from eigendamage.passes import restoring, tensors_in
from eigendamage.streams import ChannelSelection

FIXED = -1

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
INSTANCE_NORMS = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)

TIED = "its channels are tied to values that cannot be pruned"


@dataclass(frozen=True)
class Sides:
    """The unit of each input and output channel of one module; `FIXED` where the channel must stay."""

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True)
class Coupling:
    """Channels of equal unit stand and fall together. ``reasons`` says why output channels of a layer are fixed."""

    sides: dict[str, Sides]
    reasons: dict[str, str]

    @property
    def count(self) -> int:
        """How many units there are."""
        return 1 + max((unit for side in self.sides.values() for unit in (*side.inputs, *side.outputs)), default=FIXED)


def watched(model: nn.Module, run: Callable[[], object], fixed: Collection[str] = ()) -> Coupling:
    """What one ``run()``, which calls ``model``, shows. The output channels of the layers named in ``fixed`` stay.

    Raises:
        ValueError: if ``run`` returns no tensor.
    """
    modules = _known(model)
    watch = _Watch(modules, fixed)
    with hooked(modules, watch.enter, watch.leave), torch.no_grad(), restoring(model), watch:
        outputs = tensors_in(run())
    if not outputs:
        raise ValueError("run() must return the model's output, but there is no tensor in what it returned")
    watch.finish(outputs)
    return watch.coupling()


# --- modules ----------------------------------------------------------------------------------------------------------------


def _known(model: nn.Module) -> dict[str, nn.Module]:
    """Modules whose channels we can follow: they run the forward of their class, on tensors of their own, without hooks."""
    stay = {name for name, reason in reasons_to_stay(model).items() if not reason.startswith("it is grouped")}
    uses = Counter(id(tensor) for module in model.modules() for tensor in _tensors_of(module))
    return {
        name: module
        for name, module in model.named_modules()
        if (kind_of(module) and name not in stay) or _is_per_channel(module) or type(module) is ChannelSelection
        if "forward" not in vars(module) and not module._modules
        if not (module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)
        if all(uses[id(tensor)] == 1 for tensor in _tensors_of(module))
    }


def _is_per_channel(module: nn.Module) -> bool:
    return type(module) in (*BATCH_NORMS, *INSTANCE_NORMS) or (type(module) is nn.PReLU and module.num_parameters > 1)


def _tensors_of(module: nn.Module) -> Iterator[Tensor]:
    return chain(module.parameters(recurse=False), module.buffers(recurse=False))


def channel_dim_of(module: nn.Module, rank: int) -> int:
    if type(module) in INSTANCE_NORMS:
        return rank - INSTANCE_NORMS.index(type(module)) - 2
    return channel_dim(module, rank) if kind_of(module) else 1


def _multiplier(module: nn.Module, inputs: int) -> int | None:
    """Outputs per input of a module that keeps its channels apart; None if it mixes them or has channels of its own."""
    if type(module) is ChannelSelection:
        return None
    if not kind_of(module):
        return 1
    return module.out_channels // inputs if getattr(module, "groups", 1) == inputs > 1 else None


def input_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    return next(value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))


@contextmanager
def hooked(modules: Mapping[str, nn.Module], before: Callable[..., Any], after: Callable[..., Any]) -> Iterator[None]:
    """``before(name, module, args, kwargs)`` and ``after(name, module, args, kwargs, output)`` around each forward."""
    with ExitStack() as stack:
        for name, module in modules.items():
            pre = module.register_forward_pre_hook(lambda *call, name=name: before(name, *call), with_kwargs=True)
            stack.callback(pre.remove)
            post = module.register_forward_hook(lambda *call, name=name: after(name, *call), with_kwargs=True)
            stack.callback(post.remove)
        yield


# --- one watched pass -------------------------------------------------------------------------------------------------------


class _Watch(TorchDispatchMode):
    """Labels the tensors of a pass, and collects which units are linked and which are fixed for what reason."""

    supports_higher_order_operators = True

    def __init__(self, modules: Mapping[str, nn.Module], fixed: Collection[str]) -> None:
        super().__init__()
        self.modules, self.fixed = modules, fixed
        self.owners = {id(tensor): name for name, module in modules.items() for tensor in _tensors_of(module)}
        self.exposed: set[str] = set()
        # The tensor beside its label stays alive, and with it its id its own.
        self.labels: dict[int, tuple[Tensor, Label]] = {}
        self.sides: dict[str, tuple[Tensor, Tensor]] = {}
        self.links: list[tuple[Tensor, Tensor]] = []
        self.causes: list[tuple[Tensor, str]] = []
        self.units = 0
        self.inside = False

    def label(self, tensor: Tensor) -> Label | None:
        return self.labels[id(tensor)][1] if id(tensor) in self.labels else None

    def fix(self, units: Tensor, reason: str) -> None:
        self.causes.append((units[units != FIXED], reason))

    def fix_all(self, tensors: list[Tensor], reason: str) -> None:
        for tensor in tensors:
            label = self.label(tensor)
            if label:
                self.fix(label.units, reason)

    def link(self, a: Tensor, b: Tensor) -> None:
        free = (a != FIXED) & (b != FIXED)
        self.links.append((a[free], b[free]))
        self.fix(torch.cat([a[~free], b[~free]]), TIED)

    # A known module speaks for itself; the operations in it go unwatched.

    def enter(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.inside = True

    def leave(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Tensor) -> None:
        self.inside = False
        tensor = input_of(args, kwargs)
        dim = channel_dim_of(module, tensor.dim())
        label = self.label(tensor)
        if label and label.dim == dim:
            inputs = label.units
        else:
            self.fix_all([tensor], f"{type(module).__name__} reads them along another dimension")
            inputs = torch.full((tensor.shape[dim],), FIXED)
        if name in self.sides:
            self.link(self.sides[name][0], inputs)
        else:
            self.sides[name] = inputs, self.produce(name, module, inputs, output.shape[dim])
        self.labels[id(output)] = output, Label(dim, self.sides[name][1])

    def produce(self, name: str, module: nn.Module, inputs: Tensor, size: int) -> Tensor:
        """The units of a module's outputs when it is first called."""
        multiplier = _multiplier(module, len(inputs))
        if multiplier:
            outputs = inputs.repeat_interleave(multiplier)
        else:
            outputs = torch.arange(self.units, self.units + size)
            self.units += size
            if getattr(module, "groups", 1) > 1:
                self.fix(inputs, f"its channels are the input of {name}, which is grouped")
                self.fix(outputs, f"it is grouped (groups={module.groups})")
            elif type(module) is ChannelSelection:
                self.fix(inputs, f"its channels are a stream that stays whole; {name} selects from it")
        if name in self.fixed:
            self.fix(outputs, "skipped on request")
        return outputs

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.inside:
            self.follow(func, args, kwargs or {}, result)
        return result

    def follow(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.exposed.update(self.owners[id(tensor)] for tensor in tensors if id(tensor) in self.owners)
        if not any(id(tensor) in self.labels for tensor in tensors):
            return
        labels = self.carry(func, _arguments(func, args, kwargs), tensors, outputs)
        if not outputs or None in labels:
            self.fix_all(tensors, f"its channels pass through {_name(func)}")
        for output, label in zip(outputs, labels, strict=True):
            self.labels.pop(id(output), None)
            if label:
                self.labels[id(output)] = output, label

    def carry(self, func: Any, arguments: dict[str, Any], tensors: list[Tensor], outputs: list[Tensor]) -> list[Label | None]:
        name, first = _name(func), self.label(tensors[0])
        if name == "cat":
            return [self.concatenate(arguments["tensors"], arguments["dim"], outputs[0])]
        if is_elementwise(name, func):
            return [self.meet(tensors, output, name) for output in outputs]
        if first and not any(self.label(tensor) for tensor in tensors[1:]):
            return [carried(name, first, tensors[0], arguments, output) for output in outputs]
        return [None] * len(outputs)

    def meet(self, tensors: list[Tensor], output: Tensor, name: str) -> Label | None:
        """Tensors broadcast against each other: channels that meet at one position of the output are one."""
        labels = [(tensor, self.label(tensor), output.dim() - tensor.dim()) for tensor in tensors]
        whole = [(label.dim + shift, label.units) for _, label, shift in labels if label and _spans(label, output, shift)]
        if len({place for place, _ in whole}) != 1:
            return None
        place, units = whole[0]
        for tensor, label, shift in labels:
            if label and _spans(label, output, shift):
                self.link(units, label.units)
                continue
            self.fix_all([tensor], f"{name} spreads its channels over others")
            if shift <= place and tensor.shape[place - shift] == output.shape[place]:
                self.fix(units, f"{name} joins its channels with values that cannot be pruned")
        return Label(place, units)

    def concatenate(self, tensors: list[Tensor], dim: int, output: Tensor) -> Label | None:
        dim, parts = dim % output.dim(), [tensor for tensor in tensors if tensor.dim() == output.dim()]
        labels = [self.label(tensor) for tensor in parts]
        if not any(label and label.dim == dim for label in labels):
            return self.meet(parts, output, "cat")
        units = []
        for tensor, label in zip(parts, labels, strict=True):
            if label and label.dim == dim:
                units.append(label.units)
            else:
                self.fix_all([tensor], "its channels are concatenated along another dimension")
                units.append(torch.full((tensor.shape[dim],), FIXED))
        return Label(dim, torch.cat(units))

    def finish(self, outputs: list[Tensor]) -> None:
        self.fix_all(outputs, "its channels are the model's output")
        for name in sorted(self.exposed & self.sides.keys()):
            self.fix(torch.cat(self.sides[name]), f"the model uses tensors of {name} outside of it")

    def coupling(self) -> Coupling:
        roots = components(self.units, self.links)
        cause = torch.full((self.units,), -1)
        for position, (units, _) in reversed(list(enumerate(self.causes))):  # so that the first cause stands
            cause[roots[units]] = position
        # One entry more than there are units, so that FIXED, as a position, finds itself.
        settled = torch.cat([roots.masked_fill(cause[roots] >= 0, FIXED), torch.tensor([FIXED])])
        sides = {name: Sides(*(tuple(settled[units].tolist()) for units in pair)) for name, pair in self.sides.items()}
        reasons = {}
        for name, (_, outputs) in self.sides.items():
            if kind_of(self.modules[name]) and FIXED in sides[name].outputs:
                first = outputs[settled[outputs] == FIXED][0]
                reasons[name] = TIED if first == FIXED else self.causes[int(cause[roots[first]])][1]
        return Coupling(numbered(sides), reasons)


def _spans(label: Label, output: Tensor, shift: int) -> bool:
    """Whether the channels fill their dimension of the output, rather than being broadcast over it."""
    return len(label.units) == output.shape[label.dim + shift]


def _name(func: Any) -> str:
    return func._schema.name.removeprefix("aten::") if hasattr(func, "_schema") else str(func)


def _arguments(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an operation by name, defaults included."""
    if not hasattr(func, "_schema"):
        return {}
    schema = func._schema.arguments
    defaults = {argument.name: argument.default_value for argument in schema if argument.has_default_value()}
    return {**defaults, **{argument.name: value for argument, value in zip(schema, args, strict=False)}, **kwargs}


def components(units: int, links: list[tuple[Tensor, Tensor]]) -> Tensor:
    """The smallest unit that each unit is linked to, directly or through others."""
    roots = torch.arange(units)
    if not links:
        return roots
    a, b = (torch.cat(ends) for ends in zip(*links, strict=True))
    while not torch.equal(roots[a], roots[b]):
        high, low = torch.maximum(roots[a], roots[b]), torch.minimum(roots[a], roots[b])
        roots = roots.scatter_reduce(0, high, low, "amin")
        while not torch.equal(roots, roots[roots]):
            roots = roots[roots]
    return roots


def numbered(sides: dict[str, Sides], fixed: Collection[int] = ()) -> dict[str, Sides]:
    """Units numbered in the order in which they first appear, without those that are fixed."""
    numbers = {FIXED: FIXED, **dict.fromkeys(fixed, FIXED)}
    offset = len(numbers)

    def renumber(units: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(numbers.setdefault(unit, len(numbers) - offset) for unit in units)

    return {name: Sides(renumber(side.inputs), renumber(side.outputs)) for name, side in sides.items()}

"""One matrix view of the layers that can be compressed.

Convolutions of one to three dimensions, transposed convolutions, ``nn.Linear`` and the ``Conv1D`` of Hugging Face's GPT-2
all become a weight ``[out, in, *kernel]`` that multiplies rows. A transposed convolution is an ordinary convolution with
stride 1 of its zero-stuffed input, with the kernel flipped; it is presented that way, so nothing else has to know of it.
"""

from __future__ import annotations

import copy
import inspect
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, get_type_hints

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

CONVOLUTIONS: dict[int, type[nn.Module]] = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}
TRANSPOSED: dict[int, type[nn.Module]] = {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d}

Skip = Collection[str] | str | Callable[[str, nn.Module], bool]


@dataclass(frozen=True)
class LayerShape:
    """What the cost of a layer depends on, as plain data. Positions are per example, summed over the calls in one pass."""

    kind: str
    inputs: int
    outputs: int
    kernel: tuple[int, ...]
    bias: bool
    input_positions: int = 1
    output_positions: int = 1
    axis_positions: tuple[int, ...] = ()  # where a kernel along one axis after the other runs

    OF_THE_LAYER: ClassVar = ("kind", "inputs", "outputs", "kernel", "bias")  # whatever the data is

    @classmethod
    def from_dict(cls, content: dict[str, Any]) -> LayerShape:
        """The inverse of ``dataclasses.asdict``, also after a trip through JSON. Raises ValueError for anything else."""
        values: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in content.items()}
        kinds = get_type_hints(cls)
        for key, value in values.items():
            parts = value if isinstance(value, tuple) else (value,)
            wanted = str if key == "kind" else bool if key == "bias" else int
            if any(type(part) is not wanted for part in parts) or isinstance(value, tuple) != ("tuple" in str(kinds.get(key))):
                raise ValueError(f"the shape of a layer cannot have {key} {value!r}")
        return cls(**values)

    @property
    def taps(self) -> int:
        """Number of kernel positions."""
        return math.prod(self.kernel)

    @property
    def pointwise(self) -> bool:
        return self.taps == 1 and self.kind != "transposed"

    @property
    def front_positions(self) -> int:
        """Positions at which a 1×1 stage in front of the layer runs; a pointwise layer hands its stride to that stage."""
        return self.output_positions if self.pointwise else self.input_positions

    @property
    def core_positions(self) -> int:
        """Positions at which the kernel is multiplied with a vector of channels."""
        return self.input_positions if self.kind == "transposed" else self.output_positions

    @property
    def params(self) -> int:
        return self.inputs * self.outputs * self.taps + self.outputs * self.bias

    @property
    def macs(self) -> int:
        return self.inputs * self.outputs * self.taps * self.core_positions


@dataclass(frozen=True)
class Axis:
    """How a layer walks along one spatial axis: its convolution of the padded, zero-stuffed input."""

    kernel: int
    stride: int
    dilation: int
    before: int
    after: int
    stuffing: int = 1

    @property
    def reach(self) -> int:
        return self.dilation * (self.kernel - 1)

    def outputs(self, size: int) -> int:
        """Number of output positions for an input of ``size``."""
        padded = (size - 1) * self.stuffing + 1 + self.before + self.after
        return (padded - self.reach - 1) // self.stride + 1


def kind_of(module: nn.Module) -> str | None:
    """``"conv"``, ``"transposed"``, ``"linear"``, or None for a module that is none of these."""
    if isinstance(module, tuple(CONVOLUTIONS.values())):
        return "conv"
    if isinstance(module, tuple(TRANSPOSED.values())):
        return "transposed"
    if isinstance(module, nn.Linear) or _is_hugging_face_conv1d(module):
        return "linear"
    return None


def _is_hugging_face_conv1d(module: nn.Module) -> bool:
    cls = type(module)
    return cls.__name__ == "Conv1D" and cls.__module__ == "transformers.pytorch_utils"


def weight_of(module: nn.Module) -> Tensor:
    """The weight as ``[out, in, *kernel]`` in the orientation of an ordinary convolution (a view where possible)."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    if _is_hugging_face_conv1d(module):
        return weight.T
    return transpose_grouped(weight, module.groups) if kind_of(module) == "transposed" else weight


def bias_of(module: nn.Module) -> Tensor | None:
    bias = module.bias
    assert bias is None or isinstance(bias, Tensor)
    return bias


def shape_of(module: nn.Module) -> LayerShape:
    """The shape of the layer by itself, at a single position."""
    weight = weight_of(module)
    kind = kind_of(module)
    assert kind is not None
    return LayerShape(
        kind=kind,
        inputs=weight.shape[1],
        outputs=weight.shape[0],
        kernel=tuple(weight.shape[2:]),
        bias=bias_of(module) is not None,
        axis_positions=(1,) * (weight.dim() - 2),
    )


def axes_of(module: nn.Module) -> list[Axis]:
    """One `Axis` per spatial dimension; none for a linear layer. Padding that is not zeros is left to `prepare`."""
    kind = kind_of(module)
    if kind == "linear":
        return []
    rows = zip(module.kernel_size, module.stride, module.dilation, range(len(module.kernel_size)), strict=True)
    axes = []
    for kernel, stride, dilation, axis in rows:
        if kind == "transposed":
            around = dilation * (kernel - 1) - module.padding[axis]
            axes.append(Axis(kernel, 1, dilation, around, around + module.output_padding[axis], stuffing=stride))
        else:
            before, after = (0, 0) if module.padding_mode != "zeros" else _padding(module, axis)
            axes.append(Axis(kernel, stride, dilation, before, after))
    return axes


def _padding(module: nn.Module, axis: int) -> tuple[int, int]:
    if module.padding == "valid":
        return 0, 0
    if module.padding == "same":
        total = module.dilation[axis] * (module.kernel_size[axis] - 1)
        return total // 2, total - total // 2
    return module.padding[axis], module.padding[axis]


def prepare(module: nn.Module, inputs: Tensor) -> Tensor:
    """Inputs as ``[batch, in, *space]`` (``[batch, in]`` for linear layers), with reflect or circular padding carried out."""
    if kind_of(module) == "linear":
        return inputs.reshape(-1, inputs.shape[-1])
    spatial = len(module.kernel_size)
    if inputs.dim() == spatial + 1:
        inputs = inputs.unsqueeze(0)
    if kind_of(module) == "conv" and module.padding_mode != "zeros":
        pads = [size for axis in reversed(range(spatial)) for size in _padding(module, axis)]
        inputs = F.pad(inputs, pads, mode=module.padding_mode)
    return inputs


def channel_dim(module: nn.Module, rank: int) -> int:
    """Which dimension of a layer's inputs and outputs, of this rank, holds the channels."""
    return rank - 1 if kind_of(module) == "linear" else rank - len(module.kernel_size) - 1


def rows(tensor: Tensor, module: nn.Module) -> Tensor:
    """A layer's output or its gradient as a matrix ``[positions, out]``."""
    dim = channel_dim(module, tensor.dim())
    return tensor.movedim(dim, -1).reshape(-1, tensor.shape[dim])


def patches(module: nn.Module, prepared: Tensor) -> Tensor:
    """What each output position sees: ``[batch, positions, in · taps]``, to be multiplied with ``weight_of().flatten(1)``."""
    axes = axes_of(module)
    if not axes:
        return prepared.unsqueeze(1)
    stuffed = _stuff(prepared, axes)
    pads = [size for axis in reversed(axes) for size in (axis.before, axis.after)]
    windows = F.pad(stuffed, pads) if any(pads) else stuffed
    for i, axis in enumerate(axes):
        windows = windows.unfold(2 + i, axis.reach + 1, axis.stride)[..., :: axis.dilation]
    n = len(axes)
    order = [0, *range(2, 2 + n), 1, *range(2 + n, 2 + 2 * n)]
    return windows.permute(order).reshape(len(prepared), -1, prepared.shape[1] * math.prod(a.kernel for a in axes))


def outer_products(module: nn.Module, inputs: Tensor, outputs: Tensor) -> Tensor:
    """The sum over positions of y pᵀ, ``[channels, in, *kernel]``, for patches p of the inputs and values y at the outputs.

    It is the gradient of a weight, and torch finds that without extracting patches.
    """
    channels = outputs.shape[channel_dim(module, outputs.dim())]
    probe = build_like(module, weight_of(module).new_zeros(channels, *weight_of(module).shape[1:]), None).to(inputs.dtype)
    assert isinstance(probe.weight, Tensor)
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad(probe(inputs.detach()), probe.weight, outputs)
    probe.weight = nn.Parameter(gradient, requires_grad=False)
    return weight_of(probe)


def _stuff(inputs: Tensor, axes: list[Axis]) -> Tensor:
    if all(axis.stuffing == 1 for axis in axes):
        return inputs
    sizes = [(size - 1) * axis.stuffing + 1 for size, axis in zip(inputs.shape[2:], axes, strict=True)]
    stuffed = inputs.new_zeros(*inputs.shape[:2], *sizes)
    every: list[Any] = [slice(None, None, axis.stuffing) for axis in axes]
    stuffed[(..., *every)] = inputs
    return stuffed


# --- building ---------------------------------------------------------------------------------------------------------------


def build_like(module: nn.Module, weight: Tensor, bias: Tensor | None, groups: int = 1) -> nn.Module:
    """A stock module that does what ``module`` does, with this weight ``[out, in, *kernel]`` and bias."""
    if kind_of(module) == "linear":
        return _fill(_new(nn.Linear, module, weight.shape[1], weight.shape[0], bias=bias is not None), weight, bias)
    inputs, outputs = weight.shape[1] * groups, weight.shape[0]
    n, size = weight.dim() - 2, tuple(weight.shape[2:])
    geometry: dict[str, Any] = {
        "stride": module.stride,
        "padding": module.padding,
        "dilation": module.dilation,
        "padding_mode": module.padding_mode,
        "groups": groups,
        "bias": bias is not None,
    }
    if kind_of(module) == "conv":
        return _fill(_new(CONVOLUTIONS[n], module, inputs, outputs, size, **geometry), weight, bias)
    geometry["output_padding"] = module.output_padding
    return _fill(_new(TRANSPOSED[n], module, inputs, outputs, size, **geometry), transpose_grouped(weight, groups), bias)


def transpose_grouped(weight: Tensor, groups: int) -> Tensor:
    """``[out, in/groups, *kernel]`` of a convolution to ``[in, out/groups, *kernel]`` of its transposed sibling, or back."""
    out, per_group, *kernel = weight.shape
    split = weight.reshape(groups, out // groups, per_group, *kernel).transpose(1, 2)
    return split.reshape(groups * per_group, out // groups, *kernel).flip(tuple(range(2, weight.dim())))


def set_weight(module: nn.Module, weight: Tensor, bias: Tensor | None) -> None:
    """Give a layer (of one group) another weight ``[out, in, *kernel]`` and bias, of any number of inputs and outputs."""
    assert isinstance(module.weight, Tensor)
    trained = module.weight.requires_grad
    if _is_hugging_face_conv1d(module):
        module.nf, module.nx = weight.shape[0], weight.shape[1]  # type: ignore[assignment]
        weight = weight.T
    elif kind_of(module) == "linear":
        module.out_features, module.in_features = weight.shape[0], weight.shape[1]  # type: ignore[assignment]
    else:
        module.out_channels, module.in_channels = weight.shape[0], weight.shape[1]  # type: ignore[assignment]
        weight = transpose_grouped(weight, 1) if kind_of(module) == "transposed" else weight
    module.weight = nn.Parameter(weight.detach().clone(memory_format=torch.contiguous_format), trained)
    if bias is not None:
        before = bias_of(module)
        module.bias = nn.Parameter(bias.detach().clone(), before is not None and before.requires_grad)


def slice_per_channel(module: nn.Module, kept: Tensor) -> None:
    """Batch norm, instance norm and PReLU: everything they hold is per channel, but for counters."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            module._parameters[name] = nn.Parameter(parameter[kept].clone(), parameter.requires_grad)
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.dim():
            module._buffers[name] = buffer[kept].clone()
    for attribute in ("num_features", "num_parameters"):
        if hasattr(module, attribute):
            setattr(module, attribute, len(kept))


def build_pointwise(module: nn.Module, weight: Tensor, bias: Tensor | None, *, strided: bool = False) -> nn.Module:
    """A 1×1 convolution or linear layer ``[out, in]`` for the inputs or outputs of ``module``.

    ``strided`` gives it the module's own stride and padding: right when the module itself is pointwise.
    """
    if kind_of(module) == "linear":
        return _fill(_new(nn.Linear, module, weight.shape[1], weight.shape[0], bias=bias is not None), weight, bias)
    n = len(module.kernel_size)
    kept = ("stride", "padding", "padding_mode") if strided else ()
    walk: dict[str, Any] = {name: getattr(module, name) for name in kept}
    built = _new(CONVOLUTIONS[n], module, weight.shape[1], weight.shape[0], (1,) * n, bias=bias is not None, **walk)
    return _fill(built, weight.reshape(*weight.shape, *(1,) * n), bias)


def build_along(module: nn.Module, weight: Tensor, bias: Tensor | None, axis: int, groups: int = 1) -> nn.Module:
    """A module that does what ``module`` does along one spatial axis, with weight ``[out, in/groups, taps]``."""
    n = len(module.kernel_size)

    def only(values: Sequence[int], neutral: int) -> tuple[int, ...]:
        return tuple(value if i == axis else neutral for i, value in enumerate(values))

    size = only(module.kernel_size, 1)
    inputs, outputs = weight.shape[1] * groups, weight.shape[0]
    geometry: dict[str, Any] = {
        "stride": only(module.stride, 1),
        "padding": module.padding if isinstance(module.padding, str) else only(module.padding, 0),
        "dilation": only(module.dilation, 1),
        "padding_mode": module.padding_mode,
        "groups": groups,
        "bias": bias is not None,
    }
    weight = weight.reshape(*weight.shape[:2], *size)
    if kind_of(module) == "conv":
        return _fill(_new(CONVOLUTIONS[n], module, inputs, outputs, size, **geometry), weight, bias)
    geometry["output_padding"] = only(module.output_padding, 0)
    return _fill(_new(TRANSPOSED[n], module, inputs, outputs, size, **geometry), transpose_grouped(weight, groups), bias)


def _new(cls: type[nn.Module], like: nn.Module, *args: object, **kwargs: object) -> nn.Module:
    weight = like.weight
    assert isinstance(weight, Tensor)
    # skip_init leaves the random state alone: nothing is drawn for values that are overwritten at once.
    return torch.nn.utils.skip_init(cls, *args, **kwargs, device=weight.device, dtype=weight.dtype).train(like.training)


def _fill(module: nn.Module, weight: Tensor, bias: Tensor | None) -> nn.Module:
    target = module.weight
    assert isinstance(target, Tensor)
    with torch.no_grad():
        target.copy_(weight.reshape(target.shape))
        if bias is not None:
            held = bias_of(module)
            assert held is not None
            held.copy_(bias)
    return module


def describe_like(stages: nn.Sequential, layer: nn.Module) -> nn.Sequential:
    """Let ``stages`` answer for ``layer`` when the model's code asks for its widths, its stride and the like."""
    facts = {key: value for key, value in vars(layer).items() if not key.startswith("_") and key != "training"}
    vars(stages).update({key: value for key, value in facts.items() if isinstance(value, int | str | tuple)})
    return stages


def call_by_stages(model: nn.Module) -> list[tuple[nn.Module, str, Any]]:
    """Have torch's transformer layers call those of their layers that are stages now, in eval mode too.

    There they would hand the weights of all their layers to one fused kernel. Gives back what it changed: module, name, value.
    """
    staged = {
        module
        for module in model.modules()
        if isinstance(module, nn.TransformerEncoderLayer)
        if any(isinstance(layer, nn.Sequential) for layer in (module.linear1, module.linear2))
    }
    flags: list[tuple[nn.Module, str, Any]] = [(module, "activation_relu_or_gelu", 0) for module in staged]
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and not staged.isdisjoint(module.layers):
            flags.append((module, "use_nested_tensor", False))
    before = [(module, name, getattr(module, name)) for module, name, _ in flags if hasattr(module, name)]
    for module, name, value in flags:
        setattr(module, name, value)
    return before


def require_values(model: nn.Module) -> None:
    """Raise TypeError unless this is a module, ValueError unless all its tensors have values."""
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, not {type(model).__name__}")
    for name, tensor in chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise ValueError(f"{name} has no shape yet: run one batch through the model first")
        if tensor.is_meta:
            raise ValueError(f"{name} is on the meta device and has no values: build the model on a real device")


def deep_copy(model: nn.Module) -> nn.Module:
    """A deep copy, also of modules that keep what they computed from their parameters, as ``weight_norm`` does."""
    held = chain.from_iterable((*vars(module).values(), *module._buffers.values()) for module in model.modules())
    computed = [value for value in held if isinstance(value, Tensor) and not value.is_leaf]
    return copy.deepcopy(model, {id(tensor): tensor.detach().clone() for tensor in computed})


# --- which layers can change ------------------------------------------------------------------------------------------------


def candidates(model: nn.Module) -> dict[str, nn.Module]:
    """Every layer of a kind we know, by its first name in the model."""
    return {name: module for name, module in model.named_modules() if kind_of(module) is not None}


def reasons_to_stay(model: nn.Module, skip: Skip = ()) -> dict[str, str]:
    """Name of each candidate that must stay as it is, and why. Whether a layer is reached is known only after a pass."""
    skipped = skipped_layers(model, skip)
    uses = Counter(id(p) for m in model.modules() for p in m.parameters(recurse=False))
    reasons = {}
    for name, module in candidates(model).items():
        reason = "skipped on request" if name in skipped else _reason(module, uses)
        if reason:
            reasons[name] = reason
    return reasons


def _reason(module: nn.Module, uses: Counter[int]) -> str | None:
    if not isinstance(module._parameters.get("weight"), nn.Parameter) or "parametrizations" in module._modules:
        return "its weight is computed from other parameters"
    if isinstance(module.weight, nn.parameter.UninitializedParameter):
        raise ValueError(f"{type(module).__name__} has no weight yet: run one batch through the model first")
    if not module.weight.is_floating_point():
        return f"its weight is {str(module.weight.dtype).removeprefix('torch.')}, not floating point"
    for name, parameter in module.named_parameters(recurse=False):
        if uses[id(parameter)] > 1:
            return f"its {name} is shared with another module"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return "it carries hooks, which would be lost"
    if _changes_forward(module):
        return f"{type(module).__name__} has a forward of its own"
    if getattr(module, "groups", 1) > 1:
        return f"it is grouped (groups={module.groups})"
    if min(weight_of(module).shape) == 0:
        return "it is empty"
    return None


def _changes_forward(module: nn.Module) -> bool:
    if "forward" in vars(module):
        return True
    if _is_hugging_face_conv1d(module):
        return False
    stock = (*CONVOLUTIONS.values(), *TRANSPOSED.values(), nn.Linear)
    base = next(cls for cls in stock if isinstance(module, cls))
    methods = ("forward", "_conv_forward", "__call__")
    return any(inspect.getattr_static(type(module), m, None) is not inspect.getattr_static(base, m, None) for m in methods)


def skipped_layers(model: nn.Module, skip: Skip) -> set[str]:
    """Names of the candidates that ``skip`` names, by itself or through a module around them, or accepts as a predicate."""
    layers = candidates(model)
    if not callable(skip) and not isinstance(skip, Collection):
        raise TypeError(f"skip: must be names of layers, or a function of name and module; got {type(skip).__name__}")
    if callable(skip):
        return {name for name, module in layers.items() if skip(name, module)}
    wanted = [skip] if isinstance(skip, str) else list(skip)
    known = {name for name, _ in model.named_modules()}
    for name in wanted:
        if name not in known:
            raise ValueError(f"skip: the model has no module {name!r}; its layers are {some(layers)}")
    return {name for name in layers if any(name == w or name.startswith(f"{w}.") for w in wanted)}


def some(names: Iterable[str], limit: int = 8) -> str:
    """A few names for an error message."""
    listed = list(names)
    return ", ".join(listed[:limit]) + (f", … ({len(listed)} in all)" if len(listed) > limit else "") or "none"

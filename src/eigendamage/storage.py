"""A compressed model in one file, and back onto a freshly built dense model, without pickle.

The file holds the weights and the constructor arguments of every stock layer. `load` walks down those by name, replaces the
layers of the dense model that differ, and fills in the weights.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections import OrderedDict
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage import files
from eigendamage.layers import CONVOLUTIONS, TRANSPOSED, call_by_stages, deep_copy, describe_like, kind_of, require_values, some
from eigendamage.streams import ChannelSelection
from eigendamage.structures import STAGES

KIND = "model"
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
NORMS = (*BATCH_NORMS, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
LAYERS = {
    cls.__name__: cls for cls in (*CONVOLUTIONS.values(), *TRANSPOSED.values(), nn.Linear, *NORMS, nn.PReLU, ChannelSelection)
}

# The names that layers give to the width of their input and of their output; "nx" and "nf" are Hugging Face's Conv1D.
WIDTHS: list[tuple[str, ...]] = [("in_channels", "out_channels"), ("in_features", "out_features"), ("nx", "nf")]
WIDTHS += [(name, name) for name in ("num_features", "num_parameters", "channels")]
GEOMETRY = ("transposed", "kernel_size", "stride", "padding", "output_padding", "dilation", "padding_mode")

Spec = dict[str, Any]


def save(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write ``model`` to the safetensors file ``path``: its weights, and what `load` needs to rebuild its structure.

    Raises:
        FileNotFoundError: The folder of ``path`` does not exist.
        TypeError: ``model`` is not a module, or its state holds something other than dense tensors.
        ValueError: ``model`` has tensors without values.
    """
    require_values(model)
    state = _state(model)
    aliases = _aliases(state)
    content = {
        "modules": _specs(model),
        "aliases": aliases,
        "frozen": [name for name, p in model.named_parameters(remove_duplicate=False) if not p.requires_grad],
        "unsaved": {name: str(b.dtype) for name, b in model.named_buffers(remove_duplicate=False) if name not in state},
    }
    files.write(path, {name: tensor for name, tensor in state.items() if name not in aliases}, content, KIND)


def load(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """The model that `save` wrote to ``path``, rebuilt from the dense ``model`` it came from, which stays untouched.

    Values, dtypes and ``requires_grad`` are those of the file; device and training mode are those of ``model``.

    Raises:
        FileNotFoundError: There is no such file.
        TypeError: ``model`` is not a module, or its state holds something other than tensors.
        ValueError: The file is damaged, is not a saved model, or belongs to another model.
    """
    require_values(model)
    tensors, content = files.read(path, KIND)
    state = tensors | {name: tensors[first] for name, first in content["aliases"].items()}
    try:
        rebuilt = _rebuild(deep_copy(model), content["modules"])
        _require_same_state(rebuilt, state)
    except ValueError as error:
        raise ValueError(f"{path} belongs to another model: {error}") from None
    _fill(rebuilt, state, content["unsaved"], set(content["frozen"]))
    return rebuilt


# --- structure --------------------------------------------------------------------------------------------------------------


def _specs(model: nn.Module) -> dict[str, Spec]:
    """By name, parents first, what each stock layer and ``nn.Sequential`` is; a shared one under each of its names."""
    found = {name: _spec(module) for name, module in model.named_modules(remove_duplicate=False)}
    return {name: spec for name, spec in found.items() if spec}


def _spec(module: nn.Module) -> Spec | None:
    """Type and constructor arguments as JSON data, or None for a module that is never built from a file."""
    cls = type(module)
    if cls is nn.Sequential:
        return {"type": "Sequential", "children": list(module._modules)}
    if _classes(module).get(cls.__name__) is not cls:
        return None
    spec = {"type": cls.__name__}
    for name, parameter in inspect.signature(cls).parameters.items():
        if name not in ("device", "dtype", "init", "process_group") and _argument(module, name) != parameter.default:
            spec[name] = _argument(module, name)
    # Tuples become lists and numbers of NumPy become Python's, as they come back from a file.
    return json.loads(json.dumps(spec, default=lambda number: number.item()))


def _classes(module: nn.Module) -> dict[str, type[nn.Module]]:
    """The layers that can be built to stand where ``module`` does. Hugging Face's Conv1D is known only by its instances."""
    hugging_face = kind_of(module) == "linear" and not isinstance(module, nn.Linear)
    return LAYERS | {type(module).__name__: type(module)} if hugging_face else LAYERS


def _argument(module: nn.Module, name: str) -> Any:
    if name == "bias":
        # A norm without a scale has no bias in any case; not every torch knows the argument there.
        return module.bias is not None or module.weight is None
    return getattr(module, name)


def _rebuild(model: nn.Module, recorded: dict[str, Spec]) -> nn.Module:
    """``model``, in place, with every layer that differs from the record replaced."""
    # One replacement for a module under all its names. The key keeps the module alive, so that no other takes its identity.
    replacements: dict[tuple[nn.Module, str], nn.Module] = {}
    for name, spec in recorded.items():
        try:
            old = model.get_submodule(name)
        except AttributeError:
            raise ValueError(f"the model has no module {name}") from None
        if _spec(old) == spec:
            continue
        tree = _tree(name, recorded)
        key = old, json.dumps(tree)
        if key not in replacements:
            tensors = chain(old.parameters(), old.buffers(), model.parameters(), model.buffers())
            device = next((tensor.device for tensor in tensors), torch.device("cpu"))
            replacements[key] = _replacement(name, old, tree, device)
        model = _place(model, name, replacements[key])
    call_by_stages(model)
    present = _specs(model)
    for name in sorted(present.keys() | recorded.keys()):
        if present.get(name) != recorded.get(name):
            raise ValueError(f"{name or 'the model'} is {present.get(name)}, in the file {recorded.get(name)}")
    return model


def _tree(name: str, recorded: dict[str, Spec]) -> Spec:
    """The record of a module with those of its stages, which earlier rounds may have replaced by stages themselves."""
    spec = recorded.get(name, {"type": "unknown"})
    children = spec.get("children", ())
    return spec | {"stages": {child: _tree(f"{name}.{child}".lstrip("."), recorded) for child in children}}


def _replacement(name: str, old: nn.Module, tree: Spec, device: torch.device) -> nn.Module:
    try:
        new = _build(tree, _classes(old), device).train(old.training)
    except KeyError:  # a Sequential of the user's own holds modules that are not in the record
        new = None
    if new is None or not _fits(new, old):
        was = f"{type(old).__name__}({'' if isinstance(old, nn.Sequential) else old.extra_repr()})"
        raise ValueError(f"{name or 'the model'} is {was}, which does not become what the file has there, {tree}")
    if isinstance(new, nn.Sequential):
        describe_like(new, old)
        vars(new).update(zip(_width_names(new), _widths(new), strict=False))  # earlier rounds may have removed channels
    elif type(new) is type(old):
        # The same layer, only smaller: whatever else in the model refers to it goes on doing so.
        vars(old).update(
            {key: value for key, value in vars(new).items() if key in ("_parameters", "_buffers") or key[0] != "_"}
        )
        return old
    return new


def _build(tree: Spec, classes: dict[str, type[nn.Module]], device: torch.device) -> nn.Module:
    if tree["type"] == "Sequential":
        return nn.Sequential(OrderedDict((child, _build(stage, classes, device)) for child, stage in tree["stages"].items()))
    arguments = {name: value for name, value in tree.items() if name not in ("type", "stages")}
    with torch.device("meta"):  # nothing is drawn for values that are overwritten at once
        layer = classes[tree["type"]](**arguments)
    return layer.to_empty(device=device)


def _place(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    if not name:
        return module
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent).register_module(child, module)
    return model


def _fits(new: nn.Module, old: nn.Module) -> bool:
    """Whether compression can have made ``new`` of ``old``: one family, no wider, and as a single layer walking alike."""
    users_own = isinstance(old, nn.Sequential) and not set(old._modules) <= set(STAGES)
    if users_own or _family(old) is None or _family(new) != _family(old):
        return False
    staged = isinstance(new, nn.Sequential) or isinstance(old, nn.Sequential)
    if not staged and any(getattr(new, name, None) != getattr(old, name, None) for name in GEOMETRY):
        return False
    if staged and _walk(new) != _walk(old):
        return False
    return all(width <= before for width, before in zip(_widths(new), _widths(old), strict=True))


def _walk(module: nn.Module) -> list[Any]:
    """How a layer, or its stages together, walk over the input: what stages share out between them."""
    stages: list[Any] = [stage for stage in module.modules() if hasattr(stage, "kernel_size")]
    if not stages:
        return []
    axes = range(len(stages[0].kernel_size))
    written = {stage.padding for stage in stages if isinstance(stage.padding, str)} - {"valid"}
    paddings = [stage.padding for stage in stages if not isinstance(stage.padding, str)]
    return [
        [math.prod(stage.stride[axis] for stage in stages) for axis in axes],
        [sum(stage.dilation[axis] * (stage.kernel_size[axis] - 1) for stage in stages) for axis in axes],
        written or [sum(padding[axis] for padding in paddings) for axis in axes],
        [sum(stage.output_padding[axis] for stage in stages) for axis in axes],
        {stage.padding_mode for stage in stages} - {"zeros"},
        any(stage.transposed for stage in stages),
    ]


def _family(module: nn.Module) -> str | None:
    """Layers of one family work on tensors of the same form. Stages are of the family that all of them share."""
    if isinstance(module, nn.Sequential):
        families = {_family(stage) for stage in module}
        return families.pop() if len(families) == 1 else None
    if kind_of(module) == "linear":
        return "Linear"
    return next((name.replace("Transpose", "") for name, cls in LAYERS.items() if isinstance(module, cls)), None)


def _widths(module: nn.Module) -> tuple[int, int]:
    if isinstance(module, nn.Sequential):
        return _widths(module[0])[0], _widths(module[-1])[1]
    inputs, outputs = _width_names(module)
    return getattr(module, inputs), getattr(module, outputs)


def _width_names(module: nn.Module) -> tuple[str, ...]:
    return next((names for names in WIDTHS if hasattr(module, names[0])), ())


# --- values -----------------------------------------------------------------------------------------------------------------


def _state(model: nn.Module) -> dict[str, Tensor]:
    state = model.state_dict()
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} in the state of the model is {type(value).__name__}; only tensors can be stored")
    return state


def _aliases(state: dict[str, Tensor]) -> dict[str, str]:
    """For each name of a tensor that was already there under another name, that first name."""
    firsts: dict[tuple[Any, ...], str] = {}
    aliases = {}
    for name, tensor in state.items():
        if tensor.layout is not torch.strided or not tensor.numel():
            continue
        place = (tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        if firsts.setdefault(place, name) != name:
            aliases[name] = firsts[place]
    return aliases


def _require_same_state(model: nn.Module, state: dict[str, Tensor]) -> None:
    held = _state(model)
    if missing := held.keys() - state.keys():
        raise ValueError(f"the file lacks {some(sorted(missing))}")
    if unexpected := state.keys() - held.keys():
        raise ValueError(f"the model lacks {some(sorted(unexpected))}")
    if differing := [name for name in held if held[name].shape != state[name].shape]:
        shapes = (f"{name} ({list(held[name].shape)}, in the file {list(state[name].shape)})" for name in differing)
        raise ValueError(f"shapes differ: {some(shapes)}")
    for name, first in _aliases(held).items():
        one, other = state[name], state[first]
        if one is not other and not (one.dtype == other.dtype and one.equal(other)):
            raise ValueError(f"the model shares one tensor between {first} and {name}, which differ in the file")


def _fill(model: nn.Module, state: dict[str, Tensor], unsaved: dict[str, str], frozen: set[str]) -> None:
    model.requires_grad_(False).zero_grad()
    targets = model.state_dict(keep_vars=True)
    for name, target in targets.items():
        # Through .data, so that a shared parameter stays one parameter.
        target.data = target.data.to(state[name].dtype)
        targets[name] = state[name]
    model.load_state_dict(targets)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in unsaved:
            buffer.data = buffer.data.to(getattr(torch, unsaved[name].removeprefix("torch.")))
    for name, parameter in model.named_parameters(remove_duplicate=False):
        parameter.requires_grad_(name not in frozen)

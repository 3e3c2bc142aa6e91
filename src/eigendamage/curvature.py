"""What one pass over the data leaves behind: per layer, how its inputs and its output gradients look."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage import files
from eigendamage.calibration import Calibration
from eigendamage.coupling import Coupling, Sides
from eigendamage.layers import LayerShape, candidates, require_values, shape_of, some
from eigendamage.linalg import eigen, roots

TENSORS = ("inputs", "patches", "gradients", "softened", "fisher", "scale")


@dataclass(frozen=True, eq=False)
class LayerCurvature:
    """The statistics of one layer; what no method asked for is None, as is everything of a layer that must stay dense.

    With N examples and T output positions, ``A = mean over examples and positions of a aᵀ`` and
    ``S = sum over positions, mean over examples, of g gᵀ``, so that ``S ⊗ A`` is the paper's F for every kind of layer.
    """

    shape: LayerShape
    inputs: Tensor | None = None  # A over channels [in, in] (eq. 19)
    patches: Tensor | None = None  # A over patches [in · taps, in · taps] (section 2)
    gradients: Tensor | None = None  # S [out, out]
    softened: Tensor | None = None  # S of a softened prediction, for budgets; None where the loss is not one of classes
    fisher: Tensor | None = None  # mean squared gradient of every weight [out, in, *kernel]
    scale: Tensor | None = None  # |γ| of the batch norm that follows [out]

    @property
    def channel_form(self) -> Tensor | None:
        """A over channels: collected, or the mean of the diagonal blocks of A over patches."""
        if self.inputs is not None or self.patches is None:
            return self.inputs
        channels, taps = self.shape.inputs, self.shape.taps
        return torch.einsum("ikjk->ij", self.patches.view(channels, taps, channels, taps)) / taps

    @property
    def patch_form(self) -> Tensor | None:
        return self.inputs if self.patches is None and self.shape.taps == 1 else self.patches

    @property
    def sensitivity(self) -> Tensor:
        """The S that budgets go by."""
        return _present(self.gradients if self.softened is None else self.softened, "the gradient covariance")

    # Decompositions are kept: one pass of statistics serves any number of plans.

    @cached_property
    def eigen_channels(self) -> tuple[Tensor, Tensor]:
        return eigen(_present(self.channel_form, "the input covariance over channels"))

    @cached_property
    def eigen_patches(self) -> tuple[Tensor, Tensor]:
        return eigen(_present(self.patch_form, "the input covariance over patches"))

    @cached_property
    def eigen_gradients(self) -> tuple[Tensor, Tensor]:
        return eigen(_present(self.gradients, "the gradient covariance"))

    @cached_property
    def sensitivity_roots(self) -> tuple[Tensor, Tensor]:
        return roots(self.sensitivity)


def _present(tensor: Tensor | None, what: str) -> Tensor:
    if tensor is None:
        raise ValueError(f"{what} was not collected; ask for it with measure(..., methods=[...])")
    return tensor


@dataclass(frozen=True, eq=False)
class Curvature:
    """Statistics of every layer, in the order in which the layers first ran, and why some of them stay dense."""

    layers: dict[str, LayerCurvature]
    reasons: dict[str, str] = field(default_factory=dict)
    coupling: Coupling | None = None
    examples: int = 0
    macs: int = 0  # of the whole model for one example
    collected: frozenset[str] = frozenset()
    whole: dict[str, str] = field(default_factory=dict)  # layers that may lose channels but not become several, and why
    calibration: Calibration = field(default_factory=Calibration)  # of what budgets go by
    remembered: dict[Any, Any] = field(default_factory=dict, repr=False)  # what was worked out once and may serve again

    def __getitem__(self, name: str) -> LayerCurvature:
        if name not in self.layers:
            raise ValueError(f"no layer {name!r}; the layers are {some(self.layers)}")
        return self.layers[name]

    def __repr__(self) -> str:
        return f"Curvature({len(self.measured)} of {len(self.layers)} layers, {self.examples} examples)"

    @property
    def measured(self) -> dict[str, LayerCurvature]:
        """The layers that may change."""
        return {name: layer for name, layer in self.layers.items() if name not in self.reasons}

    @property
    def last_linear(self) -> str | None:
        """The linear layer that runs last: the one that produces a classifier's logits."""
        names = [name for name, layer in self.layers.items() if layer.shape.kind == "linear" and layer.shape.output_positions]
        return names[-1] if names else None

    def require(self, needs: Iterable[str], purpose: str) -> None:
        """Raise ValueError unless these statistics were collected."""
        implied = self.collected | ({"inputs"} if "patches" in self.collected else set())
        missing = sorted(set(needs) - implied)
        if missing:
            raise ValueError(
                f"{purpose} needs {', '.join(missing)}, not in this curvature; name it in measure(..., methods=[...])"
            )

    def require_model(self, model: nn.Module) -> None:
        """Raise ValueError unless this was measured on a model with the same layers."""
        require_values(model)
        present = candidates(model)
        for name, layer in self.layers.items():
            if name not in present:
                raise ValueError(f"the curvature is of another model: it knows a layer {name!r}, the model has {some(present)}")
            shape = shape_of(present[name])
            if any(getattr(shape, key) != getattr(layer.shape, key) for key in LayerShape.OF_THE_LAYER):
                raise ValueError(
                    f"the curvature is of another model: it was measured with {name} as {_describe(layer.shape)}, "
                    f"the model has {_describe(shape)}"
                )
        unknown = present.keys() - self.layers.keys()
        if unknown:
            raise ValueError(f"the curvature is of another model: it does not know {some(sorted(unknown))}")

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to one safetensors file."""
        tensors = {
            f"{name}/{key}": value
            for name, layer in self.layers.items()
            for key in TENSORS
            if (value := getattr(layer, key)) is not None
        }
        content: dict[str, object] = {
            "shapes": {name: asdict(layer.shape) for name, layer in self.layers.items()},
            "reasons": self.reasons,
            "whole": self.whole,
            "examples": self.examples,
            "macs": self.macs,
            "collected": sorted(self.collected),
            "coupling": asdict(self.coupling) if self.coupling else None,
            "calibration": asdict(self.calibration),
        }
        files.write(path, tensors, content, kind="curvature")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Curvature:
        """Read what `save` wrote. Raises ValueError for a damaged or foreign file."""
        tensors, content = files.read(path, kind="curvature")
        layers = {
            name: LayerCurvature(
                LayerShape.from_dict(shape),
                **{key: tensors[f"{name}/{key}"] for key in TENSORS if f"{name}/{key}" in tensors},
            )
            for name, shape in content["shapes"].items()
        }
        coupling = _coupling(content["coupling"])
        counts = content["examples"], content["macs"]
        trials = tuple((float(quadratic), float(increase)) for quadratic, increase in content["calibration"]["trials"])
        calibration = Calibration(trials, content["calibration"]["layers"], content["calibration"]["links"])
        return cls(
            layers, content["reasons"], coupling, *counts, frozenset(content["collected"]), content["whole"], calibration
        )


def _coupling(content: dict[str, Any] | None) -> Coupling | None:
    if content is None:
        return None
    sides = {name: Sides(tuple(side["inputs"]), tuple(side["outputs"])) for name, side in content["sides"].items()}
    return Coupling(sides, content["reasons"])


def _describe(shape: LayerShape) -> str:
    kernel = f" kernel {'×'.join(map(str, shape.kernel))}" if shape.kernel else ""
    return f"{shape.kind} {shape.inputs}→{shape.outputs}{kernel}, {'with' if shape.bias else 'without'} bias"

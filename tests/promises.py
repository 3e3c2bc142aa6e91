"""What holds for every network, whatever its layers are and however its code uses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
import torch
from networks import zero_units
from torch import Tensor, nn

import eigendamage as ed

METHODS = ["eigendamage", "kron-obd"]


@dataclass(frozen=True)
class Network:
    """A model, always built alike, and how to run it."""

    build: Callable[[], nn.Module]
    batch: Any
    forward: Callable[[nn.Module, Any], Tensor]

    @cached_property
    def model(self) -> nn.Module:
        return self.fresh(seed=0)

    @cached_property
    def curvature(self) -> ed.Curvature:
        return ed.measure(self.model, [self.batch], forward=self.forward, methods=METHODS, progress=False)

    def fresh(self, seed: int) -> nn.Module:
        with torch.random.fork_rng([]):
            torch.manual_seed(seed)
            return self.build().eval()

    def plan(self, method: str, ratio: float) -> ed.Plan:
        last = "prune" if method == "eigendamage" else None
        return ed.plan(self.model, self.curvature, method=method, ratio=ratio, allow_larger=True, last_linear=last)

    def pruned(self, method: str, ratio: float) -> nn.Module:
        return ed.apply(self.model, self.plan(method, ratio), self.curvature)

    def outputs(self, model: nn.Module) -> Tensor:
        """What the model computes, the same each time even if it draws random numbers."""
        with torch.random.fork_rng([]):
            torch.manual_seed(0)
            return self.forward(model, self.batch)


def assert_equal_within_rounding(actual: Tensor, expected: Tensor) -> None:
    eps = torch.finfo(expected.dtype).eps
    scale = float(expected.detach().abs().max())
    assert scale > 1e-3, "the outputs are too small to be compared"
    torch.testing.assert_close(actual, expected, rtol=0, atol=300 * eps * scale)


class Promises:
    """Tests for a fixture ``network``."""

    def test_full_rank_equals_the_original(self, network: Network) -> None:
        full = network.pruned("eigendamage", 0.0)
        with torch.no_grad():
            assert_equal_within_rounding(network.outputs(full), network.outputs(network.model))
        assert_equal_within_rounding(network.outputs(full), network.outputs(network.model))

    @pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
    @pytest.mark.parametrize("method", METHODS)
    def test_pruned_to_half_it_runs_and_learns(self, network: Network, method: str, training: bool) -> None:
        half = network.pruned(method, 0.5).train(training)
        outputs = network.outputs(half)
        outputs.float().square().mean().backward()
        assert bool(outputs.isfinite().all())
        dense = dict(network.fresh(seed=0).train(training).named_parameters())
        unused = self.without_gradient(network, training)
        for name, parameter in half.named_parameters():
            new = name not in dense or dense[name].shape != parameter.shape
            assert parameter.grad is not None or not (new or name not in unused), name
        with torch.no_grad():
            network.outputs(half)

    @staticmethod
    def without_gradient(network: Network, training: bool) -> set[str]:
        model = network.fresh(seed=0).train(training)
        network.outputs(model).float().square().mean().backward()
        return {name for name, parameter in model.named_parameters() if parameter.grad is None}

    def test_removed_channels_are_the_dense_ones_at_zero(self, network: Network) -> None:
        plan, coupling = network.plan("kron-obd", 0.5), network.curvature.coupling
        assert coupling is not None
        gone = {
            unit
            for name, kept in plan.kept.items()
            for index, unit in enumerate(coupling.sides[name].outputs)
            if index not in set(kept.outputs)
        }
        assert bool(gone) == (plan.params < plan.dense_params)
        zeroed = zero_units(network.model, coupling, gone)
        with torch.no_grad():
            small = network.outputs(ed.apply(network.model, plan, network.curvature))
            assert_equal_within_rounding(small, network.outputs(zeroed))

    @pytest.mark.parametrize("method", METHODS)
    def test_a_file_brings_it_back_onto_a_fresh_model(self, network: Network, method: str, tmp_path: Path) -> None:
        half = network.pruned(method, 0.5)
        ed.save(half, tmp_path / "half.safetensors")
        loaded = ed.load(network.fresh(seed=1), tmp_path / "half.safetensors")
        with torch.no_grad():
            torch.testing.assert_close(network.outputs(loaded), network.outputs(half), rtol=0, atol=0)

    @pytest.mark.parametrize("method", METHODS)
    @pytest.mark.parametrize("ratio", [0.0, 0.5])
    def test_the_table_says_why_a_layer_stays_dense(self, network: Network, method: str, ratio: float) -> None:
        plan = network.plan(method, ratio)
        shown = " ".join(str(plan).split())
        for name, choice in plan.layers.items():
            assert (choice.structure == "dense") == bool(choice.reason), name
            assert name in shown
            assert choice.reason in shown

    def test_a_budget_holds_for_the_whole_model_or_says_what_can_be_reached(self, network: Network) -> None:
        budget, size = 0.8, sum(parameter.numel() for parameter in network.model.parameters())
        try:
            plan = ed.plan(network.model, network.curvature, params=budget)
        except ValueError as error:
            reachable = re.fullmatch(r"the budget params=0.8 cannot be reached: .* become is params=([\d.]+)", str(error))
            assert reachable is not None and budget < float(reachable[1]) <= 1
            return
        small = ed.apply(network.model, plan, network.curvature)
        assert sum(parameter.numel() for parameter in small.parameters()) <= budget * size
        with torch.no_grad():
            assert network.outputs(small).shape == network.outputs(network.model).shape

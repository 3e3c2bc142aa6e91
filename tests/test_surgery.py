"""Surgery against masks: on random networks, what is removed changes nothing that zeroing it does not."""

from __future__ import annotations

import copy
import inspect
import io
import random
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
from dense import constrained_minimiser, convnet, flat, measured, with_weight
from networks import Attention, random_network, zero_units
from torch import Tensor, nn

import eigendamage as ed
from eigendamage import METHODS, Curvature, Plan
from eigendamage.coupling import Coupling, Sides
from eigendamage.layers import candidates, weight_of
from eigendamage.linalg import damped

close = torch.testing.assert_close
every_method = pytest.mark.parametrize("method", METHODS)
channel_methods = pytest.mark.parametrize("method", [name for name, row in METHODS.items() if row.removes == "channels"])


METHODS_USED = "eigendamage", "c-obd"


@dataclass
class Case:
    model: nn.Module
    inputs: Tensor
    curvature: Curvature
    ratio: float


@pytest.fixture(scope="module", params=range(200))
def network(request: pytest.FixtureRequest) -> Case:
    """A random network, measured for directions and for channels (C-OBD is the fastest), and a ratio to prune it at."""
    model, inputs = random_network(request.param)
    model, inputs = model.double(), inputs.double()
    return Case(model, inputs, measured(model, inputs, METHODS_USED), random.Random(request.param).uniform(0.1, 0.9))


def logits(model: nn.Module, inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return flat(model(inputs))


def same(actual: nn.Module, expected: nn.Module, inputs: Tensor, atol: float = 1e-9) -> None:
    close(logits(actual, inputs), logits(expected, inputs), rtol=1e-7, atol=atol)


def removed(plan: Plan, coupling: Coupling) -> set[int]:
    """The units of the output channels that a plan does not keep."""
    sides = [(coupling.sides[name].outputs, kept.outputs) for name, kept in plan.kept.items()]
    return {unit for units, kept in sides for i, unit in enumerate(units) if i not in kept}


def masked(case: Case, plan: Plan) -> nn.Module:
    assert case.curvature.coupling is not None
    return zero_units(case.model, case.curvature.coupling, removed(plan, case.curvature.coupling))


# --- random networks --------------------------------------------------------------------------------------------------------


def test_full_rank_is_the_same_network(network: Case) -> None:
    rules = {"allow_larger": True, "last_linear": "prune", "skip": wide}
    plan = ed.plan(network.model, network.curvature, method="eigendamage", ratio=0.0, **rules)
    small = ed.apply(network.model, plan, network.curvature)
    same(small, network.model, network.inputs)
    assert all(choice.structure == "bottleneck" or choice.reason for choice in plan.layers.values())


def wide(name: str, module: nn.Module) -> bool:
    """Layers whose eigenvectors take long."""
    return isinstance(module, nn.Linear) and module.in_features > 64


def test_pruned_channels_are_masked_channels_in_the_first_round_and_in_the_second(network: Case) -> None:
    plan = ed.plan(network.model, network.curvature, method="c-obd", ratio=network.ratio)
    small = ed.apply(network.model, plan, network.curvature)
    same(small, masked(network, plan), network.inputs)
    later = Case(small, network.inputs, measured(small, network.inputs, ["c-obd"]), 1 - network.ratio)
    again = ed.plan(small, later.curvature, method="c-obd", ratio=later.ratio)
    smaller = ed.apply(small, again, later.curvature)
    same(smaller, masked(later, again), network.inputs)
    same(smaller, masked_in_both_rounds(network.model, plan, again), network.inputs)


def masked_in_both_rounds(model: nn.Module, first: Plan, second: Plan) -> nn.Module:
    """The dense network with the channels zeroed that are gone after two rounds, each module by itself."""
    sides = {}
    for name in first.kept.keys() | second.kept.keys():
        channels = range(_outputs(model.get_submodule(name)))
        left = first.kept[name].outputs if name in first.kept else list(channels)
        left = [left[i] for i in second.kept[name].outputs] if name in second.kept else left
        sides[name] = Sides((), tuple(int(channel in left) for channel in channels))
    return zero_units(model, Coupling(sides, {}), {0})


def _outputs(module: nn.Module) -> int:
    sizes = ("out_features", "out_channels", "num_features", "num_parameters")
    return next(getattr(module, size) for size in sizes if hasattr(module, size))


def test_a_pruned_network_leaves_the_model_alone_and_is_a_module_like_any_other(network: Case) -> None:
    before, text = copy.deepcopy(network.model.state_dict()), str(network.model)
    small = network.model
    for method in METHODS_USED:
        plan = ed.plan(network.model, network.curvature, method=method, ratio=network.ratio, skip=wide)
        small = ed.apply(network.model, plan, network.curvature)
        assert_ordinary(small, network)
    after = network.model.state_dict()
    assert str(network.model) == text and before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    shared = {p.data_ptr() for p in network.model.parameters()} & {p.data_ptr() for p in small.parameters()}
    assert not shared


def assert_ordinary(small: nn.Module, case: Case) -> None:
    """Stock modules in the original's places, that run, learn, and can be copied and stored."""
    known = {type(module) for module in case.model.modules()}
    assert all(type(m).__module__.startswith("torch.nn.") for m in small.modules() if type(m) not in known)
    assert [m.training for m in small.modules()] == [False] * len(list(small.modules()))
    flat(small(case.inputs)).square().sum().backward()
    gradients = [p.grad for p in small.parameters() if p.grad is not None]
    assert gradients and all(bool(g.isfinite().all()) for g in gradients)
    same(copy.deepcopy(small), small, case.inputs, atol=0)


@pytest.mark.parametrize("seed", range(12))
def test_what_a_pruned_network_saves_is_what_its_plan_says(seed: int) -> None:
    model, inputs = random_network(seed)
    if any(isinstance(module, Attention) for module in model.modules()):
        return  # attention itself multiplies too
    curvature = measured(model, inputs, METHODS_USED)
    for method in METHODS_USED:
        plan = ed.plan(model, curvature, method=method, ratio=0.6)
        dense, small = ed.count(model, inputs), ed.count(ed.apply(model, plan, curvature), inputs)
        assert dense.macs - small.macs == len(inputs) * (plan.dense_macs - plan.macs)
        layers = sum(weight.numel() for name, weight in small_parameters(model, plan, curvature) if name in plan.layers)
        assert layers == plan.params


def small_parameters(model: nn.Module, plan: Plan, curvature: Curvature) -> list[tuple[str, Tensor]]:
    """Each parameter of the pruned network, with the name of the layer of the model that it belongs to."""
    names = sorted(plan.layers, key=len, reverse=True)
    parameters = ed.apply(model, plan, curvature).named_parameters()
    return [(next((n for n in names if key.startswith(f"{n}.")), ""), value) for key, value in parameters]


@pytest.mark.parametrize("method", ["kron-obd", "c-obs", "kron-obs"])
@pytest.mark.parametrize("seed", range(12))
def test_kfac_methods_are_the_dense_network_compensated_and_then_masked(seed: int, method: str) -> None:
    model, inputs = random_network(seed)
    model, inputs = model.double(), inputs.double()
    case = Case(model, inputs, measured(model, inputs, [method]), random.Random(seed).uniform(0.2, 0.8))
    plan = ed.plan(model, case.curvature, method=method, ratio=case.ratio)
    small = ed.apply(model, plan, case.curvature)
    if METHODS[method].compensates:
        case.model = compensated(model, plan, case.curvature)
    same(small, masked(case, plan), inputs, atol=1e-7)


def compensated(model: nn.Module, plan: Plan, curvature: Curvature) -> nn.Module:
    """A copy in which the filters that stay make up for those that go: one dense problem for each column of a weight."""
    model = copy.deepcopy(model)
    for name, kept in plan.kept.items():
        layer, s = model.get_submodule(name), curvature.layers[name].gradients if name in curvature.layers else None
        gone = torch.tensor([i not in kept.outputs for i in range(len(s))]) if s is not None else torch.zeros(0)
        if s is None or not gone.any():
            continue
        weight = weight_of(layer).detach()
        changed = torch.stack([column + constrained_minimiser(damped(s), column, gone) for column in weight.flatten(1).T], 1)
        layer.weight = with_weight(layer, changed.reshape(weight.shape)).weight
        if layer.bias is not None:
            layer.bias = nn.Parameter(layer.bias.detach() + constrained_minimiser(damped(s), layer.bias.detach(), gone))
    return model


def test_removing_nothing_changes_nothing() -> None:
    model, inputs = convnet()
    curvature = measured(model, inputs, list(METHODS))
    for method in METHODS.keys() - {"eigendamage-depthwise", "cp"}:  # which decompose even what they keep all of
        small = ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.0), curvature)
        assert str(small) == str(model)
        assert torch.equal(logits(small, inputs), logits(model, inputs))


# --- what can be done with the result ---------------------------------------------------------------------------------------


class Residual(nn.Module):
    """Two residual blocks; the second has a projection on its shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.blocks = nn.ModuleList([Block(8, 8, None), Block(8, 12, nn.Conv2d(8, 12, 1, stride=2))])
        self.head = nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem_norm(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


class Block(nn.Module):
    def __init__(self, inputs: int, outputs: int, shortcut: nn.Module | None) -> None:
        super().__init__()
        stride = 1 if shortcut is None else 2
        self.first, self.norm = nn.Conv2d(inputs, 10, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(10)
        self.second, self.last = nn.Conv2d(10, outputs, 3, padding=1), nn.BatchNorm2d(outputs)
        self.shortcut = shortcut or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.last(self.second(torch.relu(self.norm(self.first(x))))) + self.shortcut(x))


def residual() -> tuple[nn.Module, Tensor]:
    model = Residual().double().eval()
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.5, 1.5)
            nn.init.normal_(module.bias)
    return model, torch.randn(8, 3, 8, 8, dtype=torch.float64)


@every_method
def test_the_result_is_stored_and_loaded_without_us(method: str) -> None:
    model, inputs = residual()
    curvature = measured(model, inputs, [method])
    small = ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.5), curvature)
    assert ed.count(small, inputs).params < ed.count(model, inputs).params
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    again = torch.load(file, weights_only=False)
    assert torch.equal(logits(again, inputs), logits(small, inputs))


@pytest.mark.parametrize("method", ["eigendamage", "kron-obs", "cp"])
def test_the_result_can_be_exported(method: str) -> None:
    model, inputs = residual()
    curvature = measured(model, inputs, [method])
    small = ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.5), curvature)
    exported = torch.export.export(small, (inputs,)).module()
    close(exported(inputs), small(inputs))


def test_a_layer_by_itself_is_replaced_too_and_merged_in_a_later_round() -> None:
    model, inputs = nn.Linear(12, 10).double(), torch.randn(20, 12, dtype=torch.float64)
    for gone in (0.5, 0.3):
        curvature = measured(model, inputs)
        plan = ed.plan(model, curvature, method="eigendamage", ratio=gone, last_linear="prune", allow_larger=True)
        model = ed.apply(model, plan, curvature)
        assert list(candidates(model)) == ["rotate_in", "core", "rotate_out"]
        assert sum(p.numel() for p in model.parameters()) == plan.params


def test_what_was_frozen_stays_frozen_and_what_was_in_training_stays_so() -> None:
    model, inputs = convnet()
    model[3].requires_grad_(False)
    model.train()
    for method in ("eigendamage", "kron-obd"):
        curvature = measured(model, inputs, [method])
        small = ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.6, allow_larger=True), curvature)
        for name, parameter in small.named_parameters():
            assert parameter.requires_grad != name.startswith("3.")
        assert all(module.training for module in small.modules())


def test_a_module_in_two_places_is_replaced_in_both() -> None:
    layer = nn.Linear(6, 6)
    model = nn.Sequential(layer, nn.ReLU(), layer, nn.Linear(6, 2)).double()
    inputs = torch.randn(9, 6, dtype=torch.float64)
    curvature = measured(model, inputs)
    small = ed.apply(model, ed.plan(model, curvature, method="eigendamage", ratio=0.0, allow_larger=True), curvature)
    assert small[0] is small[2] and isinstance(small[0], nn.Sequential)
    same(small, model, inputs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_result_has_the_dtype_of_the_model(dtype: torch.dtype) -> None:
    model, inputs = convnet()
    model, inputs = model.to(dtype), inputs.to(dtype)
    curvature = measured(model, inputs, ["eigendamage", "kron-obs"])
    for method in ("eigendamage", "kron-obs"):
        small = ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.5), curvature)
        assert {p.dtype for p in small.parameters()} == {dtype}
        assert small(inputs).dtype == dtype


# --- mistakes of earlier programs -------------------------------------------------------------------------------------------


@channel_methods
@pytest.mark.parametrize("ratio", [0.4, 0.9])
def test_mistake_1_a_pruned_residual_stream_is_not_scrambled_in_any_round(method: str, ratio: float) -> None:
    """The stream's channels came from an unordered set, and the second round mixed the indices of different layers."""
    model, inputs = residual()
    for round_ratio in (ratio, 0.5, 0.0):
        case = Case(model, inputs, measured(model, inputs, [method]), round_ratio)
        plan = ed.plan(model, case.curvature, method=method, ratio=round_ratio)
        assert bool(plan.kept) == (round_ratio > 0) or round_ratio == 0.5  # by then each layer may be at its last channel
        small = ed.apply(model, plan, case.curvature)
        if METHODS[method].compensates:
            case.model = compensated(model, plan, case.curvature)
        same(small, masked(case, plan), inputs, atol=1e-7)
        model = small


class Mlp(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(
            nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 14), nn.ReLU(), nn.Linear(14, 10), nn.ReLU(), nn.Linear(10, 3)
        )


@pytest.mark.parametrize("build", [Mlp, lambda: convnet()[0]])
@pytest.mark.parametrize("basis", ["channel", "patch"])
def test_mistake_4_rotations_of_later_rounds_merge_into_those_of_earlier_ones(build, basis: str) -> None:
    """Hidden linear layers were merged with the wrong transpose."""
    model = build().double().eval()
    inputs = torch.randn(30, 9, dtype=torch.float64) if isinstance(model, Mlp) else convnet()[1]
    first = measured(model, inputs, ["eigendamage", "kron-obd"])
    rules = {"basis": basis, "allow_larger": True, "method": "eigendamage"}
    model = ed.apply(model, ed.plan(model, first, ratio=0.4, **rules), first)
    depth = len(list(model.modules()))
    for _ in range(2):
        curvature = measured(model, inputs, ["eigendamage", "kron-obd"])
        plan = ed.plan(model, curvature, ratio=0.3, **rules)
        cores = [name for name, choice in plan.layers.items() if choice.structure == "merged"]
        assert cores
        merged = ed.apply(model, plan, curvature)
        unmerged = ed.apply(model, nested(plan), curvature)
        same(merged, unmerged, inputs)
        assert len(list(merged.modules())) == depth < len(list(unmerged.modules()))
        assert ed.count(merged, inputs).params < ed.count(model, inputs).params
        assert plan.params == sum(p.numel() for layer in candidates(merged).values() for p in layer.parameters())
        model = merged


def nested(plan: Plan) -> Plan:
    """The same plan with every new bottleneck inside of the old one."""
    plan = copy.deepcopy(plan)
    for choice in plan.layers.values():
        if choice.structure == "merged":
            choice.structure = "bottleneck"
        elif choice.structure == "channels":
            choice.structure, choice.ranks = "dense", {}
    return plan


class Awkward(nn.Module):
    """Groups, dilation, "same" padding, a layer called twice, and activations that write into their input."""

    def __init__(self) -> None:
        super().__init__()
        self.grouped = nn.Conv2d(4, 6, 3, padding=1, groups=2)
        self.dilated = nn.Conv2d(6, 7, 3, padding=2, dilation=2)
        self.same = nn.Conv2d(7, 8, 3, padding="same")
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.twice = nn.Conv2d(8, 8, 3, padding=1)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.dilated(self.grouped(x).relu_()).relu_()
        x = nn.functional.relu(self.same(x), inplace=True)
        x = self.depthwise(x).relu_()
        x = self.twice(self.twice(x).relu_()).relu_()
        return self.head(x.mean((2, 3)))


def test_mistake_5_groups_dilation_same_padding_reuse_and_inplace_activations_are_right() -> None:
    model, inputs = Awkward().double(), torch.randn(6, 4, 7, 8, dtype=torch.float64)
    curvature = measured(model, inputs)
    plan = ed.plan(model, curvature, method="eigendamage", ratio=0.0, allow_larger=True)
    assert [name for name, choice in plan.layers.items() if choice.structure == "bottleneck"] == ["dilated", "same", "twice"]
    same(ed.apply(model, plan, curvature), model, inputs)
    case = Case(model, inputs, curvature, 0.5)
    plan = ed.plan(model, curvature, method="kron-obd", ratio=0.5)
    assert {"dilated", "same", "depthwise", "twice"} <= plan.kept.keys()
    same(ed.apply(model, plan, curvature), masked(case, plan), inputs)


@every_method
def test_mistake_6_every_tensor_is_in_the_state_of_the_module(method: str) -> None:
    """Weights were kept outside of the state, so that `.to()` and `state_dict()` missed them."""
    model, inputs = residual()
    curvature = measured(model, inputs, [method])
    small = ed.apply(model, ed.plan(model, curvature, method=method, ratio=0.5), curvature)
    blank = copy.deepcopy(small)
    for tensor in [*blank.parameters(), *blank.buffers()]:
        nn.init.zeros_(tensor)
    blank.load_state_dict(small.state_dict())
    assert torch.equal(logits(blank, inputs), logits(small, inputs))
    close(logits(copy.deepcopy(small).to(torch.float32), inputs.float()), logits(small, inputs).float(), rtol=1e-3, atol=1e-4)
    assert not [value for module in small.modules() for value in vars(module).values() if isinstance(value, Tensor)]


def test_mistake_7_torchvision_is_not_needed() -> None:
    """It does not import on a CPU build of torch, and then transformers does not either."""
    program = """
        import sys
        sys.modules["torchvision"] = None
        import torch
        from torch import nn
        import eigendamage as ed
        model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
        curvature = ed.measure(model, [(torch.randn(8, 4), torch.zeros(8).long())], progress=False)
        ed.apply(model, ed.plan(model, curvature, method="eigendamage", ratio=0.5), curvature)
    """
    subprocess.run([sys.executable, "-c", inspect.cleandoc(program)], check=True, timeout=120)

"""Refitting on the compressed network's own inputs, and everything in one call."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from random_layers import layers
from test_budgets import Small
from torch import Tensor, nn
from torch.nn import functional as F

import eigendamage as ed
from eigendamage.layers import patches, prepare, rows, weight_of
from eigendamage.refitting import RIDGE, _Moments


@pytest.fixture
def data() -> list[tuple[Tensor, Tensor]]:
    return [(torch.randn(64, 3, 8, 8), torch.randint(0, 5, (64,))) for _ in range(3)]


@pytest.fixture
def model(data: list[tuple[Tensor, Tensor]]) -> nn.Module:
    model = Small()
    ed.finetune(model, data, epochs=3, learning_rate=0.05, progress=False)
    return model.eval()


def error(small: nn.Module, model: nn.Module, data: list[tuple[Tensor, Tensor]]) -> float:
    with torch.no_grad():
        return sum(float(F.mse_loss(small.eval()(x), model(x))) for x, _ in data)


def test_refitting_brings_the_outputs_nearer_to_the_dense_model() -> None:
    blocks = [nn.Sequential(nn.Linear(24, 24), nn.ReLU()) for _ in range(4)]
    model = nn.Sequential(*blocks, nn.Linear(24, 5)).eval()
    mixed = torch.randn(24, 24) * torch.logspace(0, -2, 24)
    data = [(torch.randn(200, 24) @ mixed.T, torch.zeros(200).long()) for _ in range(2)]
    curvature = ed.measure(model, data, progress=False)
    for params in (0.6, 0.4):
        plan = ed.plan(model, curvature, params=params)
        plain, refitted = ed.apply(model, plan, curvature), ed.apply(model, plan, curvature, refit=data)
        assert error(refitted, model, data) < error(plain, model, data)


def test_refitting_leaves_the_dense_model_and_the_loader_as_they_were(model, data) -> None:
    model.train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    curvature = ed.measure(model, data, progress=False)
    ed.apply(model, ed.plan(model, curvature, macs=0.5), curvature, refit=iter(data))
    assert model.training and all(module.training for module in model.modules())
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@settings(max_examples=60)
@given(layers(), st.integers(1, 3))
def test_the_ridge_solution_is_that_of_the_normal_equations(drawn: tuple[nn.Module, Tensor], calls: int) -> None:
    layer, inputs = drawn
    xs = [torch.randn_like(inputs) for _ in range(calls)]
    ys = [torch.randn_like(layer(x)) for x in xs]
    moments = _Moments(layer)
    for x, y in zip(xs, ys, strict=True):
        moments.add(x, y)
    weight, bias = moments.ridge()
    x = torch.cat([patches(layer, prepare(layer, x)).flatten(0, 1) for x in xs])
    y = torch.cat([rows(y, layer) for y in ys])
    torch.testing.assert_close(moments.covariance(), x.T @ x / len(x))
    solution, trained = weight.flatten(1), weight_of(layer).detach().flatten(1)
    if bias is not None:
        x = torch.cat([x, x.new_ones(len(x), 1)], dim=1)
        solution = torch.cat([solution, bias[:, None]], dim=1)
        trained = torch.cat([trained, layer.bias.detach()[:, None]], dim=1)
    pull = RIDGE * (x.square().sum(0).mean() if x.any() else 1)
    solution.requires_grad_()
    loss = (x @ solution.T - y).square().sum() + pull * (solution - trained).square().sum()
    (gradient,) = torch.autograd.grad(loss, solution)
    assert float(gradient.abs().max()) < 1e-9 * float(loss.detach())


class Calling(nn.Module):
    """Calls one layer by keyword and another twice, and counts how often the last one is reached."""

    def __init__(self) -> None:
        super().__init__()
        self.named, self.twice, self.last = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 3)
        self.reached = [0]

    def forward(self, x: Tensor) -> Tensor:
        x = self.twice(self.twice(self.named(input=x).relu()).relu()).relu()
        self.reached[0] += 1
        return self.last(x)


def test_passes_end_behind_the_last_call_of_a_layer_however_it_is_called() -> None:
    model = Calling().eval()
    data = [(torch.randn(20, 12), torch.zeros(20).long()) for _ in range(5)]
    curvature = ed.measure(model, data, progress=False)
    plan = ed.plan(model, curvature, params=0.6)
    assert [name for name, choice in plan.layers.items() if choice.structure != "dense"] == ["named", "twice"]
    model.reached[0] = 0
    refitted = ed.apply(model, plan, curvature, refit=data)
    assert model.reached[0] + refitted.reached[0] == 2 * 2  # only in the first batch of each layer, in both networks
    assert not any(module._forward_hooks for network in (model, refitted) for module in network.modules())
    assert torch.isfinite(refitted(data[0][0])).all()


def test_batch_norm_moves_by_what_compression_changed(model, data) -> None:
    curvature = ed.measure(model, data, progress=False)
    plan = ed.plan(model, curvature, method="eigendamage", macs=0.5)
    plan.layers["stem"].structure, plan.layers["stem"].ranks = "svd", {"rank": 4}
    small = ed.apply(model, plan, curvature, refit=data).eval()
    with torch.no_grad():
        means = [torch.stack([net.stem(x).mean((0, 2, 3)) for x, _ in data]).mean(0) for net in (model, small)]
    assert torch.allclose(small.norm.running_mean - model.norm.running_mean, means[1] - means[0], atol=1e-5)
    assert small.norm.momentum == model.norm.momentum


def test_refitting_an_uncompressed_network_changes_nothing(model, data) -> None:
    curvature = ed.measure(model, data, progress=False)
    same = ed.apply(model, ed.plan(model, curvature, macs=1.0), curvature, refit=data)
    assert all(torch.allclose(value, same.state_dict()[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["eigendamage", "kron-obd"])
def test_a_last_batch_of_one_example_will_do(method: str) -> None:
    blocks = [(nn.Linear(inputs, 16), nn.BatchNorm1d(16), nn.ReLU()) for inputs in (8, 16)]
    model = nn.Sequential(*(module for block in blocks for module in block), nn.Linear(16, 3)).eval()
    batches = [(torch.randn(size, 8), torch.zeros(size).long()) for size in (16, 16, 1)]
    small, report = ed.compress(model, batches, method=method, ratio=0.4, allow_larger=True, progress=False)
    assert report.after != report.before
    assert all(bool(buffer.isfinite().all()) for buffer in small.buffers())


def test_batch_norm_in_front_of_which_nothing_changed_stays_as_it_was(model, data) -> None:
    curvature = ed.measure(model, data, methods=["kron-obd"], progress=False)
    plan = ed.plan(model, curvature, method="kron-obd", ratio=0.8)
    kept = plan.kept["norm"].outputs
    assert 0 < len(kept) < model.norm.num_features
    small = ed.apply(model, plan, curvature, refit=data[:1])
    torch.testing.assert_close(small.norm.running_mean, model.norm.running_mean[kept])
    torch.testing.assert_close(small.norm.running_var, model.norm.running_var[kept])


def test_no_more_examples_than_asked_for(model, data) -> None:
    seen = []

    def forward(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(len(batch[0]))
        return net(batch[0])

    ed.compress(model, data, macs=0.6, examples=70, forward=forward, progress=False)
    assert set(seen) == {2, 6, 64}


def test_an_empty_loader_is_an_error(model, data) -> None:
    curvature = ed.measure(model, data, progress=False)
    with pytest.raises(ValueError, match="refit: the loader is empty"):
        ed.apply(model, ed.plan(model, curvature, macs=0.5), curvature, refit=[])


def test_compress_asks_for_a_goal_before_it_looks_at_the_data(model) -> None:
    with pytest.raises(ValueError, match="plan needs one of ratio"):
        ed.compress(model, [])


@pytest.mark.parametrize(
    "arguments", [{"macs": 0.5}, {"params": 0.4}, {"method": "kron-obd", "ratio": 0.5}, {"examples": 100, "macs": 0.5}]
)
def test_compress_does_it_all_and_reports_what_is_counted(model, data, arguments) -> None:
    small, report = ed.compress(model, iter(data), progress=False, **arguments)
    assert report.after == ed.count(small, data[0][0][:1]) and report.before == ed.count(model, data[0][0][:1])
    assert report.after.params < report.before.params
    assert "MACs per example" in str(report)


def test_layers_and_batch_norm_are_refitted_apart(data: list[tuple[Tensor, Tensor]]) -> None:
    layers = [nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    model = nn.Sequential(*layers, nn.Linear(8, 5)).eval()
    curvature = ed.measure(model, data, progress=False)
    plan = ed.plan(model, curvature, macs=0.5, structures=["svd", "tucker"])
    plain = ed.apply(model, plan, curvature).state_dict()
    for parts in (["layers"], ["norms"]):
        state = ed.apply(model, plan, curvature, refit=data, refitted=parts).state_dict()
        moved = {"norms" if "running" in name else "layers" for name in plain if not torch.equal(plain[name], state[name])}
        assert moved == set(parts)
    with pytest.raises(ValueError, match="refitted: must be one of 'layers', 'norms'; got 'weights'"):
        ed.apply(model, plan, curvature, refit=data, refitted=["weights"])

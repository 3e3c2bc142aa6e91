"""On an accelerator everything is as on the CPU, and stays on the device of the model."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from dense import convnet, flat, measured
from test_budgets import Small
from torch import Tensor, nn

import eigendamage as ed
from eigendamage import METHODS
from eigendamage.curvature import TENSORS
from eigendamage.recording import WARMUP

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")

DEVICE = "cuda"


def pair() -> tuple[nn.Module, Tensor, nn.Module, Tensor]:
    model, inputs = convnet()
    return model, inputs, copy.deepcopy(model).to(DEVICE), inputs.to(DEVICE)


def devices_of(model: nn.Module) -> set[str]:
    return {tensor.device.type for tensor in model.state_dict().values()}


def test_the_statistics_are_those_of_the_cpu() -> None:
    model, inputs, elsewhere, moved = pair()
    here, there = measured(model, inputs, METHODS), measured(elsewhere, moved, METHODS)
    assert here.reasons == there.reasons and here.coupling == there.coupling
    for name, layer in here.layers.items():
        for key in TENSORS:
            one, other = getattr(layer, key), getattr(there[name], key)
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(other.cpu(), one, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_gives_the_network_of_the_cpu(method: str) -> None:
    model, inputs, elsewhere, moved = pair()
    outputs = []
    for network, batch in ((model, inputs), (elsewhere, moved)):
        curvature = measured(network, batch, [method])
        small = ed.apply(network, ed.plan(network, curvature, method=method, ratio=0.5, allow_larger=True), curvature)
        assert devices_of(small) == {batch.device.type}
        with torch.no_grad():
            outputs.append(flat(small(batch)).cpu())
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-6)


def test_compressing_fine_tuning_rounds_and_files(tmp_path: Path) -> None:
    model = Small().to(DEVICE)
    batches = [(torch.randn(32, 3, 8, 8, device=DEVICE), torch.randint(5, (32,), device=DEVICE)) for _ in range(4)]
    ed.finetune(model, batches, epochs=2, learning_rate=0.05, progress=False)
    small, report = ed.compress(model, batches, macs=0.5, progress=False)
    assert report.after.macs <= 0.5 * report.before.macs and devices_of(small) == {DEVICE}
    for round in ed.iterate(model, batches, rounds=2, measuring={"progress": False, "autocast": torch.bfloat16}):
        assert devices_of(round.model) == {DEVICE}
    ed.save(small, tmp_path / "small.safetensors")
    with torch.no_grad():
        for device in ("cpu", DEVICE):
            loaded = ed.load(Small().to(device), tmp_path / "small.safetensors").eval()
            assert devices_of(loaded) == {device}
            outputs = loaded(batches[0][0].to(device)).to(DEVICE)
            torch.testing.assert_close(outputs, small.eval()(batches[0][0]), rtol=1e-3, atol=1e-4)


def test_random_state_of_the_device_is_left_alone() -> None:
    model = Small().to(DEVICE)
    batches = [(torch.randn(8, 3, 8, 8, device=DEVICE), torch.randint(5, (8,), device=DEVICE))]
    before = torch.cuda.get_rng_state()
    ed.compress(model, batches, macs=0.5, progress=False)
    assert torch.equal(torch.cuda.get_rng_state(), before)


def test_batches_elsewhere_are_an_error_that_names_both_devices() -> None:
    with pytest.raises(ValueError, match="the inputs are on cpu, the model is on cuda:0; move one to the other"):
        ed.measure(Small().to(DEVICE), [(torch.randn(2, 3, 8, 8), torch.zeros(2).long())], progress=False)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16])
def test_training_from_a_recorded_graph_is_the_same(autocast: torch.dtype | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a last batch that is smaller, a teacher and a penalty."""
    replay, replayed = torch.cuda.CUDAGraph.replay, []
    monkeypatch.setattr(torch.cuda.CUDAGraph, "replay", lambda graph: (replayed.append(graph), replay(graph)))
    batches = [(torch.randn(n, 3, 8, 8, device=DEVICE), torch.randint(5, (n,), device=DEVICE)) for n in (16,) * 6 + (7,)]
    teacher, ends = Small().to(DEVICE), []
    with torch.backends.cudnn.flags(enabled=True, deterministic=True):
        for cuda_graph in (False, True):
            torch.manual_seed(0)
            model = Small().to(DEVICE)
            first = next(model.parameters())
            history = ed.finetune(
                model,
                batches,
                epochs=3,
                learning_rate=0.05,
                schedule="cosine",
                teacher=teacher,
                autocast=autocast,
                penalty=lambda _, first=first: first.abs().sum() / 1000,  # type: ignore[misc]
                cuda_graph=cuda_graph,
                progress=False,
            )
            ends.append([torch.tensor([epoch.loss for epoch in history]), *model.state_dict().values()])
    assert all(torch.equal(plain, other) for plain, other in zip(*ends, strict=True))
    assert len(replayed) == 3 * 6 - WARMUP


class Asking(nn.Module):
    """Looks at a value, which invalidates the recording."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(4, 3), nn.Dropout()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.dropout(self.linear(inputs))
        return outputs / 2 if outputs.sum() > 100 else outputs


class Bringing(Asking):
    """Brings values from the CPU, which torch refuses without invalidating it."""

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.dropout(self.linear(inputs))
        return outputs * torch.tensor([1.0, 2.0, 3.0]).to(inputs.device)


@pytest.mark.parametrize("network", [Asking, Bringing])
def test_a_model_that_cannot_be_recorded_trains_without(network: type[nn.Module]) -> None:
    """The warning has the reason, not that recording "failed due to a previous error"."""
    batches = [(torch.randn(8, 4, device=DEVICE), torch.randint(3, (8,), device=DEVICE)) for _ in range(6)]
    before = torch.cuda.current_stream()
    with pytest.warns(UserWarning, match="cannot be recorded as a CUDA graph, and is trained without: (?!.*previous error)"):
        ed.finetune(network().to(DEVICE), batches, epochs=2, learning_rate=0.1, cuda_graph=True, progress=False)
    assert torch.cuda.current_stream() == before

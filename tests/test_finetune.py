"""The training loop: what it learns from, how it goes on after an interruption, and over several processes."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import eigendamage as ed


def line(count: int = 64) -> list[tuple[Tensor, Tensor]]:
    x = torch.randn(count, 4)
    return list(zip(x.split(16), (x.sum(1) > 0).long().split(16), strict=True))


def test_training_lowers_the_loss_and_leaves_the_mode_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 2)).eval()
    history = ed.finetune(model, line(), epochs=20, learning_rate=0.1, progress=False)
    assert history[-1].loss < history[0].loss / 2
    assert not any(module.training for module in model.modules())


def test_the_steps_divide_the_rate_by_ten_after_a_half_and_three_quarters() -> None:
    history = ed.finetune(nn.Linear(4, 2), line(), epochs=8, learning_rate=1.0, progress=False)
    assert [epoch.learning_rate for epoch in history] == pytest.approx([1, 1, 1, 1, 0.1, 0.1, 0.01, 0.01])


def test_the_cosine_falls_to_nothing() -> None:
    rates = [e.learning_rate for e in ed.finetune(nn.Linear(4, 2), line(), epochs=10, schedule="cosine", progress=False)]
    assert rates[0] == pytest.approx(1e-3) and rates == sorted(rates, reverse=True) and rates[-1] < 1e-4


def test_frozen_weights_stay() -> None:
    model = nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 2))
    before = model[0].weight.clone()
    ed.finetune(model, line(), epochs=1, learning_rate=0.1, progress=False)
    assert torch.equal(model[0].weight, before)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": -1}, "epochs: must be at least 0; got -1"),
        ({"learning_rate": 0.0}, "learning_rate: must be above 0; got 0.0"),
        ({"schedule": "linear"}, "schedule: must be one of 'steps', 'cosine'; got 'linear'"),
        ({"batches": []}, "batches: the loader is empty"),
        ({"batches": iter(line())}, "batches: an iterator ends after one epoch; 150 epochs need a list"),
        ({"learning_rate": 1e30, "epochs": 3}, "the loss became .* a smaller learning_rate"),
        ({"momentum": 1.0}, "momentum: must be at least 0 and below 1; got 1.0"),
        ({"weight_decay": -1.0}, "weight_decay: must be at least 0; got -1.0"),
        ({"optimizer": "adam"}, "optimizer: must be one of 'sgd', 'adamw'; got 'adam'"),
        ({"warmup": -1}, "warmup: must be a number of epochs, at least 0; got -1"),
        ({"warmup": 1, "epochs": 1, "batches": iter(line())}, "warmup: 1 must know how many batches there are"),
        ({"distill": 2.0}, "distill: must be between 0 and 1; got 2.0"),
        ({"temperature": 0.0}, "temperature: must be above 0; got 0.0"),
        ({"autocast": torch.float16}, r"autocast: must be one of None, torch\.bfloat16; got torch\.float16"),
        ({"teacher": nn.Linear(4, 3)}, r"teacher: its outputs are \(16, 3\), those of the model \(16, 2\)"),
        ({"loss": lambda outputs, targets: F.cross_entropy(outputs, targets, reduction="none")}, r"loss: must .* got \(16,\)"),
        ({"loss": lambda outputs, targets: 1.0}, "loss: must return .* got float"),
        ({"cuda_graph": True}, "cuda_graph: is for one process with its model on a GPU; the model is on cpu"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ed.finetune(nn.Linear(4, 2), **{"batches": line(), "progress": False, **arguments})


def test_targets_that_are_missing_are_named() -> None:
    with pytest.raises(TypeError, match="batches: have no targets"):
        ed.finetune(nn.Linear(4, 2), [(torch.randn(2, 4), None)], progress=False)


def test_a_teacher_of_sequences_is_learned_from_by_classes_not_by_places() -> None:
    """Logits ``[texts, length, classes]``, as `measure` takes them."""
    x, model, teacher = torch.randn(8, 5, 4), nn.Linear(4, 3), nn.Linear(4, 3)
    again, flat = copy.deepcopy(model), [(x.flatten(0, 1), None)]
    (epoch,) = ed.finetune(model, [(x, None)], epochs=1, teacher=teacher, distill=1.0, progress=False)
    (same_epoch,) = ed.finetune(again, flat, epochs=1, teacher=teacher, distill=1.0, progress=False)
    assert epoch.loss == pytest.approx(same_epoch.loss, rel=1e-5) and torch.allclose(model.weight, again.weight)


def test_a_teacher_that_is_the_model_itself_is_refused() -> None:
    model = nn.Linear(4, 2)
    with pytest.raises(ValueError, match="teacher: is the model itself"):
        ed.finetune(model, line(), teacher=model)


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


# --- what is trained, and how -----------------------------------------------------------------------------------------------


def test_it_is_plain_sgd() -> None:
    model, batches = nn.Linear(4, 2), line()
    expected = copy.deepcopy(model)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    for inputs, targets in batches:
        optimizer.zero_grad()
        F.cross_entropy(expected(inputs), targets).backward()
        optimizer.step()
    ed.finetune(model, batches, epochs=1, learning_rate=0.1, weight_decay=0.01, progress=False)
    assert same(model, expected)


def test_adamw() -> None:
    model = nn.Linear(4, 2)
    history = ed.finetune(model, line(), epochs=20, learning_rate=0.05, optimizer="adamw", progress=False)
    assert history[-1].loss < history[0].loss / 2


@pytest.mark.parametrize("schedule", ["steps", "cosine"])
def test_the_warm_up_grows_to_the_schedule(schedule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.SGD.step
    monkeypatch.setattr(torch.optim.SGD, "step", lambda self: (rates.append(self.param_groups[0]["lr"]), step(self)))

    def run(warmup: float) -> list[float]:
        rates.clear()
        ed.finetune(nn.Linear(4, 2), line(), epochs=8, learning_rate=1.0, schedule=schedule, warmup=warmup, progress=False)
        return rates.copy()

    warm, cold = run(1.5), run(0)
    assert [a / b for a, b in zip(warm, cold, strict=True)] == pytest.approx([min(1, (i + 1) / 6) for i in range(32)])


def test_a_teacher_alone_needs_no_labels() -> None:
    teacher, model = nn.Linear(4, 3), nn.Linear(4, 3)
    inputs = [x for x, _ in line(256)]
    before = copy.deepcopy(teacher)
    history = ed.finetune(
        model,
        inputs,
        epochs=60,
        learning_rate=0.3,
        weight_decay=0.0,
        schedule="cosine",
        teacher=teacher,
        distill=1.0,
        forward=lambda model, batch: model(batch),
        progress=False,
    )
    assert history[-1].loss < 1e-4 < history[0].loss
    with torch.no_grad():
        agreed = torch.cat([model(x).softmax(1) - teacher(x).softmax(1) for x in inputs])
    assert agreed.abs().max() < 0.05
    assert same(teacher, before) and teacher.training and all(p.grad is None for p in teacher.parameters())


def test_the_share_of_the_teacher() -> None:
    teacher, model, (batch, *_) = nn.Linear(4, 2), nn.Linear(4, 2), line()

    def first_loss(share: float) -> float:
        student = copy.deepcopy(model)
        return ed.finetune(student, [batch], epochs=1, teacher=teacher, distill=share, temperature=3.0, progress=False)[0].loss

    ours, theirs = ((m(batch[0]).detach() / 3).softmax(1) for m in (model, teacher))
    divergence = float(9 * (theirs * (theirs / ours).log()).sum(1).mean())
    assert first_loss(0.0) == pytest.approx(float(F.cross_entropy(model(batch[0]).detach(), batch[1])), rel=1e-5)
    assert first_loss(1.0) == pytest.approx(divergence, rel=1e-4)
    assert first_loss(0.25) == pytest.approx(0.75 * first_loss(0.0) + 0.25 * first_loss(1.0), rel=1e-5)


def test_a_penalty_is_added() -> None:
    def weights(strength: float) -> float:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))
        penalty = None if not strength else lambda m: strength * m[1].weight.abs().sum()
        ed.finetune(model, line(), epochs=10, learning_rate=0.1, penalty=penalty, progress=False)
        return float(model[1].weight.detach().abs().sum())

    assert weights(0.1) < 0.7 * weights(0)


def test_mixed_precision_keeps_the_weights_in_theirs() -> None:
    seen: list[torch.dtype] = []
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    model[0].register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    history = ed.finetune(model, line(), epochs=10, learning_rate=0.1, autocast=torch.bfloat16, progress=False)
    assert set(seen) == {torch.bfloat16} and model[0].weight.dtype == torch.float32
    assert history[-1].loss < history[0].loss


def test_each_epoch_is_called_and_may_change_the_mode() -> None:
    seen = []
    model = nn.Sequential(nn.Linear(4, 2), nn.Dropout())
    modes: list[bool] = []
    model[1].register_forward_pre_hook(lambda module, args: modes.append(module.training))
    history = ed.finetune(
        model, line(), epochs=3, each_epoch=lambda epoch, model: seen.append((epoch, model.eval())), progress=False
    )
    assert [epoch for epoch, _ in seen] == history and all(modes) and model.training


# --- interrupted ------------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def dropping() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 2))


def shuffled(own_generator: bool) -> DataLoader:
    inputs, targets = (torch.cat(parts) for parts in zip(*line(), strict=True))
    generator = torch.Generator().manual_seed(5) if own_generator else None
    return DataLoader(TensorDataset(inputs, targets), 16, shuffle=True, generator=generator)


def stop_in(model: nn.Module, batch: int) -> None:
    """Interrupt the training in the middle of a batch."""
    count = 0

    def hook(module: nn.Module, args: object) -> None:
        nonlocal count
        count += module.training
        if count == batch:
            raise Stopped

    model.register_forward_pre_hook(hook)


@pytest.mark.parametrize("own_generator", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("batch", [2, 11])
def test_an_interrupted_training_comes_to_the_same_end(tmp_path: Path, optimizer: str, own_generator: bool, batch: int) -> None:
    settings = {"epochs": 5, "learning_rate": 0.05, "schedule": "cosine", "optimizer": optimizer, "progress": False}

    def start(path: Path, stop: int = 0) -> tuple[nn.Module, list]:
        torch.manual_seed(0)
        loader, model = shuffled(own_generator), dropping()
        if stop:
            stop_in(model, stop)
        return model, ed.finetune(model, loader, checkpoint=path, **settings)

    whole, history = start(tmp_path / "whole")
    with pytest.raises(Stopped):
        start(tmp_path / "checkpoint", batch)
    assert (tmp_path / "checkpoint").exists() == (batch > 4)
    again, continued = start(tmp_path / "checkpoint")
    assert same(whole, again) and continued == history
    finished, same_history = start(tmp_path / "checkpoint")
    assert same(whole, finished) and same_history == history
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint", "whole"]


def test_checkpoints_of_another_training_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint"
    ed.finetune(nn.Linear(4, 2), line(), epochs=1, checkpoint=path, progress=False)
    for arguments, message in (
        ({"epochs": 2}, "is of a training with epochs=1; this one has epochs=2"),
        ({"epochs": 1, "learning_rate": 1.0}, r"with learning_rate=0\.001; this one has learning_rate=1\.0"),
        ({"epochs": 1, "batches": line(32)}, "with batches=4; this one has batches=2"),
    ):
        with pytest.raises(ValueError, match=f"checkpoint: .*{message}"):
            ed.finetune(nn.Linear(4, 2), **{"batches": line(), "checkpoint": path, "progress": False, **arguments})
    for model in (nn.Linear(4, 3), nn.Linear(4, 2, bias=False)):
        with pytest.raises(ValueError, match=r"checkpoint: .* is of another model; they differ in"):
            ed.finetune(model, line(), epochs=1, checkpoint=path, progress=False)
    ed.save(nn.Linear(4, 2), path)
    with pytest.raises(ValueError, match="holds a model, not a training"):
        ed.finetune(nn.Linear(4, 2), line(), epochs=1, checkpoint=path, progress=False)


def test_a_checkpoint_of_a_training_with_a_teacher_needs_one(tmp_path: Path) -> None:
    path, teacher = tmp_path / "checkpoint", nn.Linear(4, 2)
    ed.finetune(nn.Linear(4, 2), line(), epochs=1, checkpoint=path, teacher=teacher, progress=False)
    with pytest.raises(ValueError, match=r"checkpoint: .* with distill=0.5; this one has distill=None"):
        ed.finetune(nn.Linear(4, 2), line(), epochs=1, checkpoint=path, progress=False)


def test_a_checkpoint_needs_its_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"checkpoint: there is no folder .*nowhere"):
        ed.finetune(nn.Linear(4, 2), line(), checkpoint=tmp_path / "nowhere" / "file")


# --- several processes ------------------------------------------------------------------------------------------------------

PROCESSES = 2


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4, momentum=None), nn.ReLU()]
    last = [nn.Flatten(), nn.Linear(16, 6), nn.BatchNorm1d(6, affine=False), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers, *last).double()


def shares(rank: int | None = None) -> list[tuple[Tensor, Tensor]]:
    """Batches of which each process has its part: of unequal sizes, and once nothing at all."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for size, cut in ((6, 3), (5, 2), (4, 4)):
        inputs = 3 + 2 * torch.randn(size, 2, 6, 6, generator=generator, dtype=torch.float64)
        targets = torch.randint(3, (size,), generator=generator)
        part = slice(None) if rank is None else slice(cut) if rank == 0 else slice(cut, None)
        found.append((inputs[part], targets[part]))
    return found


def trained(rank: int | None = None, folder: str = "") -> tuple[nn.Module, list]:
    model = convolutional()
    if rank:
        nn.init.zeros_(model[0].weight)  # the first process's weights are what counts
    return model, ed.finetune(
        model,
        shares(rank),
        epochs=4,
        learning_rate=0.1,
        penalty=lambda m: 0.01 * m[1].weight.abs().sum(),
        checkpoint=f"{folder}/checkpoint" if folder else None,
        progress=False,
    )


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    try:
        model, history = trained(rank, folder)
        ed.save(model, f"{folder}/{rank}")
        Path(folder, f"history-{rank}").write_text(repr(history))
    finally:
        dist.destroy_process_group()


def test_several_processes_come_to_the_weights_of_one(tmp_path: Path) -> None:
    mp.spawn(process, (str(tmp_path),), nprocs=PROCESSES)
    one, history = trained()
    first, second = (load_file(tmp_path / str(rank)) for rank in range(PROCESSES))
    for name, expected in one.state_dict().items():
        torch.testing.assert_close(first[name], expected, rtol=1e-9, atol=1e-9)
        assert torch.equal(first[name], second[name])
    losses = [float(text.split("loss=")[1].split(",")[0]) for text in (tmp_path / "history-1").read_text().split("Epoch")[1:]]
    assert losses == pytest.approx([epoch.loss for epoch in history])
    assert (tmp_path / "checkpoint").is_file()

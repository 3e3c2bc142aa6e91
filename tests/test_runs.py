"""A training in a folder: what it leaves there, interrupted and gone on with, refused where it is another."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch import Tensor, nn

import eigendamage as ed
from eigendamage.lab import runs
from eigendamage.lab.data import Data, Images
from eigendamage.lab.runs import Score, Training, evaluate, metrics_in, train

TRAINING = Training(epochs=4, batch_size=16, learning_rate=0.05, schedule="cosine", warmup=0.5, l1=1e-4, seed=3)


def images(count: int, seed: int) -> Images:
    """Three classes: which channel is bright."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 3
    pixels = torch.randint(0, 120, (count, 3, 8, 8), generator=generator, dtype=torch.uint8)
    pixels[torch.arange(count), labels] += 60
    return Images(pixels, labels, (0.3, 0.3, 0.3), (0.2, 0.2, 0.2), padding=1)


def data() -> Data:
    return Data("bright", 3, images(54, 0), images(31, 1))


def network(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    layers = [nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Dropout(0.1), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(6, 3))


def same(one: nn.Module, other: nn.Module) -> bool:
    return all(map(torch.equal, one.state_dict().values(), other.state_dict().values()))


def without_times(metrics: list[dict]) -> list[dict]:
    return [{key: value for key, value in line.items() if key != "seconds"} for line in metrics]


# --- what is left behind ----------------------------------------------------------------------------------------------------


def test_a_folder_has_the_configuration_the_metrics_and_the_model(tmp_path: Path) -> None:
    model, folder = network(), tmp_path / "new" / "run"
    state = torch.get_rng_state()
    metrics = train(model, data(), TRAINING, folder, progress=False)
    assert torch.equal(torch.get_rng_state(), state)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "metrics.jsonl", "model.safetensors"]
    assert same(ed.load(network(1), folder / "model.safetensors"), model)
    assert metrics == metrics_in(folder) and [line["epoch"] for line in metrics] == [1, 2, 3, 4]
    keys = {"epoch", "train_loss", "learning_rate", "test_accuracy", "test_loss", "seconds"}
    assert all(line.keys() == keys for line in metrics)
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    assert evaluate(model, data().test) == Score(metrics[-1]["test_accuracy"], metrics[-1]["test_loss"])
    config = json.loads((folder / "config.json").read_text())
    assert Training(**config["training"]) == TRAINING
    assert config["data"] == {"name": "bright", "classes": 3, "train": 54, "test": 31}
    assert config["made with"].keys() == {"eigendamage", "torch", "python", "processes", "device", "command"}


def test_training_is_plain_data() -> None:
    assert Training(**json.loads(json.dumps(asdict(TRAINING)))) == TRAINING


def test_the_defaults_are_the_paper_s_fine_tuning() -> None:
    paper = {"epochs": 150, "batch_size": 128, "learning_rate": 1e-3, "momentum": 0.9, "weight_decay": 1e-4}
    assert {key: value for key, value in asdict(Training()).items() if key in paper} == paper
    assert Training().schedule == "steps"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"epochs": -1}, "epochs: must be at least 0"),
        ({"batch_size": 0}, "batch_size: must be at least 1"),
        ({"learning_rate": 0.0}, "learning_rate: must be above 0"),
        ({"l1": -0.1}, "l1: must be at least 0"),
        ({"schedule": "linear"}, "schedule: must be one of"),
        ({"optimizer": "adam"}, "optimizer: must be one of"),
        ({"precision": "float16"}, "precision: must be one of 'float32', 'bfloat16'; got 'float16'"),
        ({"distill": 1.5}, "distill: must be between 0 and 1"),
        ({"seed": -1}, "seed: must be at least 0"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Training(**arguments)


# --- scores -----------------------------------------------------------------------------------------------------------------


class Lookup(nn.Module):
    """Says what the brightest channel says."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x.mean((2, 3))


def test_scores() -> None:
    test, model = images(31, 1), Lookup()
    inputs, labels = next(iter(test.batches(31)))
    outputs = model(inputs).detach()
    score = evaluate(model, test, batch_size=7)
    assert score.accuracy == pytest.approx(float((outputs.argmax(1) == labels).double().mean())) and score.accuracy > 0.9
    assert score.loss == pytest.approx(float(nn.functional.cross_entropy(outputs, labels)), rel=1e-5)
    wrong = Images(test.pixels, (test.labels + 1) % 3, test.mean, test.std)
    assert evaluate(model, wrong).accuracy < 0.1


def test_evaluating_leaves_the_mode_as_it_was() -> None:
    model = network()
    model[3].eval()
    evaluate(model, images(4, 0), precision="bfloat16", channels_last=True)
    assert model.training and not model[3].training and model[1].num_batches_tracked == 0


# --- interrupted ------------------------------------------------------------------------------------------------------------


class Stopped(Exception):
    pass


def stopped_in(batch: int) -> nn.Module:
    """A network that fails in the middle of training."""
    model, count = network(), 0

    def hook(module: nn.Module, args: object) -> None:
        nonlocal count
        count += module.training
        if count == batch:
            raise Stopped

    model.register_forward_pre_hook(hook)
    return model


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, list[dict]]:
    model = network()
    return model, train(model, data(), TRAINING, tmp_path_factory.mktemp("whole"), progress=False)


@pytest.mark.parametrize("batch", [1, 3, 6, 16])
def test_a_run_stopped_in_the_middle_of_an_epoch_comes_to_the_same_end(
    tmp_path: Path, whole: tuple[nn.Module, list[dict]], batch: int
) -> None:
    with pytest.raises(Stopped):
        train(stopped_in(batch), data(), TRAINING, tmp_path, progress=False)
    assert not (tmp_path / "model.safetensors").exists()
    (tmp_path / ".0123456789abcdef.tmp").touch()  # as a process leaves that is killed while it writes
    assert len(metrics_in(tmp_path)) == (batch - 1) // 4
    torch.manual_seed(99)
    model = network()
    metrics = train(model, data(), TRAINING, tmp_path, progress=False)
    assert same(model, whole[0]) and without_times(metrics) == without_times(whole[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "metrics.jsonl", "model.safetensors"]


@pytest.mark.parametrize("function", ["finetune.checkpoints.write", "lab.runs.save"])
def test_a_run_stopped_between_its_files_comes_to_the_same_end(
    tmp_path: Path, whole: tuple[nn.Module, list[dict]], function: str
) -> None:
    """After a line of metrics before its checkpoint, or after the last epoch before the model is written."""

    def stop(*args: object) -> None:
        raise Stopped

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Stopped):
        target = runs if function.endswith("save") else __import__("eigendamage.checkpoints", fromlist=["write"])
        patch.setattr(target, function.rpartition(".")[2], stop)
        train(network(), data(), TRAINING, tmp_path, progress=False)
    model = network()
    metrics = train(model, data(), TRAINING, tmp_path, progress=False)
    assert same(model, whole[0]) and without_times(metrics) == without_times(whole[1])
    assert not (tmp_path / "checkpoint.safetensors").exists()


def test_a_finished_run_gives_its_weights_at_once(tmp_path: Path, whole: tuple[nn.Module, list[dict]]) -> None:
    first = train(network(), data(), TRAINING, tmp_path, progress=False)
    again = stopped_in(1)
    assert train(again, data(), TRAINING, tmp_path, progress=False) == first
    assert same(again, whole[0])


def test_beginning_anew(tmp_path: Path, whole: tuple[nn.Module, list[dict]]) -> None:
    train(network(), data(), replace(TRAINING, epochs=1), tmp_path, progress=False)
    model = network()
    metrics = train(model, data(), TRAINING, tmp_path, resume=False, progress=False)
    assert same(model, whole[0]) and without_times(metrics) == without_times(whole[1])


def test_a_folder_of_another_training_is_refused(tmp_path: Path) -> None:
    train(network(), data(), replace(TRAINING, epochs=1), tmp_path, progress=False)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    other = replace(TRAINING, epochs=2, learning_rate=0.1)
    with pytest.raises(ValueError, match=r"holds another training: training\.epochs is 1 there and 2 here; training\.learning"):
        train(network(), data(), other, tmp_path, progress=False)
    fewer = Data("bright", 3, data().train.subset(20), data().test)
    with pytest.raises(ValueError, match=r"data\.train is 54 there and 20 here"):
        train(network(), fewer, replace(TRAINING, epochs=1), tmp_path, progress=False)
    wider = nn.Sequential(nn.Flatten(), nn.Linear(192, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    with pytest.raises(ValueError, match=r"parameters is 201 there and \d+ here"):
        train(wider, data(), replace(TRAINING, epochs=1), tmp_path, progress=False)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_of_something_else_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "model.safetensors").write_text("mine")
    with pytest.raises(ValueError, match=r"has a model\.safetensors but no config\.json, so it is no run's folder"):
        train(network(), data(), TRAINING, tmp_path, resume=resume, progress=False)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["mine"]


# --- what it is trained with ------------------------------------------------------------------------------------------------


def test_mixed_precision_and_channels_last(tmp_path: Path) -> None:
    model = network()
    training = replace(TRAINING, precision="bfloat16", channels_last=True, l1=0.0)
    metrics = train(model, data(), training, tmp_path, progress=False)
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    assert model[0].weight.is_contiguous(memory_format=torch.channels_last) and model[0].weight.dtype == torch.float32


def test_a_teacher_and_its_share_go_together(tmp_path: Path) -> None:
    teacher = network(1)
    with pytest.raises(ValueError, match="teacher: goes with a distill above 0, which is 0"):
        train(network(), data(), TRAINING, tmp_path, teacher=teacher)
    training = replace(TRAINING, distill=0.5)
    with pytest.raises(ValueError, match=r"teacher: goes with a distill above 0, which is 0\.5"):
        train(network(), data(), training, tmp_path)
    assert list(tmp_path.iterdir()) == []
    with_teacher, alone = network(), network()
    train(with_teacher, data(), training, tmp_path / "taught", teacher=teacher, progress=False)
    train(alone, data(), TRAINING, tmp_path / "alone", progress=False)
    assert not same(with_teacher, alone)


def test_l1_needs_batch_norm(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="l1: is on the scales of batch norm, and the model has none"):
        train(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), data(), TRAINING, tmp_path, progress=False)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_on_an_accelerator(tmp_path: Path) -> None:
    model, here = network().cuda(), data()
    for ours, theirs in zip(
        here.train.batches(8, shuffle=True, augment=True),
        here.to("cuda").train.batches(8, shuffle=True, augment=True),
        strict=True,
    ):
        torch.testing.assert_close(theirs[0].cpu(), ours[0])
        assert theirs[0].is_cuda and torch.equal(theirs[1].cpu(), ours[1])
    training = replace(TRAINING, precision="bfloat16", channels_last=True)
    state = torch.cuda.get_rng_state()
    metrics = train(model, here, training, tmp_path, progress=False)
    assert torch.equal(torch.cuda.get_rng_state(), state)
    assert metrics[-1]["train_loss"] < metrics[0]["train_loss"]
    again = network(1).cuda()
    assert train(again, here, training, tmp_path, progress=False) == metrics and same(model, again)


# --- several processes ------------------------------------------------------------------------------------------------------

PROCESSES = 2
TOGETHER = replace(TRAINING, epochs=2, channels_last=True)


def still() -> nn.Module:
    """Without dropout, which draws other numbers in every process."""
    return nn.Sequential(*(module for module in network() if not isinstance(module, nn.Dropout)))


def process(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=PROCESSES)
    try:
        model = still()
        metrics = train(model, data(), TOGETHER, f"{folder}/run", progress=False)
        ed.save(model, f"{folder}/{rank}")
        Path(folder, f"metrics-{rank}").write_text(json.dumps([metrics, asdict(evaluate(model, data().test))]))
    finally:
        dist.destroy_process_group()


def test_several_processes_come_to_the_end_of_one(tmp_path: Path) -> None:
    mp.spawn(process, (str(tmp_path),), nprocs=PROCESSES)
    model = still()
    metrics = train(model, data(), TOGETHER, tmp_path / "alone", progress=False)
    score = asdict(evaluate(model, data().test))
    for rank in range(PROCESSES):
        for name, tensor in load_file(tmp_path / str(rank)).items():
            torch.testing.assert_close(tensor, model.state_dict()[name], rtol=1e-4, atol=1e-5)
        lines, together = json.loads((tmp_path / f"metrics-{rank}").read_text())
        for line, expected in zip(without_times(lines), without_times(metrics), strict=True):
            assert line == pytest.approx(expected, rel=1e-4)
        assert together == pytest.approx(score, rel=1e-4)
    assert len(metrics_in(tmp_path / "run")) == 2

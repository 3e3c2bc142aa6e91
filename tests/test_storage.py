"""What is saved comes back bit for bit, on a freshly built model, in another process; anything else is a clear error."""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import eigendamage as ed
from eigendamage import files
from eigendamage.storage import load, save

DENSE = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.act = nn.PReLU(width)
        self.conv2 = nn.Conv2d(width, width, 3, padding="same", padding_mode="circular")
        self.bn2 = nn.BatchNorm2d(width, momentum=None)
        self.shortcut = nn.Sequential()

    def forward(self, x):
        y = self.act(self.bn1(self.conv1(x)))
        return self.bn2(self.conv2(y)) + self.shortcut(x)

class Net(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, stride=(2, 1), bias=False)
        self.norm = nn.InstanceNorm2d(width, affine=True, track_running_stats=True)
        self.body = nn.Sequential(Block(width), Block(width))
        self.again = self.body[0].conv2  # one module under two names
        self.up = nn.ConvTranspose2d(width, width, 3, stride=2, output_padding=1)
        self.fc1 = nn.Linear(width, 6)
        self.fc2 = nn.Linear(6, 6)
        self.fc3 = nn.Linear(6, 6)
        self.fc3.weight = self.fc2.weight  # one tensor in two modules
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def forward(self, x):
        x = self.up(self.again(self.body(self.norm(self.stem(x)))))
        return self.fc3(self.fc2(self.fc1(x.mean((2, 3))))) * self.scale
"""
namespace: dict[str, type[nn.Module]] = {"__name__": "dense"}
exec(DENSE, namespace)
Net = namespace["Net"]


def stages(**children: nn.Module) -> nn.Sequential:
    return nn.Sequential(OrderedDict(children))


def compressed(dense: nn.Module | None = None) -> nn.Module:
    """What compression can make of a `Net`: stages, sliced channels, depthwise, a shared module replaced under both names."""
    torch.manual_seed(0)
    net = copy.deepcopy(dense or Net())
    first, second = net.body
    net.stem = stages(core=nn.Conv2d(3, 4, 3, stride=(2, 1), bias=False), rotate_out=nn.Conv2d(4, 8, 1))
    net.norm = nn.InstanceNorm2d(8, affine=True, track_running_stats=True)
    core = nn.Conv2d(3, 2, 3, padding="same", padding_mode="circular")
    first.conv2 = net.again = stages(rotate_in=nn.Conv2d(8, 3, 1, bias=False), core=core, rotate_out=nn.Conv2d(2, 8, 1))
    first.conv1 = nn.Conv2d(8, 8, 3, padding=1, groups=8)
    second.conv1 = nn.Conv2d(8, 5, 3, padding=1, bias=False)
    second.bn1, second.act = nn.BatchNorm2d(5), nn.PReLU(5)
    second.conv2 = nn.Conv2d(5, 8, 3, padding="same", padding_mode="circular")
    up = nn.ConvTranspose2d(3, 3, 3, stride=2, output_padding=1, groups=3, bias=False)
    net.up = stages(rotate_in=nn.Conv2d(8, 3, 1), core=up, rotate_out=nn.Conv2d(3, 8, 1))
    twice = stages(rotate_in=nn.Linear(3, 1), rotate_out=nn.Linear(1, 6))
    net.fc1 = stages(rotate_in=nn.Linear(8, 2, bias=False), core=nn.Linear(2, 3), rotate_out=twice)
    with torch.no_grad():
        for tensor in net.state_dict().values():
            tensor.add_(torch.ones_like(tensor))
    return net


def same(one: nn.Module, other: nn.Module) -> bool:
    left, right = one.state_dict(), other.state_dict()
    return list(left) == list(right) and all(identical(left[name], right[name]) for name in left)


def identical(one: Tensor, other: Tensor) -> bool:
    as_bytes = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*as_bytes)


def structure(model: nn.Module) -> dict[str, str]:
    return {name: f"{type(m).__name__} {m.extra_repr()}" for name, m in model.named_modules(remove_duplicate=False)}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "small.safetensors"


# --- models come back -------------------------------------------------------------------------------------------------------


def test_structure_values_and_sharing_come_back_and_the_dense_model_stays(path: Path) -> None:
    small, fresh = compressed(), Net().eval()
    before = copy.deepcopy(fresh)
    save(small, path)
    loaded = load(fresh, path)
    assert same(loaded, small) and structure(loaded) == structure(small)
    assert loaded.again is loaded.body[0].conv2 and loaded.fc3.weight is loaded.fc2.weight
    assert not any(module.training for module in loaded.modules())
    assert same(fresh, before) and structure(fresh) == structure(before)
    theirs = {p.data_ptr() for p in fresh.parameters()}
    assert not theirs & {p.data_ptr() for p in loaded.parameters()}


def test_loading_draws_no_random_numbers(path: Path) -> None:
    save(compressed(), path)
    fresh, state = Net(), torch.get_rng_state()
    load(fresh, path)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("make", [Net, compressed])
def test_the_file_loads_onto_what_is_compressed_already(path: Path, make: type[nn.Module]) -> None:
    small = compressed()
    save(small, path)
    assert same(load(make(), path), small)
    refined = copy.deepcopy(small)
    refined.fc1 = nn.Linear(8, 6)  # stages merged back into one layer
    save(refined, path)
    assert same(load(small, path), refined)


def test_another_process_needs_only_the_dense_model_and_unpickles_nothing(path: Path) -> None:
    small = compressed().eval()
    inputs = torch.randn(2, 3, 9, 9)
    save(small, path)
    files.write(path.with_name("expected"), {"inputs": inputs, "outputs": small(inputs)}, {}, "example")
    check = f"""{DENSE}
import pickle
import eigendamage as ed
from eigendamage import files
from eigendamage.storage import load

def forbidden(*args, **kwargs):
    raise AssertionError("unpickled")

pickle.load = pickle.loads = pickle.Unpickler = torch.load = forbidden
loaded = load(Net().eval(), {str(path)!r})
example, _ = files.read({str(path.with_name("expected"))!r}, "example")
assert torch.equal(loaded(example["inputs"]), example["outputs"])
"""
    subprocess.run([sys.executable, "-c", check], check=True, env=os.environ, timeout=120)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_dtypes_are_those_of_the_file(path: Path, dtype: torch.dtype) -> None:
    small = compressed().to(dtype)
    save(small, path)
    loaded = load(Net(), path)
    assert same(loaded, small)
    assert loaded.scale.dtype == dtype and loaded.fc3.weight is loaded.fc2.weight


def test_special_values_keep_their_bits(path: Path) -> None:
    small = compressed()
    with torch.no_grad():
        small.fc2.weight[0, :4] = torch.tensor([float("nan"), float("inf"), -0.0, 1e-45])
    save(small, path)
    assert same(load(Net(), path), small)


def test_strided_empty_and_scalar_tensors(path: Path) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(6, 4)
            self.transposed = nn.Parameter(whole.T)
            self.register_buffer("part", whole[1:3])  # overlaps with the parameter without being the same tensor
            self.register_buffer("expanded", torch.ones(1).expand(3))
            self.register_buffer("empty", torch.empty(0, 3, dtype=torch.int64))
            self.register_buffer("mask", torch.tensor([True, False]))
            self.register_buffer("steps", torch.tensor(7))

    odd = Odd()
    save(odd, path)
    fresh = Odd()
    fresh.expanded = torch.zeros(3)
    assert same(load(fresh, path), odd)


def test_what_was_frozen_stays_frozen_and_gradients_are_not_stored(path: Path) -> None:
    small, fresh = compressed(), Net()
    small.fc1.requires_grad_(False)
    fresh.stem.requires_grad_(False)
    fresh.fc2(torch.ones(6)).sum().backward()
    save(small, path)
    loaded = load(fresh, path)
    assert {n for n, p in loaded.named_parameters() if not p.requires_grad} == {n for n, _ in small.fc1.named_parameters("fc1")}
    assert all(p.grad is None for p in loaded.parameters()) and fresh.fc2.weight.grad is not None


def test_stages_answer_for_the_layer_with_its_new_widths(path: Path) -> None:
    save(nn.Sequential(stages(rotate_in=nn.Conv2d(6, 2, 1), core=nn.Conv2d(2, 7, 3, stride=2))), path)
    loaded = load(nn.Sequential(nn.Conv2d(8, 9, 3, stride=2)), path)[0]
    assert (loaded.in_channels, loaded.out_channels, loaded.stride, loaded.kernel_size) == (6, 7, (2, 2), (3, 3))


@pytest.mark.parametrize("norm", [nn.SyncBatchNorm, nn.InstanceNorm2d])
@pytest.mark.parametrize("arguments", [{}, {"affine": True}, {"affine": False, "track_running_stats": False}])
def test_norms_with_fewer_channels(path: Path, norm: type[nn.Module], arguments: dict[str, bool]) -> None:
    small = nn.Sequential(norm(3, **arguments))
    save(small, path)
    loaded = load(nn.Sequential(norm(8, **arguments)), path)
    assert same(loaded, small) and structure(loaded) == structure(small)


def test_a_model_that_is_a_single_layer(path: Path) -> None:
    small = stages(rotate_in=nn.Conv1d(4, 2, 1, bias=False), core=nn.Conv1d(2, 5, 3, padding=1))
    save(small, path)
    loaded = load(nn.Conv1d(4, 5, 3, padding=1), path)
    assert same(loaded, small) and structure(loaded) == structure(small)


def test_parametrised_and_normed_layers_go_through_the_state(path: Path) -> None:
    def make() -> nn.Sequential:
        return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.LayerNorm(4), nn.LSTM(4, 3))

    original = make()
    save(original, path)
    assert same(load(make(), path), original)


def test_hugging_face_conv1d_replaced_and_left(path: Path) -> None:
    conv1d = pytest.importorskip("transformers.pytorch_utils").Conv1D

    def make() -> nn.ModuleDict:
        return nn.ModuleDict({name: conv1d(6, 4) for name in "abcd"})

    small = make()
    small["a"], small["b"] = nn.Linear(4, 5), stages(rotate_in=nn.Linear(4, 2), rotate_out=nn.Linear(2, 6))
    small["c"] = conv1d(3, 2)
    save(small, path)
    loaded = load(make(), path)
    assert same(loaded, small) and structure(loaded) == structure(small)
    with pytest.raises(ValueError, match="c is Linear"):
        load(nn.ModuleDict({name: nn.Linear(4, 6) for name in "abcd"}), path)


def test_numbers_of_numpy_as_arguments(path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    small = nn.Sequential(nn.Linear(4, numpy.int64(3)), nn.BatchNorm1d(numpy.int64(3), eps=torch.tensor(0.5)))
    save(small, path)
    loaded = load(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)), path)
    assert same(loaded, small) and loaded[1].eps == 0.5


# --- models that do not match -----------------------------------------------------------------------------------------------


def changed(name: str, module: nn.Module) -> nn.Module:
    net = Net()
    parent, _, child = name.rpartition(".")
    net.get_submodule(parent).register_module(child, module)
    return net


@pytest.mark.parametrize(
    ("other", "named"),
    [
        (nn.Linear(3, 3), "stem"),
        (changed("stem", nn.LayerNorm(8)), "stem"),
        (changed("stem", nn.Conv1d(3, 8, 3)), "stem"),
        (changed("stem", nn.Conv2d(2, 8, 3)), "stem"),
        (changed("body.0.conv1", nn.Conv2d(8, 8, 3, stride=2)), "body.0.conv1"),
        (changed("body.1.bn1", nn.BatchNorm2d(4)), "body.1.bn1"),
        (changed("body.1.act", nn.ReLU()), "body.1.act"),
        (changed("body.0.shortcut", nn.Sequential(nn.Conv2d(8, 8, 1))), "body.0.shortcut"),
        (changed("body", nn.Sequential(*Net().body, *Net().body)), "body"),
        (changed("body.1", nn.Identity()), "body.1.conv1"),
        (changed("fc1", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 6))), "fc1"),
        (changed("extra", nn.Linear(2, 2)), "extra"),
        (changed("extra", nn.InstanceNorm2d(2)), "extra"),
        (changed("extra", nn.LayerNorm(2)), "extra.weight"),
        (changed("fc2", nn.Linear(6, 5)), "fc2"),
        (Net(width=4), "stem"),
    ],
)
def test_a_file_of_another_model_is_refused(path: Path, other: nn.Module, named: str) -> None:
    before = copy.deepcopy(other)
    save(compressed(), path)
    with pytest.raises(ValueError, match=f"{path} belongs to another model: .*{named}"):
        load(other, path)
    assert same(other, before) and structure(other) == structure(before)


@pytest.mark.parametrize("arguments", [{"stride": 2, "padding": 1}, {"padding": 2}, {"padding": 1, "padding_mode": "circular"}])
def test_stages_do_not_fit_a_layer_that_walks_otherwise(path: Path, arguments: dict[str, Any]) -> None:
    model, inputs = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)), torch.randn(4, 3, 6, 6)
    forward = {"forward": lambda net, batch: net(batch[0]).mean((2, 3)), "progress": False}
    curvature = ed.measure(model, [(inputs, None)], **forward)
    ed.save(ed.apply(model, ed.plan(model, curvature, macs=0.5), curvature), path)
    assert isinstance(ed.load(copy.deepcopy(model), path)[1], nn.Sequential)
    with pytest.raises(ValueError, match="1 is Conv2d"):
        ed.load(nn.Sequential(model[0], nn.Conv2d(8, 8, 3, **arguments)), path)


def test_missing_state_and_shapes_of_unrecorded_modules_are_named(path: Path) -> None:
    save(nn.ModuleDict({"a": nn.LayerNorm(3), "b": nn.LayerNorm(3)}), path)
    with pytest.raises(ValueError, match=r"the model lacks b\.bias, b\.weight"):
        load(nn.ModuleDict({"a": nn.LayerNorm(3)}), path)
    with pytest.raises(ValueError, match=r"a\.weight \(\[4\], in the file \[3\]\)"):
        load(nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.LayerNorm(3)}), path)


def test_a_users_sequential_is_no_replacement_for_a_layer(path: Path) -> None:
    save(nn.ModuleDict({"a": nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))}), path)
    with pytest.raises(ValueError, match="a is Linear"):
        load(nn.ModuleDict({"a": nn.Linear(4, 4)}), path)


def test_a_tie_that_the_file_does_not_have(path: Path) -> None:
    untied = compressed()
    untied.fc3.weight = nn.Parameter(untied.fc2.weight.detach().clone())
    save(untied, path)
    assert same(load(Net(), path), untied)  # the same values: nothing is lost
    with torch.no_grad():
        untied.fc3.weight.add_(1)
    save(untied, path)
    with pytest.raises(ValueError, match=r"fc2\.weight and fc3\.weight"):
        load(Net(), path)


class WithExtra(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: object) -> None:
        raise AssertionError


def test_what_cannot_be_stored_is_named(path: Path) -> None:
    with pytest.raises(TypeError, match=r"0\._extra_state .* dict"):
        save(nn.Sequential(WithExtra(2, 2)), path)
    with pytest.raises(ValueError, match="weight is on the meta device"):
        save(nn.Linear(2, 2, device="meta"), path)
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet"):
        save(nn.Sequential(nn.LazyConv2d(2, 2)), path)
    with pytest.raises(TypeError, match="model"):
        save(nn.Linear(2, 2).state_dict(), path)  # type: ignore[arg-type]
    sparse = nn.Module()
    sparse.register_buffer("mask", torch.eye(3).to_sparse())
    with pytest.raises(TypeError, match=r"mask .*sparse"):
        save(sparse, path)
    with pytest.raises(TypeError, match="complex128"):
        save(nn.Linear(2, 2, dtype=torch.complex128), path)
    assert not list(path.parent.iterdir())


# --- files ------------------------------------------------------------------------------------------------------------------

EXAMPLE = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "steps": torch.tensor(3),
    "mask": torch.tensor([True]),
    "e": torch.ones(0, 2),
}
CONTENT = {"rank": 3, "name": "é", "list": [1.5, None]}


def written(folder: Path) -> Path:
    files.write(folder / "example", EXAMPLE, CONTENT, "curvature")
    return folder / "example"


def read_back(path: Path) -> bool:
    tensors, content = files.read(path, "curvature")
    return content == CONTENT and tensors.keys() == EXAMPLE.keys() and all(identical(tensors[n], EXAMPLE[n]) for n in EXAMPLE)


def test_files_come_back_and_others_can_read_them(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert read_back(path)
    assert safetensors.torch.load_file(path).keys() == EXAMPLE.keys()
    plain = tmp_path / "plain"
    plain.touch()
    assert path.stat().st_mode == plain.stat().st_mode


def test_all_types(path: Path) -> None:
    names = "float64 float32 float16 bfloat16 float8_e4m3fn complex64 int64 int32 int16 int8 uint8 uint16 bool"
    tensors = {name: torch.tensor([0, 1, 1]).to(getattr(torch, name)) for name in names.split()}
    files.write(path, tensors, {}, "all")
    back, _ = files.read(path, "all")
    assert back.keys() == tensors.keys() and all(identical(back[name], tensors[name]) for name in tensors)


def test_a_truncated_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=str(path)):
            files.read(path, "curvature")
    path.write_bytes(whole + b"\0")
    with pytest.raises(ValueError, match=str(path)):
        files.read(path, "curvature")


def test_every_byte_counts(tmp_path: Path) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    numbers = random.Random(0)
    for position in range(len(whole)):
        for flip in (1 << numbers.randrange(8), numbers.randrange(1, 256)):
            check_damaged(path, whole, {position: flip})


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(data=st.data())
def test_damage_is_never_silent(tmp_path: Path, data: st.DataObject) -> None:
    path = written(tmp_path)
    whole = path.read_bytes()
    check_damaged(path, whole, data.draw(st.dictionaries(st.integers(0, len(whole) - 1), st.integers(1, 255), min_size=1)))


def check_damaged(path: Path, whole: bytes, flips: dict[int, int]) -> None:
    damaged = bytearray(whole)
    for position, flip in flips.items():
        damaged[position] ^= flip
    path.write_bytes(damaged)
    try:
        assert read_back(path), f"silently different after {flips}"  # white space in the header may change
    except ValueError as error:
        assert str(path) in str(error)


def test_other_files(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(FileNotFoundError, match=str(path)):
        files.read(path, "model")
    for content in (b"", b"text", pickle.dumps({}), bytes(1000)):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"{path} is not a safetensors file"):
            files.read(path, "model")
    for metadata in (None, {"format": "pt"}):
        safetensors.torch.save_file({"a": torch.ones(2)}, path, metadata)
        with pytest.raises(ValueError, match=f"{path} was not written by eigendamage"):
            files.read(path, "model")
    safetensors.torch.save_file({"a": torch.ones(2)}, path, {"eigendamage": "2"})
    with pytest.raises(ValueError, match=f"{path} has format 2; .* up to 1"):
        files.read(path, "model")
    with pytest.raises(ValueError, match="holds a curvature, not a model"):
        load(Net(), written(tmp_path))


def test_the_folder_must_exist(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"there is no folder {tmp_path / 'none'}"):
        save(Net(), tmp_path / "none" / "file")


def test_content_must_be_json(path: Path) -> None:
    with pytest.raises(TypeError, match="JSON"):
        files.write(path, {}, {"a": torch.ones(1)}, "model")
    assert not path.exists()


@pytest.mark.parametrize("where", ["eigendamage.files.save_file", "os.fsync", "os.replace"])
@pytest.mark.parametrize("failure", [OSError("disk full"), KeyboardInterrupt()])
def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, failure: BaseException
) -> None:
    path = written(tmp_path)

    def fail(*args: object) -> None:
        raise failure

    monkeypatch.setattr(where, fail)
    with pytest.raises(type(failure)):
        files.write(path, {}, {}, "model")
    monkeypatch.undo()
    assert read_back(path) and list(tmp_path.iterdir()) == [path]


def test_a_link_is_followed(tmp_path: Path) -> None:
    path, link = written(tmp_path), tmp_path / "latest"
    link.symlink_to(path)
    files.write(str(link), {}, {"new": True}, "model")
    assert link.is_symlink() and files.read(path, "model") == ({}, {"new": True})


def test_what_was_read_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = written(tmp_path)
    tensors, _ = files.read(path, "curvature")
    with open(path, "rb+") as file:
        file.write(bytes(path.stat().st_size))
    assert identical(tensors["weight"], EXAMPLE["weight"])


def test_the_metadata_is_plain_json(tmp_path: Path) -> None:
    with safetensors.safe_open(written(tmp_path), "pt") as file:
        assert json.loads(file.metadata()["content"]) == CONTENT

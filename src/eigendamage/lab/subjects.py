"""What runs are about: a data set and networks of the lab, or a user's own, named as ``package.module:function``."""

from __future__ import annotations

import importlib
import json
import os
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from eigendamage.batches import detached, last_examples, outputs_of, pair
from eigendamage.checks import require_batches
from eigendamage.files import write_text
from eigendamage.finetune import Epoch, finetune
from eigendamage.lab.data import Data, Images, load_data
from eigendamage.lab.folders import CHECKPOINT, METRICS, MODEL, metrics_in
from eigendamage.lab.networks import build
from eigendamage.lab.runs import PRECISIONS, Score, Training, evaluate, penalty_of, train
from eigendamage.labels import cross_entropy
from eigendamage.passes import evaluating
from eigendamage.storage import load, save

# Statistics and times are of batches of this size.
BATCH = 128
FUNCTION = "package.module:function"
EMPTY = "data: a loader is empty"


class Subject(ABC):
    """A data set as runs use it."""

    classes: int

    @abstractmethod
    def statistics(self, examples: int | None, seed: int) -> Iterable[Any]:
        """Batches of training examples to measure on, drawn by ``seed``."""

    @abstractmethod
    def test(self, model: nn.Module, training: Training) -> Score: ...

    @abstractmethod
    def judged(self, model: nn.Module, examples: int, measured: int | None, training: Training, seed: int) -> Score:
        """On so many training examples as they are; of a data set that has enough, on none that `statistics` draws.

        Those are ``measured`` examples, drawn by the same ``seed``.
        """

    @abstractmethod
    def inputs(self) -> Tensor:
        """A batch of test examples."""

    @abstractmethod
    def tune(
        self, model: nn.Module, training: Training, folder: Path, teacher: nn.Module | None, progress: bool
    ) -> list[dict[str, Any]]:
        """Train in place, resumable in ``folder``, which then has the model; the metrics of the epochs."""


class Prepared(Subject):
    """A data set of the lab."""

    def __init__(self, data: Data) -> None:
        self.data, self.classes = data, data.classes

    def statistics(self, examples: int | None, seed: int) -> Iterable[Any]:
        return part_of(self.data.train, examples, seed).batches(BATCH)

    def test(self, model: nn.Module, training: Training) -> Score:
        return evaluate(model, self.data.test, precision=training.precision, channels_last=training.channels_last)

    def judged(self, model: nn.Module, examples: int, measured: int | None, training: Training, seed: int) -> Score:
        # From the other end of the order than those that were measured.
        images = part_of(self.data.train, examples, seed, last=True)
        return evaluate(model, images, precision=training.precision, channels_last=training.channels_last)

    def inputs(self) -> Tensor:
        inputs, _ = next(iter(part_of(self.data.test, BATCH, 0).batches(BATCH)))
        return inputs

    def tune(
        self, model: nn.Module, training: Training, folder: Path, teacher: nn.Module | None, progress: bool
    ) -> list[dict[str, Any]]:
        return train(model, self.data, training, folder, teacher=teacher, progress=progress)


def part_of(images: Images, examples: int | None, seed: int, last: bool = False) -> Images:
    """So many of the images in an order drawn by ``seed``, from its beginning or its end."""
    if examples is None or examples >= len(images):
        return images
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed))
    return images.subset(order[-examples:] if last else order[:examples])


class Loaders(Subject):
    """A user's own batches, to train and to test on: two iterables of pairs ``(inputs, labels)``."""

    classes = 0  # only the user's own model knows

    def __init__(self, training: Iterable[Any], testing: Iterable[Any], device: str) -> None:
        self.training, self.testing, self.device = training, testing, device

    def statistics(self, examples: int | None, seed: int) -> Iterable[Any]:
        with self._order(seed):
            return [self._moved(batch) for batch in detached(self.training, examples)]

    def test(self, model: nn.Module, training: Training) -> Score:
        return self._score(model, self.testing, training)

    def judged(self, model: nn.Module, examples: int, measured: int | None, training: Training, seed: int) -> Score:
        with self._order(seed):
            passed = detached(self.training, None if measured is None else measured + examples)
            batches = last_examples(passed, examples)
        return self._score(model, batches, training)

    def inputs(self) -> Tensor:
        batch = next(iter(self.testing), None)
        if batch is None:
            raise ValueError(EMPTY)
        inputs, _ = pair(self._moved(batch))
        if not isinstance(inputs, Tensor):
            raise TypeError(f"data: inputs must be tensors; got {type(inputs).__name__}")
        return inputs[:BATCH]

    def tune(
        self, model: nn.Module, training: Training, folder: Path, teacher: nn.Module | None, progress: bool
    ) -> list[dict[str, Any]]:
        if (folder / MODEL).is_file():
            model.load_state_dict(load(model, folder / MODEL).state_dict())
            return metrics_in(folder)
        folder.mkdir(parents=True, exist_ok=True)

        def note(epoch: Epoch, model: nn.Module) -> None:
            score = self.test(model, training)
            line = {"epoch": epoch.number, "train_loss": epoch.loss, "learning_rate": epoch.learning_rate}
            line |= {"test_accuracy": score.accuracy, "test_loss": score.loss}
            before = metrics_in(folder)[: epoch.number - 1]
            write_text(folder / METRICS, "".join(json.dumps(entry) + "\n" for entry in [*before, line]))

        with torch.random.fork_rng():
            torch.manual_seed(training.seed)
            finetune(
                model,
                (_Counted if isinstance(self.training, Sized) else _Moved)(self),
                teacher=teacher,
                **training.arguments,
                penalty=penalty_of(model, training),
                checkpoint=folder / CHECKPOINT,
                each_epoch=note,
                progress=progress,
            )
        save(model, folder / MODEL)
        (folder / CHECKPOINT).unlink(missing_ok=True)
        return metrics_in(folder)

    @contextmanager
    def _order(self, seed: int) -> Iterator[None]:
        """The training batches come in the same order each time, also from a loader that shuffles as torch's own do."""
        holders = (self.training, getattr(self.training, "sampler", None))
        found = (getattr(holder, "generator", None) for holder in holders)
        generators = {generator: generator.get_state() for generator in found if isinstance(generator, torch.Generator)}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            for generator in generators:
                generator.manual_seed(seed)
            _Moved(self).set_epoch(0)
            try:
                yield
            finally:
                for generator, state in generators.items():
                    generator.set_state(state)

    def _moved(self, batch: Any) -> tuple[Any, Any]:
        inputs, labels = pair(batch)
        return tuple(value.to(self.device) if isinstance(value, Tensor) else value for value in (inputs, labels))  # type: ignore[return-value]

    def _score(self, model: nn.Module, batches: Iterable[Any], training: Training) -> Score:
        right, total, examples = 0, 0.0, 0
        with torch.no_grad(), evaluating(model):
            for batch in map(self._moved, batches):
                outputs = outputs_of(model, batch, autocast=PRECISIONS[training.precision]).float()
                total += float(cross_entropy(outputs, batch[1], reduction="sum"))
                right += int((outputs.argmax(1) == batch[1]).sum())
                examples += len(outputs)
        if not examples:
            raise ValueError(EMPTY)
        return Score(right / examples, total / examples)


class _Moved:
    """The training batches on the device, as often as they are gone through."""

    def __init__(self, loaders: Loaders) -> None:
        self.loaders = loaders

    def __iter__(self) -> Iterator[tuple[Any, Any]]:
        return map(self.loaders._moved, self.loaders.training)

    def set_epoch(self, number: int) -> None:
        for source in (self.loaders.training, getattr(self.loaders.training, "sampler", None)):
            announce = getattr(source, "set_epoch", None)
            if announce is not None:
                announce(number)


class _Counted(_Moved):
    def __len__(self) -> int:
        return len(self.loaders.training)  # type: ignore[arg-type]


# --- by name ----------------------------------------------------------------------------------------------------------------


def is_own(name: str) -> bool:
    return ":" in name


@lru_cache(maxsize=2)
def subject_named(data: str, root: Path, device: str, progress: bool = True) -> Subject:
    """A data set of the lab, or what a user's own function returns: batches to train and to test on."""
    if not is_own(data):
        return Prepared(load_data(data, root, progress=progress).to(device))
    loaders = _made("data", data)
    if not isinstance(loaders, tuple | list) or len(loaders) != 2:
        raise TypeError(f"data: {data} must return two loaders, to train and to test on; got {type(loaders).__name__}")
    for loader in loaders:
        require_batches("data", loader)
        if iter(loader) is loader:
            raise ValueError(f"data: {data} must return loaders that can be gone through several times, not iterators")
    return Loaders(loaders[0], loaders[1], device)


def network_named(name: str, classes: int, seed: int) -> nn.Module:
    """A network of the lab with fresh weights, or what a user's own function returns."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _made("model", name) if is_own(name) else build(name, classes)
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {name} must return a torch.nn.Module; got {type(model).__name__}")
    return model


def _made(argument: str, path: str) -> Any:
    """What a user's own function returns."""
    function = function_named(argument, path)
    try:
        return function()
    except Exception as error:  # their code may raise anything
        raise ValueError(f"{argument}: {path} failed: {_told(error)}") from error


def _told(error: Exception) -> str:
    """An error of a user's own code in a line, with where in their file it came about."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}{_where(error)}"


def _where(error: Exception) -> str:
    ours = (__file__, importlib.__file__)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in ours and f.filename[0] != "<"]
    own = [frame for frame in frames if frame.filename == frames[0].filename]
    return f" ({Path(own[-1].filename).name}, line {own[-1].lineno})" if own else ""


def function_named(argument: str, path: str) -> Any:
    """What ``package.module:function`` names; modules in the current folder are found too."""
    module, _, name = path.partition(":")
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        holder = importlib.import_module(module)
    except Exception as error:  # whatever the user's own module comes to
        if isinstance(error, ModuleNotFoundError | ValueError | TypeError) and not _where(error):  # its name is what is wrong
            raise ValueError(f"{argument}: {path!r} cannot be imported ({error}); it must be {FUNCTION}") from None
        raise ValueError(f"{argument}: {path!r} cannot be imported: {_told(error)}") from error
    found = getattr(holder, name, None)
    if found is None:
        raise ValueError(f"{argument}: {module} has no {name!r}; it must be {FUNCTION}")
    if not callable(found):
        raise TypeError(f"{argument}: {path} must be a function; got {type(found).__name__}")
    return found

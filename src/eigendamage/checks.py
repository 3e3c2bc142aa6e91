"""Arguments that are of the wrong kind or out of range: errors that name the argument, what is allowed and what came."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Integral, Real
from pathlib import Path
from types import UnionType
from typing import Any


def require(name: str, value: object, kind: type | UnionType, allowed: str) -> None:
    """Raise TypeError unless ``value`` is of this kind."""
    if not isinstance(value, kind):
        raise TypeError(f"{name}: must be {allowed}; got {type(value).__name__}")


def require_whole(name: str, value: Any, least: int) -> None:
    """Raise TypeError or ValueError unless this is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: must be a whole number, at least {least}; got {value!r}")
    if value < least:
        raise ValueError(f"{name}: must be at least {least}; got {value}")


def require_number(name: str, value: Any, allowed: str, holds: Callable[[float], bool]) -> None:
    """Raise TypeError unless this is a finite number, ValueError unless it ``holds``; ``allowed`` says what does."""
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: must be a number {allowed}; got {value!r}")
    if not math.isfinite(value) or not holds(float(value)):
        raise ValueError(f"{name}: must be {allowed}; got {value}")


def require_choice(name: str, value: object, allowed: Sequence[object]) -> None:
    """Raise ValueError unless ``value`` is one of these."""
    if value not in allowed:
        raise ValueError(f"{name}: must be one of {', '.join(map(repr, allowed))}; got {value!r}")


def require_folder(name: str, path: Path) -> None:
    """Raise ValueError if the path, which need not exist yet, is or leads through something that is no folder."""
    blocking = next((part for part in (path, *path.parents) if part.exists()), None)
    if blocking is not None and not blocking.is_dir():
        raise ValueError(f"{name}: must be a folder, or one that can be made; {blocking} is a file")


def require_batches(name: str, value: object) -> None:
    if not isinstance(value, Iterable) or isinstance(value, str | bytes):
        raise TypeError(f"{name}: must be an iterable of batches, such as a list or a DataLoader; got {type(value).__name__}")


def require_function(name: str, value: object, of: str) -> None:
    if not callable(value):
        raise TypeError(f"{name}: must be a function of {of}; got {type(value).__name__}")

"""The pickles of CIFAR, read without running what may be in them."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

# What numpy writes of an array. Its own functions, wherever this version of numpy keeps them.
ARRAYS: dict[str, Any] = {"_reconstruct": np.empty(0).__reduce__()[0], "ndarray": np.ndarray, "dtype": np.dtype}
MODULES = {"_reconstruct": ("numpy.core.multiarray", "numpy._core.multiarray"), "ndarray": ("numpy",), "dtype": ("numpy",)}


def unpickle(path: Path) -> dict[bytes, Any]:
    """The dictionary in a pickle that holds numbers, strings, lists, dictionaries and arrays of numpy, and nothing else.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is no such pickle. Nothing in it was run.
    """
    with open(path, "rb") as file:
        try:
            content = _Restricted(file, encoding="bytes").load()
        except _Refused as error:
            raise ValueError(f"{path} is refused: {error}") from None
        except Exception as error:  # bytes that are no pickle make the unpickler raise almost anything
            raise ValueError(f"{path} is not a pickle, or is cut short or damaged ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, not a dictionary")
    return {key.encode("latin1") if isinstance(key, str) else key: value for key, value in content.items()}


class _Refused(Exception):
    pass


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable[..., Any]:
        if module in MODULES.get(name, ()):
            return ARRAYS[name]
        if (module, name) == ("_codecs", "encode"):
            return _encode
        raise _Refused(f"it asks for {module}.{name}; arrays, bytes, lists and dictionaries are all that is read")


def _encode(text: str, encoding: str) -> bytes:
    """How Python 3 writes bytes into pickles that Python 2 can read."""
    if encoding not in ("latin1", b"latin1"):
        raise _Refused(f"it asks for bytes in encoding {encoding!r}")
    return text.encode("latin1")

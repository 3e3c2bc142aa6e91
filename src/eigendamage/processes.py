"""Several processes that work on one thing: who they are, and what they put together."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


@contextmanager
def joined() -> Iterator[None]:
    """Together with the other processes that torchrun started, if it did."""
    if "RANK" not in os.environ or not dist.is_available() or dist.is_initialized():
        yield
        return
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    try:
        yield
    finally:
        dist.destroy_process_group()


def place() -> tuple[int, int]:
    """The number of this process and how many there are."""
    return (dist.get_rank(), dist.get_world_size()) if distributed() else (0, 1)


def from_processes(value: T) -> list[T]:
    """This value of every process."""
    if not distributed():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_processes(tensor: Tensor, device: torch.device) -> Tensor:
    if not distributed():
        return tensor
    shared = tensor.to(device).contiguous()
    dist.all_reduce(shared)
    return shared

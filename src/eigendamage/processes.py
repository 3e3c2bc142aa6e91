"""Several processes that work on one thing: who they are, and what they put together."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")


def distributed() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


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

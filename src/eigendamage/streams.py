"""A residual stream that stays whole while its readers lose channels: the module that reads some of it."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class ChannelSelection(nn.Module):
    """Reads some of the channels of a residual stream (Liu et al., Network Slimming), at first all of them.

    Channel pruning takes away from what it reads, and from the stream itself nothing.
    """

    def __init__(self, channels: int) -> None:
        super().__init__()
        # A parameter that is not trained, because the paper's count of PreResNet29's parameters has it.
        self.index = nn.Parameter(torch.arange(channels), requires_grad=False)

    @property
    def channels(self) -> int:
        return len(self.index)

    def forward(self, x: Tensor) -> Tensor:
        return x.index_select(1, self.index)

    def extra_repr(self) -> str:
        return str(self.channels)

"""Where full gradients are laid out for hop 1."""

from __future__ import annotations

import torch

from mics.comm.lanes import DONE, Ticket
from mics.layout import UnitLayout


class ReduceBuffer:
    """A buffer that full gradients are laid out in for hop 1, shared by all units of a format."""

    def __init__(self, *, numel: int, shard_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.full = torch.empty(numel, dtype=dtype, device=device)  # [largest unit], written by hop 1
        self.shard = torch.empty(shard_numel, dtype=dtype, device=device)  # [largest chunk], its result
        self.emptied: Ticket = DONE  # when the unit before has been reduced
        self.views: dict[int, ReduceViews] = {}  # by unit index

    def views_for(self, unit: int, layout: UnitLayout) -> ReduceViews:
        if unit not in self.views:
            self.views[unit] = ReduceViews(self, layout)
        return self.views[unit]


class ReduceViews:
    """One unit's views of the reduce buffer, made once."""

    def __init__(self, buffer: ReduceBuffer, layout: UnitLayout) -> None:
        self.full = buffer.full[: layout.numel]
        self.shard = buffer.shard[: layout.chunk_numel]
        self.params = [self.full[slot.start : slot.stop].view(slot.shape) for slot in layout.slots]
        self.gaps = [self.full[gap.start : gap.stop] for gap in layout.gaps()]

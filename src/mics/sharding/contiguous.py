"""One buffer for what belongs together, so that it is never scattered over the allocator's memory.

Parts are reserved while the units are planned. The buffer of a format is allocated whole when the first of
its parts is asked for, before training has left holes that only small tensors fit in. There are no gaps: what
units reserve is as long as alignment asks for (see layout/flat.py).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mics.sharding.host_memory import HostPool


@dataclass(frozen=True, eq=False)
class Reserved:
    """A reserved range of elements."""

    owner: Contiguous
    dtype: torch.dtype
    start: int
    stop: int

    def tensor(self) -> Tensor:
        """The memory of this part, zero at first (but not after :meth:`Contiguous.release`).

        With a version counter of its own: an edit of one part is not one of the others.
        """
        return self.owner.buffer(self.dtype)[self.start : self.stop].data


class Contiguous:
    """One buffer for each format, on one device, or on the host in memory of ``pool``."""

    def __init__(self, device: torch.device, *, pool: HostPool | None = None) -> None:
        self._device = device
        self._pool = pool
        self._ends: dict[torch.dtype, int] = {}
        self._buffers: dict[torch.dtype, Tensor] = {}
        self._was_released = False

    def reserve(self, dtype: torch.dtype, numel: int) -> Reserved:
        """A part of the buffer of ``dtype``, all of which must be reserved before one is used."""
        assert dtype not in self._buffers, "the buffer has been allocated"
        start = self._ends.get(dtype, 0)
        stop = start + numel
        self._ends[dtype] = stop
        return Reserved(self, dtype, start, stop)

    def buffer(self, dtype: torch.dtype) -> Tensor:
        """The whole buffer of a format."""
        if dtype not in self._buffers and self._pool is not None:
            taken = self._pool.take(self._ends[dtype] * dtype.itemsize, "masters")
            self._buffers[dtype] = taken.zero_().view(dtype)
        if dtype not in self._buffers:
            make = torch.empty if self._was_released else torch.zeros
            self._buffers[dtype] = make(self._ends[dtype], dtype=dtype, device=self._device)
        return self._buffers[dtype]

    def release(self) -> None:
        """Let go of the buffers, which live on as long as somebody has a part of them."""
        self._was_released = True
        self._buffers.clear()

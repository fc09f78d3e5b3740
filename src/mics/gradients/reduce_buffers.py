"""Where full gradients are laid out for hop 1."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mics.comm.lanes import DONE, Ticket
from mics.cost.memory import TINY_SHARE
from mics.layout.flat import UnitLayout
from mics.sharding.spec import UnitSpec


class ReduceBuffer:
    """A buffer that full gradients are laid out in for hop 1, shared by all units of a kind."""

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


class ReduceBuffers:
    """The buffers of all units: ``count`` for each reduce format, used in turn.

    Tiny units have their own: a norm between two matrices must not keep the next of them out of the buffer.
    """

    def __init__(self, specs: Sequence[UnitSpec], *, count: int, device: torch.device) -> None:
        self._specs = list(specs)
        self._count = count
        self._device = device
        self._largest = max((spec.layout.numel for spec in specs), default=0)
        self._by_kind: dict[tuple[torch.dtype, bool], list[ReduceBuffer]] = {}

    def __iter__(self) -> Iterator[ReduceBuffer]:
        return (buffer for buffers in self._by_kind.values() for buffer in buffers)

    def next_for(self, spec: UnitSpec) -> ReduceBuffer:
        """While one is being reduced, the next unit's gradients go to the other."""
        buffers = self.allocate(spec)
        buffers.append(buffers.pop(0))
        return buffers[0]

    def allocate(self, spec: UnitSpec) -> list[ReduceBuffer]:
        """Those that units like this one use."""
        kind = self._kind_of(spec)
        if kind not in self._by_kind:
            alike = [other.layout for other in self._specs if self._kind_of(other) == kind]
            self._by_kind[kind] = [
                ReduceBuffer(
                    numel=max(layout.numel for layout in alike),
                    shard_numel=max(layout.chunk_numel for layout in alike),
                    dtype=spec.reduce_dtype,
                    device=self._device,
                )
                for _ in range(self._count)
            ]
        return self._by_kind[kind]

    def release(self) -> None:
        """Have no memory until the next gradient comes."""
        for buffer in self:
            buffer.emptied.wait()
        self._by_kind.clear()

    def expected_nbytes(self) -> int:
        """Their bytes once every unit has been reduced."""
        largest: dict[tuple[torch.dtype, bool], int] = {}
        for spec in self._specs:
            nbytes = (spec.layout.numel + spec.layout.chunk_numel) * spec.reduce_dtype.itemsize
            largest[self._kind_of(spec)] = max(largest.get(self._kind_of(spec), 0), nbytes)
        return self._count * sum(largest.values())

    def _kind_of(self, spec: UnitSpec) -> tuple[torch.dtype, bool]:
        """Units of one kind share their buffers."""
        return spec.reduce_dtype, spec.layout.numel * TINY_SHARE < self._largest

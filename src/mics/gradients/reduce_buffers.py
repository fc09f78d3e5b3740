"""Where full gradients are laid out for hop 1, of one unit or of several that are reduced together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

import torch

from mics.comm.lanes import DONE, Ticket
from mics.cost.memory import TINY_SHARE
from mics.layout.flat import UnitLayout
from mics.sharding.spec import UnitSpec

_MAX_VIEWS: Final = 1024
_SMALL_NBYTES: Final = 1 << 20  # a buffer that nobody misses


class ReduceBuffer:
    """A buffer that full gradients are laid out in for hop 1, shared by all units of a kind."""

    def __init__(self, *, numel: int, shard_numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self.full = torch.empty(numel, dtype=dtype, device=device)  # [largest unit], written by hop 1
        self.shard = torch.empty(shard_numel, dtype=dtype, device=device)  # [largest chunk], its result
        self.emptied: Ticket = DONE  # when the units before have been reduced
        self._views: dict[tuple[int, int], ReduceViews] = {}  # by unit index and first element

    def views_for(self, unit: int, layout: UnitLayout, start: int) -> ReduceViews:
        """The views of a unit that is laid out from element ``start`` on."""
        if (unit, start) not in self._views:
            if len(self._views) >= _MAX_VIEWS:  # orders that go on changing
                self._views.clear()
            self._views[unit, start] = ReduceViews(self, layout, start)
        return self._views[unit, start]


class ReduceViews:
    """One unit's views of the reduce buffer, made once for each place."""

    def __init__(self, buffer: ReduceBuffer, layout: UnitLayout, start: int) -> None:
        first = start // layout.num_chunks
        self.full = buffer.full[start : start + layout.numel]
        self.shard = buffer.shard[first : first + layout.chunk_numel]
        self.params = [self.full[slot.start : slot.stop].view(slot.shape) for slot in layout.slots]
        self.gaps = [self.full[gap.start : gap.stop] for gap in layout.gaps()]


class Places:
    """Where the units of one collective are laid out: one after the other, in a buffer for each kind."""

    def __init__(self, buffers: ReduceBuffers) -> None:
        self.used: list[ReduceBuffer] = []
        self._buffers = buffers
        self._ends: dict[ReduceBuffer, int] = {}
        self._of_kind: dict[BufferKind, ReduceBuffer] = {}

    def has_room(self, spec: UnitSpec) -> bool:
        """Whether ``spec`` fits beside those that are here."""
        buffer = self._of_kind.get(self._buffers.kind_of(spec))
        return buffer is None or self._ends[buffer] + spec.layout.numel <= buffer.full.numel()

    def take(self, spec: UnitSpec) -> tuple[ReduceBuffer, ReduceViews]:
        """The place of ``spec``."""
        kind = self._buffers.kind_of(spec)
        if kind not in self._of_kind:
            self._of_kind[kind] = buffer = self._buffers.next_for(spec)
            self._ends[buffer] = 0
            self.used.append(buffer)
        buffer = self._of_kind[kind]
        start = self._ends[buffer]
        self._ends[buffer] = start + spec.layout.numel
        return buffer, buffer.views_for(spec.index, spec.layout, start)


BufferKind = tuple[torch.dtype, bool]
"""The format of a reduction, and whether the unit is tiny."""


class ReduceBuffers:
    """The buffers of all units: ``count`` for each reduce format, used in turn.

    Tiny units have their own: a norm between two matrices must not keep the next of them out of the buffer.
    It has room for several, because they are reduced together up to ``joined_nbytes``.
    """

    def __init__(
        self, specs: Sequence[UnitSpec], *, count: int, device: torch.device, joined_nbytes: int = 0
    ) -> None:
        self._specs = list(specs)
        self._count = count
        self._device = device
        self._joined_nbytes = joined_nbytes
        self._largest = max((spec.layout.numel for spec in specs), default=0)
        self._by_kind: dict[BufferKind, list[ReduceBuffer]] = {}

    def __iter__(self) -> Iterator[ReduceBuffer]:
        return (buffer for buffers in self._by_kind.values() for buffer in buffers)

    def next_for(self, spec: UnitSpec) -> ReduceBuffer:
        """While one is being reduced, the next gradients go to the other."""
        buffers = self.allocate(spec)
        buffers.append(buffers.pop(0))
        return buffers[0]

    def allocate(self, spec: UnitSpec) -> list[ReduceBuffer]:
        """Those that units like this one use."""
        kind = self.kind_of(spec)
        if kind not in self._by_kind:
            numel, shard_numel = self._numels(kind)
            self._by_kind[kind] = [
                ReduceBuffer(numel=numel, shard_numel=shard_numel, dtype=kind[0], device=self._device)
                for _ in range(self._count)
            ]
        return self._by_kind[kind]

    def release(self, but: Sequence[ReduceBuffer] = ()) -> None:
        """Have no memory until the next gradient comes, except for buffers that gradients wait in."""
        for kind, buffers in list(self._by_kind.items()):
            if not any(buffer in but for buffer in buffers):
                for buffer in buffers:
                    buffer.emptied.wait()
                del self._by_kind[kind]

    def expected_nbytes(self) -> int:
        """Their bytes once every unit has been reduced."""
        kinds = {self.kind_of(spec) for spec in self._specs}
        return self._count * sum(sum(self._numels(kind)) * kind[0].itemsize for kind in kinds)

    def kind_of(self, spec: UnitSpec) -> BufferKind:
        """Units of one kind share their buffers."""
        return spec.reduce_dtype, self.is_tiny(spec)

    def is_tiny(self, spec: UnitSpec) -> bool:
        """Whether its buffer takes next to nothing beside that of the largest unit."""
        return spec.layout.numel * TINY_SHARE < self._largest

    def _numels(self, kind: BufferKind) -> tuple[int, int]:
        """Elements of a buffer, and of the result: of the largest unit, or of several that are tiny."""
        alike = [spec.layout for spec in self._specs if self.kind_of(spec) == kind]
        numel, shard_numel = (
            max(layout.numel for layout in alike),
            max(layout.chunk_numel for layout in alike),
        )
        dtype, are_tiny = kind
        if are_tiny and self._joined_nbytes:
            # A batch goes when it has so many bytes: with the last unit it has a few more.
            joined = self._joined_nbytes // dtype.itemsize + numel
            most = max(self._largest // TINY_SHARE, _SMALL_NBYTES // dtype.itemsize)
            fits = min(sum(layout.numel for layout in alike), joined, most)
            numel = max(numel, fits)
            shard_numel = max(shard_numel, -(-numel // alike[0].num_chunks))
        return numel, shard_numel

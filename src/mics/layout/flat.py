"""Where each parameter's elements live in a unit and in its shards: arithmetic alone.

A unit of three parameters over p = 2 chunks, each halved again over R = 2 replicas::

    flat     |  a a a a a . | b b b b b b b b b | c c .  .  .  .  . |      '.' is padding, always zero
    chunks   |            chunk 0           |           chunk 1     |      one per rank of a partition group
    pieces   |      0       |       1       |      0      |    1    |      one per replica of that rank

Every parameter, chunk and piece starts at a multiple of ``ALIGNMENT`` elements: matrix kernels want weights
at multiples of 16 bytes, and collectives want aligned buffers. Elements, not bytes: so models of one
architecture have one layout, whatever their formats, and an average in float32 matches a model in bfloat16.

Large parameters, and chunks and pieces of units that have one, start at multiples of ``BLOCK_NUMEL``: they
are cut between the blocks of 8-bit optimizers, which are then the same on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

ALIGNMENT = 8
BLOCK_NUMEL = 256
"""Elements of a parameter that 8-bit optimizers quantise together."""
LARGE_NUMEL = 4096
"""They quantise parameters of so many elements or more."""


@dataclass(frozen=True, kw_only=True)
class Slot:
    """One parameter's place in its unit."""

    name: str
    shape: tuple[int, ...]
    start: int  # first element in the unit's flat buffer

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def stop(self) -> int:
        return self.start + self.numel

    def overlap(self, span: range) -> range:
        """The elements of this parameter that lie in ``span`` of the flat buffer (in flat positions)."""
        start = max(self.start, span.start)
        return range(start, max(start, min(self.stop, span.stop)))


@dataclass(frozen=True, kw_only=True)
class UnitLayout:
    """The flat order of one unit."""

    slots: tuple[Slot, ...]
    numel: int  # of the whole flat buffer, padding included
    num_chunks: int  # p
    num_pieces: int  # R: each chunk's pieces

    @property
    def chunk_numel(self) -> int:
        return self.numel // self.num_chunks

    @property
    def is_undivided(self) -> bool:
        """Whether one rank has all of it."""
        return self.num_chunks == self.num_pieces == 1

    @property
    def piece_numel(self) -> int:
        return self.chunk_numel // self.num_pieces

    @property
    def params_numel(self) -> int:
        """Elements that belong to parameters, without padding."""
        return sum(slot.numel for slot in self.slots)

    def chunk_span(self, chunk: int) -> range:
        """Flat positions of one chunk."""
        return range(chunk * self.chunk_numel, (chunk + 1) * self.chunk_numel)

    def piece_span(self, chunk: int, piece: int) -> range:
        """Flat positions of one piece of one chunk."""
        start = chunk * self.chunk_numel + piece * self.piece_numel
        return range(start, start + self.piece_numel)

    def gaps(self) -> tuple[range, ...]:
        """Flat positions that belong to no parameter."""
        edges = [0, *(edge for slot in self.slots for edge in (slot.start, slot.stop)), self.numel]
        pairs = zip(edges[::2], edges[1::2], strict=True)
        return tuple(range(start, stop) for start, stop in pairs if start < stop)


def plan_layout(
    shapes: Sequence[tuple[str, tuple[int, ...]]], *, num_chunks: int, num_pieces: int
) -> UnitLayout:
    """Lay parameters out one after the other."""
    slots: list[Slot] = []
    end = 0
    for name, shape in shapes:
        start = round_up(end, alignment_of(math.prod(shape)))
        slots.append(Slot(name=name, shape=tuple(shape), start=start))
        end = slots[-1].stop
    alignment = max((alignment_of(slot.numel) for slot in slots), default=ALIGNMENT)
    numel = round_up(end, alignment * num_chunks * num_pieces)
    return UnitLayout(slots=tuple(slots), numel=numel, num_chunks=num_chunks, num_pieces=num_pieces)


def alignment_of(numel: int) -> int:
    """Where a parameter of ``numel`` elements may begin, and may be cut."""
    return BLOCK_NUMEL if numel >= LARGE_NUMEL else ALIGNMENT


def round_up(value: int, multiple: int) -> int:
    """The smallest multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple

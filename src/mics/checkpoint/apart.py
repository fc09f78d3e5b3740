"""What ranks agree on before each writes its own part of the index: who has which elements of which tensor.

The rank with the first element of a tensor describes it, so all of them together are told once. Every rank
then compares what it will write with the formula: if none finds a difference, every element is written once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from mics.checkpoint.boxes import item_boxes
from mics.checkpoint.formats.dcp_writing import ITEM_NBYTES, WrittenItem
from mics.checkpoint.parts import Item
from mics.checkpoint.records import PieceWriters, StoredTensor, TensorPart
from mics.errors import CheckpointError

MAX_GATHERED_ITEMS: Final = 100_000
"""Boxes of all ranks that one index, and DCP's, are still made of by the first: a second, and some MB."""


def writers_of(positions: Sequence[int | None]) -> tuple[int, ...] | None:
    """The ranks by the piece of every unit that they write; None where they do not have one each."""
    ranks = {position: rank for rank, position in enumerate(positions) if position is not None}
    if sorted(ranks) != list(range(len(positions))):
        return None
    return tuple(ranks[position] for position in range(len(positions)))


def described(parts: Iterable[TensorPart], writers: tuple[int, ...], rank: int) -> dict[str, StoredTensor]:
    """The tensors whose first element this rank writes."""
    found = {}
    for part in parts:
        if part.span.start == 0:
            start, numel = (0, len(part.span)) if part.division is None else part.division
            division = PieceWriters(start, numel, (rank,) if part.division is None else writers)
            found[part.name] = StoredTensor(
                dtype=part.values.dtype, shape=part.shape, whole=part.whole, division=division
            )
    return found


def joined(tables: Iterable[dict[str, StoredTensor]]) -> dict[str, StoredTensor]:
    """The tensors of all ranks."""
    found: dict[str, StoredTensor] = {}
    for table in tables:
        both = found.keys() & table.keys()
        if both:
            raise _differs(min(both), "one rank to have its first element", "two")
        found.update(table)
    return found


def check_parts(parts: Iterable[TensorPart], tensors: dict[str, StoredTensor], rank: int) -> None:
    """What this rank writes is what the table says, of every tensor."""
    own = {part.name: part for part in parts}
    for name, tensor in tensors.items():
        division = tensor.division
        assert division is not None
        piece = division.writers.index(rank) if rank in division.writers else -1
        expected = division.span(piece, tensor.numel) if piece >= 0 else range(0)
        part = own.pop(name, None)
        span = range(0) if part is None else part.span
        if (span or expected) and span != expected:
            raise _differs(name, f"rank {rank} to have elements {expected}", str(span))
        if part is not None and (part.shape, part.values.dtype) != (tensor.shape, tensor.dtype):
            raise _differs(name, f"{tensor.dtype} {tensor.shape}", f"{part.values.dtype} {part.shape}")
    for name in own:
        raise _differs(name, "a rank with its first element", "none")


def items_of(parts: Iterable[TensorPart], written: Iterable[WrittenItem]) -> dict[str, list[Item]]:
    """Where the boxes of each part are, in the order in which the boxes follow from its span."""
    places = {(item.key.fqn, tuple(item.key.offset or ())): item for item in written}
    found = {}
    for part in parts:
        boxes = item_boxes(part.shape, part.span, ITEM_NBYTES // part.values.element_size())
        found[part.name] = [_item(places[part.name, box.offsets]) for box in boxes]
    return found


def _item(written: WrittenItem) -> Item:
    assert written.chunk is not None
    place = written.place
    return Item(place.relative_path, place.offset, place.length, written.chunk.position)


def _differs(name: str, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{name}: expected {expected}, found {found}; do all ranks save the same model and optimizer?"
    )

"""Ranges of a tensor's elements as boxes, and boxes as ranges: arithmetic alone.

A shard is a range of a parameter's elements in flat order. torch.distributed.checkpoint speaks of boxes: a
corner and a size for each dim. A range of an n-dimensional tensor is at most 2n - 1 boxes::

    range 2..13 of [4, 4]      . . a a      a   part of a row
                               b b b b      b   whole rows
                               b b b b
                               c c . .      c   part of a row

Each of them is a range itself, so its values lie one after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Final

_MAX_DIVIDED: Final = 8  # dims along which a tensor may be cut: each doubles the corners of its boxes


@dataclass(frozen=True)
class Box:
    """A part of a tensor: ``sizes`` elements of each dim from ``offsets`` on."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def overlap(self, other: Box) -> Box | None:
        """What both have, or None."""
        offsets = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        stops = (
            min(a + n, b + m)
            for a, n, b, m in zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        )
        sizes = tuple(stop - start for start, stop in zip(offsets, stops, strict=True))
        return Box(offsets, sizes) if all(size > 0 for size in sizes) else None

    def within(self, outer: Box) -> Box:
        """The same elements, counted from the corner of ``outer``."""
        return Box(tuple(a - b for a, b in zip(self.offsets, outer.offsets, strict=True)), self.sizes)


def tiles(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether ``boxes`` have every element of a tensor once, and nothing else.

    How often an element is covered changes at corners alone: a box is the sum of its corners, with signs.
    What the boxes cover is the tensor, once, where the corners of both are the same.
    """
    whole = Box((0,) * len(shape), tuple(shape))
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        return False
    if not whole.numel:
        return not boxes
    dims = [
        dim
        for dim, size in enumerate(shape)
        if any((box.offsets[dim], box.sizes[dim]) != (0, size) for box in boxes)
    ]  # along the others every box is whole
    if len(dims) > _MAX_DIVIDED or any(box.numel <= 0 or min(box.sizes, default=1) < 0 for box in boxes):
        return False
    corners: dict[tuple[int, ...], int] = {}
    for box, weight in [*((box, 1) for box in boxes), (whole, -1)]:
        for corner, sign in _corners(box, dims):
            corners[corner] = corners.get(corner, 0) + sign * weight
    return not any(corners.values())


def _corners(box: Box, dims: Sequence[int]) -> Iterator[tuple[tuple[int, ...], int]]:
    ends = [((box.offsets[dim], 1), (box.offsets[dim] + box.sizes[dim], -1)) for dim in dims]
    for corner in product(*ends):
        yield tuple(at for at, _ in corner), math.prod(sign for _, sign in corner)


def boxes_of(shape: Sequence[int], span: range) -> Iterator[tuple[int, Box]]:
    """The boxes that ``span`` of a tensor's elements is made of, in order, each with where it begins."""
    if not span:
        return
    if not shape:
        yield 0, Box((), ())
        return
    row = math.prod(shape[1:])
    first, last = span.start // row, (span.stop - 1) // row
    if first == last and len(span) < row:
        yield from _inside(first, shape, span)
        return
    whole = range(-(-span.start // row), span.stop // row)  # rows that are wholly in it
    if span.start % row:
        yield from _inside(first, shape, range(span.start, whole.start * row))
    if whole:
        rest = tuple(shape[1:])
        yield whole.start * row, Box((whole.start, *(0 for _ in rest)), (len(whole), *rest))
    if span.stop % row:
        yield from _inside(last, shape, range(whole.stop * row, span.stop))


def _inside(row: int, shape: Sequence[int], span: range) -> Iterator[tuple[int, Box]]:
    """The boxes of a span that lies inside one row."""
    base = row * math.prod(shape[1:])
    for start, box in boxes_of(shape[1:], range(span.start - base, span.stop - base)):
        yield base + start, Box((row, *box.offsets), (1, *box.sizes))


def runs(sizes: Sequence[int], part: Box) -> Iterator[range]:
    """The elements of ``part`` of a tensor of ``sizes`` as ranges of its flat order, in order."""
    num_outer = len(sizes)
    while num_outer and part.sizes[num_outer - 1] == sizes[num_outer - 1]:
        num_outer -= 1  # dims that are whole continue the run
    num_outer = max(0, num_outer - 1)  # and one that is not whole is a run itself
    inner = math.prod(sizes[num_outer + 1 :])
    numel = math.prod(part.sizes[num_outer:])
    start = part.offsets[num_outer] * inner if sizes else 0
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(num_outer)]
    for index in _indices(part.offsets[:num_outer], part.sizes[:num_outer]):
        begin = start + sum(i * stride for i, stride in zip(index, strides, strict=True))
        yield range(begin, begin + numel)


def pieces(part: Box, max_numel: int) -> Iterator[Box]:
    """``part`` cut along its leading dims into boxes of at most ``max_numel`` elements, in order."""
    if part.numel <= max_numel:
        yield part
        return
    dim = next(d for d, size in enumerate(part.sizes) if size > 1)
    step = max(1, max_numel // math.prod(part.sizes[dim + 1 :]))
    for begin in range(0, part.sizes[dim], step):
        offsets, sizes = list(part.offsets), list(part.sizes)
        offsets[dim] += begin
        sizes[dim] = min(step, part.sizes[dim] - begin)
        yield from pieces(Box(tuple(offsets), tuple(sizes)), max_numel)


def item_boxes(shape: Sequence[int], span: range, max_numel: int) -> Iterator[Box]:
    """The boxes that ``span`` of a tensor is written as, none of more than ``max_numel`` elements."""
    for _, box in boxes_of(shape, span):
        yield from pieces(box, max_numel)


def _indices(offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    if not offsets:
        yield ()
        return
    for i in range(offsets[0], offsets[0] + sizes[0]):
        for rest in _indices(offsets[1:], sizes[1:]):
            yield (i, *rest)

"""Ranges as boxes and back: against numpy, by property."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mics.checkpoint.boxes import Box, boxes_of, pieces, runs

shapes = st.lists(st.integers(1, 5), min_size=0, max_size=4)


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(box.offsets, box.sizes, strict=True))


@given(shapes, st.data())
def test_boxes_are_the_range_in_order(shape: list[int], data: st.DataObject) -> None:
    """The boxes of a range hold its elements in flat order, each where it is said to begin; they are few."""
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    stop = data.draw(st.integers(start, numel))
    values = np.arange(numel).reshape(shape)
    found, at = [], start
    boxes = list(boxes_of(shape, range(start, stop)))
    for begin, box in boxes:
        assert begin == at
        at += box.numel
        found += values[_slices(box)].reshape(-1).tolist()
    assert found == list(range(start, stop))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def _part(data: st.DataObject, shape: list[int]) -> Box:
    sizes = [data.draw(st.integers(1, n)) for n in shape]
    offsets = [data.draw(st.integers(0, n - size)) for n, size in zip(shape, sizes, strict=True)]
    return Box(tuple(offsets), tuple(sizes))


@given(shapes, st.data())
def test_runs_are_the_elements_of_a_box(shape: list[int], data: st.DataObject) -> None:
    """Runs are a box's elements in order, and no two of them could be one."""
    part = _part(data, shape)
    values = np.arange(math.prod(shape)).reshape(shape)
    found = list(runs(shape, part))
    assert [i for run in found for i in run] == values[_slices(part)].reshape(-1).tolist()
    assert all(a.stop < b.start for a, b in pairwise(found))


@given(shapes, st.integers(1, 20), st.data())
def test_pieces_are_small_and_in_order(shape: list[int], most: int, data: st.DataObject) -> None:
    """Pieces of a box are its elements in order, none of them larger than asked for."""
    part = _part(data, shape)
    values = np.arange(math.prod(shape)).reshape(shape)
    found = list(pieces(part, most))
    assert all(piece.numel <= most for piece in found)
    together = [i for piece in found for i in values[_slices(piece)].reshape(-1).tolist()]
    assert sorted(together) == sorted(values[_slices(part)].reshape(-1).tolist())


@given(shapes, st.data())
def test_overlap(shape: list[int], data: st.DataObject) -> None:
    """What two boxes share is what their elements share."""
    a, b = _part(data, shape), _part(data, shape)
    values = np.arange(math.prod(shape)).reshape(shape)
    both = a.overlap(b)
    shared = set(values[_slices(a)].reshape(-1)) & set(values[_slices(b)].reshape(-1))
    assert (set() if both is None else set(values[_slices(both)].reshape(-1))) == shared
    if both is not None:
        inside = values[_slices(a)][_slices(both.within(a))]
        assert set(inside.reshape(-1)) == shared

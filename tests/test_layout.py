"""The flat order of a unit, by property."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from mics.layout.flat import ALIGNMENT, BLOCK_NUMEL, LARGE_NUMEL, UnitLayout, alignment_of, plan_layout

shapes = st.lists(st.lists(st.integers(0, 7), max_size=3).map(tuple), min_size=1, max_size=6).map(
    lambda dims: [(f"p{i}", shape) for i, shape in enumerate(dims)]
)
layouts = st.builds(
    lambda s, p, r: plan_layout(s, num_chunks=p, num_pieces=r),
    shapes, st.integers(1, 8), st.integers(1, 4),
)  # fmt: skip


@given(layouts)
def test_slots_and_gaps_tile_the_flat_buffer(layout: UnitLayout) -> None:
    """Every flat position belongs to one parameter or to one gap."""
    owners = [0] * layout.numel
    for slot in layout.slots:
        assert slot.numel == math.prod(slot.shape)
        for position in range(slot.start, slot.stop):
            owners[position] += 1
    for gap in layout.gaps():
        for position in gap:
            owners[position] += 1
    assert owners == [1] * layout.numel


@given(layouts)
def test_everything_is_aligned_and_equal(layout: UnitLayout) -> None:
    """Parameters, chunks and pieces start at multiples of 8 elements, and chunks and pieces are equal."""
    starts = [slot.start for slot in layout.slots]
    for chunk in range(layout.num_chunks):
        starts.append(layout.chunk_span(chunk).start)
        pieces = [layout.piece_span(chunk, piece) for piece in range(layout.num_pieces)]
        starts.extend(piece.start for piece in pieces)
        assert [position for piece in pieces for position in piece] == list(layout.chunk_span(chunk))
    assert all(start % ALIGNMENT == 0 for start in starts)


large = st.lists(st.integers(1, 3 * LARGE_NUMEL), min_size=1, max_size=6).map(
    lambda numels: [(f"p{i}", (numel,)) for i, numel in enumerate(numels)]
)


@given(large, st.integers(1, 8), st.integers(1, 4))
def test_large_parameters_are_cut_between_blocks(
    shapes: list[tuple[str, tuple[int, ...]]], num_chunks: int, num_pieces: int
) -> None:
    """Every piece of one begins at a multiple of 256 of its own elements; small ones lose no more than 7."""
    layout = plan_layout(shapes, num_chunks=num_chunks, num_pieces=num_pieces)
    cuts = range(0, layout.numel, layout.piece_numel)
    for slot in layout.slots:
        if slot.numel >= LARGE_NUMEL:
            assert slot.start % BLOCK_NUMEL == 0
            assert all((cut - slot.start) % BLOCK_NUMEL == 0 for cut in cuts if slot.start < cut < slot.stop)
    ends = [0, *(slot.stop for slot in layout.slots)]
    for end, slot in zip(ends, layout.slots, strict=False):
        assert 0 <= slot.start - end < alignment_of(slot.numel)


@given(layouts)
def test_padding_is_bounded(layout: UnitLayout) -> None:
    """At most one alignment for each parameter and each piece is lost."""
    allowed = ALIGNMENT * (len(layout.slots) + layout.num_chunks * layout.num_pieces)
    assert layout.numel - layout.params_numel <= allowed


@given(layouts, st.data())
def test_overlaps_of_pieces_rebuild_each_parameter(layout: UnitLayout, data: st.DataObject) -> None:
    """The parts of a parameter on all ranks, in flat order, are the parameter."""
    slot = data.draw(st.sampled_from(layout.slots))
    positions = [
        position
        for chunk in range(layout.num_chunks)
        for piece in range(layout.num_pieces)
        for position in slot.overlap(layout.piece_span(chunk, piece))
    ]
    assert positions == list(range(slot.start, slot.stop))

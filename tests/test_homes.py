"""Homes: units that are in memory together never share a place, and little is wasted."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics.layout.homes import ALIGNMENT, Change, Recorded, _lifetimes, _meet, plan_homes, plan_segments
from mics.layout.order import Prefetch, make_plan


def _chain(num_blocks: int) -> list[Change]:
    """Forward and backward of a chain: each block is released before the next is needed."""
    order = [*range(num_blocks), *reversed(range(num_blocks))]
    return [Change(block, needed=needed) for block in order for needed in (True, False)]


def _recorded(events: list[Change], sizes: dict[int, int], prefetch: int) -> Recorded:
    order = [event.unit for event in events if event.needed]
    plan = make_plan(order, sizes=sizes, prefetch=Prefetch(units=prefetch))
    return Recorded(events=events, sent_at=plan.sent_at(), first=plan.first_units, staying=())


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_a_chain_needs_as_many_homes_as_units_are_alive(prefetch: int) -> None:
    """The one at work, and those ahead."""
    sizes = dict.fromkeys(range(12), 1024)
    homes = plan_homes([_recorded(_chain(12), sizes, prefetch)], sizes)
    assert homes.nbytes == (prefetch + 1) * 1024


def test_small_units_fit_between_large_ones() -> None:
    """An embedding ten times a block: the arena is its size and a few blocks, not several embeddings."""
    sizes = {0: 10240, **dict.fromkeys(range(1, 9), 1024)}
    homes = plan_homes([_recorded(_chain(9), sizes, 2)], sizes)
    assert homes.nbytes <= 10240 + 3 * 1024


@pytest.mark.parametrize("prefetch", [1, 2, 3])
def test_a_language_model_wastes_next_to_nothing(prefetch: int) -> None:
    """Its embedding and its head are a little larger than a block: whoever goes first is in the way."""
    sizes = {0: 3144 * 512, **dict.fromkeys(range(1, 17), 3072 * 512), 17: 3144 * 512}
    recorded = _recorded(_chain(18), sizes, prefetch)
    lifetimes = _lifetimes(recorded)
    at_once = max(
        sum(sizes[unit] for unit, spans in lifetimes.items() if any(a <= moment < b for a, b in spans))
        for moment in range(-1, len(recorded.events))
    )
    assert plan_homes([recorded], sizes).nbytes <= 1.02 * at_once


@given(data=st.data(), prefetch=st.integers(1, 3))
def test_units_alive_together_never_overlap(data: st.DataObject, prefetch: int) -> None:
    """Whatever the order: replay it, and look at who is in memory."""
    num_units = data.draw(st.integers(1, 6))
    sizes = {unit: data.draw(st.integers(1, 5000)) for unit in range(num_units)}
    recorded = []
    for _ in range(data.draw(st.integers(1, 3))):
        events: list[Change] = []
        alive: list[int] = []
        for _ in range(data.draw(st.integers(1, 20))):
            if alive and data.draw(st.booleans()):
                events.append(Change(alive.pop(data.draw(st.integers(0, len(alive) - 1))), needed=False))
            elif len(alive) < num_units:
                unit = data.draw(st.sampled_from([unit for unit in range(num_units) if unit not in alive]))
                alive.append(unit)
                events.append(Change(unit, needed=True))
        recorded.append(events)
    homes = plan_homes([_recorded(events, sizes, prefetch) for events in recorded], sizes)
    assert all(offset % ALIGNMENT == 0 for offset in homes.offsets.values())
    for events in recorded:
        needed = [event.unit for event in events if event.needed]
        held: set[int] = set(needed[: prefetch + 1])
        seen = 0
        for event in events:
            if event.needed:
                seen += 1
                held |= {event.unit, *needed[seen : seen + prefetch]}
                for unit in held:
                    assert not held & set(homes.neighbours(unit, sizes)), (held, homes.offsets)
            elif event.unit not in needed[seen : seen + prefetch]:
                held.discard(event.unit)


@given(data=st.data(), prefetch=st.integers(1, 3))
def test_segments_hold_everybody_once_and_nobody_overlaps(data: st.DataObject, prefetch: int) -> None:
    """What the loss meets is in the first, which is no larger for its guests; who is apart is alone."""
    num_blocks = data.draw(st.integers(2, 8))
    sizes = {unit: data.draw(st.integers(1, 5000)) for unit in range(num_blocks)}
    apart = data.draw(st.sets(st.integers(0, num_blocks - 1), max_size=2))
    order = [*range(num_blocks), *reversed(range(num_blocks))]
    plan = make_plan(order, sizes=sizes, prefetch=Prefetch(units=prefetch), turn=num_blocks)
    events = _chain(num_blocks)
    del events[2 * num_blocks - 1]  # the last is kept at the turn
    recorded = Recorded(
        events=events, sent_at=plan.sent_at(), first=plan.first_units, staying=apart, turn=plan.turn
    )
    segments = plan_segments([recorded], sizes, apart=apart)
    assert sorted(unit for homes in segments for unit in homes.offsets) == list(range(num_blocks))
    lifetimes = _lifetimes(recorded)
    for homes in segments:
        for unit in homes.offsets:
            assert not any(
                _meet(lifetimes[unit], lifetimes[other]) for other in homes.neighbours(unit, sizes)
            )
            assert homes.offsets[unit] + sizes[unit] <= homes.nbytes
    at_turn = recorded.at_turn() - apart
    assert num_blocks - 1 in at_turn | apart and at_turn <= segments[0].offsets.keys()
    assert segments[0].nbytes == plan_homes([recorded], sizes, leave_out=sizes.keys() - at_turn).nbytes
    assert [set(homes.offsets) for homes in segments[2:]] == [{unit} for unit in sorted(apart)]

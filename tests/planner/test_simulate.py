"""Tasks on streams and links, checked by hand."""

from __future__ import annotations

import pytest

from mics.cost.collectives import Cost
from mics.planner.simulate import Program, play


def _inter(seconds: float) -> Cost:
    return Cost(inter_seconds=seconds)


def test_a_stream_keeps_its_order_and_others_run_beside_it() -> None:
    program = Program()
    first = program.compute("a", 3.0)
    moved = program.transfer("gather", "g", _inter(2.0))
    second = program.compute("b", 1.0, [moved])
    assert play(program) == 4.0
    assert (first.start, moved.start, second.start) == (0.0, 0.0, 3.0)


def test_a_link_carries_one_transfer_at_a_time_first_come_first_served() -> None:
    program = Program()
    late = program.compute("late", 1.0)
    second = program.transfer("reduce", "second", _inter(2.0), [late])
    first = program.transfer("gather", "first", _inter(5.0))
    assert play(program) == 7.0
    assert (first.start, second.start) == (0.0, 5.0)


def test_links_do_not_hold_each_other_up() -> None:
    program = Program()
    program.transfer("gather", "outside", _inter(5.0))
    inside = program.transfer("reduce", "inside", Cost(intra_seconds=1.0))
    assert play(program) == 5.0
    assert inside.end == 1.0


def test_whoever_asks_later_does_not_overtake() -> None:
    """The link is busy until 4; two transfers ask for it, at 1 and at 2."""
    program = Program()
    program.transfer("gather", "holds", _inter(4.0))
    one, two = program.compute("one", 1.0), program.compute("two", 1.0)
    asks_second = program.transfer("b", "asks second", _inter(1.0), [two])
    asks_first = program.transfer("a", "asks first", _inter(1.0), [one])
    assert play(program) == 6.0
    assert (asks_first.start, asks_second.start) == (4.0, 5.0)


def test_a_stream_waits_for_its_own_first_task() -> None:
    program = Program()
    slow = program.compute("slow", 5.0)
    blocked = program.transfer("gather", "blocked", _inter(1.0), [slow])
    behind = program.transfer("gather", "behind", _inter(1.0))
    play(program)
    assert (blocked.start, behind.start) == (5.0, 6.0)


def test_links_that_share_something_slow_each_other_while_both_are_busy() -> None:
    """At 2 they take as long as one after the other, whichever is longer; at 1.5 half of that is hidden."""
    for slowdown, end in ((2.0, 7.0), (1.5, 6.0)):
        program = Program()
        program.transfer("gather", "outside", _inter(5.0))
        inside = program.transfer("reduce", "inside", Cost(intra_seconds=2.0))
        assert play(program, link_slowdown=slowdown) == pytest.approx(end, rel=2e-3)
        assert inside.end == pytest.approx(2.0 * slowdown, rel=2e-3)


def test_stages_of_one_collective_slow_each_other_too() -> None:
    program = Program()
    program.transfer("gather", "two stages", Cost(intra_seconds=2.0, inter_seconds=5.0))
    assert play(program, link_slowdown=2.0) == pytest.approx(7.0, rel=2e-3)


def test_computation_beside_a_slow_link_takes_longer() -> None:
    """Two of four seconds are beside a transfer, and count one and a half times; other links do not."""
    program = Program()
    program.compute("forward", 4.0)
    program.transfer("gather", "gather", Cost(inter_seconds=2.0))
    assert play(program, {"intra": 2.0, "inter": 1.0}) == 4.0
    assert play(program, {"inter": 1.5}) == 5.0

"""Recorded orders: what is predicted, and what happens when the order changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mics.plans import Plans

TRAIN = (0, 1, 2, 3, 3, 2, 1, 0)
EVAL = (0, 1, 2, 3)


def _run(plans: Plans, order: tuple[int, ...]) -> list[tuple[int, ...]]:
    plans.begin()
    return [tuple(plans.advance(unit)) for unit in order]


def _right(order: tuple[int, ...], depth: int) -> list[tuple[int, ...]]:
    return [order[at + 1 : at + 1 + depth] for at in range(len(order))]


def test_the_second_time_everything_is_known() -> None:
    plans = Plans(2)
    assert _run(plans, TRAIN) == [()] * len(TRAIN)
    assert _run(plans, TRAIN) == _right(TRAIN, 2)
    assert tuple(plans.first()) == (0, 1)


def test_several_plans_take_over_from_each_other() -> None:
    """An evaluation between two training steps: known again from where the two differ."""
    plans = Plans(2)
    _run(plans, TRAIN)
    assert _run(plans, EVAL) == _right(TRAIN, 2)[:4], "a training step was to be expected"
    found = _run(plans, TRAIN)
    assert found[:4] == _right(EVAL, 2), "now an evaluation"
    assert found[4:] == _right(TRAIN, 2)[4:], "until the backward says otherwise"
    assert _run(plans, TRAIN) == _right(TRAIN, 2)


def test_a_new_order_is_recorded() -> None:
    """A layer left out: gathered when needed from there on, and known the next time."""
    plans = Plans(1)
    skipped = (0, 2, 3, 3, 2, 0)
    _run(plans, TRAIN)
    assert _run(plans, skipped)[1:] == [()] * 5
    _run(plans, TRAIN)
    assert _run(plans, skipped)[1:] == _right(skipped, 1)[1:]


def test_a_failed_backward_leaves_no_plan() -> None:
    plans = Plans(1)
    _run(plans, TRAIN)
    _run(plans, TRAIN[:6])
    plans.forget_current()
    assert _run(plans, TRAIN) == _right(TRAIN, 1)


@given(
    orders=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=8).map(tuple), min_size=1, max_size=20),
    depth=st.integers(1, 3),
)
def test_two_ranks_with_the_same_calls_predict_the_same(orders: list[tuple[int, ...]], depth: int) -> None:
    """And a repeated order is predicted without a mistake."""
    first, second = Plans(depth), Plans(depth)
    for order in orders:
        assert _run(first, order) == _run(second, order)
        assert _run(first, order) == _run(second, order) == _right(order, depth)

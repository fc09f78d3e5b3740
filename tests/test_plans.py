"""Recorded orders: what is predicted, and what happens when the order changes."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mics.layout.order import Batching, Plans, Prefetch, make_plan

TRAIN = (0, 1, 2, 3, 3, 2, 1, 0)
EVAL = (0, 1, 2, 3)


def _plans(depth: int) -> Plans:
    return Plans(Prefetch(units=depth), sizes=dict.fromkeys(range(8), 100))


def _run(plans: Plans, order: tuple[int, ...]) -> list[tuple[int, ...]]:
    plans.begin()
    return [tuple(unit for batch in plans.advance(unit) for unit in batch) for unit in order]


def _right(order: tuple[int, ...], depth: int) -> list[tuple[int, ...]]:
    return [order[at + 1 : at + 1 + depth] for at in range(len(order))]


def test_the_second_time_everything_is_known() -> None:
    plans = _plans(2)
    assert _run(plans, TRAIN) == [()] * len(TRAIN)
    assert _run(plans, TRAIN) == _right(TRAIN, 2)
    assert tuple(plans.first()) == ((0,), (1,), (2,))


def test_several_plans_take_over_from_each_other() -> None:
    """An evaluation between two training steps: known again from where the two differ."""
    plans = _plans(2)
    _run(plans, TRAIN)
    assert _run(plans, EVAL) == _right(TRAIN, 2)[:4], "a training step was to be expected"
    found = _run(plans, TRAIN)
    assert found[:4] == _right(EVAL, 2), "now an evaluation"
    assert found[4:] == _right(TRAIN, 2)[4:], "until the backward says otherwise"
    assert _run(plans, TRAIN) == _right(TRAIN, 2)


def test_a_new_order_is_recorded() -> None:
    """A layer left out: gathered when needed from there on, and known the next time."""
    plans = _plans(1)
    skipped = (0, 2, 3, 3, 2, 0)
    _run(plans, TRAIN)
    assert _run(plans, skipped)[1:] == [()] * 5
    _run(plans, TRAIN)
    assert _run(plans, skipped)[1:] == _right(skipped, 1)[1:]


def test_a_failed_backward_leaves_no_plan() -> None:
    plans = _plans(1)
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
    first, second = _plans(depth), _plans(depth)
    for order in orders:
        assert _run(first, order) == _run(second, order)
        assert _run(first, order) == _run(second, order) == _right(order, depth)


def test_small_neighbours_travel_together() -> None:
    """A norm and two biases between two matrices: one collective, and no unit twice in it."""
    sizes = {0: 1000, 1: 10, 2: 20, 3: 30, 4: 1000}
    plan = make_plan((0, 1, 2, 3, 4), sizes=sizes, prefetch=Prefetch(units=1), batching=Batching(nbytes=100))
    assert plan.first == ((0,), (1, 2, 3))
    assert plan.ahead == (((1, 2, 3),), ((2, 3), (4,)), ((3,), (4,)), ((4,),), ())
    assert plan.sent_at() == [-1, -1, -1, -1, 1]
    alone = Batching(nbytes=100, tiny_nbytes=30)
    plan = make_plan((0, 1, 2, 3, 4), sizes=sizes, prefetch=Prefetch(units=1), batching=alone)
    assert plan.first == ((0, 1, 2, 3), (4,)), "tiny units go with any other"
    turning = make_plan((1, 2, 2, 1), sizes=sizes, prefetch=Prefetch(units=1), batching=Batching(nbytes=100))
    assert turning.ahead[0] == ((2,), (2, 1))


def test_bytes_limit_what_is_on_its_way() -> None:
    """Two units fit, the third does not; a unit that is too large is never sent for ahead."""
    sizes = {0: 10, 1: 40, 2: 50, 3: 60, 4: 500}
    plan = make_plan((0, 1, 2, 3, 4), sizes=sizes, prefetch=Prefetch(units=3, nbytes=100))
    assert plan.first == ((0,), (1,), (2,))
    assert plan.ahead == (((1,), (2,)), ((2,),), ((3,),), (), ())


def test_the_depth_may_change_once_it_is_known() -> None:
    plans = Plans(Prefetch(units=1), sizes=dict.fromkeys(range(8), 100), is_final=False)
    _run(plans, TRAIN)
    plans.look_ahead(Prefetch(units=3))
    assert plans.is_final
    assert _run(plans, TRAIN) == _right(TRAIN, 3)


@given(
    order=st.lists(st.integers(0, 5), min_size=1, max_size=12),
    depth=st.integers(1, 3),
    limit=st.integers(0, 300),
)
def test_every_unit_is_sent_for_before_it_is_needed(order: list[int], depth: int, limit: int) -> None:
    """And what is prefetched at a position comes after it in the order."""
    sizes = {unit: 10 + 60 * unit for unit in range(6)}
    plan = make_plan(
        order, sizes=sizes, prefetch=Prefetch(units=depth), batching=Batching(nbytes=limit, tiny_nbytes=-1)
    )
    for position, sent in enumerate(plan.sent_at()):
        assert (
            sent < max(position, 0) or (position == 0 and sent == -1) or order[position] in order[:position]
        )
    for position, batches in enumerate(plan.ahead):
        following = [unit for batch in batches for unit in batch]
        assert following == order[position + 1 : position + 1 + len(following)]


def test_what_is_needed_again_soon_is_kept() -> None:
    """At the turn from forward to backward, one unit more than the plan looks ahead."""
    for depth, kept in ((0, {3}), (1, {3, 2}), (2, {3, 2, 1}), (3, {3, 2, 1, 0})):
        plans = _plans(depth)
        _run(plans, TRAIN)
        plans.begin()
        found = set()
        for unit in TRAIN[:4]:
            plans.advance(unit)
            found |= {unit} if plans.keeps(unit) else set()
        assert found == kept, depth

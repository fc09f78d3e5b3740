"""The thinned cases of `make test` lose no pair of settings."""

from __future__ import annotations

from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import pairwise


def _meetings(rows: list[tuple[Any, ...]], strength: int) -> set[tuple[Any, ...]]:
    return {
        (chosen, tuple(row[c] for c in chosen))
        for row in rows
        for chosen in combinations(range(len(row)), strength)
    }


@given(
    rows=st.integers(1, 5).flatmap(
        lambda n: st.lists(st.tuples(*[st.integers(0, 3)] * n), min_size=1, max_size=60)
    ),
    strength=st.integers(1, 2),
)
def test_whatever_meets_in_the_list_meets_in_the_cover(rows: list[tuple[int, ...]], strength: int) -> None:
    """Pairs, or single values, of lists that need not be products; and no row twice."""
    picked = pairwise.cover(rows, strength=strength)
    strength = min(strength, len(rows[0]))
    assert _meetings([rows[index] for index in picked], strength) == _meetings(rows, strength)
    assert len(set(picked)) == len(picked)


def test_a_cover_is_small() -> None:
    """Ten settings of two values: 1024 combinations, and at most twelve that have all pairs."""
    rows = list(product((False, True), repeat=10))
    assert len(pairwise.cover(rows)) <= 12
    assert len(pairwise.cover(rows, strength=1)) == 2


def test_the_rest_is_marked() -> None:
    """Each combination is there, once, and those that are not in the cover carry the marker."""
    mark = pairwise.parametrize(a=[1, 2, 3], b=[{}, {"x": 1}], c=["one", "two"]).mark
    names, params = mark.args
    assert names == ["a", "b", "c"] and len(params) == 12
    kept = [param.values for param in params if not param.marks]
    assert len(kept) == 6
    assert {values[0] for values in kept} == {1, 2, 3}
    assert all(param.marks in ((), (pytest.mark.full,)) for param in params)


def test_full_strength_leaves_pairs_and_single_values() -> None:
    """All pairs in `make test-all`, all values in `make test`."""
    mark = pairwise.parametrize(strength=1, full_strength=2, a=[1, 2, 3], b=[4, 5], c=[6, 7]).mark
    rows = [param.values for param in mark.args[1]]
    assert len(rows) == 6 and {(a, b) for a, b, _ in rows} == {(a, b) for a in (1, 2, 3) for b in (4, 5)}
    kept = [param.values for param in mark.args[1] if not param.marks]
    assert len(kept) == 3 and {a for a, _, _ in kept} == {1, 2, 3} and {c for *_, c in kept} == {6, 7}

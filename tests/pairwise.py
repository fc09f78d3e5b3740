"""Fewer cases for `make test`: those in which every pair of settings still meets.

Most mistakes show when one setting, or two together, have certain values. `cover` picks from a list of cases
a few in which all pairs of values occur that occur in the list; `parametrize` gives a test all cases and
marks those that were not picked as `full`, for `make test-all`.

    @pairwise.parametrize(partition_size=[1, 2, 4], bf16=[False, True], clipped=[False, True])
    def test_something(partition_size: int, bf16: bool, clipped: bool) -> None: ...

Greedy and without chance: the same cases on every machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

import pytest

Row = Sequence[Any]


def cover(rows: Sequence[Row], *, strength: int = 2) -> list[int]:
    """Positions of a few rows in which all values occur that meet in any `strength` columns of `rows`."""
    columns = list(zip(*rows, strict=True))
    levels = [[column.index(value) for value in column] for column in columns]  # need not be hashable
    strength = min(strength, len(columns))
    groups = list(combinations(range(len(columns)), strength))
    meetings = [
        {(group, tuple(levels[c][index] for c in group)) for group in groups} for index in range(len(rows))
    ]
    missing = set().union(*meetings)
    picked = []
    while missing:
        best = max(range(len(rows)), key=lambda index: len(meetings[index] & missing))  # of equals the first
        picked.append(best)
        missing -= meetings[best]
    return sorted(picked)


def thin(names: str, rows: Sequence[Row], *, strength: int = 2, ids: Any = None) -> pytest.MarkDecorator:
    """`pytest.mark.parametrize(names, rows)`, with the rows that `cover` does not need marked `full`."""
    picked = set(cover(rows, strength=strength))
    marks = [() if index in picked else pytest.mark.full for index in range(len(rows))]
    params = [pytest.param(*row, marks=mark) for row, mark in zip(rows, marks, strict=True)]
    return pytest.mark.parametrize(names.split(", "), params, ids=ids)


def parametrize(
    *, strength: int = 2, full_strength: int | None = None, **levels: Sequence[Any]
) -> pytest.MarkDecorator:
    """As `thin`, for all combinations of the values that each argument can have.

    `full_strength`: where all would take minutes, `make test-all` too has only those in which all values of
    so many arguments meet.
    """
    rows = list(product(*levels.values()))
    if full_strength is not None:
        rows = [rows[index] for index in cover(rows, strength=full_strength)]
    return thin(", ".join(levels), rows, strength=strength)

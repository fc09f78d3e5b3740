"""A curve in text."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics.utils.sparkline import Curve, sparkline


@pytest.mark.parametrize(
    ("values", "width", "height", "expected"),
    [
        ([], 8, 1, [""]),
        ([3.0], 8, 1, ["▁"]),
        ([2.0, 2.0, 2.0], 8, 1, ["▁▁▁"]),
        ([0, 1, 2, 3, 4, 5, 6, 7], 8, 1, ["▁▂▃▄▅▆▇█"]),
        ([7, 0], 8, 2, ["█ ", "█▁"]),
        ([0, 15, 7], 8, 2, [" █ ", "▁██"]),
        ([0, 0, 7, 7], 2, 1, ["▁█"]),  # the mean of each pair
        ([0, math.nan, 7, math.inf], 8, 1, ["▁ █ "]),
        ([math.nan, math.inf], 8, 2, ["  ", "  "]),
        ([0, math.nan, 7, 7], 2, 1, ["▁█"]),
    ],
)
def test_a_curve_is_drawn_from_its_lowest_to_its_highest(
    values: list[float], width: int, height: int, expected: list[str]
) -> None:
    assert sparkline(values, width, height) == expected


@given(
    st.lists(st.floats(min_value=-1e6, max_value=1e6), min_size=1, max_size=300),
    st.integers(1, 80),
    st.integers(1, 9),
)
def test_it_fits_and_higher_values_are_never_lower(values: list[float], width: int, height: int) -> None:
    """As many rows and at most as many columns as asked for; no column floats above an empty one."""
    rows = sparkline(values, width, height)
    assert len(rows) == height and {len(row) for row in rows} == {min(width, len(values))}
    columns = [sum(" ▁▂▃▄▅▆▇█".index(mark) for mark in column) for column in zip(*rows, strict=True)]
    assert min(columns) >= 1
    if len(values) <= width:
        drawn = sorted(zip(values, columns, strict=True))
        assert [filled for _, filled in drawn] == sorted(columns)
        if max(values) - min(values) > 1e-3:
            assert max(columns) == 8 * height


def test_a_long_curve_keeps_its_shape_and_its_last_value() -> None:
    """However many values come: few are kept, each the mean of as many, but for the last."""
    curve = Curve(limit=8)
    for value in range(100):
        curve.add(float(value))
    assert curve.values == [7.5, 23.5, 39.5, 55.5, 71.5, 87.5, 97.5]
    short = Curve(limit=8)
    for value in range(7):
        short.add(float(value))
    assert short.values == [0, 1, 2, 3, 4, 5, 6]

"""Stretches of time as lists of (start, end): unite them, take one from another, add them up."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same time as sorted stretches that do not touch."""
    merged: list[Interval] = []
    for start, end in sorted(found for found in intervals if found[1] > found[0]):
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((start, end))
    return merged


def subtract(intervals: Iterable[Interval], others: Iterable[Interval]) -> list[Interval]:
    """The time of ``intervals`` that is in none of ``others``."""
    left: list[Interval] = []
    holes = union(others)
    first = 0
    for start, end in union(intervals):
        while first < len(holes) and holes[first][1] <= start:
            first += 1
        at = start
        for hole_start, hole_end in holes[first:]:
            if hole_start >= end:
                break
            if hole_start > at:
                left.append((at, hole_start))
            at = max(at, hole_end)
        if at < end:
            left.append((at, end))
    return left


def total(intervals: Sequence[Interval]) -> float:
    """Seconds of stretches that do not overlap."""
    return sum(end - start for start, end in intervals)


class Busy:
    """How much of any stretch is in the given ones, without going through all of them each time."""

    def __init__(self, intervals: Iterable[Interval]) -> None:
        self._intervals = union(intervals)
        self._starts = [start for start, _ in self._intervals]
        self._before = [0.0, *accumulate(end - start for start, end in self._intervals)]

    def within(self, start: float, end: float) -> float:
        """Seconds of them from ``start`` to ``end``."""
        return self._until(end) - self._until(start)

    def _until(self, moment: float) -> float:
        number = bisect_right(self._starts, moment)
        if number == 0:
            return 0.0
        return self._before[number] - max(0.0, self._intervals[number - 1][1] - moment)

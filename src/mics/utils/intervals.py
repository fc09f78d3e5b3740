"""Stretches of time as lists of (start, end): unite them, take one from another, add them up."""

from collections.abc import Iterable, Sequence

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

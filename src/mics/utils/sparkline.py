"""A curve in text: columns of block characters, from the lowest value to the highest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Final

_BLOCKS: Final = " ▁▂▃▄▅▆▇█"
_LEVELS: Final = len(_BLOCKS) - 1


class Curve:
    """Values to draw, of which there may be very many: beyond a limit each stands for the mean of several."""

    def __init__(self, limit: int = 1024) -> None:
        self._limit = limit
        self._means: list[float] = []
        self._stride = 1  # values that a mean is of
        self._pending: list[float] = []

    def add(self, value: float) -> None:
        self._pending.append(value)
        if len(self._pending) == self._stride:
            self._means.append(_mean(self._pending))
            self._pending = []
        if len(self._means) == self._limit:
            self._means = [_mean(self._means[at : at + 2]) for at in range(0, self._limit, 2)]
            self._stride *= 2

    @property
    def values(self) -> list[float]:
        """In order, the last one of what has come since."""
        return [*self._means, _mean(self._pending)] if self._pending else list(self._means)


def sparkline(values: Sequence[float], width: int, height: int = 1) -> list[str]:
    """``height`` rows of text, the top first. One column is one value, or the mean of several.

    The lowest value fills an eighth of a row, the highest all rows. NaN and infinities leave gaps.
    """
    columns = _columns(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return [" " * len(columns)] * height
    low, span = min(finite), max(finite) - min(finite)
    eighths = [_eighths(value, low, span, height) for value in columns]
    return [
        "".join(_BLOCKS[min(max(filled - _LEVELS * below, 0), _LEVELS)] for filled in eighths)
        for below in reversed(range(height))
    ]


def _eighths(value: float, low: float, span: float, height: int) -> int:
    if not math.isfinite(value):
        return 0
    share = (value - low) / span if span > 0 else 0.0
    return 1 + round(share * (_LEVELS * height - 1))


def _columns(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` values, each the mean of as many neighbours as any other or one more."""
    if len(values) <= width:
        return list(values)
    edges = [len(values) * column // width for column in range(width + 1)]
    return [_mean(values[start:end]) for start, end in pairwise(edges)]


def _mean(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return math.fsum(finite) / len(finite) if finite else math.nan

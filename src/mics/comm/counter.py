"""Counts of collectives and of the bytes that this rank sends, per mesh axis."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What one rank has sent since its model was sharded. Keys are ``(axis, kind)``.

    Axes are ``partition``, ``replication`` and ``world``; groups that two stages serve are also counted by
    link, as ``intra`` and ``inter``. Bytes are those a bandwidth-optimal algorithm sends.
    """

    calls: dict[tuple[str, str], int]
    nbytes: dict[tuple[str, str], int]

    def axis_nbytes(self, axis: str) -> int:
        """Bytes sent along one mesh axis."""
        return sum(nbytes for (along, _), nbytes in self.nbytes.items() if along == axis)

    @property
    def partition_nbytes(self) -> int:
        return self.axis_nbytes("partition")

    @property
    def replication_nbytes(self) -> int:
        return self.axis_nbytes("replication")


class TrafficCounter:
    """Adds up what the collectives of one model send."""

    def __init__(self) -> None:
        self._calls: Counter[tuple[str, str]] = Counter()
        self._nbytes: Counter[tuple[str, str]] = Counter()

    def add(self, axis: str, kind: str, nbytes: int) -> None:
        self._calls[axis, kind] += 1
        self._nbytes[axis, kind] += nbytes

    def snapshot(self) -> Traffic:
        return Traffic(calls=dict(self._calls), nbytes=dict(self._nbytes))

"""What an emulated collective was, and when."""

from __future__ import annotations

from dataclasses import dataclass

from mics.cost.collectives import Cost, Kind


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds on one clock. Between arrival and start it waited for others to leave the link."""

    arrival: float
    start: float
    end: float


@dataclass(frozen=True, kw_only=True)
class Collective:
    """One emulated collective, in the order of issue."""

    kind: Kind
    group: str
    group_size: int
    stride: int = 1
    """From one rank of the group to the next: replicas are a partition size apart."""
    nbytes: int
    cost: Cost
    times: Times

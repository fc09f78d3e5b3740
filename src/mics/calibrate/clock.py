"""Times of what all ranks do at once: the slowest rank counts, and all ranks come to the same figures."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from mics.comm.host_group import HostGroup

_READING_SECONDS: Final = 0.2  # what is shorter runs several times: a shaped network lets bursts through
_READING_SHARE: Final = 1 / 600  # of all the time, at most
_MOST_RUNS: Final = 64
_NUM_REPEATS: Final = 5
_UNKNOWN_SPREAD: Final = 0.1  # of one or two repeats: they may agree by chance


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Seconds of one run, in the median of the repeats."""

    seconds: float
    spread: float
    """Half of the distance between the quickest and the slowest repeat, as a share of the median."""


class Stopwatch:
    """Times actions that every rank of the world calls in the same order."""

    def __init__(self, ranks: HostGroup, device: torch.device, *, max_seconds: float) -> None:
        self._ranks = ranks
        self._device = device
        self._began = time.monotonic()
        self._max_seconds = max_seconds

    @property
    def size(self) -> int:
        return self._ranks.size

    @property
    def left(self) -> float:
        """Seconds of the budget that are left, the same on all ranks."""
        spent: list[float] = self.tell(time.monotonic() - self._began)
        return self._max_seconds - max(spent)

    def tell(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        return self._ranks.all_gather(value)

    def time(
        self, action: Callable[[], object], *, repeats: int = _NUM_REPEATS, max_seconds: float = math.inf
    ) -> Timing:
        """Seconds of ``action`` on the slowest rank, after one run that is not counted.

        Fewer repeats, though one at least, where all of them would take more than ``max_seconds``.
        """
        self._reading(action, 1)
        once = max(1e-9, *self.tell(self._reading(action, 1)))
        least = min(_READING_SECONDS, _READING_SHARE * self._max_seconds)
        runs = max(1, min(_MOST_RUNS, math.ceil(least / once)))
        repeats = int(max(1, min(repeats, max_seconds / (runs * once) - 2)))
        readings = [self._reading(action, runs) for _ in range(repeats)]
        slowest = [max(each) for each in zip(*self.tell(readings), strict=True)]
        middle = statistics.median(slowest)
        spread = (max(slowest) - min(slowest)) / 2 / middle
        return Timing(seconds=middle, spread=max(spread, _UNKNOWN_SPREAD) if repeats < 3 else spread)

    def _reading(self, action: Callable[[], object], runs: int) -> float:
        self._synchronize()
        self.tell(None)  # all begin together
        began = time.perf_counter()
        for _ in range(runs):
            action()
        self._synchronize()
        return (time.perf_counter() - began) / runs

    def _synchronize(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

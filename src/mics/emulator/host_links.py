"""Links of a cluster on the host's clock: for tensors on the CPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from mics.cost.collectives import Cost
from mics.emulator.log import Times


class HostLinks:
    """Grants each collective its turn on the links it uses, first come, first served.

    Each link has a queue of its own: a collective that waits for the uplink does not keep others from the
    links inside the node, it only takes its bytes' time on them.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = {"intra": 0.0, "inter": 0.0}

    def reserve(self, cost: Cost) -> Times:
        """The moments at which a collective that is issued now starts and ends."""
        with self._lock:
            arrival = self._clock()
            intra = self._book("intra", arrival, cost.intra_seconds)
            inter = self._book("inter", arrival, cost.inter_seconds)
        start = (inter if cost.inter_seconds > 0 else intra)[0]
        return Times(arrival=arrival, start=start, end=max(intra[1], inter[1]))

    def _book(self, link: str, arrival: float, seconds: float) -> tuple[float, float]:
        if seconds <= 0:
            return arrival, arrival
        start = max(arrival, self._free_at[link])
        self._free_at[link] = start + seconds
        return start, start + seconds

    def wait_until(self, end: float) -> None:
        """Return at ``end`` on the clock: sleep most of the way, then look."""
        while (left := end - self._clock()) > 0:
            time.sleep(left - 100e-6 if left > 300e-6 else 0.0)

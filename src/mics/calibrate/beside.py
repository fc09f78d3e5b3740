"""What communication beside computation costs: on processors they share cores, on GPUs multiprocessors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from mics.calibrate.clock import Stopwatch
from mics.calibrate.collectives import Groups, sizes
from mics.calibrate.computing import ModelWork
from mics.calibrate.fit import Division
from mics.cost.clusters import Cluster
from mics.cost.collectives import Kind, cost

_LEAST_SECONDS: Final = 0.1  # of each, so that they really meet
_NUM_REPEATS: Final = 3
_MOST_SLOWDOWN: Final = 3.0  # more is another program that came in between


@dataclass(frozen=True, kw_only=True)
class Together:
    """Seconds of computation, of communication, and of both at once."""

    compute: float
    communicate: float
    both: float

    @property
    def slowdown(self) -> float:
        """How many times as long computation takes while the link is busy.

        Perfect overlap takes as long as the longer of the two: that is 1. One after the other is 2.
        """
        longer, shorter = sorted((self.compute, self.communicate), reverse=True)
        return min(_MOST_SLOWDOWN, 1.0 + max(0.0, self.both - longer) / shorter)


def measure_together(
    watch: Stopwatch,
    work: ModelWork,
    groups: Groups,
    cluster: Cluster,
    division: Division,
    *,
    max_nbytes: int,
    max_seconds: float,
) -> Together:
    """A block's forward and backward beside all-gathers that take about as long."""
    block = work.block()
    alone = watch.time(block, repeats=1).seconds
    span = groups.span(division)
    nbytes = min(
        sizes(max_nbytes),
        key=lambda size: abs(cost(cluster, Kind.ALL_GATHER, span, size).seconds - alone),
    )
    buffer = torch.zeros(nbytes // 4 // span.size * span.size, dtype=torch.float32, device=work.device)
    gather = groups.action(division, Kind.ALL_GATHER, buffer)
    once = watch.time(gather, repeats=1).seconds
    wanted = max(alone, once, _LEAST_SECONDS)
    compute = _times(block, round(wanted / alone))
    communicate = _times(gather, round(wanted / once))
    both = _beside(compute, communicate, work.device)
    found = [
        watch.time(each, repeats=_NUM_REPEATS, max_seconds=max_seconds / 3).seconds
        for each in (compute, communicate, both)
    ]
    return Together(compute=found[0], communicate=found[1], both=found[2])


def _times(action: Callable[[], object], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(max(1, count)):
            action()

    return run


def _beside(
    compute: Callable[[], object], communicate: Callable[[], object], device: torch.device
) -> Callable[[], None]:
    """Both at once, as the engine's lanes do it: another stream on a GPU, else another thread."""
    if device.type == "cuda":
        lane = torch.cuda.Stream(device)

        def on_streams() -> None:
            lane.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(lane):
                communicate()
            compute()
            torch.cuda.current_stream(device).wait_stream(lane)

        return on_streams

    def in_threads() -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                communicate()
            except BaseException as error:
                failed.append(error)

        lane = threading.Thread(target=run, name="mics-calibrate")
        lane.start()
        compute()
        lane.join()
        if failed:
            raise failed[0]

    return in_threads

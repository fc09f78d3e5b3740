"""What things cost beside each other: computation beside a link, and one link beside the other.

Ranks on processors share cores, and on GPUs multiprocessors; links may share a bus or the host's memory.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import torch

from mics.calibrate.clock import Stopwatch
from mics.calibrate.collectives import Groups, sizes
from mics.calibrate.computing import ModelWork
from mics.calibrate.fit import LINK_NAMES, Division
from mics.cost.clusters import Cluster
from mics.cost.collectives import Kind, cost

_LEAST_SECONDS: Final = 0.1  # of each, so that they really meet
_KINDS: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER)
"""What is measured beside something else: a forward has gathers beside it, a backward reductions."""
_LINK_SECONDS: Final = 0.02  # of one collective beside those of the other link: large, as in a step
_NUM_REPEATS: Final = 3
_MOST_SLOWDOWN: Final = 3.0  # more is another program that came in between


@dataclass(frozen=True, kw_only=True)
class Together:
    """Seconds of one thing alone, of another alone, and of both at once."""

    first: float
    second: float
    both: float

    @property
    def slowdown(self) -> float:
        """How many times as long one takes while the other is busy.

        Perfect overlap takes as long as the longer of the two: that is 1. One after the other is 2.
        """
        longer, shorter = sorted((self.first, self.second), reverse=True)
        return min(_MOST_SLOWDOWN, 1.0 + max(0.0, self.both - longer) / shorter)


def measure_beside_link(
    watch: Stopwatch,
    work: ModelWork,
    groups: Groups,
    cluster: Cluster,
    division: Division,
    *,
    max_nbytes: int,
    max_seconds: float,
) -> float:
    """How much slower a block's forward and backward are beside collectives that take about as long."""
    block = work.block()
    alone = watch.time(block, repeats=1).seconds
    return _mean(
        _measure(
            watch,
            block,
            _collective(kind, groups, cluster, division, alone, max_nbytes=max_nbytes, device=work.device),
            work.device,
            max_seconds=max_seconds / len(_KINDS),
        )
        for kind in _KINDS
    )


def measure_links_together(
    watch: Stopwatch,
    groups: Groups,
    cluster: Cluster,
    device: torch.device,
    *,
    max_nbytes: Mapping[Division, int],
    max_seconds: float,
) -> float:
    """How much slower collectives inside nodes are beside collectives between them."""

    def together(kind: Kind) -> Together:
        inside, between = (
            _collective(
                kind, groups, cluster, name, _LINK_SECONDS, max_nbytes=max_nbytes[name], device=device
            )
            for name in LINK_NAMES
        )
        return _measure(watch, inside, between, device, max_seconds=max_seconds / len(_KINDS))

    return _mean(map(together, _KINDS))


def _mean(found: Iterable[Together]) -> float:
    return statistics.mean(each.slowdown for each in found)


def _collective(
    kind: Kind,
    groups: Groups,
    cluster: Cluster,
    division: Division,
    seconds: float,
    *,
    max_nbytes: int,
    device: torch.device,
) -> Callable[[], None]:
    """A collective that takes about ``seconds``, by the links of ``cluster``."""
    span = groups.span(division)
    nbytes = min(
        sizes(max_nbytes),
        key=lambda size: abs(cost(cluster, kind, span, size).seconds - seconds),
    )
    buffer = torch.zeros(nbytes // 4 // span.size * span.size, dtype=torch.float32, device=device)
    return groups.action(division, kind, buffer)


def _measure(
    watch: Stopwatch,
    first: Callable[[], object],
    second: Callable[[], object],
    device: torch.device,
    *,
    max_seconds: float,
) -> Together:
    """Each as often as it takes for both to last as long."""
    once = [watch.time(each, repeats=1).seconds for each in (first, second)]
    wanted = max(*once, _LEAST_SECONDS)
    one, other = (
        _times(each, round(wanted / took)) for each, took in zip((first, second), once, strict=True)
    )
    found = [
        watch.time(each, repeats=_NUM_REPEATS, max_seconds=max_seconds / 3).seconds
        for each in (one, other, _beside(one, other, device))
    ]
    return Together(first=found[0], second=found[1], both=found[2])


def _times(action: Callable[[], object], count: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(max(1, count)):
            action()

    return run


def _beside(
    first: Callable[[], object], second: Callable[[], object], device: torch.device
) -> Callable[[], None]:
    """Both at once, as the engine's lanes do it: another stream on a GPU, else another thread."""
    if device.type == "cuda":
        lane = torch.cuda.Stream(device)

        def on_streams() -> None:
            lane.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(lane):
                second()
            first()
            torch.cuda.current_stream(device).wait_stream(lane)

        return on_streams

    def in_threads() -> None:
        failed: list[BaseException] = []

        def run() -> None:
            try:
                second()
            except BaseException as error:
                failed.append(error)

        lane = threading.Thread(target=run, name="mics-calibrate")
        lane.start()
        first()
        lane.join()
        if failed:
            raise failed[0]

    return in_threads

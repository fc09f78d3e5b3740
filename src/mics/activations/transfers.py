"""Copies of saved activations to the host and back, and how long they take beside a unit's backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from mics.activations.saved import Saved
from mics.comm.lanes import INLINE, Lane, LaneWatch, StreamLane, Work
from mics.cost.auto import horizon_for

_NUM_MEASURED: Final = 3  # micro-steps in which transfers and computation are timed


class Transfers:
    """Two lanes (streams on a GPU), one for each direction."""

    def __init__(self, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self.device = device
        self.away: Lane = StreamLane(device) if on_gpu else INLINE
        self.back: Lane = StreamLane(device) if on_gpu else INLINE
        self.watch: LaneWatch | None = None
        self._clock = TransferClock() if on_gpu else None

    def send_away(self, saved: Saved) -> None:
        """To the host's memory that it has been given."""
        source, target = saved.device_bytes(), saved.host_bytes()

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        saved.moved = self._lane(self.away, "to host").submit(copy)

    def bring_back(self, saved: Saved) -> None:
        """To new memory of the device, unless it is there."""
        if saved.on_device is not None:
            return
        here = torch.empty(saved.nbytes, dtype=torch.uint8, device=self.device)
        source, target = saved.host_bytes(), here.data  # whose version is its own: this is no edit

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        saved.be_on_device(here, is_original=False)
        lane = self._lane(self.back, "from host")
        saved.moved = lane.submit(copy if self._clock is None else lambda: self._clock_copy(copy))

    def reach(self) -> None:
        """The backward has come to a group."""
        if self._clock is not None:
            self._clock.reach(self.device)

    def horizon(self) -> int | None:
        """Groups to prefetch, told once, when enough has been seen. Asked as a forward begins."""
        if self._clock is None or not self._clock.is_read():
            return None
        found, self._clock = self._clock.horizon(), None
        return found

    def _lane(self, lane: Lane, name: str) -> Lane:
        return lane if self.watch is None else self.watch.follow(lane, Work(name, "copy", "activations"))

    def _clock_copy(self, copy: Callable[[], None]) -> None:
        assert self._clock is not None
        with self._clock.transfer():
            copy()


class TransferClock:
    """The GPU's own. Events are looked at when they are over: nobody waits for them."""

    def __init__(self) -> None:
        self._reached: list[torch.cuda.Event] = []  # when the backward came to a group
        self._transfers: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._by_group: list[int] = []  # for each group, transfers begun since the one before
        self._num_read = 0

    def reach(self, device: torch.device) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(device))
        self._reached.append(event)
        self._by_group.append(0)

    @contextmanager
    def transfer(self) -> Iterator[None]:
        if not self._reached:  # a unit takes a gradient in its own forward: that is no backward yet
            yield
            return
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        yield
        end.record()
        self._transfers.append((start, end))
        self._by_group[-1] += 1

    def is_read(self) -> bool:
        """Asked at the beginning of a forward: whether enough has been seen, and is over."""
        self._num_read += bool(self._transfers)
        pending = [self._reached[-1], *(end for _, end in self._transfers[-1:])] if self._transfers else []
        return self._num_read >= _NUM_MEASURED and all(event.query() for event in pending)

    def horizon(self) -> int:
        """Groups to prefetch, so that each is back when the backward comes to it."""
        transfers = iter(self._transfers)
        deepest = 1
        pairs = zip(self._reached, self._reached[1:], self._by_group, strict=False)
        for reached, following, count in pairs:
            moved = sum(start.elapsed_time(end) for start, end in (next(transfers) for _ in range(count)))
            deepest = max(deepest, horizon_for(moved, reached.elapsed_time(following)))
        return deepest

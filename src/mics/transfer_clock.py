"""How long transfers take beside the computation of a unit's backward, on the GPU's own clock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import torch

from mics.auto import horizon_for

_NUM_MEASURED: Final = 3  # micro-steps in which transfers and computation are timed


class TransferClock:
    """Events are looked at when they are over: nobody waits for them."""

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
        """Groups to send for ahead, so that each is back when the backward comes to it."""
        transfers = iter(self._transfers)
        deepest = 1
        pairs = zip(self._reached, self._reached[1:], self._by_group, strict=False)
        for reached, following, count in pairs:
            moved = sum(start.elapsed_time(end) for start, end in (next(transfers) for _ in range(count)))
            deepest = max(deepest, horizon_for(moved, reached.elapsed_time(following)))
        return deepest

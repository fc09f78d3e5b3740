"""A tape of marks: what the computation does, what lanes do beside it, and who waits for whom.

On a GPU a mark is a CUDA event on the stream that is at work: the host never waits for it. On a CPU it is a
moment. The marks become times when the tape is read.
"""

from __future__ import annotations

import enum
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from mics.comm.lanes import INLINE, Lane, Ticket, Work
from mics.comm.protocol import Action


class Moment(enum.Enum):
    """What a mark on the tape says."""

    FORWARD = enum.auto()  # of the whole model begins
    EVALUATION = enum.auto()  # the same without gradients: no backward follows
    BACKWARD = enum.auto()
    BACKWARD_OVER = enum.auto()
    OPTIMIZER = enum.auto()
    STEP_OVER = enum.auto()
    ENTER = enum.auto()  # a module, in the forward
    LEAVE = enum.auto()
    ENTER_BACKWARD = enum.auto()
    LEAVE_BACKWARD = enum.auto()
    RECOMPUTE = enum.auto()
    RECOMPUTE_OVER = enum.auto()
    WAIT = enum.auto()  # for what a lane does
    WAIT_OVER = enum.auto()


@dataclass(frozen=True, slots=True)
class Point:
    """A mark that has been read. Seconds count from the start of the tape."""

    seconds: float
    moment: Moment
    module: str = ""
    collective: int = -1  # that is waited for, by its place among the tape's
    lag: float = math.inf
    """How long after the host issued the mark the GPU came to it: near 0 where the GPU waits for the host."""


@dataclass(frozen=True, slots=True)
class Done:
    """Work of a lane that has been read."""

    work: Work
    start: float
    end: float
    after: tuple[int, ...] = ()  # what had to be over first


class Reading(NamedTuple):
    seconds: float
    lag: float


class Clock(Protocol):
    """Makes marks and reads them."""

    def mark(self) -> Any: ...

    def read(self, mark: Any) -> Reading: ...


class HostClock:
    """This process's."""

    def __init__(self, origin: float | None = None) -> None:
        self._origin = time.perf_counter() if origin is None else origin

    def mark(self) -> float:
        return time.perf_counter()

    def read(self, mark: float) -> Reading:
        return Reading(mark - self._origin, math.inf)


class DeviceClock:
    """A GPU's, and the host's beside it."""

    def __init__(self, device: torch.device, num_spare: int = 0) -> None:
        self._device = device
        self._spare: list[torch.cuda.Event] = []
        # The driver makes an event when it is first recorded, which takes longer than all that follows.
        made = [self.mark()[0] for _ in range(num_spare)]
        torch.cuda.synchronize(device)
        self._spare += made
        self._origin, self._host_origin = self.mark()
        torch.cuda.synchronize(device)

    def mark(self) -> tuple[torch.cuda.Event, float]:
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event, time.perf_counter()

    def read(self, mark: tuple[torch.cuda.Event, float]) -> Reading:
        event, host = mark
        event.synchronize()
        seconds = self._origin.elapsed_time(event) * 1e-3
        return Reading(seconds, seconds - (host - self._host_origin))


@dataclass(eq=False, slots=True)
class _LaneWork:
    work: Work
    after: tuple[int, ...]
    start: Any = None
    end: Any = None


@dataclass(eq=False)
class Tape:
    """Collects marks until it is read. Lanes tell it what they do (``mics.comm.lanes.LaneWatch``)."""

    clock: Clock
    running: bool = True
    _marks: list[tuple[Moment, str, int, Any]] = field(default_factory=list)
    _works: list[_LaneWork] = field(default_factory=list)

    @property
    def num_marks(self) -> int:
        """How many the clock has made."""
        return len(self._marks) + 2 * len(self._works)

    def note(self, moment: Moment, module: str = "", collective: int = -1) -> None:
        """The computation has come to ``moment``."""
        self._marks.append((moment, module, collective, self.clock.mark()))

    @contextmanager
    def waiting(self, collective: int) -> Iterator[None]:
        """Inside, the computation waits, until that is over or somebody presses Ctrl-C."""
        self.note(Moment.WAIT, collective=collective)
        try:
            yield
        finally:
            self.note(Moment.WAIT_OVER, collective=collective)

    def follow(self, lane: Lane, work: Work) -> Lane:
        return _WatchedLane(self, lane, work)

    def take(self, work: Work, after: Sequence[Ticket]) -> tuple[int, _LaneWork]:
        """A lane is given ``work``: its place on the tape."""
        # A ticket of an earlier tape has a place there, not here.
        before = tuple(t.place for t in after if isinstance(t, _WatchedTicket) and t.tape is self)
        found = _LaneWork(work, before)
        self._works.append(found)
        return len(self._works) - 1, found

    def read(self) -> tuple[list[Point], list[Done]]:
        """Stop, and say what is on the tape. Waits until the GPU has come to its end."""
        self.running = False
        points: list[Point] = []
        for moment, module, collective, mark in self._marks:
            seconds, lag = self.clock.read(mark)
            # The user may change streams: what comes later is not before.
            seconds = max(seconds, points[-1].seconds) if points else seconds
            points.append(Point(seconds, moment, module, collective, lag))
        works = []
        for found in self._works:
            # What is still under way has no end yet.
            begun, over = found.start is not None, found.end is not None
            start = self.clock.read(found.start).seconds if begun else math.inf
            end = self.clock.read(found.end).seconds if over else math.inf
            works.append(Done(found.work, start, end, found.after))
        return points, works


class _WatchedLane:
    """A lane that marks when an action begins and ends."""

    def __init__(self, tape: Tape, lane: Lane, work: Work) -> None:
        self._tape = tape
        self._lane = lane
        self._work = work

    def submit(self, action: Action, after: Sequence[Ticket] = ()) -> Ticket:
        place, found = self._tape.take(self._work, after)

        def watched() -> None:
            found.start = self._tape.clock.mark()
            action()
            found.end = self._tape.clock.mark()

        if self._lane is INLINE:  # the computation itself does it: others wait for nothing
            for ticket in after:
                ticket.wait()
            with self._tape.waiting(place):
                return self._lane.submit(watched)
        return _WatchedTicket(self._tape, self._lane.submit(watched, [_plain(t) for t in after]), place)


class _WatchedTicket:
    """A ticket that marks how long the computation waits for it. Lanes wait for the plain one."""

    def __init__(self, tape: Tape, ticket: Ticket, place: int) -> None:
        self.tape = tape
        self.ticket = ticket
        self.place = place

    def wait(self) -> None:
        if not self.tape.running or self.ticket.is_over():
            self.ticket.wait()
            return
        with self.tape.waiting(self.place):
            self.ticket.wait()

    def is_over(self) -> bool:
        return self.ticket.is_over()


def _plain(ticket: Ticket) -> Ticket:
    return ticket.ticket if isinstance(ticket, _WatchedTicket) else ticket

"""Lanes: where collectives run beside the computation.

A lane takes actions and does them one after the other. On a GPU it is a stream, and a ticket is an event: the
host never waits. On a CPU it is a thread. Either way the same code moves the same data in the same order, and
whoever needs a result waits for its ticket and for nothing else.

Every rank gives each lane the same actions in the same order, and a lane has process groups of its own,
so lanes may run ahead of each other without mixing up collectives.
"""

from __future__ import annotations

import atexit
import time
from collections.abc import Sequence
from queue import SimpleQueue
from threading import Event, Thread
from typing import NamedTuple, Protocol
from weakref import WeakKeyDictionary, finalize

import torch
from torch import Tensor

from mics.comm.codec import PLAIN, Codec
from mics.comm.protocol import Action, Collectives, Pairs, Parts


def _nothing() -> None:
    pass


class Ticket(Protocol):
    """Stands for an action that a lane has taken."""

    def wait(self) -> None:
        """What follows on the caller's stream (GPU) or in its thread (CPU) comes after the action."""
        ...

    def is_over(self) -> bool:
        """Whether nobody would have to wait."""
        ...


class Lane(Protocol):
    """Does actions in the order in which they are given."""

    def submit(self, action: Action, after: Sequence[Ticket] = ()) -> Ticket:
        """Do ``action`` after these tickets, and after what the caller has issued so far."""
        ...


class Work(NamedTuple):
    """What an action on a lane is for."""

    lane: str
    kind: str  # of collective
    label: str


class LaneWatch(Protocol):
    """Sees what lanes do, and who waits for it."""

    def follow(self, lane: Lane, work: Work) -> Lane:
        """``lane``, or one around it that takes notes."""
        ...


class _Done:
    """The ticket of an action that is over, as far as its caller can tell."""

    def wait(self) -> None:
        pass

    def is_over(self) -> bool:
        return True


DONE: Ticket = _Done()


class InlineLane:
    """No lane at all: every action is done at once, where it is issued."""

    def submit(self, action: Action, after: Sequence[Ticket] = ()) -> Ticket:
        for ticket in after:
            ticket.wait()
        action()
        return DONE


INLINE: Lane = InlineLane()
_END_TIMEOUT_S = 5.0


class StreamLane:
    """A CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # First served among kernels that are ready: a transfer that starts late ends late.
        self._stream = torch.cuda.Stream(device, priority=-1)

    def submit(self, action: Action, after: Sequence[Ticket] = ()) -> Ticket:
        stream = self._stream
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for ticket in after:
                ticket.wait()
            action()
            return _EventTicket(stream.record_event(), self._device)


class _EventTicket:
    def __init__(self, event: torch.cuda.Event, device: torch.device) -> None:
        self._event = event
        self._device = device

    def wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)

    def is_over(self) -> bool:
        return bool(self._event.query())


class ThreadLane:
    """A thread. What an action raises is raised again by whoever waits for it, or for any later action."""

    def __init__(self, name: str) -> None:
        self._actions: SimpleQueue[_ThreadTicket | None] = SimpleQueue()
        # A daemon: a process whose peers are gone must be able to exit while a collective still waits.
        thread = Thread(target=_work, args=(self._actions,), name=f"mics-{name}", daemon=True)
        thread.start()
        finalize(self, self._actions.put, None).atexit = False
        _threads[thread] = self._actions

    def submit(self, action: Action, after: Sequence[Ticket] = ()) -> Ticket:
        ticket = _ThreadTicket(action, after)
        self._actions.put(ticket)
        return ticket


_threads: WeakKeyDictionary[Thread, SimpleQueue[_ThreadTicket | None]] = WeakKeyDictionary()


@atexit.register
def _end_threads() -> None:
    """Let lanes finish before the interpreter ends: it kills threads, inside torch for that matter.

    At the end of training they are at work on what a next forward would begin with. Peers that are gone are
    not waited for.
    """
    running = list(_threads.items())
    for _, actions in running:
        actions.put(None)
    deadline = time.monotonic() + _END_TIMEOUT_S
    for thread, _ in running:
        thread.join(max(0.0, deadline - time.monotonic()))


class _ThreadTicket:
    def __init__(self, action: Action, after: Sequence[Ticket]) -> None:
        self._action: Action | None = action
        self._after = after
        self._over = Event()
        self._error: BaseException | None = None

    def run(self, broken: BaseException | None) -> BaseException | None:
        """Do the action, unless one before it failed: its collective would wait for ranks that never come."""
        try:
            if broken is None:
                for ticket in self._after:
                    ticket.wait()
                assert self._action is not None
                self._action()
            self._error = broken
        except BaseException as error:
            self._error = error
        self._action, self._after = None, ()  # free the tensors
        self._over.set()
        return self._error

    def wait(self) -> None:
        self._over.wait()
        if self._error is not None:
            raise self._error

    def is_over(self) -> bool:
        return self._over.is_set()


def _work(actions: SimpleQueue[_ThreadTicket | None]) -> None:
    broken: BaseException | None = None
    with torch.no_grad():
        while (ticket := actions.get()) is not None:
            broken = ticket.run(broken)


class Lanes:
    """All lanes on one device, made when they are first asked for."""

    def __init__(self, device: torch.device, *, overlap: bool) -> None:
        self._device = device
        self._overlap = overlap
        self._lanes: dict[str, Lane] = {}
        self.watch: LaneWatch | None = None

    def lane(self, name: str) -> Lane:
        if name not in self._lanes:
            self._lanes[name] = self._make(name)
        return self._lanes[name]

    def lane_for(self, work: Work) -> Lane:
        """Where to do ``work``."""
        lane = self.lane(work.lane)
        return lane if self.watch is None else self.watch.follow(lane, work)

    def here(self, work: Work) -> Lane:
        """Where the caller is: for ``work`` whose result it needs next."""
        return INLINE if self.watch is None else self.watch.follow(INLINE, work)

    def drain(self) -> None:
        """Wait until all lanes have done what they were given so far."""
        for ticket in [lane.submit(_nothing) for lane in self._lanes.values()]:
            ticket.wait()

    def _make(self, name: str) -> Lane:
        if not self._overlap:
            return INLINE
        return StreamLane(self._device) if self._device.type == "cuda" else ThreadLane(name)


class LanedCollectives:
    """A group's collectives as chains of actions, a lane for each stage: stages of two units overlap."""

    def __init__(self, collectives: Collectives, lanes: Lanes, name: str) -> None:
        self._collectives = collectives
        self._lanes = lanes
        self._name = name
        self.size = collectives.size

    def all_gather(
        self,
        out: Tensor,
        shard: Tensor,
        label: str,
        after: Sequence[Ticket] = (),
        then: Action | None = None,
    ) -> Ticket:
        """``out[c] = shard of member c``, and ``then`` what is to be done with it."""
        stages = self._collectives.gather_stages([(out, shard)], label)
        return self._chain(stages, ("all-gather", label), after, then)

    def gather_together(
        self,
        pairs: Pairs,
        label: str,
        after: Sequence[Ticket] = (),
        codec: Codec = PLAIN,
        prepare: Action | None = None,
        then: Action | None = None,
    ) -> Ticket:
        """``all_gather`` of all pairs (out, shard) as one collective, encoded on the way.

        ``prepare`` fills the shards before, and ``then`` is what is to be done with the results.
        """
        stages = list(self._collectives.gather_stages(pairs, label, codec))
        if prepare is not None:
            stage, action = stages[0]
            stages[0] = (stage, _both(prepare, action))
        return self._chain(stages, ("all-gather", label), after, then)

    def holds(self, to: int | None) -> range:
        """The positions whose parts this member has after ``gather_parts``."""
        return self._collectives.uneven.holds(to)

    def gather_parts(
        self, tensors: Sequence[Parts], label: str, to: int | None = None, after: Sequence[Ticket] = ()
    ) -> Ticket:
        """Members bring their parts, of any size, to all others or to the member at position ``to``."""
        stages = self._collectives.uneven.stages(tensors, label, to)
        return self._chain(stages, ("all-gather", label), after)

    def lay_out(self, action: Action, label: str, after: Sequence[Ticket] = ()) -> Ticket:
        """Fill a buffer that will be reduced, where the reduction begins."""
        return self._lane(self._collectives.reduces_first, "copy", label).submit(action, after)

    def reduce_together(
        self,
        pairs: Pairs,
        label: str,
        after: Sequence[Ticket] = (),
        codec: Codec = PLAIN,
        then: Action | None = None,
    ) -> Ticket:
        """For all pairs (out, buffer): ``out = sum over members of their buffer[position]``.

        As one collective, encoded on the way; and ``then`` what is to be done with the results.
        """
        stages = self._collectives.reduce_stages(pairs, label, codec)
        return self._chain(stages, ("reduce-scatter", label), after, then)

    def all_reduce_together(
        self,
        tensors: Sequence[Tensor],
        label: str,
        after: Sequence[Ticket] = (),
        codec: Codec = PLAIN,
        then: Action | None = None,
    ) -> Ticket:
        """Sum over members, in place, for each tensor; and ``then`` what is to be done with the results."""
        stages = self._collectives.all_reduce_stages(tensors, label, codec)
        return self._chain(stages, ("all-reduce", label), after, then)

    def _chain(
        self,
        stages: Sequence[tuple[str, Action]],
        what: tuple[str, str],
        after: Sequence[Ticket],
        then: Action | None = None,
    ) -> Ticket:
        ticket: Ticket = DONE
        for number, (stage, action) in enumerate(stages):
            last = number == len(stages) - 1
            whole = _both(action, then) if last and then is not None else action
            ticket = self._lane(stage, *what).submit(whole, after)
            after = (ticket,)
        return ticket

    def _lane(self, stage: str, kind: str, label: str) -> Lane:
        # One member moves nothing: going to another lane and back would only cost.
        if self.size == 1:
            return INLINE
        return self._lanes.lane_for(Work(f"{self._name} {stage}".strip(), kind, label))


def _both(first: Action, second: Action) -> Action:
    def both() -> None:
        first()
        second()

    return both

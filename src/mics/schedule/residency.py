"""Gathers, keeps and reshards units, as the recorded order (layout/order.py) says. Nothing else does.

::

    SHARDED --prefetch--> GATHERING --use--> GATHERED
       ^                  |    ^ | ^             |
       +-----reshard------+    | | +----keep-----+
       |                  update age
       |                       | v
       +-----reshard---------- OLD

GATHERING is in flight, or there and waiting for its next use. A unit is prefetched ahead of its use, used,
and resharded when nobody computes with it any more; or kept, if the recorded order (layout/order.py) says
that it is needed again soon enough. A unit that stays may be OLD while an optimizer steps: then its new
values come as how far they have moved (sharding/refresh.py). Two questions are answered from that order:

- Where does its memory come from? From its home in the arena while an order is followed that homes were
  planned for, otherwise memory of its own.
- When does it go? After this use; at the turn from forward to backward, after the turn; with units that stay
  (``Prefetch.stay_nbytes``) after the last micro-step that was announced.

Everything follows from events (events.py) in their order, the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial

import torch
from torch import Tensor

from mics.comm.lanes import DONE, Ticket
from mics.comm.world import UnitGroups
from mics.errors import MicsError
from mics.layout.order import Batch, Plans
from mics.schedule.arena import Arena
from mics.schedule.events import Event, Events, Progress, What
from mics.schedule.log import GATHERED, PREFETCHED, StepLog
from mics.sharding.refresh import is_moved, refresh_together
from mics.sharding.spec import label_of
from mics.sharding.unit import State, Unit

_MAX_DEFERRED = 2  # optimizer steps
_TRANSITIONS = {
    (State.SHARDED, State.GATHERING),  # prefetch
    (State.GATHERING, State.GATHERED),  # use
    (State.GATHERED, State.GATHERING),  # keep
    (State.GATHERING, State.SHARDED),  # reshard
    (State.GATHERING, State.OLD),  # age
    (State.OLD, State.GATHERING),  # update
    (State.OLD, State.SHARDED),  # reshard
}


class Transitions:
    """Every way from one state to another, each in one method."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self.event: Event | None = None  # what is being answered
        self._refreshes = {unit.spec.index: 0 for unit in units}  # ``num_refreshes`` of the values in memory
        self._moved: set[int] = set()  # whose values were moved, not gathered

    def prefetch(self, units: Sequence[Unit]) -> list[Unit]:
        """SHARDED to GATHERING, by one collective, as far as there are places for them: which."""
        found: list[Unit] = []
        try:
            for unit in units:
                if unit.refresh.confirm is not None and (unit.is_waiting or unit.state is State.OLD):
                    unit.refresh.confirm()  # sends moves that wait, and may find that they do not fit
                if unit.state is State.OLD:
                    self.reshard(unit)
                if unit.state is not State.SHARDED:
                    continue
                if unit.masters_changed():
                    refresh_together([unit])
                if unit.whole.is_free:
                    unit.whole.acquire()
                    self._refreshes[unit.spec.index] = unit.num_refreshes
                    self._move(unit, State.GATHERING)
                    found.append(unit)
            for groups, codec in dict.fromkeys((unit.groups, unit.spec.gather) for unit in found):
                _gather([u for u in found if u.groups is groups and u.spec.gather == codec], groups)
        except BaseException:
            for unit in found:  # nobody has their values
                with suppress(RuntimeError):  # what is raised says more
                    unit.gathered_at.wait()
                unit.gathered_at = DONE
                self.reshard(unit)
            raise
        return found

    def use(self, unit: Unit) -> None:
        """GATHERING to GATHERED; prefetched at the last moment if it was not before."""
        if unit.is_waiting and self.is_stale(unit):
            self.reshard(unit)
        if not unit.gathered:
            self.prefetch([unit])
        assert unit.is_waiting, f"{unit.spec.label}: its place is taken ({self.event})"
        unit.gathered_at.wait()
        unit.gathered_at = DONE
        unit.show_whole()
        self._move(unit, State.GATHERED)

    def is_stale(self, unit: Unit) -> bool:
        """Whether values have changed since they were prefetched."""
        return unit.masters_changed() or self.is_behind(unit)

    def keep(self, unit: Unit) -> None:
        """GATHERED to GATHERING: it is needed again soon."""
        self._move(unit, State.GATHERING)
        try:
            unit.show_shards()
        except MicsError:
            self.reshard(unit)  # nobody may find what was written
            raise

    def age(self, unit: Unit) -> None:
        """GATHERING to OLD: the next optimizer step will move its values."""
        unit.gathered_at.wait()
        unit.gathered_at = DONE
        self._move(unit, State.OLD)

    def update(self, unit: Unit, moved: Ticket) -> None:
        """OLD to GATHERING: its values are being moved to those of the last refresh."""
        unit.gathered_at = moved
        self._moved.add(unit.spec.index)
        self._refreshes[unit.spec.index] = unit.num_refreshes
        self._move(unit, State.GATHERING)

    def drop(self, unit: Unit, moved: Ticket) -> None:
        """GATHERING to SHARDED: its values were not moved right."""
        if unit.is_waiting and unit.gathered_at is moved and unit.spec.index in self._moved:
            self.reshard(unit)

    def is_behind(self, unit: Unit) -> bool:
        """Whether there has been a refresh since its values came."""
        return self._refreshes[unit.spec.index] != unit.num_refreshes

    def reshard(self, unit: Unit) -> None:
        """GATHERING or OLD to SHARDED, from GATHERED by way of GATHERING: its memory is free."""
        if unit.gathered:
            self.keep(unit)
        if unit.state in (State.GATHERING, State.OLD):
            unit.gathered_at.wait()
            unit.gathered_at = DONE
            unit.whole.release()
            self._moved.discard(unit.spec.index)
            self._move(unit, State.SHARDED)

    def _move(self, unit: Unit, to: State) -> None:
        assert (unit.state, to) in _TRANSITIONS, f"{unit.spec.label}: {unit.state} to {to} ({self.event})"
        unit.state = to


class StaysOld:
    """Whether the values of a unit that stays are moved by the next step.

    Every ``interval`` optimizer steps they are gathered anew instead (0: never). Each step compares copies as
    it is (sharding/refresh.py), but no replica audit sees whether that went well.
    """

    def __init__(self, progress: Progress, interval: int) -> None:
        self._progress = progress
        self._interval = interval
        self._due: dict[int, int] = {}  # by unit: the step from which on it is to be gathered anew
        self._anew: dict[int, int] = {}  # by unit: the step in which it is

    def __call__(self, unit: Unit) -> bool:
        if not is_moved(unit):
            return False
        index, step = unit.spec.index, self._progress.num_steps
        if self._anew.get(index, step) != step:  # that step is over
            self._due[index] = self._anew.pop(index) + self._interval
        if self._interval and step >= self._due.setdefault(index, step + self._interval):
            self._anew[index] = step
        return index not in self._anew


class Residency:
    """Decides from events when units move, and where to."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        events: Events,
        plans: Plans,
        progress: Progress,
        log: StepLog,
        low_memory: bool = False,
        edits_show: bool = False,
        room: Callable[[], float] = lambda: 0.0,
        stays_old: Callable[[Unit], bool] | None = None,
    ) -> None:
        """``stays_old``: whether the next step will move the values of a unit that stays."""
        self.units = list(units)
        self.plans = plans
        self.arena = Arena(self.units, frees=low_memory)
        self._room = room  # bytes of the device that nobody has used yet
        self._progress = progress
        self._log = log
        self._low_memory = low_memory
        self._edits_show = edits_show  # masters are gathered as they are, whoever wrote to them
        self._stays_old = stays_old
        self.transitions = Transitions(self.units)
        self._by_index = {unit.spec.index: unit for unit in self.units}
        self._has_turned = False  # a backward has come since the forward began
        self._is_late = False  # the first units are still to be prefetched for the next forward
        self._num_deferred = 0  # times that homes were to be given and backwards were still to come
        events[What.FORWARD_BEGINS].append(self._begin_forward)
        events[What.BACKWARD_BEGINS].append(self._begin_backward)
        events[What.BACKWARD_ENDS].append(self._end_backward)
        events[What.FAILED].append(self._forget)
        events[What.NEEDED].append(self._need)
        events[What.READ].append(self._read)
        events[What.UNUSED].append(self._release)
        events[What.ENDS_UNSEEN].append(self._set_apart)
        events[What.STEP_BEGINS].append(self._begin_step)
        events[What.STEP_ENDS].append(self._end_step)
        events[What.REFRESHED].append(self._prefetch_first)

    # -- the model's forward and backward -----------------------------------------------------------

    def _begin_forward(self, event: Event) -> None:
        self.transitions.event = event
        self._finish_order()
        # Reshard what was prefetched and not needed after all (an evaluation has no backward). What an
        # evaluation kept may have been edited since, in a way that nobody notices (``.data``) or that only
        # some ranks do. Between micro-steps values stay.
        has_turned, self._has_turned = self._has_turned, False
        first = self.plans.first_units() if has_turned or not self._edits_show else frozenset()
        for unit in self.units:
            is_next = unit.spec.index in first or (has_turned and self._stays(unit))
            # No step has moved what is old, nor will: who knows what else has.
            is_old = unit.state is State.OLD and unit.refresh.confirm is None
            if is_old or (unit.is_waiting and (not is_next or self.transitions.is_stale(unit))):
                self.transitions.reshard(unit)
        if self._is_late:
            self._is_late = False
            self._prefetch_batches(self.plans.first())

    def _begin_backward(self, event: Event) -> None:
        self._has_turned = True

    def _end_backward(self, event: Event) -> None:
        self.transitions.event = event
        if self._progress.more_to_come:
            self._prefetch_batches(self.plans.first())
        else:
            # Backward did not need them (a lookup), and their values may change now.
            for unit in self.units:
                if unit.is_waiting and self._ages(unit):
                    self.transitions.age(unit)
            self._reshard_waiting(self.units)

    def _forget(self, event: Event) -> None:
        self.transitions.event = event
        self.plans.forget_current()
        self.arena.forget_current()
        self._has_turned = False  # the next forward does not begin with what waits
        for unit in self.units:
            if unit.gathered:
                with suppress(MicsError):  # what was written is lost; the failure is told already
                    self.transitions.reshard(unit)

    def _finish_order(self) -> None:
        """What the forward and the backward since the last one needed is known."""
        for unit in self._progress.shared_inputs.take_units():
            # This backward may not have come to it, and the next may: a loss that begins later, of a tower.
            self.arena.set_apart(unit)
        if self.arena.gives_up:
            for unit in self.units:
                self.transitions.reshard(unit)
        self.arena.finish(self.plans.begin())

    # -- one unit -----------------------------------------------------------------------------------

    def _need(self, event: Event) -> None:
        unit = event.unit
        assert unit is not None
        self.transitions.event = event
        if event.place is not None:
            self._return_to(unit, event.place)
        if unit.gathered:
            return
        self._log.note(unit.spec.index, GATHERED)
        upcoming = self.plans.advance(unit.spec.index, in_backward=self._progress.in_backward)
        if not self._progress.in_backward:
            self._choose_place(unit)
        if unit.whole.at_home and not self._make_room(unit):
            self.arena.give_up()
            raise MicsError(
                f"{unit.spec.label} is needed while another unit is in its place: backward uses modules "
                "together that it never did since places in memory were planned. Places are given up: "
                "run this step again, from zero_grad() on, and it will go through"
            )
        self.transitions.use(unit)
        self.arena.note(unit, needed=True)
        # After the unit itself: it is needed now, they are not.
        self._prefetch_batches(upcoming)
        if self._progress.more_to_come and self.plans.at_end:
            self._prefetch_batches(self.plans.first())

    def _read(self, event: Event) -> None:
        """No call says where it was in the forward: from the next one on it has memory of its own."""
        assert event.unit is not None
        self.transitions.event = event
        self.arena.leave_out(event.unit)
        # A backward that is still to come finds its tensors where they were.
        if not self._progress.waiting[event.unit.spec.index]:
            self._live(event.unit, at_home=False)

    def _release(self, event: Event) -> None:
        unit = event.unit
        assert unit is not None
        self.transitions.event = event
        stays, index = self._stays(unit), unit.spec.index
        if not self._progress.in_backward and (stays or self.plans.keeps(index)):
            self.transitions.keep(unit)  # the last units of a forward are the first of the backward
        elif self._progress.more_to_come and (stays or self.plans.begins_next(index)):
            self.transitions.keep(unit)  # with the same values
        else:
            self.arena.note(unit, needed=False)
            self.arena.spare.look(self._progress.rows)
            if self._progress.in_backward and self._ages(unit):
                self.transitions.keep(unit)
            else:
                self.transitions.reshard(unit)

    def _set_apart(self, event: Event) -> None:
        assert event.unit is not None
        self.arena.set_apart(event.unit)

    def _stays(self, unit: Unit) -> bool:
        """Whether ``unit`` has a home of its own, in which it waits for its next use."""
        return unit.whole.at_home and self.plans.stays(unit.spec.index)

    def _ages(self, unit: Unit) -> bool:
        """Whether ``unit`` waits with its old values for the step that will move them."""
        return self._stays_old is not None and self._stays(unit) and self._stays_old(unit)

    # -- around an optimizer step -------------------------------------------------------------------

    def _begin_step(self, event: Event) -> None:
        self.transitions.event = event
        for unit in event.units:
            is_behind = unit.state is State.OLD and self.transitions.is_behind(unit)
            if unit.is_waiting or is_behind:
                self.transitions.reshard(unit)

    def _reshard_waiting(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.is_waiting:
                self.transitions.reshard(unit)

    def _end_step(self, event: Event) -> None:
        """Give units their homes once an order has settled, and again when another has.

        Deferred while a backward is still to come: tensors that it saved are at the old addresses.
        """
        # By counting calls, not by looking at who still holds a graph: all ranks must come to one answer.
        self.transitions.event, progress = event, self._progress
        num_waiting = progress.num_waiting
        progress.num_waiting = 0
        progress.waiting.clear()
        progress.num_steps += 1
        progress.counts_rows = self._low_memory or not self.plans.is_final
        if self.arena.spare.is_freed:
            self.arena.spare.note_room(self._room(), progress.rows)
        is_busy = progress.in_backward or progress.depth
        if is_busy or not self.plans.is_final or self.plans.prefetch.units == 0:
            return
        self._finish_order()
        if not self.arena.wants_planning():
            return
        # Outputs that no loss is made of never see a backward. One that comes all the same is refused.
        if num_waiting and self._num_deferred < _MAX_DEFERRED:
            self._num_deferred += 1
            return
        self._num_deferred = 0
        for unit in self.units:
            self.transitions.reshard(unit)
        self.arena.give_homes()

    def _prefetch_first(self, event: Event) -> None:
        """Prefetch the units that a forward like the last one needs first.

        Not where an edit through ``.data`` (clamping, say) is seen by a gather that comes after it.
        """
        self.transitions.event = event
        # What would make the host wait for the device waits for the forward.
        self._is_late = any(unit.refresh.confirm is not None for unit in event.units)
        if not (self._edits_show or self._is_late):
            self._prefetch_batches(self.plans.first())

    # -- places -------------------------------------------------------------------------------------

    def _choose_place(self, unit: Unit) -> None:
        """At home while an order is followed that homes were planned for, unless somebody is there."""
        if not unit.whole.has_home:
            return
        at_home = self.arena.expects(unit) and self._make_room(unit)
        # A backward that is still to come finds its tensors where they were.
        if not self._progress.waiting[unit.spec.index]:
            self._live(unit, at_home=at_home)

    def _return_to(self, unit: Unit, place: int) -> None:
        """Have ``unit`` where it was in the forward that backward comes to."""
        if place and place != unit.whole.home_number:
            raise MicsError(
                f"backward through {unit.spec.label}: expected a forward of since the units were given their "
                "places in memory (after the first optimizer steps, and when the order of modules changes), "
                "found an older one; run forward again"
            )
        if unit.whole.place != place and unit.gathered:
            raise MicsError(
                f"backward through {unit.spec.label}: expected it where its forward had it, found it "
                "elsewhere for another forward; run backward after each forward while the order in which "
                "modules are used still changes"
            )
        self._live(unit, at_home=bool(place))

    def _live(self, unit: Unit, *, at_home: bool) -> None:
        if at_home != unit.whole.at_home:
            self.transitions.reshard(unit)
            unit.whole.use_place(at_home=at_home)

    def _prefetch_batches(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            for unit in self.transitions.prefetch([self._by_index[index] for index in batch]):
                self._log.note(unit.spec.index, PREFETCHED)

    def _make_room(self, unit: Unit) -> bool:
        """Have its home to itself, but for units that are in use; whether that is so."""
        for other in self.arena.neighbours(unit):
            if other.state in (State.GATHERING, State.OLD) and other.whole.at_home:
                self.transitions.reshard(other)  # it was prefetched too early
        return unit.whole.home_is_free


def _cast(casts: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Bring masters to where their gather begins. On its lane."""
    torch._foreach_copy_([chunk for chunk, _ in casts], [master for _, master in casts])


def _gather(units: Sequence[Unit], groups: UnitGroups) -> None:
    """Have the values of ``units`` come, by one collective of their groups."""
    if not units[0].whole.is_own:  # one rank a group, whose shard is the whole unit
        for unit in units:
            unit.gathered_at = unit.refresh.ticket()
        return
    casts = [pair for unit in units if (pair := unit.cast_pair()) is not None]
    ticket = groups.gather.gather_together(
        [unit.gather_pair() for unit in units],
        label_of([unit.spec for unit in units]),
        codec=units[0].spec.gather,
        prepare=partial(_cast, casts) if casts else None,
        after=tuple(unit.refresh.ticket() for unit in units),
    )
    for unit in units:
        unit.gathered_at = ticket

"""The arena: memory in which gathered units live, each at its home.

Homes are planned for orders that have come twice, so that an order that changes with every step does not move
everybody every time. A unit is gathered at its home only while such an order is followed: only then is it
known who else is in memory. Otherwise it has memory of its own, which comes and goes.

The arena is one buffer. In low memory units that are gathered while the loss is computed have one of their
own, and the loss may have the memory of the others. That is kept, too, as soon as a step has shown that the
device has room for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mics.layout.homes import Change, Recorded, plan_homes
from mics.layout.order import Plan
from mics.sharding.unit import Unit
from mics.sharding.whole import Segment

_MAX_ORDERS = 8  # that are remembered


@dataclass(eq=False)
class _Order:
    """One that has come ``times`` times, and what happened in it."""

    plan: Plan
    events: list[Change]
    apart: frozenset[int]  # units that share their home with nobody
    times: int = 1

    def recorded(self) -> Recorded:
        return Recorded(
            events=self.events,
            sent_at=self.plan.sent_at(),
            first=self.plan.first_units,
            staying=self.apart | self.plan.staying,
            turn=self.plan.turn,
        )


class Arena:
    """Who lives where, and which orders that was planned for."""

    def __init__(self, units: Sequence[Unit], *, lends: bool = False) -> None:
        self.num_planned = 0  # times that homes were given, or given up
        self.lends = lends  # the loss may have the memory of units that are not gathered then
        self._units = {unit.spec.index: unit for unit in units if unit.whole.is_own}
        self._device = units[0].device if units else torch.device("cpu")
        self._left_out: set[int] = set()
        self._events: list[Change] = []  # gathers and releases since the forward began
        self._apart: set[int] = set()  # units that were in use until the backward's end
        self._neighbours: dict[int, list[Unit]] = {}  # whose homes overlap, by index
        self._lent: list[Segment] = []  # what the loss may have
        self._rows_with_room = 0  # of a step beside which the device had room for all of the arena
        self._orders: list[_Order] = []  # the latest first
        self._covered: list[Plan] = []
        self._possible: list[Plan] = []  # covered orders that began as this forward did
        self._num_needed = 0  # gathers since the forward began
        self.gives_up = False
        self._wait, self._waited = 0, 0  # boundaries until homes may be given again

    def note(self, unit: Unit, *, needed: bool) -> None:
        """A unit is needed, or released."""
        if needed:
            self._possible = self._possible_with(unit)
            self._num_needed += 1
        self._events.append(Change(unit.spec.index, needed=needed))

    def expects(self, unit: Unit) -> bool:
        """Whether ``unit`` comes next in an order that homes were planned for."""
        return unit.spec.index not in self._left_out and bool(self._possible_with(unit))

    def _possible_with(self, unit: Unit) -> list[Plan]:
        position, index = self._num_needed, unit.spec.index
        return [plan for plan in self._possible if plan.order[position : position + 1] == (index,)]

    def set_apart(self, unit: Unit) -> None:
        """A unit is resharded only because the backward is over: how long it was needed nobody saw.

        Another backward may need it beside any other unit, so nobody shares its home.
        """
        self._apart.add(unit.spec.index)

    def leave_out(self, unit: Unit) -> None:
        """A unit lives in memory of its own for good."""
        self._left_out.add(unit.spec.index)

    def neighbours(self, unit: Unit) -> Sequence[Unit]:
        """The units whose homes overlap that of ``unit``."""
        return self._neighbours.get(unit.spec.index, ())

    def give_up(self) -> None:
        """Homes turned out wrong: from the next forward on nobody has one, until orders settle again."""
        self.gives_up = True

    def forget_current(self) -> None:
        """What happened since the forward began led nowhere."""
        self._events, self._apart, self._num_needed, self._possible = [], set(), 0, []

    def finish(self, plan: Plan | None) -> None:
        """What happened up to here is what happens when ``plan`` is followed."""
        events, apart = self._events, frozenset(self._apart)
        self.forget_current()
        if self.gives_up:
            self._give_up()
        self._possible = self._covered
        if plan is None or [event.unit for event in events if event.needed] != list(plan.order):
            return
        for order in self._orders:
            if order.plan.order == plan.order:
                order.plan, order.events, order.apart = plan, events, order.apart | apart
                order.times += 1
                return
        self._orders.insert(0, _Order(plan, events, apart))
        if len(self._orders) > _MAX_ORDERS:
            # An order that comes again and again is not pushed out by ones that came once.
            self._orders.remove(min(reversed(self._orders[1:]), key=lambda order: order.times))

    def wants_planning(self) -> bool:
        """Whether an order has settled that homes were not planned for. Asked once a boundary.

        Every time homes are given it takes twice as long until they are given again: orders that go on
        changing must not move everybody all the time.
        """
        self._waited += 1
        settled = any(each.plan not in self._covered for each in self._settled())
        return bool(self._units) and settled and self._waited >= self._wait

    def _give_up(self) -> None:
        self.gives_up = False
        self._move_out()
        self._orders, self._covered = [], []
        self.num_planned += 1

    def give_homes(self) -> None:
        """Plan homes for all settled orders, allocate the arena, and let units move in."""
        self.num_planned += 1
        settled = self._settled()
        self._covered = self._possible = [each.plan for each in settled]
        self._wait, self._waited = 2 * self._wait + 1, 0
        recorded = [each.recorded() for each in settled]
        self._move_out()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()  # once: what gathered units have used up to here is free from now on
        units = frozenset(self._units) - self._left_out
        if not self.lends:
            self._settle(recorded, units)
            return
        apart = frozenset(unit for each in settled for unit in each.apart)
        at_loss = frozenset(unit for each in recorded for unit in each.at_turn()) - apart
        self._settle(recorded, units & at_loss)
        # Each of those that share with nobody alone: together they would be there as long as any is.
        lent = [units - at_loss - apart, *(frozenset([unit]) for unit in sorted(units & apart))]
        self._lent, self._rows_with_room = [self._settle(recorded, part) for part in lent], 0
        self._lend(True)
        for segment in self._lent:
            segment.lend_if_empty()

    def _settle(self, recorded: Sequence[Recorded], units: frozenset[int]) -> Segment:
        """Give these units their homes in one segment."""
        sizes = {index: unit.whole.nbytes for index, unit in self._units.items()}
        homes = plan_homes(recorded, sizes, leave_out=sizes.keys() - units)
        segment = Segment(homes.nbytes, self._device)
        for index, offset in homes.offsets.items():
            neighbours = [self._units[other] for other in homes.neighbours(index, sizes)]
            self._neighbours[index] = neighbours
            others = [unit.whole for unit in neighbours]
            self._units[index].whole.move_in(segment, offset, others, number=self.num_planned)
        return segment

    def _lend(self, lends: bool) -> None:
        for segment in self._lent:
            segment.lends = lends

    @property
    def is_lent(self) -> bool:
        """Whether part of it is not there while the loss is computed."""
        return any(segment.lends for segment in self._lent)

    def lend_for(self, rows: int) -> None:
        """A unit is resharded in a step of so many rows: may the loss have the memory?"""
        if self._lent:
            self._lend(rows > self._rows_with_room)

    def note_room(self, free_nbytes: float, rows: int) -> None:
        """A step of so many rows is over, and nobody has ever used ``free_nbytes`` of the device."""
        if free_nbytes >= sum(segment.memory.numel() for segment in self._lent):
            self._rows_with_room = rows

    def _move_out(self) -> None:
        self._neighbours, self._lent = {}, []
        for unit in self._units.values():
            unit.whole.move_out()

    def _settled(self) -> list[_Order]:
        return [each for each in self._orders if each.times > 1]

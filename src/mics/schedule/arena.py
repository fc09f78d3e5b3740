"""The arena: memory in which gathered units live, each at its home.

Homes are planned for orders that have come twice, so that an order that changes with every step does not move
everybody every time. A unit is gathered at its home only while such an order is followed: only then is it
known who else is in memory. Otherwise it has memory of its own, which comes and goes.

The arena is one buffer. In low memory units that are gathered while the loss is computed have one of their
own, and each buffer has memory only while a unit is gathered there: at the peak hardly more than units with
memory of their own would take. As soon as a step has shown that the device has room for all, it is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from mics.layout.homes import Change, Homes, Recorded, plan_homes, plan_segments
from mics.layout.order import Plan
from mics.sharding.unit import Unit
from mics.sharding.whole import HomeSegment

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


class SpareMemory:
    """Whether others may have the memory of segments in which no unit is gathered: the loss above all.

    They may until a step of as many rows has shown that the device has room for both.
    """

    def __init__(self, segments: Sequence[HomeSegment]) -> None:
        self._segments = list(segments)
        self._rows_with_room = 0
        for segment in segments:
            segment.is_freed = True
            segment.free_if_unused()

    @property
    def nbytes(self) -> int:
        return sum(segment.memory.numel() for segment in self._segments)

    @property
    def is_freed(self) -> bool:
        return any(segment.is_freed for segment in self._segments)

    def look(self, rows: int) -> None:
        """A unit is resharded in a step of so many rows."""
        for segment in self._segments:
            segment.is_freed = rows > self._rows_with_room

    def note_room(self, free_nbytes: float, rows: int) -> None:
        """A step of so many rows is over, and nobody has ever used ``free_nbytes`` of the device."""
        if free_nbytes >= self.nbytes:
            self._rows_with_room = rows


class Arena:
    """Who lives where, and which orders that was planned for."""

    def __init__(self, units: Sequence[Unit], *, frees: bool = False) -> None:
        self.num_planned = 0  # times that homes were given, or given up
        self._frees = frees  # the loss may have the memory of units that are not gathered then
        self.spare = SpareMemory([])
        self._units = {unit.spec.index: unit for unit in units if unit.whole.is_own}
        self._device = units[0].device if units else torch.device("cpu")
        self._left_out: set[int] = set()
        self._events: list[Change] = []  # gathers and releases since the forward began
        self._apart: set[int] = set()  # units that were in use until the backward's end
        self._neighbours: dict[int, list[Unit]] = {}  # whose homes overlap, by index
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
        sizes = {index: unit.whole.nbytes for index, unit in self._units.items()}
        if not self._frees:
            self._settle(plan_homes(recorded, sizes, leave_out=self._left_out), sizes)
            return
        apart = {unit for each in settled for unit in each.apart}
        planned = plan_segments(recorded, sizes, apart=apart, leave_out=self._left_out)
        self.spare = SpareMemory([self._settle(homes, sizes) for homes in planned])

    def _settle(self, homes: Homes, sizes: Mapping[int, int]) -> HomeSegment:
        """Let units move in, and give them their memory."""
        segment = HomeSegment(homes.nbytes, self._device)
        for index, offset in homes.offsets.items():
            neighbours = [self._units[other] for other in homes.neighbours(index, sizes)]
            self._neighbours[index] = neighbours
            others = [unit.whole for unit in neighbours]
            self._units[index].whole.move_in(segment, offset, others, number=self.num_planned)
        return segment

    def _move_out(self) -> None:
        self._neighbours, self.spare = {}, SpareMemory([])
        for unit in self._units.values():
            unit.whole.move_out()

    def _settled(self) -> list[_Order]:
        return [each for each in self._orders if each.times > 1]

"""The arena: one buffer in which gathered units live, each at its home.

Homes are planned for orders that have come twice, so that an order that changes with every step does not move
everybody every time. A unit is gathered at its home only while such an order is followed: only then is it
known who else is in memory. Otherwise it has memory of its own, which comes and goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mics.layout.homes import Change, Recorded, plan_homes
from mics.layout.order import Plan
from mics.sharding.unit import Unit

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
        )


class Arena:
    """Who lives where, and which orders that was planned for."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.num_planned = 0  # times that homes were given, or given up
        self._units = {unit.spec.index: unit for unit in units if unit.whole.is_own}
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
        sizes = {index: unit.whole.nbytes for index, unit in self._units.items()}
        homes = plan_homes([each.recorded() for each in settled], sizes, leave_out=self._left_out)
        device = next(iter(self._units.values())).device
        self._move_out()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # once: what gathered units have used up to here is free from now on
        arena = torch.empty(homes.nbytes, dtype=torch.uint8, device=device)
        for index, offset in homes.offsets.items():
            neighbours = [self._units[other] for other in homes.neighbours(index, sizes)]
            self._neighbours[index] = neighbours
            home = arena[offset : offset + sizes[index]]
            others = [unit.whole for unit in neighbours]
            self._units[index].whole.move_in(home, others, number=self.num_planned)

    def _move_out(self) -> None:
        self._neighbours = {}
        for unit in self._units.values():
            unit.whole.move_out()

    def _settled(self) -> list[_Order]:
        return [each for each in self._orders if each.times > 1]

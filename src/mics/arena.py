"""The arena: one buffer in which gathered units live, each at its home.

Homes are planned for orders that have come twice, so that an order that changes with every step does not move
everybody every time. A unit is gathered at its home only while such an order is followed: only then is it
known who else is in memory. Otherwise it has memory of its own, which comes and goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from mics.homes import Event, Recorded, plan_homes
from mics.plans import Plan
from mics.unit import Unit

_MAX_ORDERS = 4  # that homes are planned for at the same time


@dataclass(eq=False)
class _Order:
    """One that has come ``times`` times, and what happened in it."""

    plan: Plan
    events: list[Event]
    times: int = 1

    def recorded(self) -> Recorded:
        return Recorded(events=self.events, sent_at=self.plan.sent_at(), first=self.plan.first_units)


class Arena:
    """Who lives where, and which orders that was planned for."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.num_planned = 0  # times that homes were given
        self.nbytes = 0
        self._units = {unit.spec.index: unit for unit in units if unit.memory.is_own}
        self._events: list[Event] = []  # gathers and releases since the forward began
        self._orders: list[_Order] = []  # the latest first
        self._covered: list[Plan] = []
        self._possible: list[Plan] = []  # covered orders that began as this forward did
        self._num_needed = 0  # gathers since the forward began

    def note(self, unit: Unit, *, needed: bool) -> None:
        """A unit is needed, or released."""
        if needed:
            self._possible = self._possible_with(unit)
            self._num_needed += 1
        self._events.append(Event(unit.spec.index, needed=needed))

    def expects(self, unit: Unit) -> bool:
        """Whether ``unit`` comes next in an order that homes were planned for."""
        return bool(self._possible_with(unit))

    def _possible_with(self, unit: Unit) -> list[Plan]:
        position, index = self._num_needed, unit.spec.index
        return [plan for plan in self._possible if plan.order[position : position + 1] == (index,)]

    def finish(self, plan: Plan | None) -> None:
        """What happened up to here is what happens when ``plan`` is followed."""
        events, self._events = self._events, []
        self._num_needed, self._possible = 0, self._covered
        if plan is None:
            return
        for order in self._orders:
            if order.plan.order == plan.order:
                order.plan, order.events = plan, events
                order.times += 1
                return
        self._orders = [_Order(plan, events), *self._orders][:_MAX_ORDERS]

    def _covers(self, plan: Plan) -> bool:
        return any(plan is covered for covered in self._covered)

    def wants_planning(self) -> bool:
        """Whether an order has settled that homes were not planned for."""
        return bool(self._units) and any(not self._covers(each.plan) for each in self._settled())

    def give_homes(self) -> None:
        """Plan homes for all settled orders, allocate the arena, and let units move in."""
        settled = self._settled()
        self._covered = self._possible = [each.plan for each in settled]
        sizes = {index: unit.memory.nbytes for index, unit in self._units.items()}
        homes = plan_homes([each.recorded() for each in settled], sizes)
        device = next(iter(self._units.values())).device
        for index in homes.offsets:
            self._units[index].move_out()
        if device.type == "cuda":
            torch.cuda.empty_cache()  # once: what gathered units have used up to here is free from now on
        arena = torch.empty(homes.nbytes, dtype=torch.uint8, device=device)
        for index, offset in homes.offsets.items():
            neighbours = [self._units[other] for other in homes.neighbours(index, sizes)]
            self._units[index].move_in(arena[offset : offset + sizes[index]], neighbours)
        self.num_planned += 1
        self.nbytes = homes.nbytes

    def _settled(self) -> list[_Order]:
        return [each for each in self._orders if each.times > 1]

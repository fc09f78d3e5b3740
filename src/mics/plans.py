"""Recorded orders of gathers: what comes next, looked up by position.

The first micro-step records in which order units are needed. Later ones replay it: at every position the plan
says what follows, so that it can be sent for ahead of time. A plan is what happens between two beginnings of
the model's forward: a whole micro-step, or an evaluation. Several are kept. Where the order leaves the plan,
another one that began the same way takes over; if there is none, units are gathered when they are needed and
the new order is recorded.

Everything here follows from the order of the calls alone, so all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence

_MAX_PLANS = 16


class Plans:
    """The orders seen, and the place in the one that is being replayed."""

    def __init__(self, depth: int) -> None:
        self._depth = depth  # units to look ahead
        self._plans: list[tuple[int, ...]] = []  # the latest first
        self._plan: tuple[int, ...] = ()
        self._seen: list[int] = []  # since the forward began
        self._follows = False  # ``_seen`` is how ``_plan`` begins

    def begin(self) -> None:
        """The model's forward begins: what was seen up to here is a plan."""
        if self._seen:
            done = self._plan if self._follows and len(self._seen) == len(self._plan) else tuple(self._seen)
            if done in self._plans:
                self._plans.remove(done)
            self._plans.insert(0, done)
            del self._plans[_MAX_PLANS:]
        self._seen = []
        self._follows = bool(self._plans)
        self._plan = self._plans[0] if self._plans else ()

    def first(self) -> Sequence[int]:
        """What will be needed first if the next forward is like the last one."""
        if self._seen and not self._follows:
            return tuple(self._seen[: self._depth])
        latest = self._plan if self._follows else (self._plans[0] if self._plans else ())
        return latest[: self._depth]

    def advance(self, unit: int) -> Sequence[int]:
        """``unit`` is needed now. What will be needed after it, as far as is known."""
        position = len(self._seen)
        self._seen.append(unit)
        if not (self._follows and position < len(self._plan) and self._plan[position] == unit):
            self._change()
        ahead = position + 1
        return self._plan[ahead : ahead + self._depth] if self._follows else ()

    def _change(self) -> None:
        """Find a plan that began as this one did."""
        seen = tuple(self._seen)
        found = next((plan for plan in self._plans if plan[: len(seen)] == seen), None)
        self._follows = found is not None
        if found is not None:
            self._plan = found

    def forget_current(self) -> None:
        """What was seen since the forward began led nowhere (a failed backward)."""
        self._seen = []
        self._follows = False

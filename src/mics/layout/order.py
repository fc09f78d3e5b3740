"""Recorded orders of gathers: what to prefetch at each position, what to keep, and which units stay gathered.

The first micro-step records in which order units are needed. Later ones replay it: at every position the plan
says what follows, so that it can be prefetched. A plan is what happens between two beginnings of
the model's forward: a whole micro-step, or an evaluation. Several are kept. Where the order leaves the plan,
another one that began the same way takes over; if there is none, units are gathered when they are needed and
the new order is recorded.

Small units that follow each other are prefetched together: a collective of few bytes is all latency.

Everything here follows from the order of the calls alone, so all ranks decide alike.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mics.errors import SettingsError

_MAX_PLANS = 16

Batch = tuple[int, ...]
"""Units that are gathered by one collective."""


@dataclass(frozen=True, kw_only=True)
class Prefetch:
    """How far ahead of their use units are gathered.

    ``units`` counts units (small ones that travel together count as one); with 0 nothing runs beside the
    computation. ``nbytes`` limits the bytes on their way as well: a unit that does not fit is gathered when
    it is needed.

    ``stay_nbytes``: units of up to so many bytes altogether stay gathered from their first use in a step to
    their last, if the last one is known; otherwise from each forward to its backward. That spares gathers
    where the network is busier than the GPU, and takes the memory. Units that are needed twice a micro-step
    come first. Models in low memory and ``units=0`` have no memory for it: there it changes nothing.
    """

    units: int = 2
    nbytes: int | None = None
    stay_nbytes: int = 0

    def __post_init__(self) -> None:
        for field, least in (("units", 0), ("nbytes", 1), ("stay_nbytes", 0)):
            value = getattr(self, field)
            if value is None and field == "nbytes":
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < least:
                raise SettingsError(f"Prefetch.{field}: expected an integer from {least}, found {value!r}")


@dataclass(frozen=True, kw_only=True)
class Batching:
    """Which neighbours in an order are gathered by one collective.

    Units that together have at most ``nbytes``, and units of at most ``tiny_nbytes`` with any.
    """

    nbytes: int = 0
    tiny_nbytes: int = 0

    def takes(self, batch_nbytes: int, unit_nbytes: int) -> bool:
        """Whether a unit goes with a batch that has ``batch_nbytes`` up to now."""
        is_tiny = min(batch_nbytes, unit_nbytes) <= self.tiny_nbytes
        return is_tiny or batch_nbytes + unit_nbytes <= self.nbytes


NO_BATCHING = Batching(tiny_nbytes=-1)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One recorded order, and what to prefetch at each of its positions."""

    order: tuple[int, ...]
    first: tuple[Batch, ...]
    """To prefetch before the forward begins."""
    ahead: tuple[tuple[Batch, ...], ...]
    """By position: what to have on its way once the unit there is needed."""
    kept: tuple[frozenset[int], ...]
    """By position: units that need not be released, because they are needed again so soon.

    Those that come next, one more than the plan looks ahead: at the turn from forward to backward there are
    homes for them, which the backward has use for later.
    """
    staying: frozenset[int] = frozenset()
    """Units that are not released between two uses, however far apart."""
    turn: int | None = None
    """Where the backward begins, if the plan stops there (see ``make_plan``)."""

    @property
    def first_units(self) -> frozenset[int]:
        return frozenset(unit for batch in self.first for unit in batch)

    def sent_at(self) -> list[int]:
        """For each position the one at which its unit is prefetched; -1: before the first."""
        found: list[int] = []
        sent: dict[int, int] = {unit: -1 for batch in self.first for unit in batch}
        for position, unit in enumerate(self.order):
            found.append(sent.pop(unit, position))
            for batch in self.ahead[position]:
                for other in batch:
                    sent.setdefault(other, position)
        return found


_NO_PLAN = Plan(order=(), first=(), ahead=(), kept=())


def make_plan(
    order: Sequence[int],
    *,
    sizes: Mapping[int, int],
    prefetch: Prefetch,
    batching: Batching = NO_BATCHING,
    turn: int | None = None,
    chosen: Iterable[int] = (),
) -> Plan:
    """Look ahead from every position of ``order``. ``sizes``: bytes of each gathered unit.

    ``chosen`` are units that stay in other orders: they stay in this one, too.

    ``turn`` is where the backward begins: what comes after it is not prefetched before it, and nothing kept
    but what it begins with, so that little is gathered while the loss is computed. None: look past it.
    """
    forward = batches_of(order[:turn], sizes, batching)
    batches = forward if turn is None else forward + batches_of(order[turn:], sizes, batching)
    places = [(number, place) for number, batch in enumerate(batches) for place in range(len(batch))]

    def window(upcoming: Iterable[Batch]) -> tuple[Batch, ...]:
        found, nbytes = [], 0
        for batch in upcoming:
            nbytes += sum(sizes[unit] for unit in batch)
            if prefetch.nbytes is not None and nbytes > prefetch.nbytes:
                break
            found.append(batch)
        return tuple(found)

    ahead = []
    for number, place in places:
        rest = batches[number][place + 1 :]
        following = batches[number + 1 : number + 1 + prefetch.units]
        if turn is not None and number < len(forward):
            following = following[: len(forward) - number - 1]
        ahead.append(window([*([rest] if rest else []), *following]) if prefetch.units else ())
    # One more than elsewhere: nothing is computed before the first.
    first = window(batches[: prefetch.units + 1]) if prefetch.units else ()
    kept = []
    for number, place in places:
        upcoming = [batches[number][place + 1 :], *batches[number + 1 :]]
        kept.append(
            frozenset(
                unit
                for batch in window(_distinct(upcoming, prefetch.units + 1 if turn is None else 1))
                for unit in batch
            )
        )
    # Whoever stops at the turn is short of memory.
    may_stay = turn is None and prefetch.units > 0
    staying = staying_units(order, sizes, prefetch.stay_nbytes if may_stay else 0, chosen)
    return Plan(
        order=tuple(order), first=first, ahead=tuple(ahead), kept=tuple(kept), staying=staying, turn=turn
    )


def staying_units(
    order: Sequence[int], sizes: Mapping[int, int], nbytes: int, chosen: Iterable[int] = ()
) -> frozenset[int]:
    """The units of ``order`` that stay gathered, in what ``chosen`` ones leave of ``nbytes``.

    Those first that are needed again, and of them from the middle outwards: those at the ends are kept around
    the turns anyway.
    """
    units, found = list(dict.fromkeys(order)), set(chosen)
    times, left = Counter(order), nbytes - sum(sizes[unit] for unit in found)
    middle = (len(units) - 1) / 2
    for place in sorted(range(len(units)), key=lambda p: (times[units[p]] == 1, abs(p - middle))):
        unit = units[place]
        if unit not in found and sizes[unit] <= left:
            found.add(unit)
            left -= sizes[unit]
    return frozenset(found).intersection(units)


def _distinct(upcoming: Iterable[Batch], count: int) -> Iterator[Batch]:
    """The first ``count`` batches that bring new units."""
    seen: set[int] = set()
    for batch in upcoming:
        if count and not seen.issuperset(batch):
            seen.update(batch)
            count -= 1
            yield batch
        elif not count:
            return


def batches_of(order: Sequence[int], sizes: Mapping[int, int], batching: Batching) -> list[Batch]:
    """``order`` cut into what is gathered together, no unit twice."""
    found: list[list[int]] = []
    nbytes = 0
    for unit in order:
        if found and unit not in found[-1] and batching.takes(nbytes, sizes[unit]):
            found[-1].append(unit)
            nbytes += sizes[unit]
        else:
            found.append([unit])
            nbytes = sizes[unit]
    return [tuple(batch) for batch in found]


class Plans:
    """The orders seen, and the place in the one that is being replayed."""

    def __init__(
        self,
        prefetch: Prefetch,
        *,
        sizes: Mapping[int, int],
        batching: Batching = NO_BATCHING,
        stops_at_turn: bool = False,
        is_final: bool = True,
    ) -> None:
        self.prefetch = prefetch
        self.is_final = is_final  # whether ``prefetch`` is what it will be
        self._sizes = sizes
        self.batching = batching
        self._stops_at_turn = stops_at_turn
        self._turn: int | None = None  # where in ``_seen`` the backward began
        self._plans: list[Plan] = []  # the latest first
        self._plan = _NO_PLAN
        self._seen: list[int] = []  # since the forward began
        self._follows = False  # ``_seen`` is how ``_plan`` begins
        self._named: frozenset[int] = frozenset()  # units that stay because somebody says so
        self._chosen: frozenset[int] = frozenset()  # units that stay, in any order

    def begin(self) -> Plan | None:
        """The model's forward begins: what was seen up to here is a plan, if anything was."""
        done = self._current() if self._seen else None
        if done is not None:
            self._plans = [done, *(plan for plan in self._plans if plan.order != done.order)][:_MAX_PLANS]
        self._seen, self._turn = [], None
        self._follows = bool(self._plans)
        self._plan = self._plans[0] if self._plans else _NO_PLAN
        return done

    def look_ahead(self, prefetch: Prefetch) -> None:
        """Change how far ahead units are prefetched, from the next forward on."""
        self.is_final = True
        if prefetch != self.prefetch:
            self.prefetch = prefetch
            self._look_again()

    def let_stay(self, units: Iterable[int]) -> None:
        """Have these units stay, whatever bytes they have, from the next forward on."""
        named = frozenset() if self._stops_at_turn else frozenset(units)
        if named != self._named:
            self._named = named
            self._look_again()

    def first(self) -> Sequence[Batch]:
        """What will be needed first if the next forward is like the last one."""
        if self._seen and not self._follows:
            return self._make(self._seen, self._turn).first
        return (self._plan if self._follows else (self._plans or [_NO_PLAN])[0]).first

    def first_units(self) -> frozenset[int]:
        """The same as one set of units."""
        return frozenset(unit for batch in self.first() for unit in batch)

    def stays(self, unit: int) -> bool:
        """Whether ``unit`` is not to be released before its last use."""
        return self._follows and unit in self._plan.staying

    def advance(self, unit: int, *, in_backward: bool = False) -> Sequence[Batch]:
        """``unit`` is needed now. What will be needed after it, as far as is known."""
        position = len(self._seen)
        if in_backward and self._turn is None:
            self._turn = position
        self._seen.append(unit)
        order = self._plan.order
        if not (self._follows and position < len(order) and order[position] == unit):
            self._change()
        return self._plan.ahead[position] if self._follows else ()

    @property
    def follows(self) -> bool:
        """Whether there is a plan that began as this one did."""
        return self._follows

    @property
    def at_end(self) -> bool:
        """Whether the plan that is followed expects nothing more."""
        return self._follows and len(self._seen) == len(self._plan.order)

    def begins_next(self, unit: int) -> bool:
        """Whether ``unit`` is only needed again at the beginning of the next micro-step, which is near."""
        left = self._plan.order[len(self._seen) :]
        return self._follows and len(left) <= 1 and unit not in left and unit in self.first_units()

    def keeps(self, unit: int) -> bool:
        """Whether ``unit`` is needed again so soon that it may stay."""
        return self._follows and bool(self._seen) and unit in self._plan.kept[len(self._seen) - 1]

    def latest(self) -> tuple[int, ...]:
        """The order of the last micro-step, as far as it is known."""
        return tuple(self._seen) or (self._plans or [_NO_PLAN])[0].order

    def forget_current(self) -> None:
        """What was seen since the forward began led nowhere (a failed backward)."""
        self._seen, self._turn = [], None
        self._follows = False

    def _look_again(self) -> None:
        self._chosen = self._named
        self._plans = [self._make(plan.order, plan.turn) for plan in self._plans]
        self._plan = self._make(self._plan.order, self._plan.turn)

    def _current(self) -> Plan:
        follows_to_the_end = self._follows and len(self._seen) == len(self._plan.order)
        return self._plan if follows_to_the_end else self._make(self._seen, self._turn)

    def _make(self, order: Sequence[int], turn: int | None) -> Plan:
        plan = make_plan(
            order,
            sizes=self._sizes,
            prefetch=self.prefetch,
            batching=self.batching,
            turn=(len(order) if turn is None else turn) if self._stops_at_turn else None,
            chosen=self._chosen,
        )
        self._chosen |= plan.staying
        return plan

    def _change(self) -> None:
        """Find a plan that began as this one did."""
        seen = tuple(self._seen)
        found = next((plan for plan in self._plans if plan.order[: len(seen)] == seen), None)
        self._follows = found is not None
        if found is not None:
            self._plan = found

"""Homes: fixed places for gathered units in one buffer. Arithmetic alone.

From recorded micro-steps it is known which units are gathered, or on their way, at the same time. Those get
places that do not overlap; others may share one. Because a unit's address never changes, tensors that
autograd saved in the forward point at the right values when the unit is gathered again for the backward, and
a steady step allocates nothing for parameters.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

ALIGNMENT = 512  # bytes; what CUDA's own allocator gives
_ALIKE = 0.75  # of a unit's size: one of that size or more may count as large as it


@dataclass(frozen=True)
class Change:
    """A unit is needed (and from then on gathered), or released."""

    unit: int
    needed: bool


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """A micro-step as it was seen."""

    events: Sequence[Change]
    sent_at: Sequence[int]
    """For each gather the number of the gather at which it is prefetched; -1: before the first."""
    staying: Collection[int]
    """Units that may be in use, or wait for their next use, beside any other."""
    first: Collection[int]
    """Units that the next micro-step needs first: prefetched, or kept, while this one's last is at work."""
    turn: int | None = None
    """The number of the gather with which the backward begins; None: there is none, or nobody asks."""

    def at_turn(self) -> frozenset[int]:
        """Units that are in memory while the loss is computed."""
        needed = [position for position, event in enumerate(self.events) if event.needed]
        if self.turn is None or self.turn >= len(needed):
            return frozenset()
        turn = needed[self.turn]
        return frozenset(
            unit
            for unit, spans in _lifetimes(self).items()
            if any(start < turn <= end for start, end in spans)
        )


@dataclass(frozen=True, kw_only=True)
class Homes:
    """Where each unit lives, in bytes from the arena's start."""

    offsets: Mapping[int, int]
    nbytes: int

    def neighbours(self, unit: int, sizes: Mapping[int, int]) -> list[int]:
        """The units whose places overlap this one's."""
        start, end = self.offsets[unit], self.offsets[unit] + sizes[unit]
        return [
            other
            for other, offset in self.offsets.items()
            if other != unit and offset < end and start < offset + sizes[other]
        ]


def plan_homes(
    recorded: Sequence[Recorded], sizes: Mapping[int, int], *, leave_out: Collection[int] = ()
) -> Homes:
    """Give every unit its place, but for those to ``leave_out``. ``sizes`` are in bytes."""
    meeting = _meetings(recorded, leave_out)
    return _best(sorted(meeting), sizes, meeting)


def plan_segments(
    recorded: Sequence[Recorded],
    sizes: Mapping[int, int],
    *,
    apart: Collection[int],
    leave_out: Collection[int] = (),
) -> list[Homes]:
    """The same in several buffers, which may come and go with the units in them.

    In the first are units that are in memory while the loss is computed, and others that fit in between. Each
    of those that share with nobody (``apart``) has one: together they would be there as long as any is.
    """
    meeting = _meetings(recorded, leave_out)
    alone = sorted(unit for unit in meeting if unit in apart)
    at_turn = {unit for each in recorded for unit in each.at_turn() if unit in meeting and unit not in apart}
    first = _best(sorted(at_turn), sizes, meeting)
    rest = [unit for unit in sorted(meeting) if unit not in at_turn and unit not in apart]
    found = [
        (with_guests, _best([unit for unit in rest if unit not in with_guests.offsets], sizes, meeting))
        for with_guests in (
            first,
            *(_with_guests(first, order, sizes, meeting) for order in (rest, rest[::-1])),
        )
    ]
    smallest = min(found, key=lambda both: both[1].nbytes)
    return [*smallest, *(_best([unit], sizes, meeting) for unit in alone)]


def _with_guests(
    homes: Homes, units: Sequence[int], sizes: Mapping[int, int], meeting: Mapping[int, Collection[int]]
) -> Homes:
    """``homes`` with those of ``units`` that fit in between."""
    placed = dict(homes.offsets)
    for unit in units:
        offset = _gap_for(unit, sizes[unit], sizes, placed, meeting)
        if offset + sizes[unit] <= homes.nbytes:
            placed[unit] = offset
    return Homes(offsets=placed, nbytes=homes.nbytes)


def _meetings(recorded: Sequence[Recorded], leave_out: Collection[int]) -> dict[int, set[int]]:
    """Which units are in memory at the same time as each."""
    by_step = [_lifetimes(each) for each in recorded]
    units = sorted({unit for lifetimes in by_step for unit in lifetimes if unit not in leave_out})
    meeting: dict[int, set[int]] = {unit: set() for unit in units}
    for lifetimes in by_step:
        for first, second in combinations((unit for unit in units if unit in lifetimes), 2):
            if second not in meeting[first] and _meet(lifetimes[first], lifetimes[second]):
                meeting[first].add(second)
                meeting[second].add(first)
    return meeting


def _best(units: Sequence[int], sizes: Mapping[int, int], meeting: Mapping[int, Collection[int]]) -> Homes:
    # Large units first, so that small ones fill what is left between them; or one after the other, so that
    # those at both ends of the order share. As they are, or units of about one size as if they were equal, so
    # that each fits where another was. None of these is best for all models.
    by_size = sorted(units, key=lambda unit: (-sizes[unit], unit))
    found = [
        _place(order, sizes, room, meeting)
        for order in (by_size, units, units[::-1])
        for room in (sizes, _evened(sizes))
    ]
    return min(found, key=lambda homes: homes.nbytes)


def _evened(sizes: Mapping[int, int]) -> dict[int, int]:
    """Every size as that of the largest unit that is not much larger."""
    found: dict[int, int] = {}
    room = 0
    for unit, size in sorted(sizes.items(), key=lambda item: -item[1]):
        if not room or size < _ALIKE * room:
            room = size
        found[unit] = room
    return found


def _place(
    order: Sequence[int],
    sizes: Mapping[int, int],
    room: Mapping[int, int],
    meeting: Mapping[int, Collection[int]],
) -> Homes:
    """Give units, in turn, the first place with ``room`` for them that none of those they meet has."""
    placed: dict[int, int] = {}
    for unit in order:
        placed[unit] = _gap_for(unit, room[unit], room, placed, meeting)
    end = max((offset + sizes[unit] for unit, offset in placed.items()), default=0)
    return Homes(offsets=placed, nbytes=aligned(end))


def _lifetimes(recorded: Recorded) -> dict[int, list[tuple[int, int]]]:
    """When each unit is in memory, in positions of the events: from its prefetch to its release."""
    events, sent_at = recorded.events, recorded.sent_at
    needed_at = [position for position, event in enumerate(events) if event.needed]
    found: dict[int, list[tuple[int, int]]] = {}
    released: dict[int, int] = {}  # the next release of each unit, looking back from the end
    ends = [0] * len(events)
    for position in reversed(range(len(events))):
        event = events[position]
        if not event.needed:
            released[event.unit] = position
        ends[position] = released.get(event.unit, len(events))
    for position, sent in zip(needed_at, sent_at, strict=True):
        start = needed_at[sent] if sent >= 0 else -1
        found.setdefault(events[position].unit, []).append((start, ends[position]))
    for unit in recorded.first:
        found.setdefault(unit, []).append((needed_at[-1], len(events)))
    for unit in recorded.staying:
        found[unit] = [(-1, len(events))]
    return found


def _meet(first: Sequence[tuple[int, int]], second: Sequence[tuple[int, int]]) -> bool:
    return any(a_start < b_end and b_start < a_end for a_start, a_end in first for b_start, b_end in second)


def _gap_for(
    unit: int,
    nbytes: int,
    room: Mapping[int, int],
    placed: Mapping[int, int],
    meeting: Mapping[int, Collection[int]],
) -> int:
    """The first place for ``unit`` that none of those it meets has."""
    met = (other for other in meeting[unit] if other in placed)
    return _first_gap(sorted((placed[other], placed[other] + room[other]) for other in met), nbytes)


def _first_gap(taken: Sequence[tuple[int, int]], nbytes: int) -> int:
    offset = 0
    for start, end in taken:
        if offset + nbytes <= start:
            break
        offset = max(offset, aligned(end))
    return offset


def aligned(nbytes: int) -> int:
    """``nbytes`` as the allocator gives them."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT

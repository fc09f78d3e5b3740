"""Residency by lists of events alone: no autograd, no collectives, no parameters.

Hypothesis draws programs: nested units, units used twice, skipped, recomputed in the backward, read without
a call, evaluations between steps and between forward and backward, forwards and backwards that fail, several
optimizers, edits that somebody notices and edits that nobody does. After every event the state of every unit
must make sense.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mics.comm.codec import PLAIN
from mics.comm.lanes import DONE, InlineLane
from mics.errors import MicsError
from mics.layout.order import Plans, Prefetch
from mics.schedule import residency
from mics.schedule.events import Event, Events, Progress, What
from mics.schedule.log import StepLog
from mics.schedule.residency import Residency
from mics.sharding.unit import Refresh, State

_SIZE = 512  # bytes, of the smallest unit


class FakeWhole:
    """Places without parameters. A home is known by its addresses."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_own = True
        self.is_too_large = False
        self.has_memory = self.at_home = self.has_home = False
        self.home_number = self.start = 0
        self.segment: Any = None
        self.neighbours: list[FakeWhole] = []

    @property
    def place(self) -> int:
        return self.home_number if self.at_home else 0

    @property
    def home_is_free(self) -> bool:
        return not any(other.has_memory and other.at_home for other in self.neighbours)

    @property
    def is_free(self) -> bool:
        return not self.at_home or self.home_is_free

    def acquire(self) -> None:
        if self.is_too_large:
            raise MemoryError
        assert not self.has_memory
        assert self.is_free, "two owners of one home"
        self.has_memory = True
        if self.at_home:
            self.segment.enter()
            assert self.segment.memory.untyped_storage().nbytes() >= self.nbytes

    def release(self) -> None:
        assert self.has_memory
        self.has_memory = False
        if self.at_home:
            self.segment.leave()

    def use_place(self, *, at_home: bool) -> None:
        assert not self.has_memory, "a unit moved while it had memory"
        self.at_home = at_home

    def move_in(self, segment: Any, offset: int, neighbours: list[FakeWhole], *, number: int) -> None:
        assert offset + self.nbytes <= segment.memory.numel()
        self.segment, self.start = segment, (id(segment) << 64) + offset
        self.has_home, self.home_number = True, number
        self.neighbours = list(neighbours)
        self.use_place(at_home=True)

    def move_out(self) -> None:
        self.use_place(at_home=False)
        self.has_home, self.home_number, self.neighbours = False, 0, []

    def overlaps(self, other: FakeWhole) -> bool:
        return self.start < other.start + other.nbytes and other.start < self.start + self.nbytes


@dataclass(eq=False)
class FakeUnit:
    spec: SimpleNamespace
    whole: FakeWhole
    groups: FakeGroups
    state: State = State.SHARDED
    num_refreshes: int = 0
    gathered_at: Any = DONE
    refresh: Refresh = field(default_factory=Refresh)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    is_edited: bool = False  # its masters, as anybody can see
    num_edits: int = 0  # of its values, seen or unseen
    values: tuple[int, int] = (-1, -1)  # ``num_refreshes`` and ``num_edits`` when it was gathered
    sees_edits: bool = False

    @property
    def gathered(self) -> bool:
        return self.state is State.GATHERED

    @property
    def is_waiting(self) -> bool:
        return self.state is State.GATHERING

    def masters_changed(self) -> bool:
        return self.is_edited

    def cast_pair(self) -> None:
        return None

    def gather_pair(self) -> tuple[FakeUnit, None]:
        return self, None

    def show_whole(self) -> None:
        refreshes, edits = self.values
        assert self.whole.has_memory and refreshes == self.num_refreshes, "used before its values came"
        assert not self.is_edited, "an edit did not show"
        assert edits == self.num_edits or not self.sees_edits, "an edit that nobody noticed did not show"

    def show_shards(self) -> None:
        pass


class FakeGroups:
    """Values arrive at once."""

    def __init__(self) -> None:
        self.gather = self
        self.fails = False
        self.num_gathers: Counter[int] = Counter()

    def gather_together(self, pairs: Any, label: str, **_: Any) -> Any:
        for unit, _nothing in pairs:
            assert unit.whole.has_memory
            if self.fails:
                raise ConnectionError
            unit.values = unit.num_refreshes, unit.num_edits
            self.num_gathers[unit.spec.index] += 1
        return DONE


@dataclass(frozen=True)
class Call:
    """A module that needs a unit, and what it calls."""

    unit: int
    inside: tuple[Call, ...] = ()
    recomputes: bool = False  # in the backward: all that is inside is needed once more
    is_lookup: bool = False  # its backward reads no parameters
    ends_unseen: bool = False  # nobody sees its backward end
    reads: int | None = None  # a unit that it computes with and does not call


@dataclass(frozen=True)
class Saved:
    """A call, and where its unit was."""

    call: Call
    place: int
    num_steps: int
    inside: tuple[Saved, ...]


class Program:
    """Tells a residency what autograd would, and looks at all units after every event."""

    def __init__(
        self,
        sizes: list[int],
        prefetch: Prefetch,
        *,
        low_memory: bool = False,
        edits_show: bool = False,
        room: float = 0.0,
        moves: bool = False,
    ) -> None:
        """``moves``: new values of units that stay come as moves, which do not fit for each third unit."""
        self.gather = groups = FakeGroups()
        self.units: list[Any] = [
            FakeUnit(
                SimpleNamespace(index=index, label=f"unit {index}", gather=PLAIN),
                FakeWhole(nbytes),
                groups,
                sees_edits=edits_show,
            )
            for index, nbytes in enumerate(sizes)
        ]
        self.events, self.progress = Events(), Progress()
        plans = Plans(prefetch, sizes=dict(enumerate(sizes)), stops_at_turn=low_memory)
        self.residency = Residency(
            self.units,
            events=self.events,
            plans=plans,
            progress=self.progress,
            log=StepLog([unit.spec for unit in self.units]),
            low_memory=low_memory,
            edits_show=edits_show,
            room=lambda: room,
            stays_old=(lambda unit: True) if moves else None,
        )
        self.num_moved: Counter[int] = Counter()
        self.uses: Counter[int] = Counter()
        self.read: set[int] = set()  # for good

    def tell(self, what: What, unit: int | None = None, place: int | None = None) -> None:
        self._hear(Event(what, None if unit is None else self.units[unit], place=place))

    def _hear(self, event: Event) -> None:
        for hear in self.events[event.what]:
            hear(event)
        self.look()

    def look(self) -> None:
        for unit in self.units:
            assert unit.whole.has_memory == (unit.state is not State.SHARDED)
            assert unit.gathered or not self.uses[unit.spec.index], "used while not gathered"
            index = unit.spec.index
            # In a backward it may be where its forward had it: it is in use until the end.
            if index in self.read and not self.uses[index] and not self.progress.waiting[index]:
                assert not (unit.whole.at_home and unit.gathered), "nobody sees it leave"
        at_home = [unit.whole for unit in self.units if unit.whole.at_home and unit.whole.has_memory]
        for number, first in enumerate(at_home):
            assert not any(first.overlaps(second) for second in at_home[number + 1 :])

    def need(self, index: int, place: int | None = None) -> None:
        unit = self.units[index]
        if not unit.gathered or (place is not None and place != unit.whole.place):
            self.tell(What.NEEDED, index, place)
        self.uses[index] += 1
        self.look()

    def leave(self, call: Call) -> None:
        self.uses[call.unit] -= 1
        unit = self.units[call.unit]
        if not self.uses[call.unit] and unit.gathered:
            stays = self.residency._stays(unit) and self.progress.more_to_come
            self.tell(What.UNUSED, call.unit)
            assert unit.is_waiting or not stays, "it was to stay"

    # -- one micro-step -----------------------------------------------------------------------------

    def forward(self, calls: tuple[Call, ...], *, trains: bool = True) -> list[Saved]:
        self.tell(What.FORWARD_BEGINS)
        self._check_beginning()
        self.progress.depth += 1
        saved = [self._forward(call, trains=trains) for call in calls]
        self.progress.depth -= 1
        self.leave_read()
        return saved

    def _check_beginning(self) -> None:
        """What waits is of use: it comes first, or stays."""
        first = self.residency.plans.first_units()
        for unit in self.units:
            if unit.is_waiting:
                assert unit.spec.index in first or self.residency._stays(unit), "kept for nothing"
                assert not unit.is_edited

    def _forward(self, call: Call, *, trains: bool) -> Saved:
        self.need(call.unit)
        if call.reads is not None:
            self.read_on_demand(call.reads)
        place = self.units[call.unit].whole.place
        inside = tuple(self._forward(inner, trains=trains) for inner in call.inside)
        self.leave(call)
        if trains:
            self.progress.count_waiting([self.units[call.unit]], 1)
        return Saved(call, place, self.progress.num_steps, inside)

    def read_on_demand(self, index: int) -> None:
        """A parameter of a unit that may not be gathered. It is in use until the forward ends."""
        if self.units[index].gathered and index not in self.read:
            return
        if index not in self.read:
            self.tell(What.READ, index)
            self.read.add(index)
        if not self.units[index].gathered:
            self.tell(What.NEEDED, index)

    def leave_read(self) -> None:
        for index in self.read:
            if self.units[index].gathered and not self.uses[index]:
                self.tell(What.UNUSED, index)

    def backward(self, saved: list[Saved], *, fails_after: int | None = None) -> bool:
        """Whether it went through: it may fail, or be refused where the order changes."""
        self._left = fails_after
        unseen: list[Call] = []
        try:
            self.progress.in_backward = True
            self.tell(What.BACKWARD_BEGINS)
            for index in self.read:
                self.need(index)
            for each in reversed(saved):
                self._backward(each, unseen)
            for call in unseen:
                if self.units[call.unit].gathered and self.uses[call.unit] == 1:
                    self.tell(What.ENDS_UNSEEN, call.unit)
                self.leave(call)
            for index in self.read:
                self.leave(Call(index))
            self.progress.in_backward = False
            self.tell(What.BACKWARD_ENDS)
        except (MicsError, ArithmeticError) as error:
            self._check_refusal(str(error))
            self.uses.clear()
            self.progress.in_backward = False
            self.tell(What.FAILED)
            # What waits goes when the next forward begins.
            assert not any(unit.gathered for unit in self.units)
            return False
        if not self.progress.more_to_come:
            assert not any(unit.is_waiting or unit.gathered for unit in self.units), "something was left"
        return True

    def _check_refusal(self, error: str) -> None:
        """A place is refused only because somebody computes there: what merely waits makes room."""
        if "in its place" in error:
            used = [self.units[index].whole for index, count in self.uses.items() if count]
            assert any(whole.at_home for whole in used), error

    def _backward(self, saved: Saved, unseen: list[Call]) -> None:
        call = saved.call
        if saved.num_steps == self.progress.num_steps:
            self.progress.count_waiting([self.units[call.unit]], -1)
        if self._left is not None:
            self._left -= 1
            if self._left < 0:
                raise ArithmeticError
        if not call.is_lookup:
            self.need(call.unit, saved.place)
            assert self.units[call.unit].whole.place == saved.place, "saved tensors point elsewhere"
        if call.recomputes:
            for inner in saved.inside:
                self.need(inner.call.unit)
                self.leave(inner.call)
        for inner in reversed(saved.inside):
            self._backward(inner, unseen)
        if call.is_lookup:
            return
        if call.ends_unseen:
            unseen.append(call)
        else:
            self.leave(call)

    # -- steps --------------------------------------------------------------------------------------

    def train(
        self,
        orders: list[tuple[Call, ...]],
        *,
        announced: bool,
        fails_after: int | None = None,
        num_optimizers: int = 1,
    ) -> bool:
        """A step of some micro-steps; whether all went through."""
        done = True
        for number, order in enumerate(orders):
            last = number == len(orders) - 1
            self.progress.more_to_come = announced and not last
            saved = self.forward(order)
            done &= self.backward(saved, fails_after=fails_after if last else None)
        self.progress.more_to_come = False
        self.step(num_optimizers)
        return done

    def step(self, num_optimizers: int = 1) -> None:
        for number in range(num_optimizers):
            units = self.units[number::num_optimizers]
            self._hear(Event(What.STEP_BEGINS, units=units))
            assert not any(unit.is_waiting for unit in units), "its values are about to change"
            for unit in units:
                is_old = unit.state is State.OLD
                assert not is_old or unit.values[0] == unit.num_refreshes, "older than before the step"
                unit.num_refreshes += 1
                unit.num_edits += 1
                unit.is_edited = False
            self._hear(Event(What.STEP_ENDS, units=units))
            for unit in units:
                if unit.state is State.OLD:
                    self._move(unit)
            self._hear(Event(What.REFRESHED, units=units))

    def _move(self, unit: Any) -> None:
        """As ``sharding/refresh.py: MovedValues``."""
        ticket = InlineLane().submit(lambda: None)
        fits = unit.spec.index % 3 != 2
        transitions = self.residency.transitions

        def confirm() -> None:
            unit.refresh.confirm = None
            if not fits:
                transitions.drop(unit, ticket)

        unit.refresh.begin(DONE, confirm=confirm)
        transitions.update(unit, ticket)
        if fits:
            unit.values = unit.num_refreshes, unit.num_edits
            self.num_moved[unit.spec.index] += 1


def _chain(count: int) -> tuple[Call, ...]:
    """A lookup, blocks, a head: the usual model."""
    first = Call(0, is_lookup=True)
    return (first, *(Call(index, ends_unseen=index == 1) for index in range(1, count)))


_CALLS = st.recursive(
    st.builds(
        Call,
        unit=st.integers(0, 5),
        is_lookup=st.sampled_from([False, False, False, True]),
        ends_unseen=st.sampled_from([False, False, False, True]),
        reads=st.sampled_from([None] * 7 + [4, 5]),
    ),
    lambda inner: st.builds(
        Call,
        unit=st.integers(0, 5),
        inside=st.lists(inner, max_size=3).map(tuple),
        recomputes=st.booleans(),
    ),
    max_leaves=6,
)
_ACTIONS = ["evaluate", "fail", "evaluate between", "refresh", "edit", "unseen edit", "two forwards"]
_ORDERS = st.lists(_CALLS, min_size=1, max_size=6).map(tuple)


@pytest.fixture(autouse=True)
def _refreshes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Edited masters go to all replicas before they are gathered."""

    def refresh(units: list[FakeUnit]) -> None:
        for unit in units:
            unit.is_edited = False
            unit.num_refreshes += 1

    monkeypatch.setattr(residency, "refresh_together", refresh)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4).map(lambda n: n * _SIZE), min_size=6, max_size=6),
    orders=st.lists(_ORDERS, min_size=1, max_size=3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["train"] * 4 + _ACTIONS),
            st.integers(0, 2),
            st.integers(1, 3),
            st.booleans(),
        ),
        max_size=10,
    ),
    units=st.integers(0, 3),
    stay=st.sampled_from([0, 2 * _SIZE, 100 * _SIZE]),
    low_memory=st.booleans(),
    edits_show=st.booleans(),
    num_settled=st.sampled_from([0, 4]),
)
def test_any_program(
    sizes: list[int],
    orders: list[tuple[Call, ...]],
    actions: list[tuple[str, int, int, bool]],
    units: int,
    stay: int,
    low_memory: bool,
    edits_show: bool,
    num_settled: int,
) -> None:
    prefetch = Prefetch(units=units, stay_nbytes=stay)
    program = Program(sizes, prefetch, low_memory=low_memory, edits_show=edits_show, moves=not edits_show)
    for _ in range(num_settled):  # homes are given
        program.train([orders[0]], announced=False)
    for what, which, num_micro_steps, announced in actions:
        order = orders[which % len(orders)]
        if what == "evaluate":
            program.forward(order, trains=False)
        elif what == "refresh":  # new values come, whoever has memory
            program.units[which].num_refreshes += 1
        elif what == "edit":
            program.units[which].is_edited = True
            program.units[which].num_edits += 1
        elif what == "unseen edit":
            program.units[which].num_edits += 1
        elif what == "two forwards":
            both = [program.forward(order), program.forward(order)]
            for saved in reversed(both) if announced else both:
                program.backward(saved)
            program.step()
        elif what == "evaluate between":
            saved = program.forward(order)
            program.forward(orders[0], trains=False)
            program.backward(saved)
            program.step()
        else:
            fails = num_micro_steps if what == "fail" else None
            done = program.train(
                [order] * num_micro_steps,
                announced=announced,
                fails_after=fails,
                num_optimizers=1 + num_micro_steps % 2,
            )
            is_steady = len(orders) == 1 and all(action == "train" for action, *_ in actions)
            assert done or not is_steady, "a program that never changes was refused"


@settings(max_examples=100, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6).map(lambda n: n * _SIZE), min_size=3, max_size=10),
    units=st.integers(1, 3),
    stay=st.integers(0, 10).map(lambda n: n * _SIZE),
    low_memory=st.booleans(),
)
def test_a_steady_step_holds_no_more_than_it_may(
    sizes: list[int], units: int, stay: int, low_memory: bool
) -> None:
    """What is in use, as many units ahead, one that is kept around the turn, and what may stay."""
    program = Program(sizes, Prefetch(units=units, stay_nbytes=stay), low_memory=low_memory)
    most = 0

    def count(event: Event) -> None:
        nonlocal most
        most = max(most, sum(unit.whole.nbytes for unit in program.units if unit.whole.has_memory))

    for _ in range(4):
        assert program.train([_chain(len(sizes))] * 2, announced=True)
    program.events[What.NEEDED].append(count)
    assert program.train([_chain(len(sizes))] * 2, announced=True)
    assert most <= sum(sorted(sizes)[-units - 2 :]) + stay
    homes = [unit.whole for unit in program.units if unit.whole.has_home]
    if homes and not stay and len(set(sizes)) == 1:
        spread = sum(segment.memory.numel() for segment in {home.segment for home in homes})
        assert spread <= (units + 3) * sizes[0], "homes are shared"


def test_new_values_of_units_that_stay_come_as_moves() -> None:
    """Once homes are given, nothing is gathered but what moves do not fit for; a failed step changes that."""
    program = Program([_SIZE] * 6, Prefetch(units=1, stay_nbytes=6 * _SIZE), moves=True)
    for _ in range(4):
        assert program.train([_chain(6)] * 2, announced=True)
    program.gather.num_gathers.clear()
    program.num_moved.clear()
    for _ in range(3):
        assert program.train([_chain(6)] * 2, announced=True)
    assert program.gather.num_gathers == {2: 3, 5: 3}
    assert program.num_moved == {0: 3, 1: 3, 3: 3, 4: 3}
    program.forward(_chain(6), trains=False)  # with those of the step
    assert program.gather.num_gathers == {2: 4, 5: 4}
    program.units[1].is_edited = True
    assert program.train([_chain(6)], announced=True)
    assert program.gather.num_gathers[1] > 0, "an edit shows"


def _held(program: Program) -> int:
    """Bytes of all memory that units have, or have their homes in."""
    segments = {unit.whole.segment for unit in program.units if unit.whole.has_home}
    own = [unit.whole.nbytes for unit in program.units if unit.whole.has_memory and not unit.whole.at_home]
    return sum(own) + sum(segment.memory.untyped_storage().nbytes() for segment in segments)


@pytest.mark.parametrize("room", [0.0, 100.0 * _SIZE])
def test_the_loss_may_have_the_memory_of_units_that_are_not_there(room: float) -> None:
    """In low memory, unless the device has room for both. A larger batch asks again."""
    program = Program([2 * _SIZE] * 5 + [_SIZE], Prefetch(units=1), low_memory=True, room=room)
    at_loss = []
    for rows in [4] * 5 + [8, 8]:
        program.progress.rows = rows
        saved = program.forward(_chain(6))
        at_loss.append(_held(program))
        program.backward(saved)
        program.step()
    assert all(unit.whole.has_home for unit in program.units)
    arena = sum(segment.memory.numel() for segment in {unit.whole.segment for unit in program.units})
    assert arena == (2 + 2 + 2 + 1) * _SIZE, "two in turns, one whose end nobody sees, the last"
    kept = arena if room else _SIZE
    assert at_loss[3:] == [kept, kept, _SIZE, kept], "the first of eight rows finds no home in its way"


def _steady(*, units: int = 1) -> Program:
    program = Program([_SIZE] * 6, Prefetch(units=units))
    for _ in range(4):
        assert program.train([_chain(6)], announced=False)
    return program


def test_the_first_units_are_prefetched_after_a_step() -> None:
    """The first of them, and as many as are looked ahead."""
    program = _steady(units=2)
    assert [unit.is_waiting for unit in program.units] == [True] * 3 + [False] * 3


def test_new_values_show_in_what_was_prefetched() -> None:
    program = _steady()
    assert program.units[0].is_waiting
    program.units[0].num_refreshes += 1
    assert program.train([_chain(6)], announced=False)


def test_edits_that_nobody_notices_show() -> None:
    """So nothing is prefetched after a step, and nothing that an evaluation kept is used again."""
    program = Program([_SIZE] * 2, Prefetch(units=1), edits_show=True)
    for _ in range(4):
        assert program.train([_chain(2)], announced=False)
    assert not any(unit.is_waiting for unit in program.units)
    program.forward(_chain(2), trains=False)
    assert program.units[1].is_waiting
    for unit in program.units:
        unit.num_edits += 1
    assert program.train([_chain(2)], announced=False)


def test_several_optimizers_and_homes() -> None:
    """The first one's new values are prefetched when the second one's step ends, and homes are given."""
    program = Program([_SIZE] * 6, Prefetch(units=1))
    for _ in range(4):
        assert program.train([_chain(6)], announced=False, num_optimizers=2)
    assert any(unit.whole.has_home for unit in program.units)


def test_a_unit_is_where_its_backward_expects_it() -> None:
    """A forward in another order, while one that had units at home waits for its backward."""
    program = _steady()
    saved = program.forward(_chain(6))
    assert any(each.place for each in saved)
    others = program.forward(_chain(6)[::-1])
    assert program.backward(others) and program.backward(saved)


def test_a_read_unit_leaves_its_home() -> None:
    program = _steady()
    order = (*_chain(6)[:5], Call(5, reads=2))
    assert program.units[2].whole.at_home
    program.backward(
        program.forward(order)
    )  # its call was at home, so the read was too, and may be in the way
    program.step()
    saved = program.forward(order)
    assert not program.units[2].whole.at_home
    assert program.backward(saved)


def test_units_are_gathered_before_they_are_needed() -> None:
    program = _steady(units=2)
    in_time = []

    def look(event: Event) -> None:
        in_time.append(event.unit is not None and event.unit.is_waiting)

    program.events[What.NEEDED].insert(0, look)
    assert program.train([_chain(6)], announced=False)
    assert all(in_time)


def test_homes_wait_for_a_backward_that_is_still_to_come() -> None:
    """At most for two steps: an output may never see one."""
    program = Program([_SIZE] * 6, Prefetch(units=1))
    saved = program.forward(_chain(6))
    while not any(unit.whole.has_home for unit in program.units):
        late, saved = saved, program.forward(_chain(6))
        assert program.backward(late), "its tensors are elsewhere"
        program.step()
        assert program.progress.num_steps < 10
    assert program.progress.num_steps > 3, "nobody waited"


def test_a_gather_that_fails_leaves_no_memory() -> None:
    program = _steady(units=1)
    program.gather.fails = True
    with pytest.raises(ConnectionError):
        program.forward(_chain(6))
    program.look()
    assert [unit.state for unit in program.units[2:]] == [State.SHARDED] * 4


def test_memory_that_runs_out_leaves_no_unit_without_values() -> None:
    """Units of one batch: the second finds no memory, and the first must not be taken for gathered."""
    program = _steady()
    program._hear(Event(What.STEP_BEGINS, units=program.units))
    program.units[1].whole.is_too_large = True
    with pytest.raises(MemoryError):
        program.residency.transitions.prefetch(program.units[:3])
    program.look()
    assert {unit.state for unit in program.units} == {State.SHARDED}


def test_units_that_stay_are_gathered_once_a_step() -> None:
    program = Program([_SIZE] * 6, Prefetch(units=1, stay_nbytes=6 * _SIZE))
    for _ in range(4):
        assert program.train([_chain(6)] * 3, announced=True)
    program.gather.num_gathers.clear()
    assert program.train([_chain(6)] * 3, announced=True)
    assert set(program.gather.num_gathers.values()) == {1}


def test_a_wrong_transition_names_unit_and_event() -> None:
    program = Program([_SIZE] * 2, Prefetch(units=1))
    program.need(0)
    with pytest.raises(AssertionError, match=r"unit 0: State.GATHERED to State.GATHERED.*NEEDED"):
        program.residency.transitions._move(program.units[0], State.GATHERED)

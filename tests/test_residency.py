"""Residency by lists of events alone: no autograd, no collectives, no parameters.

Hypothesis draws programs: nested units, units used twice, skipped, recomputed in the backward, evaluations
between steps, backwards that fail. After every event the state of every unit must make sense.
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

from mics.comm.lanes import DONE
from mics.errors import MicsError
from mics.layout.order import Plans, Prefetch
from mics.schedule.events import Event, Events, Progress, What
from mics.schedule.log import StepLog
from mics.schedule.residency import Residency
from mics.sharding.unit import State

_SIZE = 512  # bytes, of the smallest unit


class FakeWhole:
    """Places without parameters. A home is known by its addresses."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.is_own = True
        self.has_memory = self.at_home = self.has_home = False
        self.home_number = self.start = 0
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
        assert not self.has_memory
        assert self.is_free, "two owners of one home"
        self.has_memory = True

    def release(self) -> None:
        assert self.has_memory
        self.has_memory = False

    def use_place(self, *, at_home: bool) -> None:
        assert not self.has_memory, "a unit moved while it had memory"
        self.at_home = at_home

    def move_in(self, home: Any, neighbours: list[FakeWhole], *, number: int) -> None:
        self.start, self.has_home, self.home_number = home.data_ptr(), True, number
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
    refreshed_at: Any = DONE
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    values: int = -1  # ``num_refreshes`` when it was gathered

    @property
    def gathered(self) -> bool:
        return self.state is State.GATHERED

    @property
    def is_waiting(self) -> bool:
        return self.state is State.GATHERING

    def masters_changed(self) -> bool:
        return False

    def cast_pair(self) -> None:
        return None

    def gather_pair(self) -> tuple[FakeUnit, None]:
        return self, None

    def show_whole(self) -> None:
        assert self.whole.has_memory and self.values == self.num_refreshes, "used before its values came"

    def show_shards(self) -> None:
        pass


class FakeGroups:
    """Values arrive at once."""

    def __init__(self) -> None:
        self.gather = self
        self.num_gathers: Counter[int] = Counter()

    def gather_together(self, pairs: Any, label: str, **_: Any) -> Any:
        for unit, _nothing in pairs:
            assert unit.whole.has_memory
            unit.values = unit.num_refreshes
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


@dataclass(frozen=True)
class Saved:
    """A call, and where its unit was."""

    call: Call
    place: int
    inside: tuple[Saved, ...]


class Program:
    """Tells a residency what autograd would, and looks at all units after every event."""

    def __init__(self, sizes: list[int], prefetch: Prefetch, *, low_memory: bool = False) -> None:
        self.gather = groups = FakeGroups()
        self.units: list[Any] = [
            FakeUnit(SimpleNamespace(index=index, label=f"unit {index}"), FakeWhole(nbytes), groups)
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
        )
        self.uses: Counter[int] = Counter()

    def tell(self, what: What, unit: int | None = None, place: int | None = None) -> None:
        units = self.units if what in (What.STEP_BEGINS, What.STEP_ENDS, What.REFRESHED) else ()
        event = Event(what, None if unit is None else self.units[unit], units, place)
        for hear in self.events[what]:
            hear(event)
        self.look()

    def look(self) -> None:
        for unit in self.units:
            assert unit.whole.has_memory == (unit.state is not State.SHARDED)
            assert unit.gathered or not self.uses[unit.spec.index], "used while not gathered"
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
        saved = [self._forward(call, trains=trains) for call in calls]
        self.tell(What.FORWARD_ENDS)
        return saved

    def _forward(self, call: Call, *, trains: bool) -> Saved:
        self.need(call.unit)
        place = self.units[call.unit].whole.place
        inside = tuple(self._forward(inner, trains=trains) for inner in call.inside)
        self.leave(call)
        if trains:
            self.progress.count_waiting([self.units[call.unit]], 1)
        return Saved(call, place, inside)

    def backward(self, saved: list[Saved], *, fails_after: int | None = None) -> bool:
        """Whether it went through: it may fail, or be refused where the order changes."""
        self._left = fails_after
        unseen: list[Call] = []
        try:
            self.tell(What.BACKWARD_BEGINS)
            for each in reversed(saved):
                self._backward(each, unseen)
            for call in unseen:
                if self.units[call.unit].gathered and self.uses[call.unit] == 1:
                    self.tell(What.ENDS_UNSEEN, call.unit)
                self.leave(call)
            self.tell(What.BACKWARD_ENDS)
        except (MicsError, ArithmeticError) as error:
            self._check_refusal(str(error))
            self.uses.clear()
            self.tell(What.BACKWARD_FAILED)
            assert all(unit.state is State.SHARDED for unit in self.units)
            return False
        if not self.progress.more_to_come:
            assert all(unit.state is State.SHARDED for unit in self.units), "something was left"
        return True

    def _check_refusal(self, error: str) -> None:
        """A place is refused only because somebody computes there: what merely waits makes room."""
        if "in its place" in error:
            used = [self.units[index].whole for index, count in self.uses.items() if count]
            assert any(whole.at_home for whole in used), error

    def _backward(self, saved: Saved, unseen: list[Call]) -> None:
        call = saved.call
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
        self, orders: list[tuple[Call, ...]], *, announced: bool, fails_after: int | None = None
    ) -> bool:
        """A step of some micro-steps; whether all went through."""
        done = True
        for number, order in enumerate(orders):
            last = number == len(orders) - 1
            self.progress.more_to_come = announced and not last
            saved = self.forward(order)
            done &= self.backward(saved, fails_after=fails_after if last else None)
        self.progress.more_to_come = False
        self.step()
        return done

    def step(self) -> None:
        self.tell(What.STEP_BEGINS)
        for unit in self.units:
            unit.num_refreshes += 1
        self.tell(What.STEP_ENDS)
        self.tell(What.REFRESHED)


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
    ),
    lambda inner: st.builds(
        Call,
        unit=st.integers(0, 5),
        inside=st.lists(inner, max_size=3).map(tuple),
        recomputes=st.booleans(),
    ),
    max_leaves=6,
)
_ORDERS = st.lists(_CALLS, min_size=1, max_size=6).map(tuple)


@settings(max_examples=200, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 4).map(lambda n: n * _SIZE), min_size=6, max_size=6),
    orders=st.lists(_ORDERS, min_size=1, max_size=3),
    actions=st.lists(
        st.tuples(
            st.sampled_from(["train", "train", "train", "evaluate", "fail", "evaluate between", "edit"]),
            st.integers(0, 2),
            st.integers(1, 3),
            st.booleans(),
        ),
        max_size=10,
    ),
    units=st.integers(0, 3),
    stay=st.sampled_from([0, 2 * _SIZE, 100 * _SIZE]),
    low_memory=st.booleans(),
)
def test_any_program(
    sizes: list[int],
    orders: list[tuple[Call, ...]],
    actions: list[tuple[str, int, int, bool]],
    units: int,
    stay: int,
    low_memory: bool,
) -> None:
    program = Program(sizes, Prefetch(units=units, stay_nbytes=stay), low_memory=low_memory)
    for what, which, num_micro_steps, announced in actions:
        order = orders[which % len(orders)]
        if what == "evaluate":
            program.forward(order, trains=False)
        elif what == "edit":  # new values come, whoever has memory
            program.units[which].num_refreshes += 1
        elif what == "evaluate between":
            saved = program.forward(order)
            program.forward(orders[0], trains=False)
            program.backward(saved)
            program.step()
        else:
            fails = num_micro_steps if what == "fail" else None
            done = program.train([order] * num_micro_steps, announced=announced, fails_after=fails)
            is_steady = len(orders) == 1 and all(action == "train" for action, *_ in actions)
            assert done or not is_steady, "a program that never changes was refused"


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("low_memory", [False, True])
def test_a_steady_step_holds_no_more_than_it_looks_ahead(units: int, low_memory: bool) -> None:
    """In use, what is ahead, and what is kept around the turn."""
    program = Program([_SIZE] * 8, Prefetch(units=units), low_memory=low_memory)
    most = 0

    def count(event: Event) -> None:
        nonlocal most
        most = max(most, sum(unit.whole.has_memory for unit in program.units))

    for _ in range(4):
        assert program.train([_chain(8)], announced=False)
    program.events[What.NEEDED].append(count)
    assert program.train([_chain(8)], announced=False)
    assert most <= units + 2
    if not low_memory:
        ends = {unit.whole.start + unit.whole.nbytes for unit in program.units}
        starts = {unit.whole.start for unit in program.units}
        assert max(ends) - min(starts) <= (units + 3) * _SIZE, "homes are shared"


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
        program.residency._moves._move(program.units[0], State.GATHERED)

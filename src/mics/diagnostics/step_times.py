"""From marks on a tape to where the time of a step goes. Arithmetic only."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from mics.comm.lanes import Work
from mics.diagnostics.tape import Done, Moment, Point

FORWARD: Final = "forward"
RECOMPUTATION: Final = "recomputation"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"
GATHER: Final = "all-gather"
HOP_1: Final = "hop 1"
HOP_2: Final = "hop 2"
REFRESH: Final = "refresh"
AGREEMENT: Final = "agreement"
OFFLOAD: Final = "offload"
HOST: Final = "host"
DATA: Final = "data"

ABOUT: Final = {
    FORWARD: "computation",
    RECOMPUTATION: "activation checkpointing",
    BACKWARD: "computation",
    OPTIMIZER: "clipping and the update",
    GATHER: "exposed: parameters, in the partition group",
    HOP_1: "exposed: gradients, in the partition group (reduce-scatter)",
    HOP_2: "exposed: gradients, between replicas",
    REFRESH: "exposed: new parameters, between replicas",
    AGREEMENT: "exposed: small numbers of all ranks (norm, flags, buffers)",
    OFFLOAD: "exposed: activations, between GPU and host",
    HOST: "the GPU waited for the host to launch its work",
    DATA: "outside model and optimizer: data loading, logging, your code",
}
COMPUTATION: Final = (FORWARD, RECOMPUTATION, BACKWARD, OPTIMIZER)
EXPOSED: Final = (GATHER, HOP_1, HOP_2, REFRESH, AGREEMENT, OFFLOAD)
_STARVED_SECONDS: Final = 50e-6  # so soon after the host does an idle GPU come to a mark


def kind_of(work: Work) -> str:
    """Which row of the table a lane's work belongs to."""
    if work.lane in ("to host", "from host"):
        return OFFLOAD
    if work.lane == "world":
        return AGREEMENT
    if work.lane.startswith("replicas"):
        return REFRESH if work.kind == "all-gather" else HOP_2
    return GATHER if work.kind == "all-gather" else HOP_1


@dataclass(frozen=True, slots=True, kw_only=True)
class Stretch:
    """Time between two marks of the computation, and what it went into."""

    start: float
    end: float
    kind: str
    module: str
    """The module at work, or the one that waits."""
    label: str = ""
    """What was waited for."""


@dataclass(kw_only=True)
class ModuleTimes:
    """Seconds per step of one module, without the modules inside it that have units of their own."""

    computation: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By phase: forward, recomputation, backward."""
    exposed: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    """By what it waited for."""

    @property
    def total(self) -> float:
        return sum(self.computation.values()) + sum(self.exposed.values())


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Where the time of one rank's steps went. Seconds per step."""

    steps: tuple[float, ...]
    """Each step's own."""
    kinds: dict[str, float]
    modules: dict[str, ModuleTimes]

    @property
    def seconds(self) -> float:
        """Of a step, on average."""
        return sum(self.steps) / len(self.steps)

    @property
    def computation(self) -> float:
        return sum(self.kinds.get(kind, 0.0) for kind in COMPUTATION)

    @property
    def exposed(self) -> float:
        """Communication that nothing hid."""
        return sum(self.kinds.get(kind, 0.0) for kind in EXPOSED)

    @property
    def own(self) -> float:
        """What the rank did itself: everything but waiting for communication, and so for other ranks."""
        return self.seconds - self.exposed


def stretches(points: Sequence[Point], works: Sequence[Done]) -> list[Stretch]:
    """The whole tape, cut at its marks."""
    found: list[Stretch] = []
    walk = _Walk()
    for (point, following), between in zip(itertools.pairwise(points), _kinds_between(points), strict=False):
        walk.go_to(point)
        start, end = point.seconds, following.seconds
        if end <= start:
            continue
        if walk.waits_for >= 0:
            for place, first, last in _blame(works, walk.waits_for, start, end):
                work = works[place].work
                found.append(
                    Stretch(start=first, end=last, kind=kind_of(work), module=walk.module, label=work.label)
                )
            continue
        kind = between if walk.phase == _BETWEEN else walk.phase
        starved = point.lag < _STARVED_SECONDS and following.lag < _STARVED_SECONDS
        if starved and walk.phase in COMPUTATION:
            kind = HOST
        found.append(Stretch(start=start, end=end, kind=kind, module=walk.module))
    return found


def step_times(cut: Sequence[Stretch], ends: Sequence[float]) -> StepTimes:
    """Add up the stretches from the first of ``ends`` to the last: the ends of steps."""
    num_steps = len(ends) - 1
    kinds: dict[str, float] = defaultdict(float)
    modules: dict[str, ModuleTimes] = defaultdict(ModuleTimes)
    for stretch in cut:
        if ends[0] <= stretch.start and stretch.end <= ends[-1]:
            seconds = (stretch.end - stretch.start) / num_steps
            kinds[stretch.kind] += seconds
            if stretch.kind in (FORWARD, RECOMPUTATION, BACKWARD):
                modules[stretch.module].computation[stretch.kind] += seconds
            elif stretch.kind in EXPOSED:
                modules[stretch.module].exposed[stretch.kind] += seconds
    return StepTimes(
        steps=tuple(end - start for start, end in itertools.pairwise(ends)),
        kinds=dict(kinds),
        modules=dict(modules),
    )


def step_ends(points: Sequence[Point]) -> list[float]:
    """When steps ended: the optimizer was done, after at least one forward."""
    ends, had_forward = [], True
    for point in points:
        had_forward |= point.moment in (Moment.FORWARD, Moment.EVALUATION)
        if point.moment is Moment.STEP_OVER and had_forward:
            ends.append(point.seconds)
            had_forward = False
    return ends


_BETWEEN: Final = "between"  # after a backward: the optimizer's, or the user's own; what follows tells


@dataclass
class _Walk:
    """Where the computation is, from mark to mark."""

    phase: str = _BETWEEN
    waits_for: int = -1
    _modules: list[str] = field(default_factory=list)
    _phases: list[str] = field(default_factory=list)  # around recomputed modules

    @property
    def module(self) -> str:
        return self._modules[-1] if self._modules else ""

    def go_to(self, point: Point) -> None:
        match point.moment:
            case Moment.WAIT:
                self.waits_for = point.collective
            case Moment.WAIT_OVER:
                self.waits_for = -1
            case Moment.ENTER:
                self._modules.append(point.module)
                self._phases.append(self.phase)
                self.phase = FORWARD if self.phase in (_BETWEEN, DATA, FORWARD) else RECOMPUTATION
            case Moment.LEAVE:
                self._leave(point.module)
                self.phase = self._phases.pop() if self._phases else self.phase
            case Moment.RECOMPUTE:
                self._phases.append(self.phase)
                self.phase = RECOMPUTATION
            case Moment.RECOMPUTE_OVER:
                self.phase = self._phases.pop() if self._phases else self.phase
            case Moment.ENTER_BACKWARD:
                self._modules.append(point.module)
            case Moment.LEAVE_BACKWARD:
                self._leave(point.module)
            case _:
                self._modules.clear()
                self._phases.clear()
                self.phase = _PHASES[point.moment]

    def _leave(self, module: str) -> None:
        if module in self._modules:
            del self._modules[len(self._modules) - 1 - self._modules[::-1].index(module)]


_PHASES: Final = {
    Moment.FORWARD: FORWARD,
    Moment.EVALUATION: _BETWEEN,  # but for its modules
    Moment.BACKWARD: BACKWARD,
    Moment.BACKWARD_OVER: _BETWEEN,
    Moment.OPTIMIZER: OPTIMIZER,
    Moment.STEP_OVER: DATA,
}


def _kinds_between(points: Sequence[Point]) -> list[str]:
    """For each point what ``_BETWEEN`` means there.

    After a backward comes clipping, or the next micro-batch: the optimizer's time, or the user's own.
    """
    kinds: list[str] = []
    kind = DATA
    for point in reversed(points):
        kinds.append(kind)
        if point.moment in _PHASES:
            kind = OPTIMIZER if point.moment in (Moment.OPTIMIZER, Moment.STEP_OVER) else DATA
    return kinds[::-1]


def _blame(works: Sequence[Done], place: int, start: float, end: float) -> Iterator[tuple[int, float, float]]:
    """Which work a wait from ``start`` to ``end`` was for: what is waited for, or what that came after."""
    own = works[place]
    begun = min(max(own.start, start), end)
    if begun > start:
        before = [number for number in own.after if works[number].end > start]
        if before:
            last = max(before, key=lambda number: works[number].end)
            until = min(begun, works[last].end)
            yield from _blame(works, last, start, until)
            start = until
    if end > start:
        yield place, start, end

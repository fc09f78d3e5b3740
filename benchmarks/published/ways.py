"""The engine with one mechanism of the documents taken away.

Where the engine has a setting, that is used. Where it has none, the old behaviour is put around it from
outside:

- coarse synchronisation: who waits for one collective waits for all that were issued
- decisions anew: the order is planned again at every use of a unit
- one collective for each matrix: four for a unit, each with memory of its own, and a copy
- norm through the host: a number for each parameter is fetched from the device
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn

import mics
from mics.bench.job import Job
from mics.bench.systems import Batch
from mics.bench.systems.loop import Loop
from mics.bench.systems.with_mics import build_mics
from mics.comm.codec import PLAIN, Codec
from mics.comm.lanes import Lane, Ticket, Work
from mics.comm.protocol import Action, Pairs
from mics.engine import Engine, engine_of
from mics.schedule.events import Event, What

_MATRICES: Final = 4  # of a block, gathered one by one before they were batched


class CoarseLanes:
    """Watches lanes; a caller that waits for one action waits for the latest of every lane."""

    def __init__(self) -> None:
        self._latest: dict[str, Ticket] = {}

    def follow(self, lane: Lane, work: Work) -> Lane:
        return _CoarseLane(lane, work.lane, self._latest)


class _CoarseLane:
    def __init__(self, lane: Lane, name: str, latest: dict[str, Ticket]) -> None:
        self._lane, self._name, self._latest = lane, name, latest

    def submit(self, action: Action, after: Sequence[Ticket] = ()) -> Ticket:
        # Between lanes nothing changes: a lane that waited for itself would never go on.
        own = [ticket.own if isinstance(ticket, _CoarseTicket) else ticket for ticket in after]
        ticket = self._lane.submit(action, own)
        self._latest[self._name] = ticket
        return _CoarseTicket(ticket, self._latest)


class _CoarseTicket:
    def __init__(self, own: Ticket, latest: Mapping[str, Ticket]) -> None:
        self.own, self._latest = own, latest

    def wait(self) -> None:
        self.own.wait()
        for ticket in list(self._latest.values()):
            ticket.wait()

    def is_over(self) -> bool:
        return self.own.is_over()


class InPieces:
    """Collectives of a group, cut into one for each matrix. Everything else is the group's own."""

    def __init__(self, collectives: Any, pieces: int = _MATRICES) -> None:
        self._collectives, self._pieces = collectives, pieces

    def __getattr__(self, name: str) -> Any:
        return getattr(self._collectives, name)

    def gather_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        found: list[tuple[str, Action]] = []
        for out, shard in pairs:
            rows = out.view(self._collectives.size, -1)
            for begin, end in _cuts(shard.numel(), self._pieces):
                part = _Scratch(rows[:, begin:end], shard[begin:end])
                stages = list(self._collectives.gather_stages([part.pair()], label, codec))
                link, action = stages[-1]
                found += [*stages[:-1], (link, part.then_copy_out(action))]
        return found

    def reduce_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        found: list[tuple[str, Action]] = []
        for out, buffer in pairs:
            rows = buffer.view(self._collectives.size, -1)
            for begin, end in _cuts(out.numel(), self._pieces):
                part = _Scratch(rows[:, begin:end], torch.empty_like(out[begin:end]))
                stages = list(self._collectives.reduce_stages([part.pair()[::-1]], label, codec))
                first, last = stages[0], stages[-1]
                stages[0] = (first[0], part.copy_in_then(first[1]))
                stages[-1] = (last[0], part.then_keep(stages[-1][1], out[begin:end]))
                found += stages
        return found


class _Scratch:
    """Memory for one piece of a collective, as the caching allocator gives it."""

    def __init__(self, rows: Tensor, shard: Tensor) -> None:
        self._rows, self._shard = rows, shard
        self._whole = torch.empty(rows.numel(), dtype=rows.dtype, device=rows.device)

    def pair(self) -> tuple[Tensor, Tensor]:
        return self._whole, self._shard

    def then_copy_out(self, action: Action) -> Action:
        def both() -> None:
            action()
            self._rows.copy_(self._whole.view_as(self._rows))

        return both

    def copy_in_then(self, action: Action) -> Action:
        def both() -> None:
            self._whole.view_as(self._rows).copy_(self._rows)
            action()

        return both

    def then_keep(self, action: Action, out: Tensor) -> Action:
        def both() -> None:
            action()
            out.copy_(self._shard)

        return both


def _cuts(numel: int, pieces: int) -> Iterator[tuple[int, int]]:
    step = max(8, -(-numel // pieces // 8) * 8)
    for begin in range(0, numel, step):
        yield begin, min(numel, begin + step)


class _Changed:
    """A trainer of a model whose engine is changed after it was built."""

    def __init__(self, trainer: Loop, change: Callable[[Engine], None]) -> None:
        self.same_start = trainer.same_start
        self._trainer = trainer
        change(engine_of(trainer._model))

    def step(self, batches: Sequence[Batch]) -> Tensor:
        return self._trainer.step(batches)

    def close(self) -> None:
        self._trainer.close()


def _coarse(engine: Engine) -> None:
    engine.mesh.lanes.watch = CoarseLanes()


def _planned_anew(engine: Engine) -> None:
    plans = engine.residency.plans

    def plan_again(event: Event) -> None:
        plans._make(plans.latest(), None)

    engine.events[What.NEEDED].insert(0, plan_again)


def _in_pieces(engine: Engine) -> None:
    for group in (engine.mesh.groups.gather, engine.mesh.groups.reduce):
        group._collectives = InPieces(group._collectives)


def one_hop(model: nn.Module, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Every micro-step is announced as the last: gradients cross the replicas in each."""
    for batch in batches:
        yield from mics.microsteps(model, [batch])


def norm_through_the_host(model: nn.Module, max_norm: float) -> None:
    """As before the first document: a kernel and a copy to the host for each parameter, then a factor."""
    engine = engine_of(model)
    engine.step.synchronize()
    total = 0.0
    for unit in engine.units:
        piece = engine.shown.of(unit).step_gradient()
        for part in piece.chunk(max(1, len(unit.whole.params))):
            total += float(part.float().norm().item()) ** 2
    summed = torch.tensor(total, device=engine.device)
    engine.mesh.world.all_reduce(summed, "the gradient norm, through the host")
    factor = min(1.0, max_norm / (float(summed.item()) ** 0.5 + 1e-6))
    for unit in engine.units:
        engine.shown.of(unit).step_gradient().mul_(factor)


def build_with_host_norm(job: Job) -> Loop:
    trainer = build_mics(job)
    trainer._clip = norm_through_the_host
    return trainer


class _Builder(Protocol):
    def __call__(self, job: Job) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Way:
    """The default with one mechanism taken away."""

    key: str
    mechanism: str
    without: str
    """What the row is called in a table."""
    document: str
    build: _Builder


def _changed(change: Callable[[Engine], None]) -> _Builder:
    return lambda job: _Changed(build_mics(job), change)


DEFAULT: Final = Way(
    key="default", mechanism="", without="everything on", document="", build=lambda job: build_mics(job)
)
_FIRST: Final = "zero3-on-efa"
WAYS: Final = (
    DEFAULT,
    Way(
        key="no-overlap",
        mechanism="communication beside the computation",
        without="nothing beside the computation",
        document=_FIRST,
        build=partial(build_mics, prefetch=0),
    ),
    Way(
        key="coarse-sync",
        mechanism="fine synchronisation",
        without="each wait is for all collectives",
        document=_FIRST,
        build=_changed(_coarse),
    ),
    Way(
        key="decisions-anew",
        mechanism="cached decisions",
        without="decisions anew at each use",
        document=_FIRST,
        build=_changed(_planned_anew),
    ),
    Way(
        key="not-batched",
        mechanism="batched collectives",
        without="one collective per matrix",
        document=_FIRST,
        build=_changed(_in_pieces),
    ),
    Way(
        key="host-norm",
        mechanism="norm without host sync",
        without="norm through the host",
        document=_FIRST,
        build=build_with_host_norm,
    ),
    Way(
        key="flat",
        mechanism="hierarchical all-gather",
        without="collectives in one stage",
        document="mics",
        build=partial(build_mics, hierarchical=False),
    ),
    Way(
        key="one-hop",
        mechanism="two-hop gradient synchronisation",
        without="hop 2 in every micro-step",
        document="mics",
        build=partial(build_mics, microsteps=one_hop),
    ),
    Way(
        key="low-memory",
        mechanism="fixed places, units that stay",
        without="low_memory: no fixed places, nothing stays",
        document="trillion",
        build=partial(build_mics, low_memory=True),
    ),
)

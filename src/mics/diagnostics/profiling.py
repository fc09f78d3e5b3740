"""``mics.profile``: where the time of your own training steps goes, on real ranks."""

from __future__ import annotations

import gc
import statistics
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Final
from weakref import WeakSet, finalize

import torch
import torch.nn as nn

from mics.activations.transfers import Transfers
from mics.comm.journal import calling, collective_call
from mics.comm.lanes import Lanes
from mics.diagnostics.profile_files import draw_profile, write_profile_trace
from mics.diagnostics.step_times import (
    ABOUT,
    BACKWARD,
    EXPOSED,
    FORWARD,
    RECOMPUTATION,
    ModuleTimes,
    StepTimes,
    Stretch,
    step_ends,
    step_times,
    stretches,
)
from mics.diagnostics.tape import DeviceClock, Done, HostClock, Moment, Tape
from mics.engine import Engine, engine_of, engines_of, is_sharded
from mics.errors import SettingsError
from mics.schedule.events import Event, What
from mics.utils.numbers import plural

_STANDS_OUT = 1.03  # times the median of the ranks
_MARKS_PER_UNIT = 40  # and step, with two micro-batches: more are made on the way
_NUM_MODULES = 12  # that the table lists, the slowest of them


@dataclass(frozen=True, kw_only=True)
class RankTimes:
    """One rank's steps."""

    rank: int
    seconds: float
    """Of a step, on average."""
    own: float
    """Of it, everything but waiting for communication."""
    kinds: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class ProfileReport:
    """Where the time of a step goes. ``str()`` of it is a table. Seconds per step."""

    times: StepTimes
    """This rank's."""
    rank: int
    ranks: tuple[RankTimes, ...]
    about: str

    @property
    def slowest(self) -> RankTimes:
        """The rank that does most itself. The others spend the difference waiting for it."""
        return max(self.ranks, key=lambda rank: rank.own)

    def __str__(self) -> str:
        return "\n".join([self.about, *self._rows(), "", *self._module_rows(), "", self._verdict()])

    def _rows(self) -> list[str]:
        times, slowest = self.times, self.slowest
        others = slowest.rank != self.rank
        heads = [f"rank {self.rank}", "", *([f"rank {slowest.rank} (slowest)"] if others else [])]
        rows = [["", *heads, ""]]
        for kind, about in ABOUT.items():
            if not any(rank.kinds.get(kind) for rank in self.ranks):
                continue
            seconds = times.kinds.get(kind, 0.0)
            share = f"{seconds / times.seconds:.1%}"
            beside = [_ms(slowest.kinds.get(kind, 0.0))] if others else []
            rows.append([kind, _ms(seconds), share, *beside, about])
        beside = [_ms(slowest.seconds)] if others else []
        rows.append(["step", _ms(times.seconds), "", *beside, _spread(times.steps)])
        return _aligned(rows)

    def _module_rows(self) -> list[str]:
        """The slowest modules, in the order of their names' first use."""
        modules = self.times.modules
        kept = sorted(modules, key=lambda name: -modules[name].total)[:_NUM_MODULES]
        waits = [kind for kind in EXPOSED if any(modules[name].exposed.get(kind) for name in kept)]
        phases = [
            phase
            for phase in (FORWARD, RECOMPUTATION, BACKWARD)
            if any(modules[name].computation.get(phase) for name in kept)
        ]
        rows = [["module", *phases, *(f"waits: {kind}" for kind in waits)]]
        rows += [_module_row(name, modules[name], phases, waits) for name in modules if name in kept]
        left = len(modules) - len(kept)
        return _aligned(rows) + ([f"{left} more modules take less time each"] if left else [])

    def _verdict(self) -> str:
        slowest = self.slowest
        median = statistics.median(rank.own for rank in self.ranks)
        if len(self.ranks) == 1:
            return "one rank: nothing to compare it with"
        if slowest.own < _STANDS_OUT * median:
            return f"no rank stands out: each takes about {_ms(median)} per step without its waits"
        return (
            f"rank {slowest.rank} is the slowest: {_ms(slowest.own)} per step without its waits, the median "
            f"rank {_ms(median)}, most of the difference in {self._excess()}; the others wait for it"
        )

    def _excess(self) -> str:
        """The row in which the slowest rank differs most from the others."""
        own = [kind for kind in ABOUT if kind not in EXPOSED]
        medians = {kind: statistics.median(r.kinds.get(kind, 0.0) for r in self.ranks) for kind in own}
        return max(own, key=lambda kind: self.slowest.kinds.get(kind, 0.0) - medians[kind])


class Profile:
    """A profile under way. ``report`` is there once its steps have run."""

    def __init__(self, model: nn.Module, *, steps: int, warmup: int, folder: Path | None, show: bool) -> None:
        self.report: ProfileReport | None = None
        self._engines = engines_of(model)  # the model's own first
        self._steps, self._warmup = steps, warmup
        self._folder, self._show = folder, show
        self._prefixes = _prefixes(model)
        self._unwatch: Callable[[], object] = _nothing
        self._tape: Tape | None = None
        self._had_forward = False
        self._ends = 0
        self._heard: list[tuple[list[Callable[[Event], None]], Callable[[Event], None]]] = []
        self._hear(self._engines[0], What.FORWARD_BEGINS, self._begin_forward, first=True)
        for engine in self._engines:  # an optimizer may have parameters of one of them alone
            self._hear(engine, What.STEP_ENDS, self._begin_refresh, first=True)
            self._hear(engine, What.REFRESHED, self._end_step)
        _profiles.add(self)
        if warmup == 0:
            self._start()
            for lanes in {engine.mesh.lanes for engine in self._engines}:
                lanes.drain()  # nobody watched what they are doing
            self._note(Moment.STEP_OVER)

    @property
    def finished(self) -> bool:
        """Whether its steps have run, or it was stopped."""
        return not self._heard

    def stop(self) -> None:
        """Record no more, on all ranks. What has been recorded is dropped, unless all steps have run."""
        self._unwatch()
        self._engines.clear()  # whoever keeps the report need not keep the model
        for listeners, listener in self._heard:
            listeners.remove(listener)
        self._heard.clear()
        if self._tape is not None:
            self._tape.running = False

    def shares_lanes(self, engines: Sequence[Engine]) -> bool:
        """Whether it sees what the lanes of ``engines`` do, or will."""
        lanes = {engine.mesh.lanes for engine in engines}
        return any(engine.mesh.lanes in lanes for engine in self._engines)

    # -- inside -------------------------------------------------------------------------------------

    def _hear(
        self, engine: Engine, what: What, listener: Callable[[Event], None], *, first: bool = False
    ) -> None:
        listeners = engine.events[what]
        listeners.insert(0 if first else len(listeners), listener)
        self._heard.append((listeners, listener))

    def _start(self) -> None:
        device = self._engines[0].device
        num_units = sum(len(engine.units) for engine in self._engines)
        spare = _MARKS_PER_UNIT * num_units * self._steps
        self._tape = tape = Tape(DeviceClock(device, spare) if device.type == "cuda" else HostClock())

        def noting(moment: Moment, prefix: str = "") -> Callable[[Event], None]:
            return lambda event: tape.note(moment, _joined(prefix, event.module))

        self._hear(self._engines[0], What.BACKWARD_BEGINS, noting(Moment.BACKWARD), first=True)
        self._hear(self._engines[0], What.BACKWARD_ENDS, noting(Moment.BACKWARD_OVER))
        for engine, prefix in zip(self._engines, self._prefixes, strict=True):
            self._hear(engine, What.STEP_BEGINS, noting(Moment.OPTIMIZER), first=True)
            self._hear(engine, What.MODULE_FORWARD_BEGINS, noting(Moment.ENTER, prefix))
            self._hear(engine, What.MODULE_FORWARD_ENDS, noting(Moment.LEAVE, prefix))
            self._hear(engine, What.MODULE_BACKWARD_BEGINS, noting(Moment.ENTER_BACKWARD, prefix))
            self._hear(engine, What.MODULE_BACKWARD_ENDS, noting(Moment.LEAVE_BACKWARD, prefix))
            self._hear(engine, What.RECOMPUTATION_BEGINS, noting(Moment.RECOMPUTE))
            self._hear(engine, What.RECOMPUTATION_ENDS, noting(Moment.RECOMPUTE_OVER))
        watched: list[Lanes | Transfers] = [engine.mesh.lanes for engine in self._engines]
        watched += [transfers for engine in self._engines for transfers in _transfers(engine)]
        for each in watched:
            each.watch = tape
        # Lanes outlive the model: they must not go on taking notes when it is gone.
        self._unwatch = unwatch = finalize(self, _unwatch, watched, tape)
        unwatch.atexit = False

    def _note(self, moment: Moment) -> None:
        if self._tape is not None:
            self._tape.note(moment)

    def _begin_forward(self, event: Event) -> None:
        self._had_forward = True
        self._note(Moment.FORWARD if torch.is_grad_enabled() else Moment.EVALUATION)

    def _begin_refresh(self, event: Event) -> None:
        """The first recorded step waits for the refresh of the one before it."""
        if self._tape is None and self._had_forward and self._ends + 1 == self._warmup:
            self._start()

    def _end_step(self, event: Event) -> None:
        self._note(Moment.STEP_OVER)
        if not self._had_forward:  # a second optimizer's step
            return
        self._had_forward = False
        self._ends += 1
        if self._tape is not None and self._ends == self._warmup + self._steps:
            self._finish(self._tape)

    def _finish(self, tape: Tape) -> None:
        world, topology = self._engines[0].world, self._engines[0].topology
        self.stop()
        points, works = tape.read()
        cut = stretches(points, works)
        ends = step_ends(points)
        times = step_times(cut, ends)
        own = RankTimes(rank=world.rank, seconds=times.seconds, own=times.own, kinds=times.kinds)
        # Not over the host group: a save in the background may be at work there.
        with calling("mics.profile"):
            ranks = [own] if world.imagined is not None else world.gather_objects(own)
        about = (
            f"{plural(len(times.steps), 'step')}, {plural(world.size, 'rank')}, partition size "
            f"{topology.partition_size}, {plural(topology.num_replicas, 'replica')}"
        )
        self.report = ProfileReport(times=times, rank=world.rank, ranks=tuple(ranks), about=about)
        if self._show and world.rank == 0:
            print(self.report, flush=True)
        if self._folder is not None and world.rank in (0, self.report.slowest.rank):
            self._write(self._folder, cut, works, ends)

    def _write(
        self, folder: Path, cut: Sequence[Stretch], works: Sequence[Done], ends: Sequence[float]
    ) -> None:
        """What goes wrong with the files is no reason to end the training."""
        report = self.report
        assert report is not None
        trace = folder / f"rank-{report.rank}.trace.json"
        image = folder / f"rank-{report.rank}.png"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            title = f"rank {report.rank}: step {_ms(ends[-1] - ends[-2])}"
            write_profile_trace(trace, cut, works, window=(ends[0], ends[-1]), title=report.about)
            written = f"{trace} (ui.perfetto.dev)"
            if find_spec("matplotlib") is None:
                written += "; pip install 'mics-torch[plot]' for a timeline as a picture"
            else:
                last = (ends[-2], ends[-1])
                draw_profile(image, cut, works, window=last, title=title, subtitle=report.about)
                written += f", {image}"
        except Exception as error:  # also a matplotlib that does not fit the numpy beside it
            found = str(error) if isinstance(error, OSError) else repr(error)
            warnings.warn(f"profile: expected to write to {folder}, found {found}", stacklevel=2)
            return
        if self._show:
            print(f"written: {written}", flush=True)


_profiles: Final[WeakSet[Profile]] = WeakSet()


@collective_call
def profile(
    model: nn.Module,
    *,
    steps: int = 3,
    warmup: int = 2,
    folder: str | Path | None = "runs/profile",
    show: bool = True,
) -> Profile:
    """Record the next optimizer steps of ``model``, and say where their time goes.

    Every rank calls it once, before a training loop or inside it, and trains on. When ``warmup`` and then
    ``steps`` steps have run, rank 0 prints a table. Rank 0 and the slowest rank each write a timeline (PNG)
    and a trace for Perfetto to ``folder`` (None: no files).

    Communication is *exposed* while the computation waits for it; a rank that is late makes the others wait
    there. On a GPU all times are the GPU's own.

    Args:
        steps: optimizer steps to record; the table shows their mean.
        warmup: optimizer steps before them: the first ones decide what is prefetched.
        show: print the table on rank 0.
    """
    for name, value, least in (("steps", steps, 1), ("warmup", warmup, 0)):
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise SettingsError(f"profile: expected {name} of at least {least}, found {value!r}")
    engine = engine_of(model)
    own = (steps, warmup, engine.progress.num_steps), _is_under_way(engines_of(model))
    asked, under_way = zip(*engine.world.gather_objects(own), strict=True)
    if any(under_way):
        raise SettingsError("profile: expected no other profile under way, found one; stop() it first")
    if len(set(asked)) > 1:
        raise SettingsError(
            "profile: expected all ranks to call it with the same steps and warmup after the same optimizer "
            f"step, found (steps, warmup, step) of {list(asked)}"
        )
    return Profile(
        model, steps=steps, warmup=warmup, folder=None if folder is None else Path(folder), show=show
    )


def _is_under_way(engines: Sequence[Engine]) -> bool:
    """Whether a profile has not ended yet of a model that shares lanes, and is still there."""

    def found() -> bool:
        return any(not profile.finished and profile.shares_lanes(engines) for profile in _profiles)

    if found():
        gc.collect()
    return found()


def _nothing() -> None:
    pass


def _unwatch(watched: Sequence[Lanes | Transfers], tape: Tape) -> None:
    for each in watched:
        if each.watch is tape:
            each.watch = None


def _prefixes(model: nn.Module) -> list[str]:
    """What comes before the names of modules, for each engine of the model: a part's are its own."""
    names = {id(engine_of(module)): name for name, module in model.named_modules() if is_sharded(module)}
    return [names[id(engine)] for engine in engines_of(model)]


def _joined(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _transfers(engine: Engine) -> list[Transfers]:
    return [] if engine.offloader is None else [engine.offloader.transfers]


def _module_row(name: str, times: ModuleTimes, phases: Sequence[str], waits: Sequence[str]) -> list[str]:
    computed = [_ms(times.computation.get(phase, 0.0)) for phase in phases]
    return [name or "(the model's own)", *computed, *(_ms(times.exposed.get(kind, 0.0)) for kind in waits)]


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms"


def _spread(steps: Sequence[float]) -> str:
    if len(steps) == 1:
        return ""
    return f"{_ms(min(steps))} to {_ms(max(steps))}"


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns, the first and the last to the left."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    return [
        "  ".join(
            cell.ljust(width) if column in (0, last) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]

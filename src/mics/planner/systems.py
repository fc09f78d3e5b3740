"""How each system orders its work: programs for the simulation."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from mics.cost.collectives import Kind
from mics.cost.setting import Setting
from mics.cost.shapes import UnitShape
from mics.layout.order import staying_units
from mics.planner.host_copies import HostCopies
from mics.planner.simulate import LINKS, Program, Task, play
from mics.planner.step_costs import StepCosts
from mics.utils.intervals import Interval, subtract, total, union

HOST_SECONDS: Final = 0.3e-3
"""Fitted: what the host took to decide about one parameter in DeepSpeed's ZeRO-3 before the seed's work."""
_TENSORS_OF_A_BLOCK: Final = 4  # large ones, gathered one by one before they were batched
_MAX_MICRO: Final = 3
_FEW_UNITS: Final = 40
_MAX_MICRO_OF_FEW: Final = 8  # what is kept and sent ahead spans whole micro-steps there
_QUICK_BLOCKS: Final = (24, 48)


class _Measured(NamedTuple):
    """Seconds of a step, or of a part of one."""

    seconds: float
    compute: float
    links: tuple[float, ...]
    exposed: tuple[float, ...]

    def plus(self, share: float, other: _Measured) -> _Measured:
        """With so much of another one."""
        return _Measured(
            self.seconds + share * other.seconds,
            self.compute + share * other.compute,
            tuple(a + share * b for a, b in zip(self.links, other.links, strict=True)),
            tuple(a + share * b for a, b in zip(self.exposed, other.exposed, strict=True)),
        )


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What one step takes, in seconds, and where it goes."""

    setting: Setting
    system: str
    measured: _Measured
    tasks: tuple[Task, ...]
    """Of the step that was looked at, for pictures; later micro-steps may be left out."""
    began: float

    @property
    def step_seconds(self) -> float:
        return self.measured.seconds

    @property
    def compute_seconds(self) -> float:
        return self.measured.compute

    @property
    def link_seconds(self) -> dict[str, float]:
        """A transfer held the link."""
        return dict(zip(LINKS, self.measured.links, strict=True))

    @property
    def exposed_seconds(self) -> dict[str, float]:
        """A transfer held the link and nothing computed."""
        return dict(zip(LINKS, self.measured.exposed, strict=True))

    @property
    def tflops(self) -> float:
        """Of the model, a rank, without what is recomputed."""
        return self._flops(recomputed=False)

    @property
    def hardware_tflops(self) -> float:
        """With what is recomputed: as the seeds count."""
        return self._flops(recomputed=self.setting.activations.checkpoint)

    @property
    def mfu(self) -> float:
        """Model FLOPs as a share of the data sheet's peak."""
        return self.tflops * 1e12 / self.setting.device.peak_flops

    @property
    def tokens_per_second(self) -> float:
        """Of all GPUs together."""
        return self.setting.tokens_per_step / self.step_seconds

    @property
    def tokens_per_second_per_gpu(self) -> float:
        return self.tokens_per_second / self.setting.cluster.world_size

    def _flops(self, *, recomputed: bool) -> float:
        setting = self.setting
        flops = setting.model.flops(setting.tokens, recomputed=recomputed) * setting.accumulation
        return flops / self.step_seconds / 1e12


@dataclass(frozen=True, kw_only=True)
class _Style:
    """What tells systems apart that gather, compute and reduce unit by unit."""

    overlaps: bool = True
    keeps_around_turn: bool = False  # units that are needed again soon stay
    spreads_masters: bool = False  # hop 2 is a reduce-scatter, and new parameters follow
    hides_boundary: bool = False  # hop 2 runs unit by unit under the last backward
    copies: bool = False  # gathered parameters and full gradients are copied once more
    num_pieces: int = 1  # collectives for one unit
    host_seconds: float = 0.0  # for each of them, nothing else going on


@dataclass(frozen=True, kw_only=True)
class SimulatedSystem:
    """A way to order the work."""

    name: str
    about: str
    style: _Style
    over_the_world: bool = False  # one partition group, whatever was asked for
    flat: bool = False  # one ring, also over several nodes
    prefetch: int | None = None  # None: as mics decides it

    def adapt(self, setting: Setting) -> Setting:
        """What it would make of a setting."""
        return replace(
            setting,
            partition_size=setting.cluster.world_size if self.over_the_world else setting.partition_size,
            hierarchical=setting.hierarchical and not self.flat,
            prefetch=setting.prefetch if self.prefetch is None else self.prefetch,
        )


class _Issuer:
    """Issues the steps of one setting in one style."""

    def __init__(self, program: Program, setting: Setting, style: _Style) -> None:
        self.program, self.setting, self.style = program, setting, style
        self.units = setting.model.units
        self.costs = StepCosts(setting)
        self.depth = setting.depth if style.overlaps else 0
        self.computed: list[Task] = []  # in the order of the computation
        self.refreshed: dict[int, Task] = {}
        self.kept: set[int] = set()
        self.staying = staying_units(
            [index for index, unit in enumerate(self.units) if unit.numel],
            {index: 2 * unit.numel for index, unit in enumerate(self.units)},
            setting.stay_nbytes if style.keeps_around_turn else 0,
        )
        self.alone = setting.partition_size == 1
        self.spreads_masters = style.spreads_masters and setting.over_replicas
        self.host_copies = HostCopies(program, self.units, self.costs)

    def micro_step(self, *, last: bool) -> None:
        order = [(i, False) for i in range(len(self.units))]
        order += [(i, True) for i in reversed(range(len(self.units)))]
        reduced: list[Task] = []
        turn = len(self.units)
        for position, (index, is_backward) in enumerate(order):
            unit = self.units[index]
            gathered = None if self.alone else self._gather(index, unit, is_backward)
            costs = self.costs
            seconds = costs.backward_seconds(unit) if is_backward else costs.forward_seconds(unit)
            if self.style.copies and not self.alone:
                seconds += (6 if is_backward else 4) * unit.numel / self.setting.device.memory_bandwidth
            name = ("backward " if is_backward else "forward ") + unit.name
            copied = self.host_copies.backward if is_backward else self.host_copies.forward
            before = copied(index, self.computed[-1] if self.computed else None)
            task = self.program.compute(name, seconds, [gathered, self.refreshed.get(index), *before])
            self.computed.append(task)
            if self.style.keeps_around_turn:
                self._keep(position, index, turn, last=last)
            if is_backward:
                done = self._reduce(unit, task)
                if last and self.style.hides_boundary:
                    done = self._hop2(unit, done)
                reduced.append(done)
                if not self.style.overlaps:
                    self.computed.append(self.program.compute("wait", 0.0, [done]))
        self.refreshed = {}
        if last:
            self._boundary(reduced)

    def _keep(self, position: int, index: int, turn: int, *, last: bool) -> None:
        ahead = self.depth + 1
        # `low_memory`, which goes with offload: only what the backward begins with stays at the turn.
        at_turn = 1 if self.setting.division.low_memory else ahead
        if position < turn <= position + at_turn:
            self.kept.add(index)
        if not last and position >= 2 * turn - ahead:
            self.kept.add(index)
        if index in self.staying and not (last and position >= turn):
            self.kept.add(index)

    def _gather(self, index: int, unit: UnitShape, is_backward: bool) -> Task | None:
        if unit.numel == 0 or index in self.kept or (is_backward and unit.kind == "embedding"):
            self.kept.discard(index)
            return None
        window = self.computed[-1 - self.depth] if len(self.computed) > self.depth else None
        found: Task | None = None
        style = self.style
        for _ in range(style.num_pieces):
            if style.host_seconds:
                window = self.program.compute("host", style.host_seconds)
            after = [window, self.refreshed.get(index)]
            for link, price in self.costs.moves(Kind.ALL_GATHER, 2 * unit.numel / style.num_pieces):
                found = self.program.transfer(f"gather {link}", f"gather {unit.name}", price, [*after, found])
        return found

    def _reduce(self, unit: UnitShape, task: Task) -> Task:
        if unit.numel == 0 or self.alone:
            return task
        done = task
        nbytes = self.setting.wire_nbytes * unit.numel
        for _ in range(self.style.num_pieces):
            for link, price in self.costs.moves(Kind.REDUCE_SCATTER, nbytes / self.style.num_pieces):
                done = self.program.transfer(f"reduce {link}", f"reduce {unit.name}", price, [done])
        return done

    def _hop2(self, unit: UnitShape, after: Task) -> Task:
        setting = self.setting
        if setting.num_replicas == 1 or unit.numel == 0:
            return after
        kind = Kind.REDUCE_SCATTER if self.spreads_masters else Kind.ALL_REDUCE
        price = self.costs.replica_cost(kind, setting.wire_nbytes * unit.numel / setting.partition_size)
        return self.program.transfer("replicas", f"hop 2 of {unit.name}", price, [after])

    def _boundary(self, reduced: Sequence[Task]) -> None:
        setting, style = self.setting, self.style
        after = list(reduced)
        if not style.hides_boundary:
            after = [self._hop2(unit, after[-1]) for unit in reversed(self.units)] or after
        owners = setting.partition_size * (setting.num_replicas if self.spreads_masters else 1)
        seconds = setting.device.update_seconds(setting.model.num_parameters / owners)
        update = self.program.compute("optimizer", seconds, after)
        self.computed.append(update)
        if self.spreads_masters and setting.num_replicas > 1:
            for index, unit in enumerate(self.units):
                if unit.numel:
                    nbytes = 2 * unit.numel / setting.partition_size
                    price = self.costs.replica_cost(Kind.ALL_GATHER, nbytes)
                    self.refreshed[index] = self.program.transfer(
                        "replicas", f"new {unit.name}", price, [update]
                    )


_MICS: Final = _Style(keeps_around_turn=True, spreads_masters=True, hides_boundary=True)
_FSDP: Final = _Style(hides_boundary=True, copies=True)
_LATE: Final = _Style(copies=True)
_ONE_BY_ONE: Final = _Style(
    overlaps=False, copies=True, num_pieces=_TENSORS_OF_A_BLOCK, host_seconds=HOST_SECONDS
)
_ALL: Final = (
    SimulatedSystem(name="mics", about="this library", style=_MICS),
    SimulatedSystem(
        name="hsdp", about="FSDP2 over partition groups, with replicas", style=_FSDP, flat=True, prefetch=1
    ),
    SimulatedSystem(
        name="fsdp2", about="FSDP2 over the world", style=_FSDP, over_the_world=True, flat=True, prefetch=1
    ),
    SimulatedSystem(
        name="mics-published",
        about="MiCS as published: replicas are synchronised after the last backward",
        style=_LATE,
        prefetch=1,
    ),
    SimulatedSystem(
        name="zero3",
        about="DeepSpeed's ZeRO-3 after the seed's work",
        style=_LATE,
        over_the_world=True,
        flat=True,
        prefetch=1,
    ),
    SimulatedSystem(
        name="zero3-before",
        about="DeepSpeed's ZeRO-3 before the seed's work: one tensor at a time, nothing overlaps",
        style=_ONE_BY_ONE,
        over_the_world=True,
        flat=True,
    ),
)
SYSTEMS: Final = MappingProxyType({system.name: system for system in _ALL})


def predict(setting: Setting, system: str = "mics") -> Prediction:
    """Play a few steps, and take one from the middle."""
    setting = SYSTEMS[system].adapt(setting)
    most = _MAX_MICRO if len(setting.model.units) > _FEW_UNITS else _MAX_MICRO_OF_FEW
    num_micro = min(setting.accumulation, most)
    program = Program()
    issuer = _Issuer(program, setting, SYSTEMS[system].style)
    for number in range(2 * num_micro + 1):  # two steps, and where a third begins
        issuer.micro_step(last=number % num_micro == num_micro - 1)
    play(program)
    name = f"forward {setting.model.units[0].name}"
    starts = [task.start for task in program.tasks if task.name == name]
    began, ended = starts[num_micro], starts[2 * num_micro]
    step = [task for task in program.tasks if task.end > began and task.start < ended]
    one = _measure(step, began, ended)
    more = setting.accumulation - num_micro
    if more:
        first, second = starts[2 * num_micro - 2], starts[2 * num_micro - 1]
        middle = _measure([t for t in program.tasks if t.end > first and t.start < second], first, second)
        one = one.plus(more, middle)
    return Prediction(setting=setting, system=system, measured=one, tasks=tuple(step), began=began)


def predict_quickly(setting: Setting, system: str = "mics") -> Prediction:
    """The same from two shorter models: a block more takes what a block takes."""
    few, more = _QUICK_BLOCKS
    model = setting.model
    num_blocks = model.num_blocks // model.parts
    if num_blocks <= 2 * more:
        return predict(setting, system)
    shapes = [replace(setting, model=model.with_blocks(count)) for count in (few, more)]
    if len({SYSTEMS[system].adapt(found).staying_share for found in (setting, *shapes)}) > 1:
        return predict(setting, system)  # not every block takes the same
    shorter = [predict(found, system) for found in shapes]
    share = (num_blocks - few) / (more - few)
    one, two = (found.measured for found in shorter)
    measured = one.plus(share, two.plus(-1, one))
    return replace(shorter[1], setting=SYSTEMS[system].adapt(setting), measured=measured)


def _measure(tasks: Sequence[Task], began: float, ended: float) -> _Measured:
    def busy(moments: Iterable[Interval]) -> list[Interval]:
        return union((max(began, start), min(ended, end)) for start, end in moments if end > began)

    compute = busy((t.start, t.end) for t in tasks if t.stream == "compute" and t.name != "host")
    links = {
        link: busy((t.start, t.start + s) for t in tasks for name, s in t.links if name == link)
        for link in LINKS
    }
    return _Measured(
        ended - began,
        total(compute),
        tuple(total(links[link]) for link in LINKS),
        tuple(total(subtract(links[link], compute)) for link in LINKS),
    )

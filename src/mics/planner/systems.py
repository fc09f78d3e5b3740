"""How each system orders its work: programs for the simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final, NamedTuple

from mics.cost.constants import HOST_SECONDS
from mics.cost.memory import Terms
from mics.cost.setting import Setting
from mics.layout.compression import UNCOMPRESSED
from mics.planner.issuing import Issuer, Style
from mics.planner.peer_memory import fsdp_terms, zero2_terms, zero3_terms
from mics.planner.simulate import LINKS, Program, Task, play
from mics.planner.step_costs import StepCosts
from mics.utils.intervals import Interval, subtract, total, union

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
    def worst_wait(self) -> tuple[str, float]:
        """The link that the step waits for longest, and the share of the step that it does."""
        exposed = self.exposed_seconds
        worst = max(exposed, key=lambda link: exposed[link])
        return worst, exposed[worst] / self.step_seconds

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
class SimulatedSystem:
    """A way to order the work."""

    name: str
    about: str
    style: Style
    terms: Callable[[Setting], Terms]
    """What a setting needs, by its own division of the memory."""
    float8: bool = False  # it can gather matrices so
    over_the_world: bool = False  # one partition group, whatever was asked for
    flat: bool = False  # one ring, also over several nodes
    prefetch: int | None = None  # None: as mics decides it

    def adapt(self, setting: Setting) -> Setting:
        """What it would make of a setting."""
        return replace(
            setting,
            model=setting.model if self.float8 else setting.model.with_float8(False),
            partition_size=setting.cluster.world_size if self.over_the_world else setting.partition_size,
            hierarchical=setting.hierarchical and not self.flat,
            prefetch=setting.prefetch if self.prefetch is None else self.prefetch,
            state_on_host=setting.state_on_host and self.style.spreads_masters,
            compression=setting.compression if self.style.spreads_masters else UNCOMPRESSED,
            rings=not self.style.spreads_masters,
        )

    def need(self, setting: Setting) -> Terms:
        """Memory of what it would make of a setting."""
        return self.terms(self.adapt(setting))


_MICS: Final = Style(keeps_around_turn=True, spreads_masters=True, hides_boundary=True)
_FSDP: Final = Style(hides_boundary=True, copies_gathered=True, blocking_copies=True)
_LATE: Final = Style(copies_gathered=True)
_ZERO3: Final = replace(_LATE, blocking_copies=True)
_ZERO2: Final = Style(blocking_copies=True, keeps_parameters=True, buckets=True, joins_owners=True)
_ZERO2_LATE: Final = replace(_ZERO2, overlaps=False, joins_owners=False)
_MICS_SHORT: Final = replace(_MICS, hop_1_nbytes=2)
_MEGATRON: Final = Style(hides_boundary=True, hop_1_nbytes=2, copies_gradients=False, blocking_copies=True)
_ONE_BY_ONE: Final = Style(
    overlaps=False,
    copies_gathered=True,
    num_pieces=_TENSORS_OF_A_BLOCK,
    host_seconds=HOST_SECONDS,
    blocking_copies=True,
)
_ALL: Final = (
    SimulatedSystem(name="mics", about="this library", style=_MICS, terms=Setting.need, float8=True),
    SimulatedSystem(
        name="mics-hop-1-bf16",
        about="this library with Precision(reduce_dtype=bfloat16)",
        style=_MICS_SHORT,
        terms=Setting.need,
        float8=True,
    ),
    SimulatedSystem(
        name="hsdp",
        about="FSDP2 over partition groups, with replicas",
        style=_FSDP,
        terms=fsdp_terms,
        flat=True,
        prefetch=1,
        float8=True,
    ),
    SimulatedSystem(
        name="fsdp2",
        about="FSDP2 over the world",
        style=_FSDP,
        terms=fsdp_terms,
        over_the_world=True,
        flat=True,
        prefetch=1,
        float8=True,
    ),
    SimulatedSystem(
        name="megatron-fsdp",
        about="Megatron-FSDP v2 over partition groups: no copies, hop 1 in 16 bits, its optimizer not spread",
        style=_MEGATRON,
        terms=zero3_terms,  # divided in the same way
        flat=True,
        prefetch=1,
    ),
    SimulatedSystem(
        name="mics-published",
        about="MiCS as published: replicas are synchronised after the last backward",
        style=_LATE,
        terms=zero3_terms,
        prefetch=1,
    ),
    SimulatedSystem(
        name="zero3",
        about="DeepSpeed's ZeRO-3, gathers and reductions batched and beside the computation",
        style=_ZERO3,
        terms=zero3_terms,
        over_the_world=True,
        flat=True,
        prefetch=1,
    ),
    SimulatedSystem(
        name="zero3-before",
        about="DeepSpeed's ZeRO-3 of 2021: one tensor at a time, nothing overlaps",
        style=_ONE_BY_ONE,
        terms=zero3_terms,
        over_the_world=True,
        flat=True,
    ),
    SimulatedSystem(
        name="zero2",
        about="DeepSpeed's ZeRO-2: parameters whole, buckets of gradients all-reduced in every micro-step",
        style=_ZERO2,
        terms=zero2_terms,
        over_the_world=True,
        flat=True,
        prefetch=1,
    ),
    SimulatedSystem(
        name="zero2-before",
        about="DeepSpeed's ZeRO-2 of 2021: each bucket reduced to its owners, without overlap_comm",
        style=_ZERO2_LATE,
        terms=zero2_terms,
        over_the_world=True,
        flat=True,
        prefetch=1,
    ),
)
SYSTEMS: Final = MappingProxyType({system.name: system for system in _ALL})


def predict(setting: Setting, system: str = "mics") -> Prediction:
    """Play a few steps, and take one from the middle."""
    setting = SYSTEMS[system].adapt(setting)
    most = _MAX_MICRO if len(setting.model.units) > _FEW_UNITS else _MAX_MICRO_OF_FEW
    num_micro = min(setting.accumulation, most)
    program = Program()
    issuer = Issuer(program, setting, SYSTEMS[system].style)
    for number in range(2 * num_micro + 1):  # two steps, and where a third begins
        issuer.micro_step(last=number % num_micro == num_micro - 1)
    cluster = setting.cluster
    play(
        program,
        {"intra": cluster.intra.slowdown, "inter": cluster.inter.slowdown},
        link_slowdown=cluster.link_slowdown,
    )
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


def compute_floor(setting: Setting) -> float:
    """Seconds that the units of a step compute: no system takes less."""
    costs = StepCosts(setting)
    each = (costs.forward_seconds(unit) + costs.backward_seconds(unit) for unit in setting.model.units)
    return setting.accumulation * sum(each)


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

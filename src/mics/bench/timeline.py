"""One step, seen from the GPU (or the CPU): who was busy when.

Lanes are ``compute``, the links ``intra`` and ``inter``, and the two directions between device and host.
A collective is *exposed* while it holds its link and nothing computes. Computing belongs to the phase of the
step in which the host asked for it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Final, TypeVar

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mics.bench.phases import Phase, listening
from mics.comm import join_world
from mics.cost.collectives import Kind
from mics.diagnostics.step_times import EXPOSED, stretches
from mics.diagnostics.tape import HostClock, Tape
from mics.emulator import Collective, Emulation
from mics.emulator.device_links import RESERVE, WAIT
from mics.utils.intervals import Interval, subtract, total, union

LINKS: Final = ("intra", "inter", "to host", "from host")
LANES: Final = ("compute", *LINKS)
MARK: Final = "spin_kernel"
"""On a GPU a phase begins with this kernel, of ``torch.cuda._sleep``, which ends at once."""
_SMALL: Final = 2**16  # bytes: a norm, a flag; gradients are more


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Something that took time on a lane. Seconds count from the step's start."""

    name: str
    start: float
    end: float
    detail: str = ""
    phase: Phase | None = None
    """In which the host asked for it; None: before the first."""
    role: str = "other"
    """What a collective is for: all-gather, reduce-scatter, hop 2, refresh, other; of a copy: host copy."""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What happened on each lane of one step."""

    seconds: float
    lanes: dict[str, list[Segment]]

    def dilated(self, dilation: float) -> Timeline:
        """The same on a clock that counts so many seconds for one of this."""
        lanes = {
            lane: [replace(each, start=dilation * each.start, end=dilation * each.end) for each in found]
            for lane, found in self.lanes.items()
        }
        return Timeline(seconds=dilation * self.seconds, lanes=lanes)

    def busy(self, lane: str) -> list[Interval]:
        return union((found.start, found.end) for found in self.lanes[lane])

    def by_role(self, lane: str) -> dict[str, list[Interval]]:
        """When a link was busy, and with what; no two at once."""
        return _divided([(found.role, (found.start, found.end)) for found in self.lanes[lane]])

    def by_phase(self) -> dict[Phase | None, list[Interval]]:
        """When which phase computed, in their order; no two at once."""
        return _divided([(found.phase, (found.start, found.end)) for found in self.lanes["compute"]])

    def phases(self) -> list[Segment]:
        """Each from its first computing to its last, or to where the next one begins."""
        spans = [(phase, of[0][0], of[-1][1]) for phase, of in self.by_phase().items() if phase and of]
        spans.sort(key=lambda span: span[1])
        nexts = [start for _, start, _ in spans[1:]] + [self.seconds]
        return [
            Segment(name=str(phase), start=start, end=min(end, until), phase=phase)
            for (phase, start, end), until in zip(spans, nexts, strict=False)
        ]

    def micro_batches(self) -> list[Interval]:
        """From the first computing of each micro-batch to that of the next, or of the optimizer."""
        starts: dict[float, float] = {}
        for found in self.lanes["compute"]:
            if found.phase is not None:
                number = math.inf if found.phase.kind == "optimizer" else found.phase.micro_batch
                starts[number] = min(found.start, starts.get(number, found.start))
        edges = [starts[number] for number in sorted(starts)]
        if edges and math.inf not in starts:
            edges.append(self.seconds)
        return list(pairwise(edges))


@dataclass(frozen=True, kw_only=True)
class Exposure:
    """Where the time of one step went, in seconds, and how much each link carried."""

    compute_seconds: float
    """Something computed."""
    idle_seconds: float
    """Nothing computed, nothing moved: the device waited for the host."""
    link_seconds: dict[str, float]
    """A collective held the link."""
    exposed_seconds: dict[str, float]
    """A collective held the link and nothing computed."""
    exposed_by_kind: dict[str, float] = field(default_factory=dict)
    """The same by ``link kind``."""
    link_nbytes: dict[str, float] = field(default_factory=dict)
    """intra: sent by this rank. inter: sent by this rank's node."""


def exposure(timeline: Timeline, collectives: list[Collective], ranks_per_node: int) -> Exposure:
    """Add a step up."""
    compute = timeline.busy("compute")
    link_seconds, exposed = {}, {}
    by_kind: dict[str, float] = {}
    for lane in LINKS:
        link_seconds[lane] = total(timeline.busy(lane))
        exposed[lane] = total(subtract(timeline.busy(lane), compute))
        kinds: dict[str, list[Interval]] = defaultdict(list)
        for found in timeline.lanes[lane]:
            kinds[found.name].append((found.start, found.end))
        for kind, intervals in sorted(kinds.items()):
            by_kind[f"{lane} {kind}"] = total(subtract(intervals, compute))
    anything = union(interval for lane in LANES for interval in timeline.busy(lane))
    return Exposure(
        compute_seconds=total(compute),
        idle_seconds=max(0.0, timeline.seconds - total(anything)),
        link_seconds=link_seconds,
        exposed_seconds=exposed,
        exposed_by_kind=by_kind,
        link_nbytes={
            "intra": sum(found.cost.intra_nbytes for found in collectives),
            "inter": ranks_per_node * sum(found.cost.inter_nbytes for found in collectives),
        },
    )


def record(
    step: Callable[[], object],
    emulation: Emulation,
    device: torch.device,
    *,
    partition_size: int | None = None,
) -> tuple[Timeline, list[Collective]]:
    """Run one step and see what it does on each lane.

    With a ``partition_size`` collectives between replicas are told from those inside a partition group.
    """
    on = _on_device if device.type == "cuda" else _on_host
    return on(step, emulation, partition_size)


def role_of(collective: Collective, phase: Phase | None, partition_size: int | None) -> str:
    """What a collective is for.

    Replicas may exchange what they have in place of reducing or gathering it: gradients while a backward is
    under way, new parameters from the optimizer on.
    """
    replicas = partition_size is not None and collective.stride >= partition_size
    match collective.kind:
        case Kind.ALL_GATHER:
            return "refresh" if replicas else "all-gather"
        case Kind.REDUCE_SCATTER:
            return "hop 2" if replicas else "reduce-scatter"
        case Kind.ALL_TO_ALL:
            return "hop 2" if phase is not None and phase.kind == "backward" else "refresh"
        case Kind.ALL_REDUCE:
            return "hop 2" if collective.nbytes >= _SMALL else "other"
    return "other"


def _segment(
    collective: Collective, start: float, end: float, phase: Phase | None, partition_size: int | None
) -> Segment:
    return Segment(
        name=collective.kind,
        start=start,
        end=end,
        detail=f"{collective.nbytes / 2**20:.1f} MiB over {collective.group_size} ranks",
        phase=phase,
        role=role_of(collective, phase, partition_size),
    )


def _on_device(
    step: Callable[[], object], emulation: Emulation, partition_size: int | None
) -> tuple[Timeline, list[Collective]]:
    phases: list[Phase] = []

    def mark(phase: Phase) -> None:
        phases.append(phase)
        torch.cuda._sleep(1)

    torch.cuda.synchronize()
    emulation.clear()
    with listening(mark), profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
        step()
        torch.cuda.synchronize()
    collectives = emulation.collectives()
    found = profiler.profiler
    assert found is not None
    events = [
        event
        for event in found.kineto_results.events()
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation()
    ]
    events.sort(key=lambda event: event.start_ns())
    return _from_kernels(events, collectives, phases, partition_size), collectives


def _from_kernels(
    events: list[Any],
    collectives: list[Collective],
    phases: Sequence[Phase] = (),
    partition_size: int | None = None,
) -> Timeline:
    """Sort what the profiler saw into lanes.

    A collective is a pair of kernels on one stream, and what lies between them on it is its own copying.
    The n-th pair in the order of launching is the n-th collective of the emulator's log; the first of the
    two clocks it: the moments of the log count from there. In the same way the n-th mark is the n-th phase,
    and what was launched between two marks belongs to the first of them, whichever thread launched it.
    """
    lanes: dict[str, list[Segment]] = {lane: [] for lane in LANES}
    origin = events[0].start_ns() if events else 0
    numbers = {launched: number for number, launched in enumerate(_launched(events, RESERVE))}
    marks = _launched(events, MARK)
    open_on: dict[int, tuple[int, Phase | None]] = {}  # stream -> number of the collective it is in
    for event in events:
        stream, name = event.device_resource_id(), event.name()
        start, end = (event.start_ns() - origin) * 1e-9, (event.end_ns() - origin) * 1e-9
        passed = min(bisect_right(marks, event.correlation_id()), len(phases))
        phase = phases[passed - 1] if passed else None
        if name == RESERVE:
            open_on[stream] = numbers[event.correlation_id()], phase
        elif name == WAIT:
            number, phase = open_on.pop(stream)
            collective = collectives[number]
            held = collective.cost.seconds  # before that it waited for its turn
            lanes[collective.cost.link].append(_segment(collective, end - held, end, phase, partition_size))
        elif stream in open_on or event.duration_ns() == 0 or MARK in name:
            continue
        elif "Memcpy HtoD" in name or "Memcpy DtoH" in name:
            lane = "to host" if "DtoH" in name else "from host"
            lanes[lane].append(Segment(name="copy", start=start, end=end, phase=phase, role="host copy"))
        else:
            lanes["compute"].append(Segment(name=name, start=start, end=end, phase=phase))
    last = max((event.end_ns() for event in events), default=origin)
    return Timeline(seconds=(last - origin) * 1e-9, lanes=lanes)


def _launched(events: Sequence[Any], name: str) -> list[int]:
    """Kernels with this in their name, in the order of launching."""
    return sorted(event.correlation_id() for event in events if name in event.name())


def _on_host(
    step: Callable[[], object], emulation: Emulation, partition_size: int | None
) -> tuple[Timeline, list[Collective]]:
    """On a CPU everything but waiting for a collective counts as computing.

    Systems wait for their collectives themselves. With mics a thread does, and the computation for that.
    """
    begun: list[tuple[float, Phase | None]] = []
    emulation.clear()
    began = time.perf_counter()
    tape = Tape(HostClock(began))
    listener = listening(lambda phase: begun.append((time.perf_counter() - began, phase)))
    with listener, join_world().watching(tape):
        step()
    seconds = time.perf_counter() - began
    collectives = emulation.collectives()
    lanes: dict[str, list[Segment]] = {lane: [] for lane in LANES}
    moments = [moment for moment, _ in begun]
    for found in collectives:
        if found.cost.seconds > 0:
            passed = bisect_right(moments, found.times.arrival - began)
            phase = begun[passed - 1][1] if passed else None
            start, end = found.times.start - began, found.times.end - began
            lanes[found.cost.link].append(_segment(found, start, end, phase, partition_size))
    waits = [(start - began, end - began) for start, end in emulation.blocked()]
    waits += [(stretch.start, stretch.end) for stretch in stretches(*tape.read()) if stretch.kind in EXPOSED]
    edges = [(0.0, None), *begun, (seconds, None)]
    for (start, phase), (end, _) in pairwise(edges):
        lanes["compute"] += [
            Segment(name=str(phase or "compute"), start=at, end=until, phase=phase)
            for at, until in subtract([(start, end)], waits)
        ]
    return Timeline(seconds=seconds, lanes=lanes), collectives


_Key = TypeVar("_Key")


def _divided(found: Sequence[tuple[_Key, Interval]]) -> dict[_Key, list[Interval]]:
    """By key, in the order of their first; a moment that several claim goes to the first of them."""
    claims: dict[_Key, list[Interval]] = {}
    for key, interval in sorted(found, key=lambda claim: claim[1]):
        claims.setdefault(key, []).append(interval)
    taken: list[Interval] = []
    divided = {}
    for key, intervals in claims.items():
        divided[key] = subtract(intervals, taken)
        taken = union([*taken, *intervals])
    return divided

"""One step, seen from the GPU (or the CPU): who was busy when.

Lanes are ``compute``, the links ``intra`` and ``inter``, and the two directions between device and host.
A collective is *exposed* while it holds its link and nothing computes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from mics.emulator import Collective, Emulation
from mics.emulator.device_links import RESERVE, WAIT
from mics.utils.intervals import Interval, subtract, total, union

LINKS: Final = ("intra", "inter", "to host", "from host")
LANES: Final = ("compute", *LINKS)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Something that took time on a lane. Seconds count from the step's start."""

    name: str
    start: float
    end: float
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """What happened on each lane of one step."""

    seconds: float
    lanes: dict[str, list[Segment]]

    def busy(self, lane: str) -> list[Interval]:
        return union((found.start, found.end) for found in self.lanes[lane])


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
    step: Callable[[], object], emulation: Emulation, device: torch.device
) -> tuple[Timeline, list[Collective]]:
    """Run one step and see what it does on each lane."""
    return _on_device(step, emulation) if device.type == "cuda" else _on_host(step, emulation)


def _on_device(step: Callable[[], object], emulation: Emulation) -> tuple[Timeline, list[Collective]]:
    torch.cuda.synchronize()
    emulation.clear()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as profiler:
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
    return _from_kernels(sorted(events, key=lambda event: event.start_ns()), collectives), collectives


def _from_kernels(events: list[Any], collectives: list[Collective]) -> Timeline:
    """Sort what the profiler saw into lanes.

    A collective is a pair of kernels on one stream, and what lies between them on it is its own copying.
    The n-th pair in the order of launching is the n-th collective of the emulator's log; the first of the
    two clocks it: the moments of the log count from there.
    """
    lanes: dict[str, list[Segment]] = {lane: [] for lane in LANES}
    origin = events[0].start_ns() if events else 0
    launched = sorted(
        (event for event in events if event.name() == RESERVE), key=lambda event: event.correlation_id()
    )
    numbers = {event.correlation_id(): number for number, event in enumerate(launched)}
    open_on: dict[int, int] = {}  # stream -> number of the collective it is in
    for event in events:
        stream, name = event.device_resource_id(), event.name()
        start, end = (event.start_ns() - origin) * 1e-9, (event.end_ns() - origin) * 1e-9
        if name == RESERVE:
            open_on[stream] = numbers[event.correlation_id()]
        elif name == WAIT:
            collective = collectives[open_on.pop(stream)]
            held = collective.cost.seconds  # before that it waited for its turn
            lanes[collective.cost.link].append(
                Segment(
                    name=collective.kind,
                    start=end - held,
                    end=end,
                    detail=f"{collective.nbytes / 2**20:.1f} MiB over {collective.group_size} ranks",
                )
            )
        elif stream in open_on or event.duration_ns() == 0:
            continue
        elif "Memcpy HtoD" in name or "Memcpy DtoH" in name:
            lane = "to host" if "DtoH" in name else "from host"
            lanes[lane].append(Segment(name="copy", start=start, end=end))
        else:
            lanes["compute"].append(Segment(name=name, start=start, end=end))
    last = max((event.end_ns() for event in events), default=origin)
    return Timeline(seconds=(last - origin) * 1e-9, lanes=lanes)


def _on_host(step: Callable[[], object], emulation: Emulation) -> tuple[Timeline, list[Collective]]:
    """On a CPU everything but waiting for a collective counts as computing."""
    emulation.clear()
    began = time.perf_counter()
    step()
    seconds = time.perf_counter() - began
    collectives = emulation.collectives()
    lanes: dict[str, list[Segment]] = {lane: [] for lane in LANES}
    for found in collectives:
        if found.cost.seconds > 0:
            lanes[found.cost.link].append(
                Segment(
                    name=found.kind,
                    start=found.times.start - began,
                    end=found.times.end - began,
                    detail=f"{found.nbytes / 2**20:.1f} MiB over {found.group_size} ranks",
                )
            )
    waits = [(start - began, end - began) for start, end in emulation.blocked()]
    lanes["compute"] = [
        Segment(name="compute", start=start, end=end) for start, end in subtract([(0.0, seconds)], waits)
    ]
    return Timeline(seconds=seconds, lanes=lanes), collectives

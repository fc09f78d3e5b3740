"""The files of a profile: a timeline to look at and a trace for Perfetto."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from mics.diagnostics.step_times import (
    AGREEMENT,
    COMPUTATION,
    EXPOSED,
    GATHER,
    HOP_1,
    HOP_2,
    OFFLOAD,
    REFRESH,
    Stretch,
    kind_of,
)
from mics.diagnostics.tape import Done
from mics.utils.intervals import Interval, subtract, union
from mics.utils.trace import TraceSlice, write_tracks

_ROLES: Final = {
    GATHER: "all-gather",
    HOP_1: "reduce-scatter",
    HOP_2: "hop 2",
    REFRESH: "refresh",
    OFFLOAD: "host copy",
    AGREEMENT: "other",
}
"""What pictures call them, where that differs."""
_LANES: Final = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "partition": "partition group",
    "replicas": "between replicas",
    "world": "all ranks",
}


def write_profile_trace(
    file: Path, cut: Sequence[Stretch], works: Sequence[Done], *, window: Interval, title: str
) -> None:
    """All steps: a track for the computation, one for what it waits for, and one for each lane."""
    start, end = window
    computed = [_slice(found, start) for found in cut if found.kind not in EXPOSED and found.start >= start]
    waited = [_slice(found, start) for found in cut if found.kind in EXPOSED and found.start >= start]
    tracks = {"computation": computed, "waits": waited}
    for work in _inside(works, window):
        facts = {"kind": work.work.kind, "for": kind_of(work.work)}
        name = f"{work.work.kind} {work.work.label}"
        tracks.setdefault(lane_name(work), []).append(
            TraceSlice(name, max(0.0, work.start - start), min(work.end, end) - start, facts)
        )
    write_tracks(file, tracks, title=title)


def draw_profile(
    file: Path, cut: Sequence[Stretch], works: Sequence[Done], *, window: Interval, title: str, subtitle: str
) -> None:
    """One step as lanes: the computation by phase, and communication by purpose."""
    from mics.utils.picture_lanes import draw_lanes, draw_legend, label_time  # matplotlib is an extra
    from mics.utils.picture_style import LIGHT, picture

    start, end = window
    lanes: dict[str, dict[str, list[Interval]]] = {"computation": {}}
    waits: list[Interval] = []
    for found in cut:
        if found.start >= start and found.end <= end:
            when = (found.start - start, found.end - start)
            if found.kind in COMPUTATION:
                lanes["computation"].setdefault(found.kind, []).append(when)
            elif found.kind in EXPOSED:
                waits.append(when)
    for work in _inside(works, window):
        parts = lanes.setdefault(lane_name(work), {})
        when = (max(0.0, work.start - start), min(work.end, end) - start)
        parts.setdefault(_ROLES[kind_of(work.work)], []).append(when)
    elsewhere = subtract([(0.0, end - start)], waits)
    exposed = {
        label: subtract((each for part in parts.values() for each in part), elsewhere)
        for label, parts in lanes.items()
    }
    for parts in lanes.values():
        for role, intervals in parts.items():
            parts[role] = union(intervals)
    with picture(
        file, height=1.75 + 0.72 * len(lanes), title=title, subtitle=subtitle, theme=LIGHT
    ) as figure:
        axes = figure.subplots()
        draw_lanes(axes, lanes, exposed, seconds=end - start, theme=LIGHT)
        label_time(axes)
        roles = {role for parts in lanes.values() for role in parts}
        draw_legend(axes, roles | ({"exposed"} if any(exposed.values()) else set()), theme=LIGHT)


def lane_name(work: Done) -> str:
    """What pictures and traces call the lane: ``all-gather, inside the node``."""
    name, _, stage = work.work.lane.partition(" ")
    stages = {"": "", "intra": ", inside the node", "inter": ", between nodes"}
    return _LANES[name] + stages[stage] if name in _LANES else work.work.lane


def _slice(found: Stretch, start: float) -> TraceSlice:
    name = found.kind if found.kind in EXPOSED else f"{found.kind} {found.module}".strip()
    facts = {"module": found.module, "for": found.label}
    return TraceSlice(
        name, found.start - start, found.end - start, {key: value for key, value in facts.items() if value}
    )


def _inside(works: Sequence[Done], window: Interval) -> list[Done]:
    """What lanes did in the window, in the order of its beginning."""
    start, end = window
    found = [work for work in works if work.end > start and work.start < end]
    return sorted(found, key=lambda work: work.start)

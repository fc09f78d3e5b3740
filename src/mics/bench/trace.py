"""A timeline as a trace for Perfetto."""

from __future__ import annotations

from pathlib import Path

from mics.bench.timeline import LANES, Segment, Timeline
from mics.utils.trace import TraceSlice, write_tracks


def write_trace(file: Path, timeline: Timeline, *, title: str) -> None:
    """Write one step: a track for its phases and one for each lane."""
    tracks = {"phase": timeline.phases(), **{lane: timeline.lanes[lane] for lane in LANES}}
    write_tracks(file, {name: [*map(_slice, found)] for name, found in tracks.items()}, title=title)


def _slice(found: Segment) -> TraceSlice:
    facts = {"detail": found.detail, "phase": str(found.phase or ""), "role": found.role}
    told = {key: value for key, value in facts.items() if value and value != "other"}
    return TraceSlice(found.name, found.start, found.end, told)

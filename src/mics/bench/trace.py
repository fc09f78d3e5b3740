"""A timeline as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mics.bench.timeline import LANES, Segment, Timeline


def write_trace(file: Path, timeline: Timeline, *, title: str) -> None:
    """Write one step: a track for its phases and one for each lane."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}},
        *_track(0, "phase", timeline.phases()),
    ]
    for track, lane in enumerate(LANES, 1):
        events += _track(track, lane, timeline.lanes[lane])
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _track(track: int, name: str, segments: Sequence[Segment]) -> list[dict[str, Any]]:
    meta = {"thread_name": {"name": name}, "thread_sort_index": {"sort_index": track}}
    return [
        *({"ph": "M", "pid": 0, "tid": track, "name": key, "args": args} for key, args in meta.items()),
        *(
            {
                "ph": "X",
                "pid": 0,
                "tid": track,
                "name": found.name,
                "ts": found.start * 1e6,
                "dur": (found.end - found.start) * 1e6,
                "args": _facts(found),
            }
            for found in segments
        ),
    ]


def _facts(found: Segment) -> dict[str, str]:
    facts = {"detail": found.detail, "phase": str(found.phase or ""), "role": found.role}
    return {key: value for key, value in facts.items() if value and value != "other"}

"""A timeline as a trace for Perfetto (ui.perfetto.dev) or chrome://tracing."""

import json
from pathlib import Path

from mics.bench.timeline import LANES, Timeline


def write_trace(file: Path, timeline: Timeline, *, title: str) -> None:
    """Write one step, a track for each lane."""
    events: list[dict[str, object]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}},
    ]
    for track, lane in enumerate(LANES):
        events.append({"ph": "M", "pid": 0, "tid": track, "name": "thread_name", "args": {"name": lane}})
        events.append(
            {"ph": "M", "pid": 0, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}}
        )
        events += [
            {
                "ph": "X",
                "pid": 0,
                "tid": track,
                "name": found.name,
                "ts": found.start * 1e6,
                "dur": (found.end - found.start) * 1e6,
                "args": {"detail": found.detail} if found.detail else {},
            }
            for found in timeline.lanes[lane]
        ]
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))

"""Traces for Perfetto (ui.perfetto.dev) and chrome://tracing."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class TraceSlice(NamedTuple):
    """Something that took time on a track. Seconds."""

    name: str
    start: float
    end: float
    facts: Mapping[str, str] = {}


def write_tracks(file: Path, tracks: Mapping[str, Sequence[TraceSlice]], *, title: str) -> None:
    """Write a trace with these tracks, the first on top."""
    events: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "name": "process_name", "args": {"name": title}},
    ]
    for number, (name, slices) in enumerate(tracks.items()):
        events += _track(number, name, slices)
    file.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def _track(number: int, name: str, slices: Sequence[TraceSlice]) -> Iterator[dict[str, Any]]:
    track = {"pid": 0, "tid": number}
    yield {"ph": "M", **track, "name": "thread_name", "args": {"name": name}}
    yield {"ph": "M", **track, "name": "thread_sort_index", "args": {"sort_index": number}}
    for found in slices:
        times = {"ts": found.start * 1e6, "dur": (found.end - found.start) * 1e6}
        yield {"ph": "X", **track, "name": found.name, **times, "args": dict(found.facts)}

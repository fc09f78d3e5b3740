"""Intervals, lanes and exposure: what is hidden and what is not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mics
from mics.bench.picture import draw_scaling, draw_systems, draw_timeline
from mics.bench.timeline import LANES, Segment, Timeline, _from_kernels, exposure, record
from mics.bench.trace import write_trace
from mics.cost.collectives import Cost, Kind
from mics.emulator import Collective
from mics.emulator.log import Times
from mics.utils.intervals import Interval, subtract, total, union

_TICKS = 40
_INTERVALS = st.lists(
    st.tuples(st.integers(0, _TICKS), st.integers(0, _TICKS)).map(lambda pair: (min(pair), max(pair))),
    max_size=8,
)


def _ticks(intervals: list[Interval]) -> set[int]:
    """The unit ticks that the intervals cover: an independent way to count."""
    return {tick for start, end in intervals for tick in range(int(start), int(end))}


@given(first=_INTERVALS, second=_INTERVALS)
def test_intervals_are_sets_of_time(first: list[Interval], second: list[Interval]) -> None:
    united = union(first)
    assert _ticks(united) == _ticks(first)
    assert all(early[1] < late[0] for early, late in pairwise(united))
    assert total(united) == len(_ticks(first))
    assert _ticks(subtract(first, second)) == _ticks(first) - _ticks(second)
    assert total(subtract(first, second)) == len(_ticks(first) - _ticks(second))


def _collective(kind: Kind, cost: Cost) -> Collective:
    times = Times(arrival=0.0, start=0.0, end=cost.seconds)
    return Collective(kind=kind, group="g", group_size=4, nbytes=1024, cost=cost, times=times)


def test_exposure_by_hand() -> None:
    """Ten seconds: compute 0-4 and 6-8, a gather on inter 3-7, a reduction on intra 8-9."""
    lanes: dict[str, list[Segment]] = {lane: [] for lane in LANES}
    lanes["compute"] = [Segment(name="k", start=0, end=4), Segment(name="k", start=6, end=8)]
    lanes["inter"] = [Segment(name="all_gather", start=3, end=7)]
    lanes["intra"] = [Segment(name="reduce_scatter", start=8, end=9)]
    collectives = [
        _collective(Kind.ALL_GATHER, Cost(inter_seconds=4, inter_nbytes=100, intra_nbytes=7)),
        _collective(Kind.REDUCE_SCATTER, Cost(intra_seconds=1, intra_nbytes=3)),
    ]
    found = exposure(Timeline(seconds=10, lanes=lanes), collectives, ranks_per_node=8)
    assert found.compute_seconds == 6
    assert found.link_seconds == {"intra": 1, "inter": 4, "to host": 0, "from host": 0}
    assert found.exposed_seconds == {"intra": 1, "inter": 2, "to host": 0, "from host": 0}
    assert found.exposed_by_kind == {"intra reduce_scatter": 1, "inter all_gather": 2}
    assert found.idle_seconds == 1
    assert found.link_nbytes == {"intra": 10, "inter": 800}


@dataclass
class _Kernel:
    """What the profiler says about one kernel."""

    label: str
    stream: int
    start: int
    end: int
    launched: int

    def name(self) -> str:
        return self.label

    def device_resource_id(self) -> int:
        return self.stream

    def start_ns(self) -> int:
        return self.start

    def end_ns(self) -> int:
        return self.end

    def duration_ns(self) -> int:
        return self.end - self.start

    def correlation_id(self) -> int:
        return self.launched


def test_kernels_find_their_lanes() -> None:
    """A collective's own copying is not compute; the n-th launched is the n-th of the log."""
    events = [
        _Kernel("matmul", 1, 1000, 5000, 10),
        _Kernel("mics_link_reserve", 2, 1500, 1501, 12),  # launched second, though first on the GPU
        _Kernel("copy", 2, 1501, 1700, 13),
        _Kernel("mics_link_reserve", 3, 1600, 1601, 2),
        _Kernel("mics_link_wait", 2, 1700, 3500, 14),
        _Kernel("mics_link_wait", 3, 1601, 6600, 3),
        _Kernel("Memcpy DtoH (Device -> Pinned)", 4, 5000, 6000, 20),
        _Kernel("copy", 2, 6600, 7000, 21),  # after the collective: somebody's compute
    ]
    collectives = [
        _collective(Kind.ALL_REDUCE, Cost(inter_seconds=3e-6)),
        _collective(Kind.ALL_GATHER, Cost(intra_seconds=2e-6)),
    ]
    found = _from_kernels(events, collectives)
    assert found.seconds == pytest.approx(6e-6)
    assert [(s.name, s.start, s.end) for s in found.lanes["inter"]] == [
        ("all_reduce", pytest.approx(2.6e-6), pytest.approx(5.6e-6))
    ]
    assert [(s.name, s.end) for s in found.lanes["intra"]] == [("all_gather", pytest.approx(2.5e-6))]
    assert [s.name for s in found.lanes["compute"]] == ["matmul", "copy"]
    assert [s.name for s in found.lanes["to host"]] == ["copy"]
    assert found.lanes["from host"] == []


def test_a_step_on_the_cpu(tmp_path: Path) -> None:
    """Recorded for real: waiting is exposed, and the trace and the picture can be read."""
    cluster = mics.Cluster(
        num_nodes=2,
        ranks_per_node=1,
        intra=mics.Link(bandwidth=1e9, latency=0.0),
        inter=mics.Link(bandwidth=1e9, latency=5e-3),
    )
    with mics.emulate(cluster) as emulation:
        timeline, collectives = record(
            lambda: torch.distributed.all_reduce(torch.ones(8)), emulation, torch.device("cpu")
        )
    found = exposure(timeline, collectives, ranks_per_node=1)
    assert found.exposed_seconds["inter"] == pytest.approx(found.link_seconds["inter"], rel=0.2)
    assert timeline.seconds >= 10e-3
    write_trace(tmp_path / "t.json", timeline, title="here")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == set(LANES)
    assert any(e["ph"] == "X" and e["name"] == "all_reduce" for e in events)
    draw_timeline(tmp_path / "t.png", timeline, found, title="here")
    draw_systems(tmp_path / "s.png", {"a": (2.0, 1.0, 3.0)}, title="t", label="ms")
    draw_scaling(tmp_path / "g.png", {"a": [(8, 1.0), (16, 2.0), (32, 1.5)]}, title="t", label="x")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("t.png", "s.png", "g.png"))

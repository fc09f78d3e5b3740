"""Intervals, lanes and exposure: what is hidden and what is not."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import mics
from mics.bench.job import Device, Job
from mics.bench.phases import Phase, PhaseKind
from mics.bench.picture import Bar, draw_scaling, draw_systems, draw_timeline
from mics.bench.plan import Run
from mics.bench.provenance import device_name, step_subtitle, step_title
from mics.bench.systems import SYSTEMS
from mics.bench.timeline import LANES, LINKS, Segment, Timeline, _from_kernels, exposure, record, role_of
from mics.bench.trace import write_trace
from mics.cost.collectives import Cost, Kind
from mics.emulator import Collective
from mics.emulator.log import Times
from mics.models import GPTConfig
from mics.utils.intervals import Interval, subtract, total, union
from mics.utils.picture_style import THEMES, Theme
from tests import tiers
from tests.pictures import readable

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


def test_kernels_find_their_phase() -> None:
    """By the mark that was launched before them, whenever and on whatever stream they ran."""
    events = [
        _Kernel("void spin_kernel(long)", 1, 0, 1, 10),
        _Kernel("forward", 1, 1, 100, 11),
        _Kernel("mics_link_reserve", 2, 90, 91, 13),
        _Kernel("backward", 1, 100, 300, 14),  # launched by another thread, after the mark
        _Kernel("mics_link_wait", 2, 91, 250, 15),
        _Kernel("void spin_kernel(long)", 1, 300, 301, 12),
        _Kernel("void spin_kernel(long)", 1, 301, 302, 20),
        _Kernel("cast", 3, 280, 400, 16),  # still of the backward, beside the optimizer
        _Kernel("adam", 1, 302, 500, 21),
    ]
    collectives = [_collective(Kind.ALL_TO_ALL, Cost(inter_seconds=1e-7))]
    phases = [Phase("forward"), Phase("backward"), Phase("optimizer")]
    found = _from_kernels(events, collectives, phases, partition_size=4)
    assert [(s.name, str(s.phase)) for s in found.lanes["compute"]] == [
        ("forward", "forward 1"), ("backward", "backward 1"), ("cast", "backward 1"), ("adam", "optimizer")
    ]  # fmt: skip
    assert [s.role for s in found.lanes["inter"]] == ["hop 2"]
    _check_division(found)
    assert found.by_phase()[phases[2]] == [(pytest.approx(400e-9), pytest.approx(500e-9))]
    assert [str(s.phase) for s in found.phases()] == ["forward 1", "backward 1", "optimizer"]


def _check_division(timeline: Timeline) -> None:
    """Phases do not overlap, and together they are all of the computing; so do and are roles of a link."""
    for parts, lane in [
        (timeline.by_phase(), "compute"),
        *((timeline.by_role(link), link) for link in LINKS),
    ]:
        every = sorted(interval for intervals in parts.values() for interval in intervals)
        assert all(early[1] <= late[0] for early, late in pairwise(every))
        assert total(every) == pytest.approx(total(timeline.busy(lane)))
    for before, after in pairwise(timeline.phases()):
        assert before.end <= after.start


_STRIDES = st.tuples(st.sampled_from(Kind), st.sampled_from(["forward", "backward", "optimizer"]))


@given(segments=st.lists(st.tuples(_STRIDES, st.tuples(st.integers(0, 40), st.integers(1, 40))), max_size=12))
def test_time_is_divided_among_phases_and_roles(
    segments: list[tuple[tuple[Kind, PhaseKind], tuple[int, int]]],
) -> None:
    lanes: dict[str, list[Segment]] = {lane: [] for lane in LANES}
    for (kind, phase), (start, length) in segments:
        role = role_of(_collective(kind, Cost()), Phase(phase), 4)
        for lane in ("compute", "inter"):
            lanes[lane].append(
                Segment(name=kind, start=start, end=start + length, phase=Phase(phase), role=role)
            )
    _check_division(Timeline(seconds=100, lanes=lanes))


def test_what_collectives_are_for() -> None:
    """Replicas are a partition size apart; what they exchange depends on when."""
    inside = _collective(Kind.ALL_GATHER, Cost())
    replicas = replace(inside, stride=8)
    assert role_of(inside, None, 8) == "all-gather" and role_of(replicas, None, 8) == "refresh"
    assert role_of(replace(inside, kind=Kind.REDUCE_SCATTER), None, 8) == "reduce-scatter"
    assert role_of(replace(replicas, kind=Kind.REDUCE_SCATTER), None, 8) == "hop 2"
    exchange = replace(replicas, kind=Kind.ALL_TO_ALL)
    assert role_of(exchange, Phase("backward", 1), 8) == "hop 2"
    assert role_of(exchange, Phase("optimizer"), 8) == role_of(exchange, Phase("forward"), 8) == "refresh"
    norm = replace(inside, kind=Kind.ALL_REDUCE, nbytes=4)
    assert role_of(norm, None, 8) == "other" and role_of(replace(norm, nbytes=1 << 20), None, 8) == "hop 2"


_JOB = Job(
    model=GPTConfig(num_layers=2, num_heads=1, hidden_size=64, vocab_size=512, seq_len=16),
    partition_size=2,
    micro_batch=1,
    accumulation=2,
    checkpoint=False,
    param_dtype="float32",
    reduce_dtype="float32",
    device="cpu",
    max_norm=1.0,
)


_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.parametrize("device", ["cpu", _GPU])
@pytest.mark.parametrize("name", tiers.first(["mics", "fsdp2", "hsdp", "ddp"]))
def test_phases_of_every_system(name: str, device: Device, tmp_path: Path) -> None:
    """Both micro-batches and the optimizer, in order; collectives have roles; trace and picture say so."""
    job = replace(_JOB, device=device)
    run = Run(number=0, system=name, job=job, world_size=4, cluster=_CLUSTER)
    system = SYSTEMS[name]
    tokens = torch.randint(0, 512, (2, 1, 17), device="cpu").to(device)
    batches = [(rows[:, :-1].contiguous(), rows[:, 1:].contiguous()) for rows in tokens]
    with mics.emulate(_CLUSTER) as emulation:
        trainer = system.build(job)
        trainer.step(batches)
        timeline, collectives = record(
            lambda: trainer.step(batches),
            emulation,
            torch.device(device),
            partition_size=system.partition_size(job, 4),
        )
        trainer.close()
    assert [segment.name for segment in timeline.phases()] == [
        "forward 1", "backward 1", "forward 2", "backward 2", "optimizer"
    ]  # fmt: skip
    assert len(timeline.micro_batches()) == 2
    _check_division(timeline)
    assert total(timeline.busy("compute")) <= timeline.seconds
    roles = {segment.role for link in LINKS for segment in timeline.lanes[link]}
    roles -= {"other", "host copy"}  # a GPU copies what ranks tell each other
    assert (
        roles
        == {
            "mics": {"all-gather", "reduce-scatter", "hop 2", "refresh"},
            "hsdp": {"all-gather", "reduce-scatter", "hop 2"},
            "fsdp2": {"all-gather", "reduce-scatter"},
            "ddp": {"hop 2"},
        }[name]
    )
    write_trace(tmp_path / "t.json", timeline, title="here")
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert [e["name"] for e in events if e["ph"] == "X" and e["tid"] == 0][:2] == ["forward 1", "backward 1"]
    with readable() as words:
        found = exposure(timeline, collectives, ranks_per_node=2)
        draw_timeline(
            tmp_path / "t.png", timeline, found, title=step_title(run, system), subtitle=step_subtitle(run)
        )
    said = " ".join(" ".join(words).split())
    for part in (
        f"{name} on 2 x lab (4 GPUs)",
        "2 micro-batches: step ",
        device_name(device).split(" ", 1)[1],
        "backward",
    ):
        assert part.lower() in said.lower(), part
    shortest = min(end - start for start, end in timeline.micro_batches())
    if shortest > 0.2 * timeline.seconds:  # on a busy machine one of them may be too short for its name
        assert "micro-batch 2" in said.lower()


_CLUSTER = mics.Cluster(
    name="lab",
    num_nodes=2,
    ranks_per_node=2,
    intra=mics.Link(bandwidth=1e9, latency=1e-5),
    inter=mics.Link(bandwidth=1e8, latency=1e-4),
)


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
    assert {e["args"]["name"] for e in events if e["name"] == "thread_name"} == {"phase", *LANES}
    assert any(e["ph"] == "X" and e["name"] == "all_reduce" for e in events)
    with readable() as words:
        draw_timeline(tmp_path / "t.png", timeline, found, title="here")
    assert "micro-batch 1" not in words
    assert (tmp_path / "t.png").stat().st_size > 5000


@pytest.mark.parametrize("theme", tiers.first(THEMES), ids=lambda theme: theme.name)
def test_comparisons_can_be_read(tmp_path: Path, theme: Theme) -> None:
    """Bars of several settings with close values, and lines that end side by side."""
    bars = [
        Bar(system=system, name=system, setting=setting, median=ms, low=0.9 * ms, high=1.3 * ms)
        for setting in (
            "1 x p4d.24xlarge (8 GPUs), partition size 8",
            "2 x p4d.24xlarge (16 GPUs), partition size 8",
        )
        for system, ms in [("mics", 1234.5), ("hsdp", 1240.0), ("deepspeed-zero3", 12.0)]
    ]
    curves = {
        "mics": [(8, 400.0), (16, 399.0), (512, 390.0)],
        "hsdp": [(8, 401.0), (16, 399.0), (512, 389.0)],
        "hsdp-kept": [(8, 401.0), (16, 399.0)],
    }
    with readable() as words:
        draw_systems(tmp_path / "s.png", bars, title="t", label="ms", theme=theme)
        draw_scaling(tmp_path / "g.png", curves, title="t", label="TFLOP/s", theme=theme)
        draw_systems(tmp_path / "n.png", [], title="nothing ran", label="ms", theme=theme)
    assert "1,234" in words and "mics: 390" in words and "hsdp-kept: 399 at 16 GPUs" in words

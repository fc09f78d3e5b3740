"""What each mechanism of the documents is worth: the engine's default, and the default with one taken away.

    python -m benchmarks.published.ablations                # on one GPU, or on a CPU

One GPU computes as rank 0 of an emulated cluster, at their settings. `ways.py` takes mechanisms away.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
from benchmarks.published.dated import dated_file
from benchmarks.published.ways import WAYS, Way
from torch import Tensor

from mics.bench.clock import GpuClock, measure_clocks
from mics.bench.job import DType, Job
from mics.bench.measure import measure
from mics.bench.models import BENCH_MODELS
from mics.bench.plan import Outcome, Run, RunPlan
from mics.bench.systems import SYSTEMS, Batch, System
from mics.cost.clusters import find_cluster
from mics.utils.command_line import parse

GIB: Final = 2**30
_TIGHT: Final = 1.04  # of the bytes that are allocated at the peak


@dataclass(frozen=True, kw_only=True)
class Place:
    """A document's setting: model, cluster, group."""

    name: str
    model: str
    cluster: str
    partition_size: int
    micro_batch: int
    accumulation: int
    layers: int | None
    """Blocks that run, of true width; None: all."""
    ways: tuple[str, ...]
    gpu: str | None = None
    """Of the document, in whose time results are; None: this device."""


_EVERY: Final = tuple(way.key for way in WAYS)
PLACES: Final = {
    place.name: place
    for place in (
        # RoBERTa-10B on 64 A100s, ZeRO-3: one partition group over all of them, so there is no second hop.
        Place(
            name="roberta-10b",
            model="roberta-10b",
            cluster="p4d.24xlarge:8",
            partition_size=64,
            micro_batch=8,
            accumulation=2,
            layers=24,
            ways=tuple(key for key in _EVERY if key != "one-hop"),
            gpu="a100-40gb",
        ),
        # BERT-10B on 128 V100s, as MiCS: a replica on each node, four micro-steps.
        Place(
            name="bert-10b",
            model="bert-10b",
            cluster="p3dn.24xlarge:16",
            partition_size=8,
            micro_batch=8,
            accumulation=4,
            layers=24,
            ways=("default", "no-overlap", "one-hop"),
            gpu="v100",
        ),
        Place(
            name="tiny",
            model="gpt-tiny",
            cluster="p4d.24xlarge:2",
            partition_size=8,
            micro_batch=1,
            accumulation=2,
            layers=None,
            ways=_EVERY,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Found:
    """One row."""

    place: str
    key: str
    step_seconds: list[float]
    losses: list[float]
    peak_allocated_nbytes: int | None = None
    peak_reserved_nbytes: int | None = None
    num_alloc_retries: int | None = None
    num_device_free: int | None = None
    """Blocks that the caching allocator gave back to the device: its flushes."""
    limit_nbytes: int | None = None
    """Memory that the process was allowed; None: all."""
    error: str | None = None

    @property
    def median(self) -> float:
        return statistics.median(self.step_seconds)


class _Counted:
    """A trainer that notes the allocator's counters after each step."""

    def __init__(self, trainer: Any, notes: list[tuple[int, int]]) -> None:
        self.same_start = trainer.same_start
        self._trainer, self._notes = trainer, notes

    def step(self, batches: Sequence[Batch]) -> Tensor:
        loss: Tensor = self._trainer.step(batches)
        if torch.cuda.is_available():
            stats = torch.cuda.memory_stats()
            self._notes.append((stats["num_alloc_retries"], stats.get("num_device_free", 0)))
        return loss

    def close(self) -> None:
        self._trainer.close()


def measure_way(place: Place, way: Way, config: Ablations, *, limit_nbytes: int | None = None) -> Found:
    """One row, in this process."""
    job, cluster = _job(place), find_cluster(place.cluster)
    notes: list[tuple[int, int]] = []
    system = System(name=way.key, build=lambda job: _Counted(way.build(job), notes))
    run = Run(
        number=0,
        system=way.key,
        job=job,
        world_size=cluster.world_size,
        cluster=cluster,
        clock=_clock(job, place.gpu),
    )
    plan = RunPlan(
        runs=(), num_warmup_steps=config.warmup, num_steps=config.steps, folder=str(config.results)
    )
    with _limited(limit_nbytes):
        outcome = measure(run, plan, systems={way.key: system})
    return _found(place, way, outcome, notes[config.warmup :], limit_nbytes)


def _clock(job: Job, gpu: str | None) -> GpuClock | None:
    """In whose time a place is measured. On a CPU in its own: what it shows is that everything runs."""
    return None if gpu is None or job.device == "cpu" else measure_clocks([(job, gpu)])[0]


def _found(
    place: Place, way: Way, outcome: Outcome, notes: Sequence[tuple[int, int]], limit: int | None
) -> Found:
    retries, freed = (b - a for a, b in zip(notes[0], notes[-1], strict=True)) if notes else (None, None)
    return Found(
        place=place.name,
        key=way.key,
        step_seconds=outcome.step_seconds,
        losses=outcome.losses,
        peak_allocated_nbytes=outcome.peak_allocated_nbytes,
        peak_reserved_nbytes=outcome.peak_reserved_nbytes,
        num_alloc_retries=retries,
        num_device_free=freed,
        limit_nbytes=limit,
        error=outcome.error,
    )


class _limited:  # noqa: N801  (reads as a function where it is used)
    """The process may use so many bytes of the GPU."""

    def __init__(self, nbytes: int | None) -> None:
        self._nbytes = nbytes

    def __enter__(self) -> None:
        if self._nbytes is not None:
            torch.cuda.empty_cache()
            total = torch.cuda.get_device_properties(0).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, self._nbytes / total))

    def __exit__(self, *problem: object) -> None:
        if self._nbytes is not None:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _job(place: Place) -> Job:
    model = BENCH_MODELS[place.model]
    on_gpu = torch.cuda.is_available()
    usual: DType = "float16" if place.gpu == "v100" else "bfloat16"
    config = model.config if place.layers is None else replace(model.config, num_layers=place.layers)
    return Job(
        model=config,
        partition_size=place.partition_size,
        micro_batch=place.micro_batch,
        accumulation=place.accumulation,
        checkpoint=model.checkpoint,
        param_dtype=usual if on_gpu else "float32",
        reduce_dtype=usual if on_gpu else "float32",
        device="cuda" if on_gpu else "cpu",
        max_norm=1.0,
    )


def measure_place(place: Place, config: Ablations) -> list[Found]:
    """All rows of one setting, and once more with little memory those that tell whose memory has holes."""
    found = []
    for way in WAYS:
        if way.key in place.ways:
            found.append(measure_way(place, way, config))
            print(_line(found[-1], found[0]), flush=True)
    if not torch.cuda.is_available() or "low-memory" not in place.ways:
        return found
    torn = Way(
        key="fsdp2", mechanism="", without="FSDP2", document="", build=lambda job: SYSTEMS["fsdp2"].build(job)
    )
    by_key = {way.key: way for way in WAYS}
    for way in (by_key["default"], by_key["low-memory"], torn):
        peaks = [row for row in found if row.key == way.key] or [measure_way(place, way, config)]
        if way is torn:
            found += peaks
        peak = peaks[0].peak_allocated_nbytes
        if peak is not None:
            found.append(measure_way(place, way, config, limit_nbytes=int(_TIGHT * peak)))
            print(_line(found[-1], found[0]), flush=True)
    return found


def _line(row: Found, default: Found) -> str:
    if row.error is not None:
        return f"{row.place} {row.key}: {row.error}"
    more = 1e3 * (row.median - default.median)
    return f"{row.place} {row.key}: {1e3 * row.median:,.0f} ms ({more:+,.0f}), flushes {row.num_device_free}"


def _why_not(error: str) -> str:
    return "out of memory" if error.startswith("OutOfMemoryError") else f"did not run: {error}"


def table(found: Sequence[Found]) -> list[str]:
    """Markdown: what the default takes, and how much longer without each mechanism."""
    words = {way.key: way for way in WAYS}
    default = next(row for row in found if row.key == "default")
    lines = [
        "| mechanism | taken away | step ms | share of the step | peak GiB | reserved GiB | flushes |",
        "|---|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        way = words.get(row.key)
        mechanism = "" if way is None else way.mechanism
        without = "FSDP2" if way is None else way.without
        if row.limit_nbytes is not None:
            without += f", {row.limit_nbytes / GIB:.1f} GiB allowed"
        if row.error is not None:
            lines.append(f"| {mechanism} | {without} | {_why_not(row.error)} | | | | |")
            continue
        share = row.median / default.median - 1
        memory = (row.peak_allocated_nbytes, row.peak_reserved_nbytes)
        cells = ["" if nbytes is None else f"{nbytes / GIB:.2f}" for nbytes in memory]
        flushes = "" if row.num_device_free is None else f"{row.num_device_free}"
        lines.append(
            f"| {mechanism} | {without} | {1e3 * row.median:,.0f} | {100 * share:+.1f}% | "
            f"{' | '.join(cells)} | {flushes} |"
        )
    return lines


@dataclass(frozen=True, kw_only=True)
class Ablations:
    """What each mechanism of the published documents is worth, with one taken away at a time."""

    place: tuple[str, ...] = ()
    """Settings: roberta-10b, bert-10b (GPU) or tiny; unset: both on a GPU, tiny on a CPU."""
    warmup: int = 3
    """Steps before timing starts."""
    steps: int = 3
    """Timed steps."""
    results: Path = Path("benchmarks/results")
    """Folder for the dated result."""

    @property
    def places(self) -> list[Place]:
        usual = ("roberta-10b", "bert-10b") if torch.cuda.is_available() else ("tiny",)
        unknown = [name for name in self.place if name not in PLACES]
        if unknown:
            raise SystemExit(
                f"--place: expected some of {', '.join(PLACES)}, found {', '.join(unknown)}; leave it out"
            )
        return [PLACES[name] for name in self.place or usual]


def main(args: Sequence[str] | None = None) -> Path:
    """Measure, and write the dated result. Returns its JSON file."""
    import sys

    config = parse(
        Ablations, sys.argv[1:] if args is None else args, prog="python -m benchmarks.published.ablations"
    )
    config.results.mkdir(parents=True, exist_ok=True)
    by_place = {place: measure_place(place, config) for place in config.places}
    file = dated_file(config.results, "ablations")
    rows = [asdict(row) for found in by_place.values() for row in found]
    file.write_text(json.dumps({"rows": rows}, indent=1))
    lines = [f"# Ablations, {file.stem.removeprefix('ablations_')}", ""]
    lines += ["    python -m benchmarks.published.ablations", ""]
    for place, found in by_place.items():
        lines += [f"## {place.name}", "", words_of(place), "", *table(found), ""]
    file.with_suffix(".md").write_text("\n".join(lines))
    print("\n".join(lines))
    return file


def words_of(place: Place) -> str:
    """What was run, in a sentence."""
    depth = "all blocks" if place.layers is None else f"{place.layers} blocks of true width"
    return (
        f"{place.model} as rank 0 of {place.cluster}, partition size {place.partition_size}, "
        f"{place.accumulation} micro-steps of {place.micro_batch}, {depth}."
    )


def read(file: Path) -> list[Found]:
    """The rows of a dated result."""
    return [Found(**row) for row in json.loads(file.read_text())["rows"]]


if __name__ == "__main__":
    main()

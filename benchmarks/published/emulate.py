"""What one GPU measures of a published row, as rank 0 of the document's cluster and on its GPU's clock.

Every measurement is a call of `mics bench`, printed before it is made, so that anybody can repeat it alone.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Final

from benchmarks.published.planned import fits, prediction, setting_of
from benchmarks.published.predict import BESIDE_HSDP, PeerAtBest, usual_point
from benchmarks.published.rows import Measure, Point, Row

from mics.bench.command import bench_together, rows_of
from mics.bench.config import BenchConfig
from mics.bench.depths import least_blocks, too_few, whole_of
from mics.bench.plan import Run, interleave
from mics.cost.constants import MATRIX_EFFICIENCY
from mics.cost.gpus import GPUS, formats_of
from mics.utils.command_line import parse

_BENCH_SYSTEMS: Final = {
    "mics-published": "mics",
    "mics": "mics",
    BESIDE_HSDP: "mics",
    "zero3": "fsdp2",  # the same collectives; DeepSpeed of today is a system of its own
    "zero2": "zero2",
    "zero2-before": "zero2",
    "fsdp2": "fsdp2",
    "hsdp": "hsdp",
    "megatron-fsdp": "megatron-fsdp",
}
"""What runs in place of a row's system. ZeRO-3 of 2021 is in no package any more."""
_GPUS: Final = {"p3dn": "v100", "p4d": "a100", "p4de": "a100", "dgx-a100": "a100"}
_THIS_TFLOPS: Final = 450e12  # of an H200 with recomputation, for the time that a run will take
_WHOLE_SECONDS: Final = 3.6  # a step of the whole model may take
_MIN_LAYERS: Final = 4
_STEP_SECONDS: Final = 1.2  # a step of fewer blocks should take
_WARMUP, _STEPS = 3, 2
_BENCH: Final = "mics bench "
_NO_PACKAGE: Final = "expected its package, found none"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One system in one setting, in the named GPU's time."""

    key: str
    """Of the row, or ``peers`` for systems at their own best."""
    role: str
    """``row``, ``against`` or ``peer``."""
    system: str
    step_seconds: float | None
    tflops: float | None
    """With recomputation."""
    layers: int | None
    """Blocks that ran; None: all of them."""
    peak_gib: float | None
    setting: str
    command: str
    error: str | None = None
    host_bound: bool = False
    """The host of this machine decided how long the step was: it says nothing of the GPU named."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One call of `mics bench`."""

    key: str
    role: str
    system: str
    point: Point

    def arguments(self, out: Path) -> list[str]:
        layers = layers_of(self.point, self.system)
        words = [*_words(self.point, self.system), *([] if layers is None else ["--layers", str(layers)])]
        return [
            *words, "--repeats", "1", "--warmup", str(_WARMUP), "--steps", str(_STEPS), "--out", str(out)
        ]  # fmt: skip

    @property
    def command(self) -> str:
        """To repeat it alone."""
        return (_BENCH + shlex.join(self.arguments(Path()))).partition(" --out ")[0]


def _words(point: Point, system: str) -> list[str]:
    gpu = _gpu(point)
    words = [
        "--model", point.model, "--cluster", point.cluster, "--systems", system,
        "--partition-size", str(point.partition_size), "--micro-batch", str(point.micro_batch),
        "--accumulation", str(point.accumulation), "--seq-len", str(point.seq_len),
        "--reduce-dtype", "float16" if gpu == "v100" else "bfloat16", "--as-gpu", gpu,
        "--checkpoint", str(point.activations != "kept"),
    ]  # fmt: skip
    return [*words, "--offload"] if point.activations == "offload" else words


def _gpu(point: Point) -> str:
    return _GPUS[point.cluster.partition(":")[0].partition(".")[0]]


def layers_of(point: Point, system: str) -> int | None:
    """Blocks that run; None: all of them, in a few seconds a step."""
    setting = setting_of(point)
    seconds = setting.model.flops(setting.tokens, recomputed=True) * setting.accumulation / _THIS_TFLOPS
    if seconds <= _WHOLE_SECONDS:
        return None
    shallowest = _BENCH + shlex.join([*_words(point, system), "--layers", "2"])
    least = max(_MIN_LAYERS, 2 * least_blocks(_run_of(shallowest)))
    return max(least, int(_STEP_SECONDS / seconds * setting.model.num_blocks) // 2 * 2)


@cache
def _run_of(command: str) -> Run:
    """What a call of `mics bench` runs, on a GPU; with ``--layers`` the shallower model."""
    words = shlex.split(command.removeprefix(_BENCH))
    config = parse(BenchConfig, words, prog="mics bench")
    dtype: Any = formats_of(config.training.as_gpu or "")[0]
    training = replace(config.training, device="cpu", param_dtype=dtype)  # here there may be none
    runs = interleave(config.systems, rows_of(replace(config, training=training)), repeats=1, record=False)
    return runs[0]


def _of_whole(command: str) -> Run:
    """The same run for whichever number of blocks, warm-up and timed steps."""
    run = _run_of(command)
    return replace(run, job=whole_of(run.job))


def is_sound(measured: Measured) -> bool:
    """Whether all blocks ran, or as many as `mics bench` scales from today."""
    return measured.layers is None or not too_few(_run_of(measured.command))


def known_of(job: Job, known: Sequence[Measured]) -> Measured | None:
    """Of the job's setting the first that is sound. What a missing package kept from running comes last."""
    found = [each for each in known if _is_of(each, job) and is_sound(each)]
    tried = [each for each in found if _NO_PACKAGE not in (each.error or "")]
    first = next(iter([*tried, *found]), None)
    return None if first is None else replace(first, key=job.key, role=job.role)


def _is_of(measured: Measured, job: Job) -> bool:
    if not measured.command.startswith(_BENCH):  # a program of its own, for one row
        return (measured.key, measured.role) == (job.key, job.role)
    return _of_whole(measured.command) == _of_whole(job.command)


def jobs_of(row: Row, peers: Sequence[PeerAtBest] = ()) -> Iterator[Job]:
    """Both ends of the row's predicted range, what it is compared with, and peers at their best."""
    # Of ZeRO-3 as it was, what a network costs may be compared with the same collectives; speed may not.
    usual = "fsdp2" if row.measure in (Measure.SCALING, Measure.DROP) else None
    system = _BENCH_SYSTEMS.get(row.system, usual)
    if system is not None:
        for point in _ends(row):
            first, *others = row.runs(point)
            yield Job(key=row.key, role="row", system=system, point=first)
            for other in others:
                beside = _BENCH_SYSTEMS.get(other.system, "fsdp2")
                yield Job(key=row.key, role="against", system=beside, point=other)
    for peer in peers:
        if peer.step_seconds is not None and peer.system in _BENCH_SYSTEMS:
            yield Job(key=row.key, role="peer", system=_BENCH_SYSTEMS[peer.system], point=_at_best(row, peer))


def _at_best(row: Row, peer: PeerAtBest) -> Point:
    assert peer.partition_size and peer.micro_batch and peer.accumulation and peer.activations
    return replace(
        usual_point(row),
        partition_size=peer.partition_size,
        micro_batch=peer.micro_batch,
        accumulation=peer.accumulation,
        activations=peer.activations,
    )


def _ends(row: Row) -> list[Point]:
    """The plausible points with the lowest and the highest prediction; one where nothing is open.

    Of a ratio the usual point, and of weak scaling the smallest: it has the least to hide anything behind.
    """
    points = list(row.points())
    ordered = sorted(
        [point for point in points if fits(point)] or points,
        key=lambda point: prediction(point).hardware_tflops,
    )
    if row.measure is Measure.SCALING:
        return [min(points, key=lambda point: point.micro_batch * point.accumulation * point.seq_len)]
    if row.measure is not Measure.TFLOPS:
        return [usual_point(row)]
    return ordered[:1] if len(ordered) < 2 else [ordered[0], ordered[-1]]


def share_of_2022(job: Job) -> float:
    """Of the speed with kernels of today: what those of 2022 have, by the planner.

    The planner has matrices of today reach less of the peak than the clock of `mics.cost.gpus` has.
    """
    before, today = (
        prediction(replace(job.point, system=job.system, kernels=kernels)).hardware_tflops
        for kernels in ("2022", "current")
    )
    return before / today * MATRIX_EFFICIENCY / GPUS[_gpu(job.point)].matrix_share


def measure(jobs: Sequence[Job], folder: Path, known: Sequence[Measured] = ()) -> list[Measured]:
    """Make the calls of `mics bench` in one process, but for what is ``known``; equal ones once."""
    new = {}
    for job in jobs:
        found = known_of(job, known)
        if found is None or found.error:
            new[job.command] = job
    made = [*_measure_all(list(new.values()), folder), *known]
    return list(those_of(jobs, made))


def those_of(jobs: Sequence[Job], known: Sequence[Measured]) -> Iterator[Measured]:
    """What is known of each."""
    for job in jobs:
        found = known_of(job, known)
        if found is not None:
            yield found


def _measure_all(jobs: Sequence[Job], folder: Path) -> Iterator[Measured]:
    for job in jobs:
        print(job.command, flush=True)
    folder.mkdir(parents=True, exist_ok=True)
    calls = [job.arguments(folder) for job in jobs]
    for job, rows in zip(jobs, bench_together(calls) if calls else [], strict=True):
        yield measured_of(job, rows[0].as_dict())  # the first is of the whole model


def measured_of(job: Job, row: dict[str, Any]) -> Measured:
    """From the row that `mics bench` wrote."""
    setting, error = setting_of(job.point), row.get("error") or row.get("shortage")
    seconds = None if error else _median(row["step_seconds"])
    flops = setting.model.flops(setting.tokens, recomputed=setting.activations.checkpoint)
    peaks = [outcome.get("peak_allocated_nbytes") for outcome in row.get("outcomes", [])]
    known = [nbytes for nbytes in peaks if nbytes is not None]
    point = job.point
    return Measured(
        key=job.key,
        role=job.role,
        system=job.system,
        step_seconds=seconds,
        tflops=None if seconds is None else flops * setting.accumulation / seconds / 1e12,
        layers=layers_of(point, job.system),
        peak_gib=max(known) / 2**30 if known else None,
        setting=(
            f"p={point.partition_size}, {point.micro_batch} x {point.accumulation}, {point.activations}, "
            f"{point.seq_len} tokens"
        ),
        command=job.command,
        error=error,
        host_bound=bool(row.get("host_bound")),
    )


def _median(found: Sequence[float]) -> float:
    """`mics bench` writes (median, low, high), or the steps themselves."""
    return float(found[0]) if len(found) == 3 else statistics.median(found)

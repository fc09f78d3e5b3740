"""The 1.06T model, whole, on one GPU: a complete step as rank 0 of 64 p4de nodes, activations offloaded.

    python -m benchmarks.published.trillion

All 210 layers at a batch of 8, one partition group of 512 GPUs. It shards the model, makes one step that is
not timed, and then one that is: where its time goes, and the memory at every unit that is needed. On a CPU
it runs `--model gpt-tiny`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Final

import torch
from benchmarks.published.dated import dated_file, latest
from benchmarks.published.emulate import Measured
from torch import nn

import mics
from mics.bench.job import Job
from mics.bench.measure import _batches
from mics.bench.models import BENCH_MODELS
from mics.bench.picture import draw_timeline
from mics.bench.systems.loop import Loop
from mics.bench.systems.start import device_of, materialise, meta_model
from mics.bench.timeline import Exposure, exposure, record
from mics.cost.clusters import Cluster, find_cluster
from mics.cost.shapes import shape_of_config
from mics.emulator import emulate
from mics.engine import engine_of
from mics.models.gpt import Attention, Block, Linear
from mics.schedule.events import Event, What
from mics.utils.command_line import parse
from mics.utils.picture_style import LIGHT, Theme, picture

GIB: Final = 2**30
THEME: Final = "gpt-1t"
_PAGE_NBYTES: Final = 4096
_NUM_SAMPLES: Final = 300


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Memory when a unit is needed."""

    phase: str
    unit: str
    allocated: int
    reserved: int


@dataclass(frozen=True, kw_only=True)
class Found:
    """Of the whole step. Seconds are those of the GPU named, but for ``shard_seconds``."""

    model: str
    layers: int
    gpu: str
    dilation: float
    shard_seconds: float
    step_seconds: float
    tflops: float
    """With recomputation."""
    peak_allocated_nbytes: int
    peak_reserved_nbytes: int
    host_nbytes: int
    """Of this process, at its end."""
    memory_nbytes: int
    """Of the GPU that is emulated."""
    losses: list[float]
    samples: list[Sample]
    exposure: Exposure


@dataclass(frozen=True, kw_only=True)
class Trillion:
    """Train the 1.06T model for two steps on one GPU, as rank 0 of 512: time and memory of the second."""

    model: str = "gpt-1t" if torch.cuda.is_available() else "gpt-tiny"
    """One of mics bench --model."""
    cluster: str = "p4de.24xlarge:64" if torch.cuda.is_available() else "p4de.24xlarge:2"
    """The cluster to emulate."""
    layers: int | None = None
    """Blocks of true width; unset: all."""
    micro_batch: int = 8 if torch.cuda.is_available() else 1
    """Sequences per GPU."""
    offload: bool = True
    """Offload activations to host memory."""
    finer: bool = True
    """Each matrix of a block is a unit, under one checkpoint for the block."""
    as_gpu: str | None = "a100" if torch.cuda.is_available() else None
    """The GPU whose time is shown; unset: this device's own."""
    results: Path = Path("benchmarks/results")
    """Folder for the dated result and its pictures."""


def job_of(config: Trillion, cluster: Cluster) -> Job:
    model, on_gpu = BENCH_MODELS[config.model], torch.cuda.is_available()
    shape = replace(model.config, num_layers=config.layers or model.config.num_layers)
    return Job(
        model=shape,
        partition_size=cluster.world_size,
        micro_batch=config.micro_batch,
        accumulation=1,
        checkpoint=True,
        offload=config.offload,
        param_dtype="bfloat16" if on_gpu else "float32",
        reduce_dtype="bfloat16" if on_gpu else "float32",
        device="cuda" if on_gpu else "cpu",
    )


def build(job: Job, *, finer: bool) -> Loop:
    """The sharded model and its optimizer, as `mics bench` has them, or with finer units."""
    model = meta_model(job, own_activations=True)
    if job.device == "cpu":
        materialise(model, device_of(job))
    units: list[type[nn.Module]] | None = [Attention, Linear] if finer else None
    mics.shard(
        model,
        partition_size=job.partition_size,
        units=units,
        precision=mics.Precision(
            param_dtype=job.param, reduce_dtype=job.reduce, replica_reduce_dtype=job.reduce
        ),
        activations=mics.Activations(
            checkpoint=Block if finer else "unit", offload=job.offload, preserve_rng_state=False
        ),
    )
    return Loop(job, model, microsteps=mics.microsteps, clip=mics.clip_grad_norm_)


class Watch:
    """Notes the memory whenever a unit is needed."""

    def __init__(self, model: nn.Module) -> None:
        self.samples: list[Sample] = []
        self._phase = "forward"
        events = engine_of(model).events
        events[What.NEEDED].append(self._note)
        events[What.FORWARD_BEGINS].append(lambda event: self._enter("forward"))
        events[What.BACKWARD_BEGINS].append(lambda event: self._enter("backward"))
        events[What.STEP_BEGINS].append(lambda event: self._enter("optimizer"))

    def _enter(self, phase: str) -> None:
        self._phase = phase
        self._add(phase)

    def _note(self, event: Event) -> None:
        self._add("" if event.unit is None else event.unit.spec.label)

    def _add(self, unit: str) -> None:
        allocated, reserved = _memory()
        self.samples.append(Sample(phase=self._phase, unit=unit, allocated=allocated, reserved=reserved))


def _memory() -> tuple[int, int]:
    """Bytes of the device: allocated, reserved. On a CPU those of the process, twice."""
    if torch.cuda.is_available():
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    return _resident(), _resident()


def _resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * _PAGE_NBYTES


def measure(config: Trillion) -> Found:
    """Two steps; the second is looked at."""
    cluster = find_cluster(config.cluster)
    job = job_of(config, cluster)
    device = device_of(job)
    dilation = _dilation(config, job)
    with emulate(cluster, dilation=dilation) as emulation:
        began = time.perf_counter()
        trainer = build(job, finer=config.finer)
        shard_seconds = time.perf_counter() - began
        print(f"sharded in {shard_seconds:.0f} s; a step ...", flush=True)
        first, second = _batches(job, 2, device)
        losses = [trainer.step(first)]
        if device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        watch = Watch(trainer._model)
        timeline, collectives = record(
            lambda: losses.append(trainer.step(second)), emulation, device, partition_size=job.partition_size
        )
        found = exposure(timeline, collectives, cluster.ranks_per_node)
        peaks = (
            (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
            if device.type == "cuda"
            else _memory()
        )
        shape = shape_of_config(config.model, job.model)
        flops = shape.flops(job.micro_batch * job.model.seq_len, recomputed=True)
        draw_timeline(
            dated_file(config.results, f"{THEME}-timeline").with_suffix(".png"), timeline, found,
            title=f"{config.model} on {cluster.world_size} GPUs, {job.model.num_layers} layers",
            subtitle=(
                f"One GPU runs rank 0 of {config.cluster}. Its own time: {dilation:.2f} times as fast as "
                f"{'a GPU of its kind' if config.as_gpu is None else f'the {config.as_gpu}'}."
            ),
        )  # fmt: skip
        seconds = timeline.seconds * dilation
        return Found(
            model=config.model, layers=job.model.num_layers, gpu=config.as_gpu or "this device",
            dilation=dilation, shard_seconds=shard_seconds, step_seconds=seconds,
            tflops=flops / seconds / 1e12, peak_allocated_nbytes=peaks[0], peak_reserved_nbytes=peaks[1],
            host_nbytes=_resident(), memory_nbytes=int(cluster.memory_nbytes),
            losses=[float(loss) for loss in losses], samples=watch.samples, exposure=found,
        )  # fmt: skip


def _dilation(config: Trillion, job: Job) -> float:
    """How many times as fast this device computes the model as the GPU named."""
    if config.as_gpu is None:
        return 1.0
    from mics.bench.clock import StepWork, measure_clock

    return measure_clock(StepWork.of(job, config.as_gpu), job).factor


def measured_whole(folder: Path) -> tuple[Measured, ...]:
    """The newest run of all layers on a GPU, as the row that it is."""
    file = latest(folder, THEME)
    found = None if file is None else read(file)
    if found is None or found.model != THEME or found.gpu == "this device":
        return ()
    return (
        Measured(
            key=f"{THEME}/mics",
            role="row",
            system="mics",
            step_seconds=found.step_seconds,
            tflops=found.tflops,
            layers=None,
            peak_gib=found.peak_allocated_nbytes / GIB,
            setting="p=512, 8 x 1, offload, 1024 tokens",
            command="python -m benchmarks.published.trillion",
        ),
    )


def _thinned(samples: list[Sample]) -> list[Sample]:
    """Few enough for a file: every so many-th, and where a phase begins."""
    every = max(1, len(samples) // _NUM_SAMPLES)
    return [each for n, each in enumerate(samples) if n % every == 0 or each.unit == each.phase]


def read(file: Path) -> Found:
    """A dated result."""
    found = json.loads(file.read_text())
    samples = [Sample(**sample) for sample in found["samples"]]
    return Found(**{**found, "samples": samples, "exposure": Exposure(**found["exposure"])})


def draw_memory(file: Path, found: Found, theme: Theme) -> None:
    """Allocated and reserved memory over the step, unit by unit, under the GPU's own."""
    marks = [number for number, sample in enumerate(found.samples) if sample.unit == sample.phase]
    limit, peak = found.memory_nbytes / GIB, found.peak_allocated_nbytes / GIB
    with picture(
        file,
        height=3.6,
        title=f"{found.model} on one GPU: memory over a step, peak {peak:.1f} GiB",
        subtitle=(
            f"Rank 0 of 512, all {found.layers} layers, at every unit that is needed. "
            f"The emulated GPU has {limit:.0f} GiB."
        ),
        theme=theme,
    ) as figure:
        axes = figure.subplots()
        for name, colour in (("reserved", theme.muted), ("allocated", theme["mics"])):
            axes.step(
                range(len(found.samples)),
                [getattr(sample, name) / GIB for sample in found.samples],
                where="post",
                color=colour,
                label=name,
            )
        axes.axhline(limit, color=theme["exposed"], linestyle=(0, (4, 2)), label="the GPU's memory")
        labels = axes.set_xticks(marks, [f"{found.samples[number].phase}" for number in marks], ha="left")
        labels[-1].label1.set_ha("right")
        axes.set_xlim(0, max(1, len(found.samples) - 1))
        top = max([limit, *(sample.reserved / GIB for sample in found.samples)])
        axes.set_ylim(0, 1.1 * top)
        axes.set_ylabel("GiB")
        figure.legend(loc="outside lower center", ncols=3, frameon=False)


def words(found: Found) -> list[str]:
    """The dated Markdown."""
    seconds = found.exposure
    return [
        f"# {found.model}, whole, on one GPU as rank 0",
        "",
        "    python -m benchmarks.published.trillion",
        "",
        "| | |",
        "|---|---:|",
        f"| layers | {found.layers} |",
        f"| seconds to shard | {found.shard_seconds:.0f} |",
        f"| step, {found.gpu} | {found.step_seconds:.1f} s |",
        f"| TFLOP/s per GPU, with recomputation | {found.tflops:.0f} |",
        f"| this device is so many times as fast | {found.dilation:.2f} |",
        f"| computing, this device | {seconds.compute_seconds:.1f} s |",
        f"| exposed between nodes, this device | {seconds.exposed_seconds['inter']:.1f} s |",
        f"| peak allocated | {found.peak_allocated_nbytes / GIB:.1f} GiB |",
        f"| peak reserved | {found.peak_reserved_nbytes / GIB:.1f} GiB |",
        f"| the GPU that is emulated has | {found.memory_nbytes / GIB:.0f} GiB |",
        f"| host memory | {found.host_nbytes / GIB:.1f} GiB |",
        "",
    ]


def main(args: Sequence[str] | None = None) -> Path:
    """Measure, draw, write. Returns the JSON file."""
    config = parse(
        Trillion, sys.argv[1:] if args is None else args, prog="python -m benchmarks.published.trillion"
    )
    config.results.mkdir(parents=True, exist_ok=True)
    found = measure(config)
    file = dated_file(config.results, THEME)
    file.write_text(json.dumps(asdict(replace(found, samples=_thinned(found.samples))), indent=1))
    file.with_suffix(".md").write_text("\n".join(words(found)))
    draw_memory(dated_file(config.results, f"{THEME}-memory").with_suffix(".png"), found, LIGHT)
    print("\n".join(words(found)))
    return file


if __name__ == "__main__":
    main()

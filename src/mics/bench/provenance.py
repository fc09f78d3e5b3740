"""Whose computation a table shows: the device that rank 0 ran on, which is not the cluster that it played."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Final

import torch

from mics.bench.clock import GpuClock
from mics.bench.job import Device, Job
from mics.bench.plan import Run
from mics.bench.systems import System
from mics.cost.clusters import Cluster
from mics.train.hardware import peak_tflops
from mics.utils.global_batch import GlobalBatch
from mics.utils.numbers import count, listed, plural, tflops

_ANOTHER: Final = 0.1  # data sheets of one GPU differ by less


def device_name(device: Device) -> str:
    """``one NVIDIA H200``, ``a CPU (aarch64, 2 cores)``."""
    if device == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    return f"a {_cpu()}"


def compute_and_network(
    device: Device, clusters: Sequence[Cluster], clocks: Sequence[GpuClock | None] = (None,)
) -> str:
    """``compute of this NVIDIA H200, network of p4d.24xlarge:64``: what of a figure is whose."""
    names = listed(list(dict.fromkeys(f"{cluster.name}:{cluster.num_nodes}" for cluster in clusters)))
    ours = f"this {torch.cuda.get_device_name()}" if device == "cuda" else f"this {_cpu()}"
    gpus = dict.fromkeys(clock.title for clock in clocks if clock is not None)
    if gpus:
        ours = f"{listed(list(gpus))} by the clock of {ours}"
    return f"compute of {ours}, network of {names}"


def _cpu() -> str:
    return f"CPU ({platform.machine()}, {plural(os.cpu_count() or 1, 'core')})"


def emulated_title(
    clusters: Sequence[Cluster], device: Device, clocks: Sequence[GpuClock | None] = (None,)
) -> str:
    """``emulated: compute of this NVIDIA H200, network of p4d.24xlarge:64``."""
    return f"emulated: {compute_and_network(device, clusters, clocks)}"


def place_of(run: Run) -> str:
    """``8 x p4d.24xlarge (64 GPUs)``."""
    if run.cluster is None:
        return plural(run.world_size, "real rank")
    return f"{run.cluster.num_nodes:,} x {run.cluster.name} ({plural(run.world_size, 'GPU')})"


def setting_of(run: Run) -> str:
    """``8 x p4d.24xlarge (64 GPUs), partition size 8, 2 micro-batches``."""
    return f"{place_of(run)}, partition size {run.job.partition_size}, {_micro_batches(run)}"


def step_title(run: Run, system: System) -> str:
    """``mics on 8 x p4d.24xlarge (64 GPUs), partition size 8, 2 micro-batches``."""
    sharded = {
        "group": f"partition size {run.job.partition_size}",
        "world": f"sharded over all {run.world_size:,}",
        "state": "whole parameters on each",
        "none": "the whole model on each",
    }
    return f"{run.system} on {place_of(run)}, {sharded[system.partition]}, {_micro_batches(run)}"


def _micro_batches(run: Run) -> str:
    number = run.job.accumulation
    return f"{number:,} micro-batch{'' if number == 1 else 'es'}"


def computed_by(*runs: Run) -> str:
    """``Compute of this NVIDIA H200, network of p4d.24xlarge:8 (simulated).``"""
    device = runs[0].job.device
    clusters = [run.cluster for run in runs if run.cluster is not None]
    if not clusters:
        return f"Computed by {device_name(device)}."
    whose = compute_and_network(device, clusters, [run.clock for run in runs])
    return f"{whose[0].upper()}{whose[1:]} (simulated)."


def step_subtitle(run: Run) -> str:
    """``A GPT of 3.64 B parameters. Compute of this NVIDIA H200, network of p4d.24xlarge:8 (simulated).``"""
    kind = "GPT" if run.job.model.causal else "BERT"
    blocks = f" ({run.blocks})" if run.blocks else ""
    return f"A {kind} of {count(run.job.model.num_parameters)} parameters{blocks}. {computed_by(run)}"


def comparison_title(model: str, runs: Sequence[Run]) -> str:
    """``gpt-3.6b on 8 x p4d.24xlarge (64 GPUs), partition size 8``; a span where there are several."""
    places = list(dict.fromkeys(map(place_of, runs)))
    where = places[0]
    if len(places) > 1:
        names = listed(sorted({run.cluster.name for run in runs if run.cluster is not None}))
        worlds = sorted({run.world_size for run in runs})
        gpus = " to ".join(f"{world:,}" for world in dict.fromkeys((worlds[0], worlds[-1])))
        where = f"{gpus} GPUs of {names}"
    sizes = sorted({run.job.partition_size for run in runs})
    partition = "partition size" if len(sizes) == 1 else "partition sizes"
    return f"{model} on {where}, {partition} {listed([f'{size:,}' for size in sizes])}"


def caveats(
    clusters: Sequence[Cluster], device: Device, clocks: Sequence[GpuClock | None] = (None,)
) -> list[str]:
    """What must not be read out of figures that another device has computed, or whose clock they are on."""
    told = dict.fromkeys(line for clock in clocks if clock is not None for line in clock.lines())
    if told:
        return list(told)
    if device == "cpu":
        names = listed(list(dict.fromkeys(cluster.name for cluster in clusters)))
        return [
            f"Step times and TFLOP/s are those of {device_name(device)} that plays rank 0, not of {names}'s "
            "GPUs: compare systems with each other, not with figures from elsewhere."
        ]
    name = torch.cuda.get_device_name()
    ours = peak_tflops(name)
    lines = []
    for cluster in {cluster.name: cluster for cluster in clusters}.values():
        theirs = cluster.peak_flops / 1e12
        if ours and theirs and abs(ours / theirs - 1) > _ANOTHER:
            lines.append(
                f"Step times and TFLOP/s are those of {device_name(device)} ({tflops(ours)} TFLOP/s at its "
                f"peak), not of {cluster.name}'s GPUs ({tflops(theirs)}): beside them the network would look "
                f"{'faster' if ours > theirs else 'slower'}."
            )
    return lines


def batch_of(job: Job, world_size: int, *, asked_tokens: int | None) -> GlobalBatch:
    """The global batch of a job on so many ranks."""
    return GlobalBatch(
        num_sequences=job.micro_batch * job.accumulation * world_size,
        seq_len=job.model.seq_len,
        asked_tokens=asked_tokens,
    )

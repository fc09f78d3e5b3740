"""Whose computation a table shows: the device that rank 0 ran on, which is not the cluster that it played."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from typing import Final

import torch

from mics.bench.job import Device, Job
from mics.cost.clusters import Cluster
from mics.train.hardware import peak_tflops
from mics.utils.global_batch import GlobalBatch
from mics.utils.numbers import listed, plural, tflops

_ANOTHER: Final = 0.1  # data sheets of one GPU differ by less


def device_name(device: Device) -> str:
    """``one NVIDIA H200``, ``a CPU (aarch64, 2 cores)``."""
    if device == "cuda":
        return f"one {torch.cuda.get_device_name()}"
    return f"a CPU ({platform.machine()}, {plural(os.cpu_count() or 1, 'core')})"


def emulated_title(clusters: Sequence[Cluster], device: Device) -> str:
    """``emulated p4d.24xlarge:64 on one NVIDIA H200: rank 0 computes really, the network is simulated``."""
    names = dict.fromkeys(f"{cluster.name}:{cluster.num_nodes}" for cluster in clusters)
    return (
        f"emulated {listed(list(names))} on {device_name(device)}: rank 0 computes really, the network is "
        "simulated"
    )


def caveats(clusters: Sequence[Cluster], device: Device) -> list[str]:
    """What must not be read out of figures that another device has computed."""
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

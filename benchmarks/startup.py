"""How long a large model takes to start, and in how much memory: one rank of an emulated cluster.

    python benchmarks/startup.py                                   # a GPU: gpt-1t, all layers, 512 ranks
    python benchmarks/startup.py --model gpt-1.3b --layers 4       # a CPU

The model is built on ``meta`` and sharded with a unit for each matrix, as `benchmarks.published.trillion`
does. Emulated collectives take no time here. What the initial broadcasts would take on the cluster's
network is added up from the cost model, and shown beside the seconds of this machine. On a CPU the device's
memory is the host's: there the peak has the shard and the largest unit in it.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass, replace
from typing import Final

import torch

import mics
from mics.bench.models import BENCH_MODELS
from mics.cost.clusters import find_cluster
from mics.cost.collectives import Kind
from mics.emulator import emulate
from mics.engine import engine_of
from mics.models.gpt import GPT, Attention, Block, Linear
from mics.utils.command_line import parse

GIB: Final = 2**30
_ON_GPU: Final = torch.cuda.is_available()


@dataclass(frozen=True, kw_only=True)
class Startup:
    """Build a model on meta and shard it, as one rank of an emulated cluster: seconds and memory."""

    model: str = "gpt-1t" if _ON_GPU else "gpt-1.3b"
    """One of mics bench --model."""
    layers: int | None = None
    """Blocks of true width; unset: all."""
    cluster: str = "p4de.24xlarge:64"
    """The cluster to emulate."""
    partition_size: int = 512
    """Ranks of a partition group."""


def measure(config: Startup) -> dict[str, float | int]:
    """Everything that is shown, by name."""
    shape = BENCH_MODELS[config.model].config
    shape = replace(shape, num_layers=config.layers or shape.num_layers)
    device = torch.device("cuda", 0) if _ON_GPU else torch.device("cpu")
    with emulate(find_cluster(config.cluster)) as emulation, emulation.free():
        if _ON_GPU:
            torch.zeros(1, device=device)  # the driver's own memory is no part of it
        before = _resident()
        began = time.perf_counter()
        with torch.device("meta"):
            model = GPT(shape)
        on_meta = time.perf_counter()
        mics.shard(
            model,
            partition_size=config.partition_size,
            units=[Attention, Linear],
            precision=mics.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
            activations=mics.Activations(checkpoint=Block),
        )
        if _ON_GPU:
            torch.cuda.synchronize()
        sharded = time.perf_counter()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        sent = [each for each in emulation.collectives() if each.kind is Kind.BROADCAST]
        shards = engine_of(model).members.units()
        nbytes = sum(shard.nbytes for unit in shards for shard in unit.shards)
        return {
            "parameters": sum(slot.numel for unit in shards for slot in unit.spec.layout.slots),
            "units": len(shards),
            "seconds on meta": on_meta - began,
            "seconds to shard": sharded - on_meta,
            "bytes of a rank's shard (masters)": nbytes,
            "host memory over the beginning, peak": max(0, peak - before),
            "device memory, peak": torch.cuda.max_memory_allocated() if _ON_GPU else 0,
            "bytes of initial broadcasts": sum(each.nbytes for each in sent),
            "seconds of them on the network, modelled": sum(each.cost.seconds for each in sent),
        }


def _resident() -> int:
    with open("/proc/self/statm") as file:  # noqa: PTH123
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main() -> None:
    """Measure and print a table."""
    config = parse(Startup, sys.argv[1:], prog="python benchmarks/startup.py")
    print(f"{config.model} on {config.cluster}, {config.layers or 'all'} layers\n\n| | |\n|---|---:|")
    for name, value in measure(config).items():
        shown = f"{value:,}" if isinstance(value, int) else f"{value:,.3f}"
        print(
            f"| {name} | {shown}{f' ({value / GIB:.2f} GiB)' if 'byte' in name or 'memory' in name else ''} |"
        )


if __name__ == "__main__":
    main()

"""mics itself."""

from dataclasses import replace
from functools import partial
from typing import Any, Final

import mics
from mics.bench.job import Job
from mics.bench.systems.loop import Loop, Microsteps
from mics.bench.systems.start import device_of, materialise, meta_model
from mics.cost.clusters import Cluster
from mics.cost.memory import USABLE, Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import shape_of_config
from mics.emulator import emulated_cluster
from mics.layout.compression import LOSSLESS, UNCOMPRESSED


def build_mics(
    job: Job,
    *,
    microsteps: Microsteps = mics.microsteps,
    compression: mics.Compression | None = LOSSLESS,
    **settings: Any,
) -> Loop:
    """With its defaults, or other ``settings`` of ``mics.shard``.

    Where only some blocks run, it gathers as far ahead and keeps as large a share as it would of all of them.
    """
    model = meta_model(job, own_activations=True)
    if job.device == "cpu":
        # From meta, shards go to a GPU wherever the collectives reach one.
        materialise(model, device_of(job))
    if job.whole_layers is not None:
        cluster, sent = emulated_cluster(), compression or UNCOMPRESSED
        settings.setdefault("prefetch", "auto" if cluster is None else prefetch_of_whole(job, cluster, sent))
    rounds_hop_2 = compression is not None and compression.hop2 is not None
    mics.shard(
        model,
        partition_size=job.partition_size,
        precision=mics.Precision(
            param_dtype=job.param,
            reduce_dtype=job.reduce,
            replica_reduce_dtype=None if rounds_hop_2 else job.reduce,
        ),
        compression=compression,
        activations=mics.Activations(
            checkpoint="unit" if job.checkpoint else "none",
            offload=job.offload,
            preserve_rng_state=job.model.dropout > 0,
        ),
        **settings,
    )
    return Loop(job, model, microsteps=microsteps, clip=mics.clip_grad_norm_)


def prefetch_of_whole(job: Job, cluster: Cluster, compression: mics.Compression) -> mics.Prefetch:
    """What the cost model says about the whole model: fewer blocks would leave memory that it has not."""
    assert job.whole_layers is not None
    model = replace(job.model, num_layers=job.whole_layers)
    whole = Setting(
        model=shape_of_config("", model),
        cluster=cluster,
        partition_size=job.partition_size,
        micro_batch=job.micro_batch,
        accumulation=job.accumulation,
        activations=Keeping(checkpoint=job.checkpoint, offload=job.offload),
        wire_nbytes=job.reduce.itemsize,
        compression=compression,
    )
    nbytes = job.model.num_parameters * job.param.itemsize
    largest = whole.model.largest_numel * job.param.itemsize
    room = float(whole.depth * largest)
    if cluster.memory_nbytes:  # else nobody knows
        room = min(room, max(0.0, cluster.memory_nbytes * USABLE - replace(whole, prefetch=1).need().peak))
    return mics.Prefetch(
        units=whole.depth,
        nbytes=round(largest + room) if room < whole.depth * largest else None,
        stay_nbytes=round(whole.staying_share * nbytes),
    )


build_mics_partition = partial(build_mics, optimizer_sharding="partition")
"""Every replica updates the whole of its shards, as HSDP does."""
build_mics_host = partial(build_mics, optimizer_state="host")
"""Masters and optimizer state are in host memory between steps."""
build_mics_uncompressed = partial(build_mics, compression=None)
"""New parameters go to the replicas as they are."""
INT8: Final = mics.Compression(hop2="int8", inter_gather="int8", inter_reduce="int8")
INT4: Final = replace(INT8, hop2="int4")
build_mics_int8 = partial(build_mics, compression=INT8)
"""Gradients between replicas, and what a partition group sends from node to node, in int8."""
build_mics_int4 = partial(build_mics, compression=INT4)
"""The same with gradients between replicas in int4."""

"""mics itself."""

from functools import partial
from typing import Literal

import mics
from mics.bench.job import Job
from mics.bench.systems.loop import Loop
from mics.bench.systems.start import device_of, materialise, meta_model


def _build(job: Job, *, optimizer_sharding: Literal["world", "partition"]) -> Loop:
    model = meta_model(job, own_activations=True)
    if job.device == "cpu":
        # From meta, shards go to a GPU wherever the collectives reach one.
        materialise(model, device_of(job))
    mics.shard(
        model,
        partition_size=job.partition_size,
        precision=mics.Precision(param=job.param, reduce=job.reduce, replica_reduce=job.reduce),
        optimizer_sharding=optimizer_sharding,
        activations=mics.Activations(
            checkpoint="unit" if job.checkpoint else "none",
            offload=job.offload,
            preserve_rng_state=job.model.dropout > 0,
        ),
    )
    return Loop(job, model, microsteps=mics.microsteps, clip=mics.clip_grad_norm_)


build_mics = partial(_build, optimizer_sharding="world")
"""With its defaults: masters and optimizer state over the world."""
build_mics_partition = partial(_build, optimizer_sharding="partition")
"""Every replica updates the whole of its shards, as HSDP does."""

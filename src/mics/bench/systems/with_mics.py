"""mics itself."""

from functools import partial
from typing import Any

import mics
from mics.bench.job import Job
from mics.bench.systems.loop import Loop, Microsteps
from mics.bench.systems.start import device_of, materialise, meta_model


def build_mics(job: Job, *, microsteps: Microsteps = mics.microsteps, **settings: Any) -> Loop:
    """With its defaults, or other ``settings`` of ``mics.shard``."""
    model = meta_model(job, own_activations=True)
    if job.device == "cpu":
        # From meta, shards go to a GPU wherever the collectives reach one.
        materialise(model, device_of(job))
    mics.shard(
        model,
        partition_size=job.partition_size,
        precision=mics.Precision(
            param_dtype=job.param, reduce_dtype=job.reduce, replica_reduce_dtype=job.reduce
        ),
        activations=mics.Activations(
            checkpoint="unit" if job.checkpoint else "none",
            offload=job.offload,
            preserve_rng_state=job.model.dropout > 0,
        ),
        **settings,
    )
    return Loop(job, model, microsteps=microsteps, clip=mics.clip_grad_norm_)


build_mics_partition = partial(build_mics, optimizer_sharding="partition")
"""Every replica updates the whole of its shards, as HSDP does."""

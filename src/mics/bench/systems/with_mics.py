"""mics itself."""

import mics
from mics.bench.job import Job
from mics.bench.systems.loop import Loop
from mics.bench.systems.start import device_of, materialise, meta_model


def build_mics(job: Job) -> Loop:
    """``mics.shard`` with its defaults: masters and optimizer state over the world, two stages over nodes."""
    model = meta_model(job)
    if job.device == "cpu":
        # From meta, shards go to a GPU wherever the collectives reach one.
        materialise(model, device_of(job))
    mics.shard(
        model,
        partition_size=job.partition_size,
        precision=mics.Precision(param=job.param, reduce=job.reduce, replica_reduce=job.reduce),
    )
    return Loop(job, model, microsteps=mics.microsteps, clip=mics.clip_grad_norm_)

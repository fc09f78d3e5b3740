"""PyTorch's DistributedDataParallel: whole models on every rank, one all-reduce per optimizer step."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import torch
from torch.nn.parallel import DistributedDataParallel

from mics.bench.job import Job
from mics.bench.systems.loop import Loop
from mics.bench.systems.protocol import Batch
from mics.bench.systems.start import build_model


def build_ddp(job: Job) -> Loop:
    """DDP as its notes recommend: gradients live in the buckets, and only the last micro-step communicates.

    With bfloat16 parameters it trains float32 ones under ``torch.autocast``, because DDP keeps no masters.
    This is not what the other systems compute: matrix products are bfloat16 as theirs, the residual stream
    and the norms are float32, and gradients are float32 and travel so whatever ``reduce_dtype`` says.
    """
    model = build_model(job)
    if job.param is not torch.float32:
        model.forward = torch.autocast(job.device, dtype=job.param)(model.forward)  # type: ignore[method-assign]
    replicated = DistributedDataParallel(
        model,
        gradient_as_bucket_view=True,
        init_sync=False,  # the values are the same by construction: nothing to compare, nothing to send
    )
    return Loop(job, replicated, microsteps=_announced)


def _announced(model: DistributedDataParallel, batches: Sequence[Batch]) -> Iterator[Batch]:
    for index, batch in enumerate(batches):
        with nullcontext() if index == len(batches) - 1 else model.no_sync():
            yield batch

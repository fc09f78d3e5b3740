"""Facts of a rank's GPU. The first call to CUDA may hang on a broken driver: call this with a time limit."""

from __future__ import annotations

import torch

from mics.doctor.facts import GpuFacts
from mics.train.ranks import Rank


def read_gpu(me: Rank) -> GpuFacts:
    """Before the process has allocated anything on it."""
    torch.cuda.set_device(me.device)
    free, total = torch.cuda.mem_get_info(me.device)
    return GpuFacts(
        name=torch.cuda.get_device_name(me.device),
        total_nbytes=total,
        free_nbytes=free,
        num_gpus=torch.cuda.device_count(),
        ranks_per_gpu=me.ranks_per_gpu,
        driver_cuda=torch._C._cuda_getDriverVersion(),
        runtime_cuda=torch._C._cuda_getCompiledVersion(),
    )


def nccl_version() -> str:
    """``2.27.5``."""
    return ".".join(str(part) for part in torch.cuda.nccl.version())

"""Facts of a rank's GPU. The first call to CUDA may hang on a broken driver: call this with a time limit."""

from __future__ import annotations

import ctypes

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
        driver_cuda=_driver_cuda(),
        runtime_cuda=cuda_number(torch.version.cuda or "0.0"),
    )


def cuda_number(version: str) -> int:
    """``12.8`` as the driver counts: 12080."""
    major, minor = (int(part) for part in version.split(".")[:2])
    return 1000 * major + 10 * minor


def _driver_cuda() -> int:
    """0 where the driver's library is not to be found."""
    try:
        found = ctypes.c_int(0)
        ctypes.CDLL("libcuda.so.1").cuDriverGetVersion(ctypes.byref(found))
    except (OSError, AttributeError):
        return 0
    return found.value


def nccl_version() -> str:
    """``2.27.5``."""
    return ".".join(str(part) for part in torch.cuda.nccl.version())

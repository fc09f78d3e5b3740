"""What a GPU can do at most and what a process holds: the denominators of the report."""

import os
import resource
import sys
from pathlib import Path
from typing import Final

import torch

from mics.cost.clusters import find_cluster

# Dense bf16 matrix TFLOP/s without sparsity, from the makers' data sheets. The first name that occurs in the
# device's own name counts, so longer names come first. V100 and T4 have no bf16: theirs is the fp16 number.
_PEAK_TFLOPS: Final = (
    ("GB200", 2500.0),
    ("B200", 2250.0),
    ("GH200", 989.4),
    ("H200 NVL", 835.5),
    ("H200", 989.4),
    ("H100 NVL", 835.5),
    ("H100 PCIe", 756.4),
    ("H100", 989.4),
    ("A100", 312.0),
    ("A40", 149.7),
    ("A30", 165.0),
    ("A10G", 70.0),
    ("A10", 125.0),
    ("L40S", 362.1),
    ("L40", 181.1),
    ("L4", 121.0),
    ("V100", 125.0),
    ("T4", 65.0),
)


def peak_tflops(device_name: str) -> float | None:
    """The data sheet's bf16 TFLOP/s of a GPU, or None where we do not know it: no MFU beats a wrong one."""
    words = device_name.replace("-", " ").split()
    for name, peak in _PEAK_TFLOPS:
        wanted = name.split()
        if any(words[at : at + len(wanted)] == wanted for at in range(len(words))):
            return peak
    return None


def calibrated_tflops(cluster: str | None, *, device: str, precision: str) -> float | None:
    """One rank's peak in TFLOP/s by the file that ``mics calibrate`` wrote on such devices; None: it did not.

    ``precision``: what the run computes in; a peak in another format says nothing about it.
    """
    if not cluster:
        return None
    found = find_cluster(cluster)
    measured = found.computing
    if measured is None or measured.device != device or not found.peak_flops:
        return None
    fits = precision == "fp32" if measured.param_nbytes == 4 else precision in ("bf16", "fp16")
    return found.peak_flops / 1e12 if fits else None


def memory_nbytes(device: torch.device) -> int:
    """Peak bytes of tensors on the GPU since the last call; on the CPU what the process holds now."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    scale = 1 if sys.platform == "darwin" else 1024  # macOS counts bytes, the others kibibytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale

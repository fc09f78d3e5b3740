"""NVIDIA's MPS daemon, which an emulated step should be measured without."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from mics.bench.plan import Run


def mps_note(runs: Sequence[Run]) -> str:
    """What an MPS daemon does to steps that this GPU emulates; empty: none runs, or nothing is emulated."""
    if not any(run.cluster is not None and run.job.device == "cuda" for run in runs):
        return ""
    pipe = Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", "/tmp/nvidia-mps"), "control")
    if not _is_read(pipe):
        return ""
    return (
        f"An NVIDIA MPS daemon is running ({pipe}): with it emulated steps took 11 to 75% longer, most of it "
        "exposed communication. To measure without it: echo quit | nvidia-cuda-mps-control"
    )


def _is_read(pipe: Path) -> bool:
    """Whether somebody reads a named pipe: of a killed daemon it is left behind, and opening it fails."""
    try:
        if not pipe.is_fifo():
            return False
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
    except OSError:
        return False
    return True

"""``mics calibrate`` over NCCL: ranks that share a GPU measure it as they will use it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from mics.planner.hardware import planned_cluster


@pytest.mark.gpu
def test_ranks_on_one_gpu_are_calibrated(tmp_path: Path) -> None:
    """Two ranks write a file with the GPU's name, its peak, its memory and the speed of host copies."""
    out = tmp_path / "cluster.yaml"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    program = ["-m", "mics.cli", "calibrate", "--out", str(out), "--model", "gpt-118m"]
    limits = ["--max-seconds", "20", "--max-mib", "64"]
    environ = {"GLOO_SOCKET_IFNAME": "lo", **os.environ}
    subprocess.run([*launcher, *program, *limits], check=True, timeout=200, env=environ)
    cluster = planned_cluster(f"{out}:1")
    assert cluster.computing is not None
    assert cluster.computing.device == torch.cuda.get_device_name()
    assert cluster.computing.param_nbytes == 2
    assert cluster.memory_nbytes <= torch.cuda.get_device_properties(0).total_memory
    assert 1e8 < cluster.host_bandwidth < 1e12
    assert cluster.flops <= 1.05 * cluster.peak_flops

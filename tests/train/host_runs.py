"""A small run of ``mics train`` on several hosts, and what it is compared with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from benchmarks.faults.job import Job

REPOSITORY: Final = Path(__file__).parents[2]
SETTINGS: Final = """\
name: job
steps: 40
batch_size: 2
micro_steps: 2
model: {num_layers: 2, hidden_size: 32, seq_len: 32, dropout: 0.1}
report: {interval: 1, eval_interval: 15, eval_batches: 1, sample_tokens: 0, save_weights: false}
checkpoint: {interval: 10}
launch: {device: cpu, timeout_seconds: 60}
"""
"""Dropout tells whether random states come back."""
ENVIRONMENT: Final = {
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "PYTHONPATH": str(REPOSITORY / "src"),
    "OMP_NUM_THREADS": "1",
}


def last_step(run_dir: Path) -> int:
    """How many steps the run has measured."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    return sum(line.endswith("\n") and '"loss"' in line for line in lines)


def has_saved(run_dir: Path) -> bool:
    """Whether there is a checkpoint, and steps after it."""
    return (run_dir / "checkpoints" / "latest").exists() and last_step(run_dir) >= 12


def losses(run_dir: Path) -> dict[tuple[int, str], float]:
    """Every loss of a run, by step and kind."""
    return Job(folder=run_dir.parent, args=()).losses()


def reference_losses(folder: Path, *args: str) -> dict[tuple[int, str], float]:
    """Of the same settings, on this host and uninterrupted."""
    command = [sys.executable, "-m", "mics.cli", "train", "--config", "run.yaml", "--output-dir", "reference"]
    done = subprocess.run(
        [*command, *args],
        cwd=folder,
        env={**os.environ, **ENVIRONMENT},
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    return losses(folder / "reference" / "job")

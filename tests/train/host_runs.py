"""A small run of ``mics train`` on several hosts, and what it is compared with."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
from benchmarks.cluster.network import remove_namespaces
from benchmarks.cluster.requirements import examine, reason_against
from benchmarks.cluster.slurm import missing_program
from benchmarks.faults.job import losses_in

from mics.train.launch import _free_port
from tests.ranks import run_ranks

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


@pytest.fixture
def cluster_name() -> Iterator[str]:
    """Of a namespace cluster, used by nobody else; skips where there can be none."""
    reason = reason_against(examine())
    if reason is not None:
        pytest.skip(f"no namespace cluster on this machine: {reason}")
    name = f"mics-hosts{os.getpid()}"
    yield name
    assert remove_namespaces(name) == [], "the test left namespaces behind"


@pytest.fixture
def slurm() -> None:
    """Skips where there is no Slurm."""
    missing = missing_program()
    if missing is not None:
        pytest.skip(f"{missing} is not installed (Debian: slurm-wlm, munge)")


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
    return losses_in(run_dir / "metrics.jsonl")


def reference_losses(
    folder: Path, *, num_ranks: int, ranks_per_node: int, name: str = "job", config: str = "run.yaml"
) -> dict[tuple[int, str], float]:
    """Of the same settings, on ranks of this host and uninterrupted."""
    args = ["--config", config, "--output-dir", "reference", "--checkpoint.interval", "0"]
    where = {"launch": "variables", "ranks_per_node": ranks_per_node}
    run_ranks(num_ranks, train_as_rank, _free_port(), args, str(folder), timeout_s=600, **where)
    return losses(folder / "reference" / name)


def train_as_rank(port: int, args: list[str], folder: str) -> None:
    """Train as a rank of the pool, with these arguments alone."""
    from mics.train.loop import run_rank
    from mics.train.settings_file import parse_train_config

    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = "127.0.0.1", str(port)
    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        assert run_rank(parse_train_config(args)) == 0

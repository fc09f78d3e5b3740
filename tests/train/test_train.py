"""`mics train` from end to end, on gloo ranks of this machine."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from mics.models import GPT, GPTConfig
from mics.train.launch import _free_port
from tests.ranks import run_ranks
from tests.train.host_runs import train_as_rank

SHAPE = ["--model.num-layers", "2", "--model.hidden-size", "32", "--model.seq-len", "32"]
COMMON = ["--launch.device", "cpu", "--report.interval", "2", "--report.sample-tokens", "8", *SHAPE]


def _command(tmp_path: Path, *args: str) -> list[str]:
    return [sys.executable, "-m", "mics.cli", "train", "--output-dir", str(tmp_path), *COMMON, *args]


def _losses(run_dir: Path) -> list[float]:
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows if "loss" in row]


@pytest.mark.full
def test_two_nodes_of_two_train_like_one_rank(tmp_path: Path) -> None:
    """The launcher's four ranks leave all results and the losses of one rank with the same global batch."""
    args = ["--steps", "6", "--sharding.partition-size", "2", "--sharding.activations", "offload"]
    done = subprocess.run(
        _command(tmp_path, *args, "--batch-size", "2"),
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    assert "\x1b" not in done.stdout and "step 6/6 | loss " in done.stdout
    assert "4 ranks = 2 nodes x 2 (CPU), partition groups of 2, replication groups of 2" in done.stdout
    assert "The model writes:" in done.stdout
    run_dir = tmp_path / "demo"
    assert (run_dir / "run.png").read_bytes().startswith(b"\x89PNG")
    summary = json.loads((run_dir / "run.json").read_text())
    assert (summary["ranks_of_nodes"], summary["partition_size"], summary["replicas"]) == ([2, 2], 2, 2)
    assert summary["num_parameters"] == sum(
        value.numel() for value in torch.load(run_dir / "model.pt").values()
    )
    assert summary["final_loss"] < summary["first_loss"]
    assert summary["last"]["partition_nbytes"] > summary["last"]["replication_nbytes"] > 0

    model = GPT(GPTConfig(num_layers=2, num_heads=4, hidden_size=32, vocab_size=256, seq_len=32))
    model.load_state_dict(torch.load(run_dir / "model.pt"))  # the weights are plain PyTorch's

    alone = ["--output-dir", str(tmp_path), *COMMON, "--steps", "6", "--batch-size", "8", "--name", "one"]
    run_ranks(1, train_as_rank, _free_port(), alone, str(tmp_path), launch="variables")
    assert _losses(tmp_path / "one") == pytest.approx(_losses(run_dir), rel=1e-4)


@pytest.mark.full
@pytest.mark.long  # test_terminal.py has the same in a terminal
def test_an_interrupt_ends_every_rank(tmp_path: Path) -> None:
    """Ctrl-C while the ranks train: they save, exit code 130, a word about it, and no process left behind."""
    run = subprocess.Popen(
        _command(tmp_path, "--steps", "1000000", "--launch.simulated-nodes", "1", "--name", "interrupted"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert run.stdout is not None
    for line in run.stdout:  # the first step is reported as soon as it is done
        if line.startswith("step"):
            break
    run.send_signal(signal.SIGINT)
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 130
    assert "interrupted" in errors
    latest = (tmp_path / "interrupted/checkpoints/latest").read_text().strip()
    assert f"{latest}, --checkpoint.resume latest goes on from it" in errors
    time.sleep(0.5)
    assert _processes_with("interrupted") == []


def _processes_with(word: str) -> list[str]:
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = cmdline.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if f"--name {word}" in command:
            found.append(command)
    return found

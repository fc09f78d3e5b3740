"""Failures under the user's own torchrun: a network that is cut, and a node that does not come back."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from benchmarks.cluster.launch import host_environment, torchrun_argv
from benchmarks.cluster.network import NamespaceCluster
from benchmarks.faults.fault import Fault
from benchmarks.faults.job import SMALL, Job

from mics.train.launch import _free_port
from tests.train.host_runs import cluster_name
from tests.train.rank_runs import reference_losses

__all__ = ["cluster_name"]  # fixtures

REPOSITORY = Path(__file__).parents[2]
PYTHONPATH = os.pathsep.join([str(REPOSITORY / "src"), str(REPOSITORY)])


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)


def last_step(run_dir: Path) -> int:
    """The last step that the run has measured."""
    file = run_dir / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    try:
        return max((json.loads(line)["step"] for line in lines), default=0)
    except json.JSONDecodeError:  # the last line is being written
        return 0


@pytest.mark.long
def test_plain_torchrun_restarts_its_ranks(tmp_path: Path) -> None:
    """One node, torchrun's defaults: a killed rank and one in an endless loop, and the losses of neither."""
    args = ["--steps", "24", "--checkpoint.interval", "4", "--sharding.partition-size", "1"]
    faults = [
        Fault(kind="kill", moment="backward", step=11, rank=1),
        Fault(kind="loop", moment="forward", step=17, rank=0),
    ]
    job = Job(folder=tmp_path, args=args, faults=faults)
    program = ["-m", "mics.cli", "train", "--output-dir", str(tmp_path), "--name", "job", *SMALL, *args]
    options = ["--nproc-per-node=2", "--max-restarts=2"]
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *options, *program],
        env={**job.environment(), "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("going on from") == 2
    assert "Dead, stopped or cut off: rank 1 (last seen in" in done.stderr
    assert "one is behind: rank 0 (last seen in" in done.stderr
    assert job.losses() == reference_losses(tmp_path / "reference", args)


@pytest.mark.long
def test_a_cut_network_is_named_and_the_run_goes_on_after_the_mend(cluster_name: str, tmp_path: Path) -> None:
    """Both sides end in time: one names the rank that is cut off, the other the network to rank 0's node."""
    args = ["--steps", "24", "--checkpoint.interval", "6", "--launch.timeout-seconds", "5"]
    program = ["-m", "mics.cli", "train", "--output-dir", str(tmp_path), "--name", "job", *SMALL, *args]
    run_dir = tmp_path / "job"

    def start(cluster: NamespaceCluster, attempt: str, *more: str) -> list[subprocess.Popen[bytes]]:
        environment = {**host_environment(cluster, os.environ), "PYTHONPATH": PYTHONPATH}
        processes = []
        for host in range(2):
            with (tmp_path / f"{attempt}-{host}.log").open("wb") as log:
                argv = torchrun_argv(cluster, host, 1, [*program, *more])
                processes.append(cluster.exec(host, argv, environment, stdout=log, stderr=log))
        return processes

    with NamespaceCluster(2, "8mbit", name=cluster_name) as cluster:  # slow, so that there is time to cut it
        processes = start(cluster, "first")
        wait_until(lambda: (run_dir / "checkpoints/latest").exists() and last_step(run_dir) >= 8, 100)
        cluster.cut(1)
        began = time.monotonic()
        codes = [process.wait(timeout=60) for process in processes]
        took = time.monotonic() - began
        assert 0 not in codes
        assert took < 35, f"{took:.1f} s: expected the timeout of 5 s, and some to ask around and to leave"
        near, far = ((tmp_path / f"first-{host}.log").read_text() for host in range(2))
        assert "CollectiveError" in near and "Dead, stopped or cut off: rank 1 (last seen in" in near
        assert "CollectiveError" in far and "the network between this node and the one of rank 0" in far
        cluster.mend(1)
        again = start(cluster, "again", "--checkpoint.resume", "latest")
        assert [process.wait(timeout=100) for process in again] == [0, 0]
    assert "going on from" in (tmp_path / "again-0.log").read_text()
    assert Job(folder=tmp_path, args=args).losses() == reference_losses(tmp_path / "reference", args)


@pytest.mark.long
def test_an_elastic_job_goes_on_with_the_nodes_that_are_left(tmp_path: Path) -> None:
    """torchrun --nnodes 1:2: a node is gone for good, the other goes on alone with the same global batch."""
    steps = ["--steps", "300", "--checkpoint.interval", "20", "--report.interval", "10"]
    program = ["-m", "mics.cli", "train", "--output-dir", str(tmp_path), "--name", "job", *SMALL]
    program += [*steps, "--model.dropout", "0"]
    port, environment = _free_port(), {**os.environ, "PYTHONPATH": PYTHONPATH, "GLOO_SOCKET_IFNAME": "lo"}

    def start(node: int) -> subprocess.Popen[bytes]:
        hurry = f"is_host={int(node == 0)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=2"
        options = ["--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-id=elastic"]
        options += ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-conf={hurry}"]
        command = [sys.executable, "-m", "torch.distributed.run", *options, *program]
        with (tmp_path / f"node-{node}.log").open("wb") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log)

    nodes = [start(0), start(1)]
    try:
        wait_until(lambda: last_step(tmp_path / "job") >= 50, 100)
        os.kill(nodes[1].pid, signal.SIGKILL)  # and the kernel ends its rank
        assert nodes[0].wait(timeout=150) == 0, (tmp_path / "node-0.log").read_text()
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    shown = (tmp_path / "node-0.log").read_text()
    assert "2 ranks = 2 nodes x 1" in shown and "1 rank = 1 node x 1" in shown
    assert "going on from" in shown
    found = Job(folder=tmp_path, args=()).losses()
    expected = reference_losses(tmp_path / "reference", [*steps, "--model.dropout", "0"])
    kind = "loss"
    assert found.keys() == expected.keys()
    assert [found[key] for key in found if key[1] == kind] == pytest.approx(
        [expected[key] for key in expected if key[1] == kind], rel=2e-2
    )

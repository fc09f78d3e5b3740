"""The Slurm recipe, run by Slurm on namespace hosts: a node is lost, and the job resumes."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Final

import pytest
from benchmarks.cluster.network import NamespaceCluster
from benchmarks.cluster.slurm import SlurmCluster

from tests.train.host_runs import (
    ENVIRONMENT,
    SETTINGS,
    cluster_name,
    has_saved,
    losses,
    reference_losses,
    slurm,
)

__all__ = ["cluster_name", "slurm"]  # fixtures

REPOSITORY: Final = Path(__file__).parents[2]
RECIPE: Final = REPOSITORY / "examples" / "launch" / "slurm.sbatch"


@pytest.mark.full
@pytest.mark.long  # test_from_a_plan_to_a_cluster.py loses a node of the same recipe
@pytest.mark.usefixtures("slurm")
@pytest.mark.timeout(1200)  # under a load that is not ours; a minute without
def test_a_job_that_lost_a_node_goes_on_from_its_checkpoint(cluster_name: str, tmp_path: Path) -> None:
    """The file as it is, two nodes of two ranks: Slurm requeues the job, and no loss differs by a bit."""
    (tmp_path / "run.yaml").write_text(SETTINGS)
    (tmp_path / "slurm").mkdir()
    run_dir = tmp_path / "runs" / "job"
    with (
        NamespaceCluster(3, "1gbit", name=cluster_name) as cluster,
        SlurmCluster(cluster, tmp_path / "slurm", gpus=2) as slurm,
    ):
        job = slurm.call(
            *("sbatch", "--parsable", "--nodes=2", "--gpus-per-node=2", str(RECIPE), "run.yaml"),
            cwd=tmp_path,
            env={**ENVIRONMENT, "DOCTOR": "no"},
        )
        output = tmp_path / f"mics-{job}.out"
        wait_for = partial(slurm.wait_for, timeout_s=300, output=output)
        wait_for("a checkpoint", lambda: has_saved(run_dir))
        slurm.kill_host(2)
        wait_for("the requeue", lambda: slurm.state(job) not in ("RUNNING", "COMPLETING"))
        assert slurm.state(job) == "PENDING", (
            f"{slurm.call('scontrol', 'show', 'job', job)}\n{output.read_text()}"
        )
        slurm.start_node(2)
        wait_for("the end", lambda: slurm.state(job) not in ("PENDING", "RUNNING", "COMPLETING"))
        shown = slurm.call("scontrol", "show", "job", job)
    printed = output.read_text()
    assert "JobState=COMPLETED" in shown and "Restarts=1" in shown, f"{shown}\n{printed}"
    assert "4 ranks = 2 nodes x 2" in printed
    assert "going on from runs/job/checkpoints/step-" in printed
    assert losses(run_dir) == reference_losses(tmp_path, num_ranks=4, ranks_per_node=2)

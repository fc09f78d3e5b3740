"""Faults in `mics train`: it is started again, goes on from its latest checkpoint and ends as if nothing was.

`python -m benchmarks.fault_suite` does the same at many random points.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from benchmarks.faults.fault import KINDS, MOMENTS, Fault, decode, draw_faults, encode
from benchmarks.faults.job import Job

ARGS = ["--steps", "20", "--checkpoint.interval", "4", "--launch.ranks-per-node", "1"]
FAULTS = [
    Fault(kind="kill", moment="collective", step=7, rank=1),
    Fault(kind="stop", moment="save", step=12, rank=0),
    Fault(kind="node", moment="backward", step=15, rank=1),
    Fault(kind="term", moment="forward", step=18, rank=0),
]


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Job, Job]]:
    """The reference, and a run that is killed, hangs, loses a node and is asked to leave."""
    reference = Job(folder=tmp_path_factory.mktemp("reference"), args=ARGS)
    job = Job(
        folder=tmp_path_factory.mktemp("faults"), args=[*ARGS, "--launch.max-restarts", "5"], faults=FAULTS
    )
    assert reference.run() == 0, reference.output
    assert job.run() == 0, job.output
    yield reference, job


@pytest.mark.slow
def test_every_loss_is_the_uninterrupted_one_to_the_bit(jobs: tuple[Job, Job]) -> None:
    """Each step's loss and each validation is there once and equal; dropout and all."""
    reference, job = jobs
    assert len(job.observations) == len(FAULTS), job.output
    assert job.losses() == reference.losses()


@pytest.mark.slow
def test_each_failure_is_one_line_that_names_the_rank_and_the_collective(jobs: tuple[Job, Job]) -> None:
    """What is said at each restart; and that it went on from what `latest` named, which was whole."""
    _, job = jobs
    killed, stopped, node, left = job.observations
    assert "rank 1 (node 1) was ended by SIGKILL; rank 0 was in " in killed.message
    assert "the others waited in vain for rank 0; rank 1 was in " in stopped.message
    assert "node 1 is gone: its agent was ended by SIGKILL" in node.message
    assert left.latest == f"step-{left.resumed_step}" and (left.resumed_step or 0) >= 18
    for each in (killed, stopped, node):
        where = f"from {each.latest}" if each.latest else "from the beginning"
        assert f"starting all ranks again, {where} (restart " in each.message
        assert each.resumed_step == int(each.latest.removeprefix("step-") or 0)


@pytest.mark.slow
def test_the_others_notice_in_time(jobs: tuple[Job, Job]) -> None:
    """A dead peer at once, a silent one when the timeout of 10 s has passed; each and the time to ask around."""
    _, job = jobs
    killed, stopped, node, _ = job.observations
    for each, limit in ((killed, 10.0), (node, 10.0), (stopped, 20.0)):
        assert each.noticed_seconds is not None and each.noticed_seconds < limit, each


def test_drawn_faults_are_in_order_and_the_same_for_a_seed() -> None:
    """A run meets them one after the other, on ranks that exist, and kinds and moments all occur."""
    drawn = [
        draw_faults(seed, num_faults=4, num_steps=24, interval=4, num_ranks=2, kinds=list(KINDS))
        for seed in range(30)
    ]
    assert drawn[3] == draw_faults(3, num_faults=4, num_steps=24, interval=4, num_ranks=2, kinds=list(KINDS))
    for faults in drawn:
        assert [fault.step for fault in faults] == sorted({fault.step for fault in faults})
        assert all(0 <= fault.rank < 2 and 2 <= fault.step < 24 for fault in faults)
    flat = [fault for faults in drawn for fault in faults]
    assert {fault.kind for fault in flat} == set(KINDS) and {fault.moment for fault in flat} == set(MOMENTS)
    assert decode(encode(flat, "here")) == (flat, "here")

"""Faults in `mics train`: it is started again, goes on from its latest checkpoint and ends as if nothing was.

`python -m benchmarks.fault_suite` does the same at many random points.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from benchmarks.faults.fault import KINDS, MOMENTS, Fault, decode, draw_faults, encode
from benchmarks.faults.job import Job, Observation

from tests import tiers
from tests.train.rank_runs import reference_losses

ARGS = ["--steps", "20", "--checkpoint.interval", "4"]
FAULTS = [
    Fault(kind="kill", moment="collective", step=7, rank=1),
    Fault(kind="stop", moment="save", step=12, rank=0),
    Fault(kind="node", moment="backward", step=15, rank=1),
]


@pytest.mark.full
@pytest.mark.timeout(900)  # under a load that is not ours; a minute and a half without
def test_a_run_with_faults_ends_as_if_nothing_was(tmp_path: Path) -> None:
    """A run that is killed inside a collective, hangs in a save and, with `--long`, loses a node.

    Other tests lose nodes: that of hosts, and that of the page from a plan to a cluster.

    Each step's loss and each validation is there once and equal to the bit; dropout and all.
    """
    args = [*ARGS, "--launch.simulated-nodes", "2", "--launch.ranks-per-node", "1"]
    job = Job(folder=tmp_path / "faults", args=args, faults=FAULTS if tiers.long else FAULTS[:2])
    assert job.run() == 0, job.output
    assert len(job.observations) == len(job.faults), job.output
    assert job.losses() == reference_losses(tmp_path, ARGS)
    for fault, each in zip(job.faults, job.observations, strict=True):
        _check_what_is_said(fault, each)
        # A dead peer is noticed at once, a silent one after 10 s; and the time to ask who is gone.
        limit = 20.0 if fault.kind == "stop" else 10.0
        assert each.noticed_seconds is not None and each.noticed_seconds < limit, each


def _check_what_is_said(fault: Fault, each: Observation) -> None:
    """One line that names the rank and the collective; and it went on from what `latest` named, whole."""
    said = {
        "kill": "rank 1 (node 1) was ended by SIGKILL; rank 0 was in ",
        "stop": "the others waited in vain for rank 0; rank 1 was in ",
        "node": "node 1 is gone: its agent was ended by SIGKILL",
    }
    assert said[fault.kind] in each.message
    where = f"from {each.latest}" if each.latest else "from the beginning"
    assert f"starting all ranks again, {where} (restart " in each.message
    assert each.resumed_step == int(each.latest.removeprefix("step-") or 0)


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

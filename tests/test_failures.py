"""A rank that dies or stops makes the others end with an error that names it, within the timeout."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests import tiers, toys
from tests.ranks import RankPool, run_ranks

TIMEOUT_S = 5.0


def _train_until_death(victim: int, how: str, moment: str, partition_size: int) -> None:
    """Train; rank `victim` ends in its third step, at `moment`."""
    import mics

    mics.comm.liveness._BEAT_SECONDS = 0.2
    torch.manual_seed(0)
    model = mics.shard(toys.Chain(), partition_size=partition_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    rank = dist.get_rank()
    for step in range(50):
        last_moment = moment if step == 2 and rank == victim else ""
        if last_moment == "forward":
            _end(how)
        loss = model(*toys.floats(step, 0, rank))
        if last_moment == "backward":
            _end(how)
        loss.backward()
        if last_moment == "boundary":
            _end(how)
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()


def _end(how: str) -> None:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "exit":
        os._exit(3)
    if how == "raise":
        raise ArithmeticError("this rank has had enough")


@pytest.mark.parametrize(
    ("how", "moment", "victim", "partition_size"),
    tiers.first([("kill", "boundary", 3, 1), ("exit", "backward", 2, 4), ("kill", "forward", 1, 2)], 1, 2),
)
def test_a_dead_rank_is_named(how: str, moment: str, victim: int, partition_size: int) -> None:
    """Killed or exited, in any phase: every survivor raises, naming the rank and the collective."""
    with RankPool(4, timeout_s=TIMEOUT_S) as pool:
        start = time.monotonic()
        answers = pool.answers(
            4,
            _train_until_death,
            *(victim, how, moment, partition_size),
            ranks_per_node=2,
            grace_s=5 * TIMEOUT_S,
        )
        took = time.monotonic() - start
        assert took < 8 * TIMEOUT_S, f"took {took:.1f} s"
        for answer in answers:
            assert answer.error is not None
            if answer.rank == victim:
                assert answer.error.type_name == "Died"
                continue
            assert answer.error.is_a("CollectiveError") and answer.error.is_a("RuntimeError"), answer.error
            assert f"rank {victim}" in answer.error.message, answer.error.message
            kinds = ("gather", "reduce", "broadcast")
            assert any(kind in answer.error.message for kind in kinds), answer.error.message


@pytest.mark.full
def test_a_rank_that_raises_makes_the_others_fail() -> None:
    """One rank raises and stays alive without going on: the others end at the timeout with an error."""
    with RankPool(2, timeout_s=4.0) as pool:
        start = time.monotonic()
        answers = pool.answers(2, _train_until_death, 1, "raise", "forward", 2, grace_s=20.0)
        assert time.monotonic() - start < 15
        raised, waited = answers[1].error, answers[0].error
        assert raised is not None and raised.type_name == "ArithmeticError"
        assert waited is not None and waited.is_a("CollectiveError"), waited


def _stop_before(victim: int) -> None:
    """Rank `victim` stops (SIGSTOP) before its second forward: alive, but silent."""
    import mics

    mics.comm.liveness._BEAT_SECONDS = 0.2
    model = mics.shard(toys.Chain(), partition_size=2)
    rank = dist.get_rank()
    for step in range(3):
        if step == 1 and rank == victim:
            os.kill(os.getpid(), signal.SIGSTOP)
        model(*toys.floats(step, 0, rank)).backward()


def test_a_stopped_rank_is_named() -> None:
    """A rank that is stopped, not dead, is found by its silence when the timeout has passed."""
    with RankPool(2, timeout_s=2.0) as pool:
        answers = pool.answers(2, _stop_before, 1, grace_s=1.0)
        waited = answers[0].error
        assert waited is not None and waited.is_a("CollectiveError"), waited
        assert "rank 1" in waited.message, waited.message


def _num_threads() -> int:
    import mics

    mics.shard(toys.Chain(), partition_size=1)
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="counts threads by /proc")
def test_process_groups_go_with_their_world() -> None:
    """A process that joins one world after another keeps no thread of those it left."""
    found = [max(run_ranks(size, _num_threads)) for size in (2, 3) * 3]
    assert found[-1] <= found[0] + 2  # a world has six and more

"""The rank pool itself: places, process groups, failures and recovery."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankPool, RanksFailedError, run_expecting_error, run_ranks


def _where_am_i() -> dict[str, str]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    return {name: os.environ[name] for name in names} | {"rank": str(dist.get_rank())}


def _sum_of_ranks() -> tuple[int, torch.Tensor, int]:
    total = torch.tensor([float(dist.get_rank())])
    dist.all_reduce(total)
    return os.getpid(), total, torch.get_num_threads()


def _raise_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} does not like this")
    dist.barrier()


def _raise_everywhere() -> None:
    raise KeyError(f"rank {dist.get_rank()}")


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _group_exists() -> tuple[bool, str | None]:
    return dist.is_initialized(), os.environ.get("WORLD_SIZE")


def _set_variable(name: str) -> None:
    os.environ[name] = "set"
    del os.environ["HF_HUB_OFFLINE"]


def _variables() -> dict[str, str]:
    return dict(os.environ)


def _square(number: int) -> int:
    return number * number


def test_places_follow_the_launcher_and_the_last_node_may_be_smaller() -> None:
    """Five ranks on nodes of two: the variables of nodes 0, 1 and the ragged node 2."""
    places = run_ranks(5, _where_am_i, ranks_per_node=2)
    assert [int(p["RANK"]) for p in places] == [int(p["rank"]) for p in places] == [0, 1, 2, 3, 4]
    assert [int(p["GROUP_RANK"]) for p in places] == [0, 0, 1, 1, 2]
    assert [int(p["LOCAL_RANK"]) for p in places] == [0, 1, 0, 1, 0]
    assert [int(p["LOCAL_WORLD_SIZE"]) for p in places] == [2, 2, 2, 2, 1]


def test_workers_are_reused_over_world_sizes() -> None:
    """The same processes serve worlds of 2, 4 and 2 again, single-threaded, with right sums."""
    pids = []
    for world_size in (2, 4, 2):
        answers = run_ranks(world_size, _sum_of_ranks)
        assert all(a[1].item() == world_size * (world_size - 1) / 2 for a in answers)
        assert all(a[2] == 1 for a in answers)
        pids.append([a[0] for a in answers])
    assert pids[0] == pids[2] == pids[1][:2]


@pytest.mark.full
def test_a_failing_rank_fails_the_test_and_the_pool_recovers() -> None:
    """Rank 1 raises while the others wait in a barrier: its traceback surfaces, soon."""
    start = time.monotonic()
    with pytest.raises(RanksFailedError, match="rank 1 does not like this") as caught:
        run_ranks(3, _raise_on, 1)
    assert time.monotonic() - start < 20
    by_rank = {error.rank: error for error in caught.value.errors}
    assert by_rank[1].is_a("ValueError") and "_raise_on" in by_rank[1].trace
    assert [a[1].item() for a in run_ranks(3, _sum_of_ranks)] == [3.0] * 3


def test_expected_errors_come_back_per_rank() -> None:
    """All ranks raise: each one's type and message is returned, and no worker is replaced."""
    before = [a[0] for a in run_ranks(3, _sum_of_ranks)]
    errors = run_expecting_error(3, _raise_everywhere)
    assert [e.message for e in errors] == ["'rank 0'", "'rank 1'", "'rank 2'"]
    assert all(e.is_a("LookupError") for e in errors)
    assert [a[0] for a in run_ranks(3, _sum_of_ranks)] == before


def test_a_rank_that_returns_where_an_error_was_expected_fails_the_test() -> None:
    """`run_expecting_error` does not accept silence."""
    with pytest.raises(AssertionError, match="raised nothing"):
        run_expecting_error(2, _where_am_i)


def test_a_killed_rank_is_reported_as_dead() -> None:
    """SIGKILL in a pool of its own: that rank is Died, the survivor has an error of its own."""
    with RankPool(2, timeout_s=5) as pool:
        died, survivor = pool.answers(2, _die_on, 1)[::-1]
        assert died.error is not None and died.error.type_name == "Died"
        assert "-9" in died.error.message
        assert survivor.error is not None and survivor.error.type_name != "Hung"
        pids = pool.pids()
    assert not any(Path(f"/proc/{pid}/stat").exists() for pid in pids)


def test_a_process_without_a_launcher() -> None:
    """`launch` "none" and "variables" give a process without a default group."""
    assert run_ranks(1, _group_exists, launch="none") == [(False, None)]
    assert run_ranks(2, _group_exists, launch="variables") == [(False, "2")] * 2


def test_map_keeps_the_order_of_its_items() -> None:
    """Independent work spread over the workers comes back in order."""
    from tests.ranks import POOL

    assert POOL.map(_square, [(n,) for n in range(7)]) == [n * n for n in range(7)]


def test_what_a_task_sets_in_the_environment_is_gone_after_it() -> None:
    """Or every later test of the process would train with it."""
    before = run_ranks(2, _variables)
    run_ranks(2, _set_variable, "MICS_CLUSTER")
    assert run_ranks(2, _variables) == before

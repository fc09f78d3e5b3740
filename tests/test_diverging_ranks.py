"""Ranks that go different ways are named on every rank, with both calls, and no process is ended by gloo.

New process groups for each: those that are made on first use are part of what can go wrong.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import tiers, toys
from tests.ranks import Answer, RankPool, run_ranks

TIMEOUT_S = 3.0
NCCL_TIMEOUT_S = 20.0


class _Drops(nn.Module):
    """Layers of one size, of which the forward leaves one out: LayerDrop."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(toys.Block() for _ in range(4))
        self.dropped = -1

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index != self.dropped:
                x = layer(x)
        return (x - target).pow(2).mean()


Fault = Callable[[Any, torch.optim.Optimizer, tuple[Tensor, Tensor]], object]


def _evaluate(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    with torch.no_grad():
        model(*batch)


def _skip_a_step(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    """`if isnan: continue`, and so another batch before the step."""
    optimizer.zero_grad()
    model(*batch).backward()


def _summon(model: Any, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, Tensor]) -> None:
    import mics

    with mics.summon_full_params(model):
        pass


def _faults() -> dict[str, Fault]:
    """What rank 0 alone does."""
    import mics

    return {
        "evaluate": _evaluate,
        "skip": _skip_a_step,
        "save": lambda model, *_: mics.save(tempfile.mkdtemp(), model),
        "load": lambda model, *_: mics.load(tempfile.mkdtemp(), model),
        "full_state_dict": lambda model, *_: mics.full_state_dict(model),
        "full_gradients": lambda model, *_: mics.full_gradients(model),
        "full_optimizer_state_dict": lambda model, optimizer, _: mics.full_optimizer_state_dict(
            model, optimizer
        ),
        "clip_grad_norm_": lambda model, *_: mics.clip_grad_norm_(model, 1.0),
        "nonfinite_units": lambda model, *_: mics.nonfinite_units(model),
        "audit_replicas": lambda model, *_: mics.audit_replicas(model),
        "summon_full_params": _summon,
    }


def _train(partition_size: int, fault: str, errors: str = "") -> None:
    """Three steps; in the second, rank 0 alone does something between backward and step."""
    import mics

    mics.comm.liveness._BEAT_SECONDS = 0.2
    rank = dist.get_rank()
    if errors:  # what a rank says that cannot raise
        os.dup2(os.open(f"{errors}/{rank}", os.O_WRONLY | os.O_CREAT), 2)
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    torch.manual_seed(0)
    model = mics.shard(_Drops(), partition_size=partition_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(3):
        batch = tuple(tensor.to(device) for tensor in toys.floats(step, 0, rank))
        if fault == "drop":
            model.dropped = step + rank % 2
        loss = model(*batch)
        loss.backward()
        if step == 1 and rank == 0 and fault != "drop":
            _faults()[fault](model, optimizer, batch)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()


# What the error of every rank says: what rank 0 does, and what the others do.
UNIT = "unit 'layers."
STEP = "the boundary's agreement (optimizer.step)"
CALLS = [
    "save",
    "load",
    "full_state_dict",
    "full_gradients",
    "full_optimizer_state_dict",
    "clip_grad_norm_",
    "nonfinite_units",
    "audit_replicas",
    "summon_full_params",
]
SIZES = [1, 2, 4]
QUICK = {
    ("save", 4),
    ("full_state_dict", 1),
    ("clip_grad_norm_", 2),
    ("evaluate", 1),
}


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks whose collectives fail soon."""
    with RankPool(4, timeout_s=TIMEOUT_S) as pool:
        yield pool


def _check(answers: list[Answer], *said: str, texts: dict[int, str] | None = None) -> None:
    for answer in answers:
        assert answer.error is not None, f"rank {answer.rank} raised nothing"
        message = answer.error.message
        if texts is None:
            assert answer.error.is_a("MicsError"), answer.error
        elif answer.error.type_name == "Died":  # it could not raise, so it printed the same and left
            assert message == "exit code 1", answer.error
            message = texts[answer.rank]
        for part in (*said, "Every rank must make the same calls in the same order"):
            assert part in message, message


@pytest.mark.parametrize("partition_size", tiers.first([2, 1, 4]))
def test_layerdrop_by_rank(pool: RankPool, partition_size: int) -> None:
    """Ranks that leave out different layers: both units are named, where they are gathered or reduced."""
    verb = "reduce" if partition_size == 1 else "gather"
    answers = pool.answers(4, _train, partition_size, "drop", ranks_per_node=4, grace_s=30)
    _check(answers, f"{verb}", f"{UNIT}0'", f"{UNIT}1'", "from the same seed on all of them")
    own = answers[3].error
    assert own is not None and ("rank 3 " in own.message or "and 3 " in own.message), own.message


@pytest.mark.parametrize(
    ("fault", "partition_size"),
    [
        pytest.param(fault, size, marks=() if (fault, size) in QUICK else pytest.mark.full)
        for index, fault in enumerate(["evaluate", "skip", *CALLS])
        for size in SIZES
        # One size each, in turn: seconds are waited for in every case.
        if (fault, size) in QUICK or size == SIZES[(index + 1) % 3]
        if (fault, size) != ("audit_replicas", 4)  # there is no replica, and so no collective
    ],
)
def test_one_rank_goes_another_way(pool: RankPool, fault: str, partition_size: int) -> None:
    """Something that rank 0 does alone: every rank says what it was, and what the others did instead."""
    answers = pool.answers(4, _train, partition_size, fault, ranks_per_node=4, grace_s=30)
    _check(answers, "rank 0", f"(mics.{fault})" if fault in CALLS else UNIT)
    for answer in answers:
        assert answer.error is not None
        assert any(word in answer.error.message for word in (UNIT, STEP)), answer.error.message


def _leave_early() -> None:
    """Ranks other than 0 are through; rank 0 saves."""
    import mics

    model = mics.shard(_Drops(), partition_size=2)
    if dist.get_rank() == 0:
        mics.save(tempfile.mkdtemp(), model)
    else:
        mics.comm.join_world().liveness.close()  # as at the end of a program


@pytest.mark.full
def test_a_call_after_the_others_left(pool: RankPool) -> None:
    """Rank 0 saves when the others are through: the error names the call, and who left without it."""
    error = pool.answers(4, _leave_early, grace_s=30)[0].error
    assert error is not None and error.is_a("CollectiveError"), error
    assert "(mics.save) is called by rank 0 and not by ranks 1, 2 and 3" in error.message, error.message
    assert "ranks 1, 2 and 3 at the end of the program" in error.message, error.message


def _wrapped(partition_size: int) -> list[str]:
    """What DDP, FSDP and the like say to a sharded model, or to a module around it."""
    from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    import mics

    model = mics.shard(toys.Chain(), partition_size=partition_size)
    around = nn.ModuleDict({"model": model, "own": nn.Linear(3, 3)})
    said = []
    for wrapper in (DistributedDataParallel, FullyShardedDataParallel, fully_shard):
        for module in (model, nn.Sequential(around)):
            with pytest.raises(mics.SettingsError) as caught:
                wrapper(module)
            said.append(str(caught.value))
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    return said


@pytest.mark.parametrize("partition_size", [1, 2])
def test_wrappers_around_a_sharded_model(partition_size: int) -> None:
    """DDP and FSDP around a sharded model, or a module that holds one: refused, and it still trains."""
    for said in run_ranks(2, _wrapped, partition_size):
        assert all("Train with the model that mics.shard() returned as it is" in each for each in said)


@pytest.mark.gpu
@pytest.mark.parametrize("partition_size", SIZES)
@pytest.mark.parametrize("fault", ["drop", "evaluate", "skip", "full_state_dict", "clip_grad_norm_", "save"])
def test_over_nccl(fault: str, partition_size: int, tmp_path: Path) -> None:
    """The same over NCCL, where collectives wait: a rank that cannot raise prints it and leaves by itself."""
    with RankPool(4, timeout_s=NCCL_TIMEOUT_S) as pool:
        answers = pool.answers(
            *(4, _train, partition_size, fault, str(tmp_path)),
            ranks_per_node=4,
            backend="nccl",
            grace_s=2 * NCCL_TIMEOUT_S,
        )
        texts = {rank: (tmp_path / str(rank)).read_text() for rank in range(4)}
        _check(answers, f"(mics.{fault})" if fault in CALLS else UNIT, texts=texts)

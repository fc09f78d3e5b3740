"""Hop 2 in a narrower format: half the bytes, sums in float32, replicas that stay equal."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mics
from mics.comm import GroupCollectives, TrafficCounter
from mics.comm.codec import Cast
from mics.engine import engine_of
from tests.ranks import run_ranks

_PRECISION = mics.Precision(replica_reduce_dtype=torch.bfloat16)


def _reduced() -> bool:
    """Every member's chunk rounded once, and added in float32."""
    group = GroupCollectives(dist.group.WORLD, axis="replication", counter=TrafficCounter(), liveness=None)
    rows = [torch.randn(8, generator=torch.Generator().manual_seed(rank)) for rank in range(4)]
    own = rows[dist.get_rank()].clone()
    chunk = own.view(4, -1)[dist.get_rank()]
    group.reduce_together([(chunk, own)], "a test", Cast(torch.bfloat16))
    expected = torch.zeros(2)
    for row in rows:
        expected += row.view(4, -1)[dist.get_rank()].bfloat16().float()
    return torch.equal(chunk, expected)


def test_sums_are_made_in_float32() -> None:
    assert all(run_ranks(4, _reduced))


def _train(precision: mics.Precision, optimizer_sharding: str) -> tuple[list[float], torch.Tensor, int, int]:
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(nn.Linear(24, 24) for _ in range(3)))
    mics.shard(
        model,
        partition_size=2,
        precision=precision,
        optimizer_sharding=optimizer_sharding,  # type: ignore[arg-type]
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(20):
        for batch in mics.microsteps(model, torch.rand(2, 4, 24, generator=generator)):
            loss = (model(batch) - 0.5).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    sent = mics.traffic(model).replication_nbytes
    whole = torch.cat([p.reshape(-1) for p in mics.full_state_dict(model, rank0_only=False).values()])
    engine = engine_of(model)
    shards = torch.cat([unit.param_shard for unit in engine.units])
    every = [torch.empty_like(shards) for _ in range(4)]
    dist.all_gather(every, shards)
    differing = sum(not torch.equal(every[rank], every[rank + 2]) for rank in (0, 1))
    return losses, whole, sent, differing


@pytest.mark.parametrize("optimizer_sharding", ["world", pytest.param("partition", marks=pytest.mark.full)])
def test_training_moves_fewer_bytes_and_stays_close(optimizer_sharding: str) -> None:
    wide = run_ranks(4, _train, mics.Precision(), optimizer_sharding, ranks_per_node=2)[0]
    for narrow in run_ranks(4, _train, _PRECISION, optimizer_sharding, ranks_per_node=2):
        assert narrow[3] == 0, "replicas differ"
        assert 0 < (narrow[1] - wide[1]).abs().max() < 1e-3
    # 4 + 4 bytes an element (float32 parameters) become 2 + 4; an all-reduce of 4 + 4 becomes 2 + 2.
    ratio = {"world": 6 / 8, "partition": 1 / 2}[optimizer_sharding]
    assert narrow[2] == pytest.approx(wide[2] * ratio)


def test_a_wider_format_changes_nothing() -> None:
    """What is accumulated in float32 does not travel in float64."""
    assert mics.Precision(replica_reduce_dtype=torch.float64).dtype_of_hop_2(torch.float32) is torch.float32
    with pytest.raises(mics.SettingsError, match="replica_reduce_dtype"):
        mics.Precision(replica_reduce_dtype=torch.int8)


def _exchanged() -> list[str]:
    """What each member sends to each arrives where a ring would have put it; the sum is that of a ring."""
    rank, size = dist.get_rank(), dist.get_world_size()
    group = GroupCollectives(
        dist.group.WORLD, axis="replication", counter=TrafficCounter(), liveness=None, exchange=True
    )
    wrong = []
    for numel in (1, 7, 1000):
        rows = torch.arange(size * numel, dtype=torch.float32, device="cuda").view(size, -1)
        apart = torch.full_like(rows, -1).view(-1)
        inside = torch.full_like(rows, -1)
        inside[rank] = rows[rank]
        group.gather_together([(apart, rows[rank].clone()), (inside.view(-1), inside[rank])], "a test")
        buffer = rows.clone().view(-1)
        group.reduce_together([(buffer.view(size, -1)[rank], buffer)], "a test")
        found = {"apart": apart.view(size, -1), "inside": inside}
        wrong += [f"{name} {numel}" for name, out in found.items() if not torch.equal(out, rows)]
        if not torch.equal(buffer.view(size, -1)[rank], size * rows[rank]):
            wrong.append(f"sum {numel}")
    return wrong


@pytest.mark.gpu
@pytest.mark.parametrize("size", [2, 4])
def test_an_exchange_by_nccl(size: int) -> None:
    assert run_ranks(size, _exchanged, backend="nccl") == [[]] * size

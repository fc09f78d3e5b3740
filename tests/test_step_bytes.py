"""What a step sends by arithmetic, against what ranks count in a real one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from mics.cost.clusters import assumed_cluster
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import shape_of_config
from mics.cost.step_bytes import step_bytes
from mics.models import GPT, GPTConfig
from tests import tiers
from tests.ranks import run_ranks

_SHAPE = GPTConfig(num_layers=3, num_heads=2, hidden_size=64, vocab_size=256, seq_len=16)
_ACCUMULATION = 2


def _sent(partition_size: int, over_replicas: bool) -> tuple[int, int]:
    """Bytes along both axes, from one first forward to that of the next step."""
    import mics

    torch.manual_seed(0)
    model = mics.shard(
        GPT(_SHAPE),
        partition_size=partition_size,
        optimizer_sharding="world" if over_replicas else "partition",
        prefetch=1,
    )
    optimizer = torch.optim.AdamW(model.parameters())
    generator = torch.Generator().manual_seed(dist.get_rank())
    seen = []
    for _ in range(4):
        batches = torch.randint(256, (_ACCUMULATION, 1, 17), generator=generator)
        for micro_step, rows in enumerate(mics.microsteps(model, batches)):
            loss = model(rows[:, :-1], rows[:, 1:]) / _ACCUMULATION
            if micro_step == 0:
                seen.append(mics.traffic(model))
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    before, after = seen[-2:]
    return (
        after.partition_nbytes - before.partition_nbytes,
        after.replication_nbytes - before.replication_nbytes,
    )


@pytest.mark.parametrize(
    ("partition_size", "over_replicas"), tiers.first([(2, True), (2, False), (1, True), (4, True)], 2)
)
def test_a_step_sends_what_arithmetic_says(partition_size: int, over_replicas: bool) -> None:
    sent = run_ranks(4, _sent, partition_size, over_replicas, ranks_per_node=2)[0]
    setting = Setting(
        model=shape_of_config("gpt", _SHAPE),
        cluster=assumed_cluster(None, num_nodes=2, ranks_per_node=2),
        partition_size=partition_size,
        micro_batch=1,
        accumulation=_ACCUMULATION,
        activations=Keeping(checkpoint=False),
        over_replicas=over_replicas,
        prefetch=1,
    )
    found = step_bytes(setting, param_nbytes=4)
    # Padding is all that arithmetic leaves out.
    assert sent[0] == pytest.approx(found.gathers + found.hop_1, rel=0.02)
    assert sent[1] == pytest.approx(found.hop_2 + found.refresh, rel=0.02)

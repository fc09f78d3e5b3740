"""Checkpoints of models on a GPU, several NCCL ranks sharing it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.checkpoint.runs import STEPS, everything, same
from tests.ranks import run_ranks

pytestmark = pytest.mark.gpu


def _there_and_back(path: str, partition_size: int, wait: bool) -> dict[str, bool]:
    import mics
    from tests import toys

    def made(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = mics.shard(
            toys.Language().cuda(),
            partition_size=partition_size,
            precision=mics.Precision(param_dtype=torch.bfloat16),
        )
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)

    def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
        losses = []
        for step in range(first, last):
            ids, targets, spare = toys.language_batch(step, 0, 0)
            loss = model(ids.cuda(), targets.cuda(), spare)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    model, optimizer = made(0)
    train(model, optimizer, 0, STEPS)
    before = everything(model, optimizer)
    saving = mics.save(path, model, optimizer, {"step": STEPS}, wait=wait)
    after = train(model, optimizer, STEPS, 2 * STEPS)  # changes everything while it is written
    saving.wait()
    random = torch.rand(1, device="cuda")
    other, theirs = made(1)
    mics.load(path, other, theirs)
    return {
        "values": same(before, everything(other, theirs)),
        "losses": after == train(other, theirs, STEPS, 2 * STEPS),
        "random": not torch.equal(random, torch.rand(1, device="cuda")),
    }


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize(("ranks", "partition_size"), [(1, 1), (2, 2), (4, 2)])
def test_there_and_back(tmp_path: Path, ranks: int, partition_size: int, wait: bool) -> None:
    """What was there at the save comes back, also when training went on, and trains on to the bit."""
    for found in run_ranks(ranks, _there_and_back, str(tmp_path / "c"), partition_size, wait, backend="nccl"):
        assert found["values"] and found["losses"], found

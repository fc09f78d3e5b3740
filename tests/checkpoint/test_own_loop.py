"""A user's own loop with a stateful data loader, a gradient scaler and a scheduler, resumed in the middle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from tests.ranks import run_ranks

NUM_STEPS = 8
pytest.importorskip("torchdata")


class Numbers(Dataset[Tensor]):
    """Vectors of numbers that nobody would guess, each by its index alone."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(16, generator=torch.Generator().manual_seed(index))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(3)))
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        return F.mse_loss(self.blocks(self.dropout(x)), x)


def _train(folder: str, *, first: int, resume: bool, wait: bool = False) -> list[float]:
    import torch.distributed as dist
    from torch.utils.data.distributed import DistributedSampler
    from torchdata.stateful_dataloader import StatefulDataLoader

    import mics

    torch.manual_seed(0)
    model = mics.shard(Net(), partition_size=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, NUM_STEPS)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=3)
    data = Numbers()
    # A generator of its own: from the default one each new iterator would draw a number that dropout misses.
    loader = StatefulDataLoader(
        data, batch_size=4, sampler=DistributedSampler(data, seed=1), generator=torch.Generator()
    )
    torch.manual_seed(100 + dist.get_rank())  # dropout of its own on every rank
    state: dict[str, Any] = {"loader": loader, "scheduler": scheduler, "scaler": scaler}
    step = 0
    if resume:
        step = mics.load(folder, model, optimizer, state)["step"]
    assert step == first
    losses = []
    saving = None
    while step < NUM_STEPS:
        for batch in loader:
            loss = model(batch)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            mics.clip_grad_norm_(model, 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scheduler.step()
            step += 1
            losses.append(loss.item())
            if step % 3 == 0:
                saving = mics.save(
                    folder, model, optimizer, {**state, "step": step}, step=step, keep=3, wait=wait
                )
            if step == NUM_STEPS:
                break
    if saving is not None:
        saving.wait()
    return losses


def test_a_loop_with_a_stateful_loader_goes_on_bit_for_bit(tmp_path: Path) -> None:
    """From step 6 of 8, in the middle of the second epoch: every rank's losses are the uninterrupted ones."""
    whole = run_ranks(4, _train, str(tmp_path), kwargs={"first": 0, "resume": False})
    resumed = run_ranks(4, _train, str(tmp_path), kwargs={"first": 6, "resume": True})
    assert len({tuple(losses) for losses in whole}) == 4
    assert resumed == [losses[6:] for losses in whole]

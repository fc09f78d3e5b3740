"""Models that are changed after `mics.shard`: new parts are refused until they are sharded, old ones go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests import toys
from tests.reference import adamw
from tests.test_user_habits import Run, _assert_same


class Tower(nn.Module):
    """Blocks and a head, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((toys.DIM,), 0.9))
        self.blocks = nn.ModuleList(toys.Block() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(toys.DIM), nn.Linear(toys.DIM, toys.DIM))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return toys.mse(self.head(x), target)


def _seeded(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(5)
    return build()


def _replaced_head(run: Run) -> list[Any]:
    """A new head, and a block more, both sharded; then ten steps with everything that spans the model."""
    model = run.shard(Tower())
    run.backward(lambda rank: model(*toys.floats(0, 0, rank)))
    model.head = run.shard(_seeded(lambda: nn.Sequential(nn.Linear(toys.DIM, 5), nn.Linear(5, toys.DIM))))
    model.blocks.append(_seeded(toys.Block))
    run.shard(model.blocks[3])
    model.zero_grad()
    optimizer = adamw(model)
    found: list[Any] = []
    for step in range(10):
        run.backward(lambda rank, step=step: model(*toys.floats(step, 0, rank)))
        found += [run.gradients(model), run.clip(model, 0.5)]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *run.state(model)]


def test_x() -> None:
    _assert_same(_replaced_head, rtol=1e-5, atol=1e-6)

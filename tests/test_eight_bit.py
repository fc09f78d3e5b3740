"""8-bit Adam of torchao and of bitsandbytes on shards: the state of one process, to the bit."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from tests import toys
from tests.compare import assert_trains_like_plain
from tests.ranks import run_ranks
from tests.reference import Outcome, Recipe, Sharding

LIBRARIES = ["torchao", "bitsandbytes"]


class Wide(nn.Module):
    """Matrices of whole blocks and not, smaller and larger than pieces, beside small parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.full((5,), 0.1))  # what follows would begin at 8 elements
        self.up = nn.Linear(64, 80)  # 20 blocks, and on each of 4 ranks fewer than 4,096 elements
        self.down = nn.Linear(80, 67)  # 20 blocks and 240 elements: 8 bits in bitsandbytes alone
        self.table = nn.Parameter(torch.linspace(-1, 1, 4352))  # 17 blocks in one dimension
        self.head = nn.Linear(67, 7)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        scale = 1 + self.table.view(-1, 64).mean(0) * self.start.sum()
        return nn.functional.mse_loss(self.head(self.down(self.up(x * scale).relu()).relu()), target)


def batch(step: int, micro: int, rank: int) -> tuple[Tensor, Tensor]:
    generator = toys.seeded(step, micro, rank)
    return torch.randn(2, 64, generator=generator), torch.randn(2, 7, generator=generator)


def make(library: str, model: nn.Module, kind: str = "AdamW8bit", **options: Any) -> torch.optim.Optimizer:
    """An optimizer of a library, without the compiler, which takes long for each shape."""
    torch.compiler.set_stance("force_eager")
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in trained if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in trained if p.ndim < 2], "weight_decay": 0.0},
    ]
    made: torch.optim.Optimizer = getattr(import_module(f"{library}.optim"), kind)(groups, lr=1e-2, **options)
    return made


@pytest.mark.parametrize("library", LIBRARIES)
def test_trains_as_in_one_process(library: str) -> None:
    """Losses, parameters, codes and scales are equal: shards are cut between blocks."""
    pytest.importorskip(library)
    recipe = Recipe(build=Wide, batch=batch, optimizer=partial(make, library), num_steps=3, accumulation=2)
    shardings = [
        Sharding(partition_size=1),
        Sharding(partition_size=2),
        Sharding(partition_size=2, optimizer_sharding="partition"),
        Sharding(partition_size=4),
    ]
    for outcome in assert_trains_like_plain(recipe, shardings=shardings):
        _check_narrow(library, outcome)


def _check_narrow(library: str, outcome: Outcome) -> None:
    """Large parameters have codes of a byte, and a scale for each 256 elements; small ones have floats."""
    codes, scales = ("exp_avg.codes", "exp_avg.scale") if library == "torchao" else ("state1", "absmax1")
    wide = "exp_avg" if library == "torchao" else "state1"
    state = outcome.optimizer_state
    narrow = {"up.weight", "table"} | ({"down.weight"} if library == "bitsandbytes" else set())
    for name, entries in state.items():
        if name in narrow:
            assert entries[codes].dtype is torch.uint8
            assert len(entries[scales]) == -(-entries[codes].numel() // 256)
            assert entries[codes].unique().numel() > 16
        else:
            assert entries[wide].dtype is torch.float32
            assert scales not in entries
    assert state.keys() == outcome.parameters.keys()

"""Blocks under ``torch.compile``: one graph for all of them, no breaks, the losses of eager training."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch._dynamo.utils import counters

import mics
from mics.models.gpt import GPT, GPTConfig
from tests.ranks import RankPool

_SHAPE = GPTConfig(num_layers=3, num_heads=2, hidden_size=16, vocab_size=32, seq_len=8)


def _train(when: str) -> tuple[list[float], int, int]:
    """Losses, graphs compiled, graph breaks."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = GPT(_SHAPE)
    counter = CompileCounterWithBackend("aot_eager")

    def compile_blocks() -> None:
        for block in model.blocks:
            block.compile(backend=counter)

    if when == "before":
        compile_blocks()
    mics.shard(model, partition_size=2)
    if when == "after":
        compile_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        tokens = (torch.arange(8) + step + dist.get_rank()).view(1, 8)
        for batch in mics.microsteps(model, [tokens, tokens + 1]):
            loss = model(batch, batch)
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    torch._dynamo.reset()
    return losses, counter.frame_count, sum(counters["graph_break"].values())


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of its own: the compiler leaves tensors without memory behind, which other tests would count."""
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(scope="module")
def eager(pool: RankPool) -> list[list[float]]:
    return [found[0] for found in pool.run(2, _train, "never")]


@pytest.mark.parametrize("when", [pytest.param("before", marks=pytest.mark.full), "after"])
def test_compiled_blocks_train_as_eager_ones(when: str, pool: RankPool, eager: list[list[float]]) -> None:
    """Homes are given and units move while the graph stays the same."""
    found = pool.run(2, _train, when)
    for (losses, num_graphs, num_breaks), expected in zip(found, eager, strict=True):
        assert losses == pytest.approx(expected, rel=1e-6)
        assert (num_graphs, num_breaks) == (1, 0)

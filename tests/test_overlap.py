"""With communication beside the computation and without: the same bits, for many steps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import mics
from mics.comm import GroupCollectives
from mics.engine import engine_of
from mics.models.gpt import GPT, GPTConfig
from tests import pairwise, tiers
from tests.ranks import run_ranks

NUM_STEPS = 80
_SHAPE = GPTConfig(num_layers=1, num_heads=2, hidden_size=16, vocab_size=32, seq_len=8, tie_weights=True)

_GPU_SHAPE = GPTConfig(num_layers=6, num_heads=4, hidden_size=128, vocab_size=256, seq_len=64)
_SLOW_CLUSTER = mics.Cluster(
    num_nodes=2,
    ranks_per_node=4,
    intra=mics.Link(bandwidth=5e9, latency=20e-6),
    inter=mics.Link(bandwidth=1e9, latency=50e-6),
)
"""Two nodes, with links slow enough that a missing wait would show."""


def _losses(
    prefetch: int | str,
    partition_size: int,
    *,
    num_steps: int,
    device: str,
    precision: mics.Precision | None = None,
    shape: GPTConfig = _SHAPE,
    guard: Callable[[int], None] = lambda step: None,
) -> list[float]:
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    mics.shard(model, partition_size=partition_size, prefetch=prefetch, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for step in range(num_steps):
        guard(step)
        size = (2, 1, shape.seq_len)
        batches = torch.randint(shape.vocab_size, size, generator=generator)
        if device == "cuda":
            batches = batches.pin_memory().to(device, non_blocking=True)
        for batch in mics.microsteps(model, list(batches)):
            loss = model(batch, batch) / len(batches)
            loss.backward()
            losses.append(loss.detach())
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses).tolist()


def _chain_losses(
    prefetch: int | str, partition_size: int, num_steps: int = NUM_STEPS, num_blocks: int = 2
) -> list[float]:
    torch.manual_seed(0)
    blocks = [torch.nn.Linear(6, 6) for _ in range(num_blocks)]
    model = mics.shard(torch.nn.Sequential(*blocks), partition_size=partition_size, prefetch=prefetch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(num_steps):
        for batch in mics.microsteps(model, [torch.rand(2, 6, generator=generator)]):
            loss = (model(batch) - 0.5).square().mean()
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.full
@pytest.mark.parametrize("partition_size", [1, 2])
def test_many_steps_are_equal_to_the_bit(partition_size: int) -> None:
    """Two replicas, or one over two ranks: every loss of 80 steps on every rank."""
    plain, beside = (run_ranks(2, _chain_losses, prefetch, partition_size) for prefetch in (0, "auto"))
    assert beside == plain
    assert plain[0][-1] < plain[0][0]


def test_two_stages_and_replicas_are_equal_to_the_bit() -> None:
    """Two replicas over two nodes each, accumulation 2: from the third step on at home, in two stages."""
    kwargs = {"num_steps": 5, "device": "cpu", "shape": replace(_SHAPE, num_layers=3, tie_weights=False)}
    plain, *ahead = (
        run_ranks(8, _losses, prefetch, 4, ranks_per_node=2, kwargs=kwargs)
        for prefetch in [0, *tiers.some([1, 3])]
    )
    assert all(found == plain for found in ahead)


def _late_losses(prefetch: int | str, axis: str, kind: str) -> list[float]:
    """As above, with one kind of collective that takes its time before it starts."""
    on_time = getattr(GroupCollectives, kind)

    def late(self: GroupCollectives, *args: Any) -> None:
        if self._calls.axis == axis:
            time.sleep(0.02)
        on_time(self, *args)

    with patch.object(GroupCollectives, kind, late):
        return _chain_losses(prefetch, 2, num_steps=4, num_blocks=5)


@pairwise.parametrize(strength=1, kind=["all_gather", "reduce_scatter"], axis=["partition", "replication"])
def test_whoever_needs_a_result_waits_for_it(axis: str, kind: str) -> None:
    """Two replicas of two ranks, one lane late: a wait that is missing anywhere would show in the losses."""
    plain, beside = (run_ranks(4, _late_losses, prefetch, axis, kind) for prefetch in (0, "auto"))
    assert beside == plain


def _after_evaluation() -> int:
    """Units on their way when a training step begins after an evaluation, beyond those it needs first."""
    model = mics.shard(GPT(replace(_SHAPE, num_layers=5, tie_weights=False)), partition_size=2, prefetch=2)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).view(1, 8)
    engine, left = engine_of(model), []

    def look(*_: object) -> None:
        first = {index for batch in engine.residency.plans.first() for index in batch}
        left.append(sum(unit.is_waiting and unit.spec.index not in first for unit in engine.units))

    model.register_forward_pre_hook(look)
    for step in range(4):
        if step == 3:
            with torch.no_grad():
                model(tokens)  # its end sends for what a backward would need
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return left[-1]


def test_nothing_is_left_on_its_way() -> None:
    """What an evaluation made the plan send for is released when the next forward begins."""
    assert max(run_ranks(2, _after_evaluation)) == 0


def _changing_order() -> float:
    """Blocks in the order of the step's number: the plan is wrong again and again. Sharded against plain."""
    torch.manual_seed(0)
    plain = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(6))

    class Shuffled(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(6, 6) for _ in range(6))

        def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
            for index in order:
                x = torch.tanh(self.blocks[index](x))
            return x.sum()

    models = [Shuffled(), Shuffled()]
    for model in models:
        model.blocks.load_state_dict(plain.state_dict())
    mics.shard(models[0], partition_size=2, prefetch=3)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    orders = [torch.randperm(6, generator=torch.Generator().manual_seed(n)).tolist() for n in range(4)]
    worst = 0.0
    for step in range(12):
        # Two forwards of different orders before one backward, now and then.
        chosen = [orders[step % 4]] + ([orders[(step + 1) % 4][:3]] if step % 3 == 0 else [])
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            loss = sum(model(torch.ones(2, 6), order) for order in chosen)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        worst = max(worst, abs(losses[0] - losses[1]))
    return worst


def test_an_order_that_keeps_changing_stays_right() -> None:
    assert max(run_ranks(2, _changing_order)) < 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize("partition_size", [2, 8])
def test_streams_give_the_same_bits(partition_size: int) -> None:
    """On a GPU as rank 0 of two nodes: every loss of 200 steps."""
    found = []
    for prefetch in (0, 1, "auto"):
        with mics.emulate(_SLOW_CLUSTER):
            found.append(_losses(prefetch, partition_size, num_steps=200, device="cuda", shape=_GPU_SHAPE))
    assert found[0] == found[1] == found[2]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_a_steady_step_never_waits() -> None:
    """Under torch's own check for synchronisation of the host."""

    def guard(step: int) -> None:
        torch.cuda.set_sync_debug_mode("error" if 4 <= step < 10 else "default")

    try:
        with mics.emulate(_SLOW_CLUSTER):
            _losses("auto", 4, num_steps=11, device="cuda", shape=_GPU_SHAPE, guard=guard)
    finally:
        torch.cuda.set_sync_debug_mode("default")

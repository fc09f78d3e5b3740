"""Gradients that are not finite are traced to their unit, with the same answer on all ranks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import mics
from tests import toys
from tests.ranks import run_ranks
from tests.reference import adamw


class _Spoil(torch.autograd.Function):
    """Hands its input through, and back a gradient of ``value`` alone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, value: float) -> Tensor:
        ctx.value = value
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return torch.full_like(grad, ctx.value), None


class _Block(toys.Block):
    """A block whose gain, one element, can be given any gradient."""

    spoiled: float | None = None

    def forward(self, x: Tensor) -> Tensor:
        gain = self.gain if self.spoiled is None else _Spoil.apply(self.gain, self.spoiled)
        return x + gain * self.down(self.up(self.norm(x)))


def _found(
    partition_size: int, optimizer_sharding: str, value: float, bf16: bool
) -> tuple[list[list[str]], float]:
    """Answers: without gradients, for finite ones, before and after clipping, after the step, one step on.

    In the second step the last rank's gradient of the second block's gain is ``value``.
    """
    model = toys.Chain(0)
    model.blocks.extend(_Block() for _ in range(3))
    mics.shard(
        model,
        partition_size=partition_size,
        optimizer_sharding=optimizer_sharding,
        precision=mics.Precision(param_dtype=torch.bfloat16 if bf16 else torch.float32),
    )
    optimizer = adamw(model)
    answers, norm = [mics.nonfinite_units(model)], torch.zeros(())
    for step in range(3):
        is_bad = step == 1 and dist.get_rank() == dist.get_world_size() - 1
        model.blocks[1].spoiled = value if is_bad else None
        optimizer.zero_grad()
        for batch in mics.microsteps(model, [toys.floats(step, 0, dist.get_rank())]):
            model(*batch).backward()
        answers.append(mics.nonfinite_units(model))
        if step == 1:
            norm = mics.clip_grad_norm_(model, 1.0)
            answers.append(mics.nonfinite_units(model))
            optimizer.zero_grad()  # the step is skipped, as a trainer would
            answers.append(mics.nonfinite_units(model))
        else:
            mics.clip_grad_norm_(model, 1.0)
            optimizer.step()
    return answers, norm.item()


@pytest.mark.parametrize("optimizer_sharding", ["world", "partition"])
@pytest.mark.parametrize(("world_size", "partition_size"), [(2, 1), (2, 2), (3, 1), (4, 2), (4, 4)])
def test_the_unit_is_named_on_all_ranks(
    world_size: int, partition_size: int, optimizer_sharding: str
) -> None:
    """A NaN in one element on one rank, which clipping spreads over everything."""
    bad = ["unit 'blocks.1'"]
    for answers, norm in run_ranks(world_size, _found, partition_size, optimizer_sharding, math.nan, False):
        assert answers == [[], [], bad, bad, bad, []]
        assert math.isnan(norm)


@pytest.mark.parametrize("value", [math.inf, -math.inf])
def test_infinities_count(value: float) -> None:
    """And so they do with narrow parameters."""
    bad = ["unit 'blocks.1'"]
    for answers, norm in run_ranks(4, _found, 2, "world", value, True):
        assert answers == [[], [], bad, bad, bad, []]
        assert math.isinf(norm)


def _traffic() -> dict[tuple[str, str], int]:
    model = mics.shard(toys.Chain(3), partition_size=2)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    mics.clip_grad_norm_(model, 1.0)
    before = mics.traffic(model)
    mics.nonfinite_units(model)
    after = mics.traffic(model)
    return {key: number - before.calls[key] for key, number in after.calls.items()}


def test_it_costs_one_small_collective() -> None:
    for calls in run_ranks(4, _traffic):
        assert {key: number for key, number in calls.items() if number} == {("world", "all_reduce"): 1}

"""Lean: memory only while it is needed, and the same bits."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import mics
from mics.contiguous import Contiguous
from mics.engine import engine_of
from mics.plans import Prefetch, make_plan
from tests.ranks import run_ranks

_WIDTH = 24
_BF16 = mics.Precision(param=torch.bfloat16, reduce=torch.float32)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 3 * _WIDTH + 1)
        self.down = nn.Linear(3 * _WIDTH + 1, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks, a frozen one among them, and a head; the loss calls back."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(5))
        self.head = nn.Linear(_WIDTH, 7)
        self.blocks[1].requires_grad_(False)
        self.at_loss: Any = lambda: None

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).float()
        self.at_loss()
        return logits.square().mean()


def _data(step: int) -> Tensor:
    return torch.randn(4, _WIDTH, generator=torch.Generator().manual_seed(step))


def _shard(partition_size: int, *, lean: bool, **options: Any) -> tuple[Stack, torch.optim.Optimizer]:
    model = Stack()
    mics.shard(model, partition_size=partition_size, lean=lean, precision=_BF16, **options)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _storage_nbytes(tensors: list[Tensor]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for pointer, nbytes in found.items() if pointer)


def _at_loss(partition_size: int, optimizer_sharding: str, accumulation: int) -> list[dict[str, int]]:
    """Bytes of a rank's buffers whenever a loss is computed, step after step."""
    model, optimizer = _shard(
        partition_size,
        lean=True,
        optimizer_sharding=optimizer_sharding,
        activations=mics.Activations(),
        prefetch=2,
    )
    engine = engine_of(model)
    found: list[dict[str, int]] = []

    def look() -> None:
        shards = [unit.gradients.shard for unit in engine.units]
        buffers = engine.boundary.reduce_buffers()
        apart = [unit for unit in engine.units if unit.spec.trainable and not unit.spec.casts_masters]
        found.append(
            {
                "gradients": _storage_nbytes([shard for shard in shards if shard is not None]),
                "reduce": _storage_nbytes([t for buffer in buffers for t in (buffer.full, buffer.shard)]),
                "gathered": sum(unit.gathered or unit.is_arriving for unit in engine.units),
                "copies": sum(unit.param_shard.numel() for unit in apart),
            }
        )

    model.at_loss = look
    for step in range(4):
        for micro, batch in enumerate(mics.microsteps(model, [_data(step)] * accumulation)):
            model(batch).backward()
            assert all(unit.gradients.shard is not None for unit in engine.boundary.trainable), micro
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.parametrize(
    ("partition_size", "optimizer_sharding", "casts"),
    [(4, "world", True), (2, "world", False), (2, "partition", True)],
)
def test_little_is_there_while_the_loss_is_computed(
    partition_size: int, optimizer_sharding: str, casts: bool
) -> None:
    """No gradients, no buffers, no second copy of parameters whose masters are here, one unit gathered."""
    for found in run_ranks(4, _at_loss, partition_size, optimizer_sharding, 1, ranks_per_node=2):
        assert all(look["gradients"] == look["reduce"] == 0 for look in found)
        assert all((look["copies"] == 0) == casts for look in found)
        assert [look["gathered"] for look in found[2:]] == [1, 1], "the head"


def test_gradients_of_earlier_micro_steps_stay() -> None:
    for found in run_ranks(2, _at_loss, 2, "world", 3):
        assert all((look["gradients"] > 0) == (number % 3 > 0) for number, look in enumerate(found))
        assert all(look["reduce"] == 0 for look in found)


def _train(lean: bool, partition_size: int, habit: str, poisoned: bool = False) -> list[float]:
    """Losses, norms and a sum over the parameters of a few steps with a user's ``habit``."""
    options: dict[str, Any] = {}
    if habit == "partition":
        options["optimizer_sharding"] = "partition"
    if habit in ("recompute", "offload"):
        options["activations"] = mics.Activations(offload=habit == "offload")
    model, optimizer = _shard(partition_size, lean=lean, **options)
    found: list[float] = []
    held: list[Tensor] = []
    for step in range(5):
        if habit == "late clear":
            loss = model(_data(step))
            optimizer.zero_grad()
            loss.backward()
        else:
            batches = [_data(10 * step + micro) for micro in range(1 + step % 3)]
            for batch in mics.microsteps(model, batches) if step % 2 else batches:
                loss = model(batch)
                loss.backward()
        if habit == "some cleared":
            next(model.parameters()).grad = None
        if habit == "assigned":
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.grad = parameter.grad.clone() * 0.5
        if habit == "held":
            held = [p.grad for p in model.parameters() if p.grad is not None]
        if habit != "not clipped":
            found.append(float(mics.clip_grad_norm_(model, 0.1)))
        optimizer.step()
        if habit == "zeros":
            optimizer.zero_grad(set_to_none=False)
        elif habit != "late clear":
            optimizer.zero_grad()
        if habit == "edits":
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)
        if habit == "evaluates":
            with torch.no_grad():
                found.append(float(model(_data(99))))
        if habit == "loads":
            whole = mics.full_state_dict(model, rank0_only=False)
            model.load_state_dict({name: 0.5 * value for name, value in whole.items()})
        found.append(float(loss.detach()))
    whole = mics.full_state_dict(model, rank0_only=False)
    return [*found, *(float(value.double().sum()) for value in whole.values()), float(len(held) > 0)]


_HABITS = (
    "plain",
    "not clipped",
    "partition",
    "recompute",
    "offload",
    "late clear",
    "some cleared",
    "assigned",
    "held",
    "zeros",
    "edits",
    "evaluates",
    "loads",
)


def _train_with_habits(lean: bool, partition_size: int) -> dict[str, list[float]]:
    make = Contiguous.buffer

    def poisoned(self: Contiguous, dtype: torch.dtype) -> Tensor:
        """Memory that comes a second time has what others left in it."""
        is_new = dtype not in self._buffers
        buffer = make(self, dtype)
        return buffer.fill_(math.nan) if is_new and self._was_released else buffer

    with patch.object(Contiguous, "buffer", poisoned):
        return {habit: _train(lean, partition_size, habit) for habit in _HABITS}


@pytest.mark.parametrize("partition_size", [1, 2, 4])
def test_habits_give_the_same_bits(partition_size: int) -> None:
    """Also where gradients get memory that others have written to."""
    plain, lean = (run_ranks(4, _train_with_habits, lean, partition_size) for lean in (False, True))
    assert all(math.isfinite(value) for values in lean[0].values() for value in values)
    for rank in range(4):
        for habit in _HABITS:
            assert lean[rank][habit] == plain[rank][habit], (rank, habit)


def _edits_of_data() -> list[float]:
    model, _ = _shard(2, lean=True)
    found = []
    with torch.no_grad():
        for factor in (1.0, 0.0):
            for parameter in model.parameters():
                parameter.data.mul_(factor)
            found.append(float(model(_data(0))))
    return found


def test_edits_through_data_are_seen_where_masters_are_gathered() -> None:
    before, after = run_ranks(2, _edits_of_data)[0]
    assert before > after


def test_a_plan_that_does_not_look_past_the_turn() -> None:
    """Neither sends for what the backward needs, nor keeps it, but for its first."""
    order, sizes = (0, 1, 2, 3, 3, 2, 1, 0), dict.fromkeys(range(4), 10)
    plan = make_plan(order, sizes=sizes, prefetch=Prefetch(units=2), past_turn=False)
    assert plan.ahead[:4] == (((1,), (2,)), ((2,), (3,)), ((3,),), ())
    assert plan.ahead[4:] == (((2,), (1,)), ((1,), (0,)), ((0,),), ())
    assert [set(kept) for kept in plan.kept[:4]] == [{1}, {2}, {3}, {3}]


def test_lean_is_the_default_where_activations_are_offloaded() -> None:
    for activations, lean in (
        (None, False),
        (mics.Activations(), False),
        (mics.Activations(offload=True), True),
        (mics.Activations(offload=0.5), True),
    ):
        model = mics.shard(nn.Sequential(nn.Linear(4, 4)), activations=activations)
        assert engine_of(model).boundary._lends_memory == lean
    with pytest.raises(mics.SettingsError, match='lean: expected "auto", True or False'):
        mics.shard(nn.Linear(2, 2), lean="yes")  # type: ignore[arg-type]

"""`low_memory`: memory only while it is needed, and the same bits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from functools import partial, partialmethod
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn
from torch import Tensor

import mics
from mics.choices import Choices
from mics.engine import engine_of
from mics.layout.order import Plans, Prefetch, make_plan
from mics.schedule.events import What
from mics.sharding.contiguous import Contiguous
from mics.sharding.whole import HomeSegment, WholeParameters
from tests import tiers
from tests.ranks import run_expecting_error, run_ranks

_WIDTH = 24
_BF16 = mics.Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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


def _shard(partition_size: int, *, low_memory: bool, **options: Any) -> tuple[Stack, torch.optim.Optimizer]:
    model = Stack()
    mics.shard(model, partition_size=partition_size, low_memory=low_memory, **{"precision": _BF16, **options})
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def _storage_nbytes(tensors: list[Tensor]) -> int:
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(nbytes for pointer, nbytes in found.items() if pointer)


def _at_loss(partition_size: int, optimizer_sharding: str, accumulation: int) -> list[dict[str, int]]:
    """Bytes of a rank's buffers whenever a loss is computed, step after step."""
    model, optimizer = _shard(
        partition_size,
        low_memory=True,
        optimizer_sharding=optimizer_sharding,
        activations=mics.Activations(),
        prefetch=2,
    )
    engine = engine_of(model)
    found: list[dict[str, int]] = []

    def look() -> None:
        shards = [engine.shown.of(unit).shard for unit in engine.hops.units]
        buffers = list(engine.hops.buffers)
        apart = [unit for unit in engine.units if unit.spec.trainable and not unit.spec.casts_masters]
        found.append(
            {
                "gradients": _storage_nbytes([shard for shard in shards if shard is not None]),
                "reduce": _storage_nbytes([t for buffer in buffers for t in (buffer.full, buffer.shard)]),
                "gathered": sum(unit.gathered or unit.is_waiting for unit in engine.units),
                "copies": sum(unit.param_shard.numel() for unit in apart),
            }
        )

    model.at_loss = look
    for step in range(4):
        for micro, batch in enumerate(mics.microsteps(model, [_data(step)] * accumulation)):
            model(batch).backward()
            assert all(engine.shown.of(unit).shard is not None for unit in engine.hops.units), micro
        optimizer.step()
        optimizer.zero_grad()
    return found


def _most_at_once(prefetch: int, checkpoint: str) -> int:
    """Blocks with memory at once, in a backward. The head is tiny and travels with the last of them."""
    model, optimizer = _shard(
        2, low_memory=True, activations=mics.Activations(checkpoint=checkpoint), prefetch=prefetch
    )
    units, most = [unit for unit in engine_of(model).units if unit.spec.name != "head"], 0

    def count(acquire: Any, memory: WholeParameters) -> None:
        nonlocal most
        acquire(memory)
        most = max(most, sum(unit.gathered or unit.is_waiting for unit in units) + 1)

    for step in range(3):
        loss = model(_data(step))
        # What is counted is there when the next unit gets its memory, and that one.
        with patch.object(WholeParameters, "acquire", partialmethod(partial(count, WholeParameters.acquire))):
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return most


@pytest.mark.parametrize("checkpoint", ["unit", "none"])
@pytest.mark.parametrize("prefetch", [1, 2])
def test_a_backward_releases_a_unit_before_it_sends_for_another(prefetch: int, checkpoint: str) -> None:
    """The one at work, and those ahead."""
    assert run_ranks(2, _most_at_once, prefetch, checkpoint) == [prefetch + 1] * 2


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


def _train(low_memory: bool, partition_size: int, habit: str) -> list[float]:
    """Losses, norms and a sum over the parameters of a few steps with a user's ``habit``."""
    options: dict[str, Any] = {}
    if habit == "partition":
        options["optimizer_sharding"] = "partition"
    if habit in ("recompute", "offload"):
        options["activations"] = mics.Activations(offload=habit == "offload")
    model, optimizer = _shard(partition_size, low_memory=low_memory, **options)
    found: list[float] = []
    held: list[Tensor] = []
    for step in range(3):
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


def _train_with_habits(
    low_memory: bool, partition_size: int, habits: Sequence[str]
) -> dict[str, list[float]]:
    make = Contiguous.buffer

    def poisoned(self: Contiguous, dtype: torch.dtype) -> Tensor:
        """Memory that comes a second time has what others left in it."""
        is_new = dtype not in self._buffers
        buffer = make(self, dtype)
        return buffer.fill_(math.nan) if is_new and self._was_released else buffer

    with patch.object(Contiguous, "buffer", poisoned):
        return {habit: _train(low_memory, partition_size, habit) for habit in habits}


@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_habits_give_the_same_bits(world_size: int) -> None:
    """With one replica and two, also where gradients get memory that others have written to."""
    habits = tiers.some(_HABITS, 2)
    plain, low_memory = (
        run_ranks(world_size, _train_with_habits, low_memory, 2, habits) for low_memory in (False, True)
    )
    assert all(math.isfinite(value) for values in low_memory[0].values() for value in values)
    for rank in range(world_size):
        for habit in habits:
            assert low_memory[rank][habit] == plain[rank][habit], (rank, habit)


def _edits_of_data() -> list[float]:
    model, _ = _shard(2, low_memory=True)
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


def test_a_plan_that_stops_at_the_turn() -> None:
    """Neither sends for what the backward needs, nor keeps it, but for its first."""
    order, sizes = (0, 1, 2, 3, 3, 2, 1, 0), dict.fromkeys(range(4), 10)
    plan = make_plan(order, sizes=sizes, prefetch=Prefetch(units=2), turn=4)
    assert plan.ahead[:4] == (((1,), (2,)), ((2,), (3,)), ((3,),), ())
    assert plan.ahead[4:] == (((2,), (1,)), ((1,), (0,)), ((0,),), ())
    assert [set(kept) for kept in plan.kept[:4]] == [{1}, {2}, {3}, {3}]
    plans = Plans(Prefetch(units=2), sizes=sizes, stops_at_turn=True)
    twice = (0, 1, 0, 1, 2, 2, 1, 0)  # units that a forward uses again are no turn
    for _ in range(2):
        plans.begin()
        sent = [plans.advance(unit, in_backward=position > 4) for position, unit in enumerate(twice)]
    assert [len(batches) for batches in sent] == [2, 2, 2, 1, 0, 2, 1, 0]


def _in_blocks(policy: mics.Activations, share: float) -> list[list[int]]:
    """Reduce buffers when a block's own backward begins, and right after its reduction.

    But for the buffer of the head, which is tiny and waits for the next unit.
    """
    model = Stack()
    mics.shard(model, partition_size=2, low_memory=True, precision=_BF16, activations=policy)
    hops = engine_of(model).hops
    head = next(unit for unit in hops.units if hops.buffers.is_tiny(unit.spec))
    hops._reduction_share = lambda rows: share
    in_block: list[int] = []
    after: list[int] = []

    def num_large() -> int:
        return sum(buffer.full.numel() > _WIDTH * _WIDTH for buffer in hops.buffers)

    reduced = engine_of(model).autograd._events[What.GRADIENTS_READY]
    reduced.append(lambda event: after.append(num_large()) if event.unit is not head else None)
    for block in model.blocks[:-1]:
        block.down.register_full_backward_hook(lambda *_: in_block.append(num_large()))
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(3):
        model(_data(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [in_block, after]


@pytest.mark.parametrize("policy", [mics.Activations(), mics.Activations(offload=True)])
def test_reduce_buffers_go_when_reductions_are_quick(policy: mics.Activations) -> None:
    """At once if it is quick, else not before the forward."""
    for share, stays in ((0.01, False), (0.5, True)):
        for found in run_ranks(2, _in_blocks, policy, share):
            assert all((num > 0) == stays for nums in found for num in nums), share


def _rows_of_steps() -> list[int]:
    # In float32: after bfloat16 of more rows some builds of torch multiply float32 differently from then on.
    model, optimizer = _shard(2, low_memory=True, precision=mics.Precision(param_dtype=torch.float32))
    found = []
    for size in (1, 1, 1, 3, 2):
        model(_data(0).repeat(size, *[1] * (_data(0).dim() - 1))).backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(engine_of(model).progress.rows)
    return found


def test_what_is_lent_follows_the_largest_batch() -> None:
    """Also when it comes after the plan is final."""
    first, _, third, fourth, fifth = run_ranks(2, _rows_of_steps)[0]
    assert third == first > 0 and fourth == fifth == 3 * first


def _lending(share: float | None, partition_size: int) -> list[float]:
    """Losses and parameters of accumulated steps, with a cost model that says so of reductions."""
    options: dict[str, Any] = {"activations": mics.Activations(offload=True)}
    with patch.object(Choices, "reduction_share", lambda self, rows: share):
        model, optimizer = _shard(partition_size, low_memory=share is not None, **options)
    found = []
    for step in range(3):
        for batch in mics.microsteps(model, [_data(2 * step), _data(2 * step + 1)]):
            loss = model(batch)
            loss.backward()
            found.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    whole = mics.full_state_dict(model, rank0_only=False)
    return [*found, *(float(value.double().sum()) for value in whole.values())]


@pytest.mark.parametrize(
    ("world_size", "partition_size"),
    [(4, 4), *(pytest.param(*sizes, marks=pytest.mark.full) for sizes in [(4, 2), (6, 3)])],
)
def test_lent_buffers_give_the_same_bits(world_size: int, partition_size: int) -> None:
    """Over two nodes in two stages, with replicas, with accumulation, and chunks of uneven parameters."""
    plain, *lent = (
        run_ranks(world_size, _lending, share, partition_size, ranks_per_node=world_size // 2)
        for share in (None, 0.0, 0.5)
    )
    for found in lent:
        assert found == plain


def _put_aside(announced: bool) -> float:
    model, optimizer = _shard(2, low_memory=True)
    for batch in mics.microsteps(model, [_data(0)]) if announced else [_data(0)]:
        model(batch).backward()
    grads = [parameter.grad for parameter in model.parameters()]
    optimizer.zero_grad()
    with torch.no_grad():
        model(_data(1))
    for parameter, grad in zip(model.parameters(), grads, strict=True):
        parameter.grad = grad
    return float(mics.clip_grad_norm_(model, 1.0))


def test_gradients_that_are_put_aside_before_hop_2_are_not_used_after_a_forward() -> None:
    """After hop 2 they may be."""
    norms = run_ranks(4, _put_aside, True)
    assert len(set(norms)) == 1 and norms[0] > 0
    for error in run_expecting_error(4, _put_aside, False):
        assert "kept aside" in str(error)


def _with_hooks(low_memory: bool, when: str) -> list[float]:
    model, optimizer = _shard(2, low_memory=low_memory)
    found: list[float] = []

    def clear_and_evaluate(*_: Any) -> None:
        optimizer.zero_grad()
        with torch.no_grad():
            found.append(float(model(_data(9))))

    register = optimizer.register_step_pre_hook if when == "before" else optimizer.register_step_post_hook
    register(clear_and_evaluate)
    for step in range(3):
        loss = model(_data(step))
        loss.backward()
        optimizer.step()
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("when", ["before", "after"])
def test_hooks_of_the_optimizer_may_clear_and_evaluate(when: str) -> None:
    assert run_ranks(2, _with_hooks, True, when) == run_ranks(2, _with_hooks, False, when)


def _clamped_through_data(low_memory: bool) -> list[float]:
    model, optimizer = _shard(2, low_memory=low_memory, optimizer_sharding="partition")
    found = []
    for step in range(4):
        loss = model(_data(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        for parameter in model.parameters():
            parameter.data.mul_(0.5)
        with torch.no_grad():
            found.append(float(model(_data(7))))
    return found


def test_edits_through_data_are_seen_on_all_replicas() -> None:
    first, second = (run_ranks(4, _clamped_through_data, True) for _ in range(2))
    assert first == second
    assert all(rank == first[0] for rank in first)
    assert first[0][-1] < 0.1 * first[0][0], "halved four times"


class _Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(_WIDTH, _WIDTH)
        self.b = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.a(x))


def _edited_between_evaluations() -> list[float]:
    model = _Two()
    mics.shard(model, partition_size=2, units=[nn.Linear], low_memory=True, precision=_BF16, prefetch=2)
    found = []
    with torch.no_grad():
        for factor in (1.0, 1.0, 0.0, 1.0):
            for parameter in model.b.parameters():
                parameter.data.mul_(factor)
            found.append(float(model(_data(0)).float().abs().sum()))
    return found


def test_what_an_evaluation_kept_is_not_used_by_the_next() -> None:
    for found in run_ranks(2, _edited_between_evaluations):
        assert found[0] == found[1] > 0.0 == found[2] == found[3]


def test_it_is_the_default_where_activations_are_offloaded() -> None:
    for activations, low_memory in (
        (None, False),
        (mics.Activations(), False),
        (mics.Activations(offload=True), True),
        (mics.Activations(offload_fraction=0.5), True),
    ):
        blocks = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        model = mics.shard(blocks, activations=activations)
        assert engine_of(model).hops.lends_memory == low_memory
    for wrong in ("yes", 1, 0, None):
        with pytest.raises(mics.SettingsError, match='low_memory: expected "auto", True or False'):
            mics.shard(nn.Linear(2, 2), low_memory=wrong)  # type: ignore[arg-type]


def _out_of_memory() -> tuple[int, list[float]]:
    """Steps in which a freed part of the arena gets no memory, each followed by one that goes through."""
    model, optimizer = _shard(2, low_memory=True, prefetch=1)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = model(_data(number))
        loss.backward()
        optimizer.step()
        return float(loss.item())

    for number in range(4):
        step(number)
    num_failed, losses, enter = 0, [], HomeSegment.enter
    for when in (1, 2, 5, 8):
        calls = 0

        def fails(segment: HomeSegment, when: int = when) -> None:
            nonlocal calls
            calls += 1
            if calls == when:
                raise MemoryError
            enter(segment)

        with patch.object(HomeSegment, "enter", fails), suppress(MemoryError):
            optimizer.zero_grad()
            model(_data(0)).backward()
            continue
        num_failed += 1
        losses.append(step(when))
    assert all(unit.whole.at_home for unit in engine_of(model).units if unit.whole.has_home)
    return num_failed, losses


def test_memory_that_runs_out_leaves_homes_free() -> None:
    """A program that catches it goes on, with units at home."""
    (num_failed, losses), (_, others) = run_ranks(2, _out_of_memory)
    assert num_failed == 4
    assert losses == others and all(map(math.isfinite, losses))

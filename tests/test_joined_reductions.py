"""Units whose reductions are all latency are reduced together: fewer collectives, and the same bits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

import mics
from mics.choices import Choices
from mics.cost.auto import latency_nbytes, move_seconds
from mics.cost.clusters import PRESETS
from mics.cost.collectives import Kind, Span
from mics.engine import engine_of
from mics.gradients.hops import Hops, Joining
from mics.gradients.reduce_buffers import ReduceBuffers
from mics.gradients.shards import GradState
from mics.models import GPT, GPTConfig
from mics.schedule.events import What
from tests import pairwise, tiers, toys
from tests.ranks import run_ranks

_APART, _TOGETHER = Joining(), Joining(hop_1_nbytes=1 << 30, hop_2_nbytes=1 << 30)


class Layer(nn.Module):
    """About 10 KB."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(x))


class ManyLayers(nn.Module):
    def __init__(self, *, num_layers: int = 30, vocab_size: int = 4096, dim: int = 50) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(vocab_size, dim)
        self.layers = nn.ModuleList(Layer(dim) for _ in range(num_layers))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@contextmanager
def _joining(joining: Joining | None, *, roomy: bool = False) -> Iterator[None]:
    """Models that are sharded inside join units as ``joining`` says. ``roomy``: many fit into a buffer."""
    numels = ReduceBuffers._numels

    def many(self: ReduceBuffers, kind: Any) -> tuple[int, int]:
        numel, shard_numel = numels(self, kind)
        return 16 * numel, 16 * shard_numel

    with ExitStack() as stack:
        if joining is not None:
            stack.enter_context(patch.object(Choices, "joining", lambda self: joining))
        if roomy:
            stack.enter_context(patch.object(ReduceBuffers, "_numels", many))
        yield


# ---------------------------------------------------------------------------------------------
# Fewer collectives
# ---------------------------------------------------------------------------------------------


def _steady(
    joining: Joining | None, partition_size: int, announced: bool, sharding: str, **settings: Any
) -> tuple[Counter[tuple[str, str]], Counter[tuple[str, str]]]:
    """Calls and bytes of a steady step of two micro-steps, on an emulated cluster."""
    with mics.emulate("p4d.24xlarge:8"), _joining(joining):
        model = ManyLayers()
        mics.shard(
            model, partition_size=partition_size, optimizer_sharding=sharding, units=[Layer], **settings
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        batches = [torch.arange(8).view(2, 4)] * 2
        for _ in range(4):
            before = mics.traffic(model)
            for batch in mics.microsteps(model, batches) if announced else batches:
                model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
            after = mics.traffic(model)
    calls, nbytes = Counter(after.calls), Counter(after.nbytes)
    calls.subtract(before.calls)
    nbytes.subtract(before.nbytes)
    return calls, nbytes


@pytest.mark.parametrize(
    ("sharding", "partition_size"),
    tiers.first([("world", 8), ("partition", 16), ("world", 16), ("partition", 8)]),
)
def test_many_tiny_units_are_few_collectives(partition_size: int, sharding: str) -> None:
    """Thirty layers and an embedding: one hop 1 a micro-step, and one hop 2. Gathers and bytes stay."""
    calls, nbytes = _steady(None, partition_size, True, sharding)
    before, nbytes_before = _steady(_APART, partition_size, True, sharding)
    hop_2 = "reduce_scatter" if sharding == "world" else "all_reduce"
    assert before["partition", "reduce_scatter"] == 62 and before["replication", hop_2] == 31
    assert calls["partition", "reduce_scatter"] == 2 and calls["replication", hop_2] == 1
    assert calls["partition", "all_gather"] == before["partition", "all_gather"]
    assert nbytes == nbytes_before


@pytest.mark.parametrize("low_memory", tiers.first([False, True]))
def test_without_an_announcement_only_hop_1_is_joined_here(low_memory: bool) -> None:
    """What crosses replicas at the boundary goes in batches of its own."""
    calls, nbytes = _steady(None, 8, False, "world", low_memory=low_memory)
    before, nbytes_before = _steady(_APART, 8, False, "world", low_memory=low_memory)
    assert calls["partition", "reduce_scatter"] == 2
    assert calls["replication", "reduce_scatter"] == before["replication", "reduce_scatter"]
    assert nbytes == nbytes_before


def test_nothing_waits_where_everything_runs_at_once() -> None:
    """Without lanes (``prefetch=0``) each unit is reduced where its gradients come."""
    calls, _ = _steady(None, 8, True, "world", prefetch=0)
    assert calls["partition", "reduce_scatter"] == 62


@pytest.mark.parametrize("cluster", sorted(PRESETS))
@pytest.mark.parametrize("partition_size", [8, 64])
def test_blocks_that_are_alike_never_wait(cluster: str, partition_size: int) -> None:
    """Whatever the network: after each block's backward its reduction is on its way, as if alone."""
    config = GPTConfig(num_layers=4, num_heads=2, hidden_size=64, vocab_size=786, seq_len=16)
    with mics.emulate(f"{cluster}:16"):
        model = mics.shard(GPT(config), partition_size=partition_size)
        engine = engine_of(model)
        sent: list[int] = []
        send = Hops._send_batch

        def watch(self: Hops) -> None:
            if self._batch is not None:
                sent.append(sum(not self.buffers.is_tiny(one.unit.spec) for one in self._batch.gradients))
            send(self)

        after: list[bool] = []
        engine.events[What.GRADIENTS_READY].append(
            lambda event: after.append(
                engine.hops._batch is None or engine.hops.buffers.is_tiny(event.unit.spec)
            )
        )
        tokens = torch.zeros(1, 8, dtype=torch.int64)
        with patch.object(Hops, "_send_batch", watch):
            model(tokens, tokens).backward()
        assert all(after) and set(sent) <= {0, 1} and sum(sent) >= config.num_layers


def test_the_size_is_where_latency_is_half_of_the_time() -> None:
    """In one ring and in two stages."""
    cluster = PRESETS["p4d.24xlarge"]
    span = Span(size=16, num_nodes=2, on_a_node=8)
    for two_stage in (False, True):
        nbytes = latency_nbytes(cluster, span, Kind.REDUCE_SCATTER, two_stage=two_stage)
        seconds = partial(move_seconds, cluster, Kind.REDUCE_SCATTER, span, two_stage=two_stage)
        assert seconds(nbytes) == pytest.approx(2 * seconds(0), rel=0.01)


# ---------------------------------------------------------------------------------------------
# The same bits
# ---------------------------------------------------------------------------------------------


_MODELS: dict[str, tuple[Any, Any, Any]] = {
    "tied, frozen, at times unused": (
        partial(toys.Language, num_blocks=3),
        toys.language_batch,
        lambda model, batch: model(*batch),
    ),
    "skipped": (toys.SkippedBlock, toys.skip_by_step, lambda model, batch: model(*batch)),
    "called twice": (toys.CalledTwice, toys.floats, lambda model, batch: model(*batch)),
    "two backwards": (toys.Plain, toys.floats, toys.two_backwards),
    "three losses": (partial(toys.Chain, 3), toys.floats, toys.three_losses),
    "recomputed": (
        partial(toys.CheckpointAround, reentrant=False),
        toys.floats,
        lambda model, batch: model(*batch),
    ),
    "recomputed, reentrant": (
        partial(toys.CheckpointAround, reentrant=True),
        toys.floats,
        lambda model, batch: model(*batch),
    ),
    "mixed formats": (toys.MixedDtypes, toys.floats, lambda model, batch: model(*batch)),
}


def _trained(
    name: str, joining: Joining, announced: bool, scaler: bool, **settings: Any
) -> tuple[list[Tensor], int]:
    """Masters after three steps, and the most units that one collective took."""
    build, batch_of, loss_of = _MODELS[name]
    torch.manual_seed(0)
    most = 0
    send = Hops._send_batch

    def watch(self: Hops) -> None:
        nonlocal most
        most = max(most, len(self._batch.gradients) if self._batch is not None else 0)
        send(self)

    with _joining(joining, roomy=True), patch.object(Hops, "_send_batch", watch):
        model = mics.shard(build(), **settings)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scale = torch.amp.GradScaler("cpu", enabled=scaler, init_scale=64.0)
        for step in range(3):
            batches = [batch_of(step, micro, dist.get_rank()) for micro in range(2)]
            for batch in mics.microsteps(model, batches) if announced else batches:
                scale.scale(loss_of(model, batch)).backward()
            scale.unscale_(optimizer)
            mics.clip_grad_norm_(model, 1.0)
            scale.step(optimizer)
            scale.update()
            optimizer.zero_grad()
        engine = engine_of(model)
        engine.mesh.lanes.drain()
    return [unit.master.detach().clone() for unit in engine.units], most


_SHARDED: dict[str, dict[str, Any]] = {
    "two groups": {"partition_size": 2},
    "two groups, low memory": {"partition_size": 2, "low_memory": True},
    "two groups, replicated masters": {"partition_size": 2, "optimizer_sharding": "partition"},
    "two stages": {"partition_size": 4},
}


_JOINED = [
    (name, sharded, (model + way) // 2 % 2 == 0)
    for model, name in enumerate(_MODELS)
    for way, sharded in enumerate(_SHARDED)
    if (model + way) % 2 == 0  # half of the ways for each model
]
_ORDER = [0, 2, 13, 7, 4, 8, 10, 14, 9, 15]  # each way once, then each model once, and two more


@pytest.mark.parametrize(
    ("name", "sharded", "announced"),
    tiers.first([_JOINED[index] for index in sorted(range(16), key=lambda i: (*_ORDER, i).index(i))], 4, 10),
)
def test_joined_reductions_give_the_same_bits(name: str, sharded: str, announced: bool) -> None:
    """Over gloo in float32, with accumulation and clipping: two partition groups, and one of two stages."""
    args, settings = (announced, announced), _SHARDED[sharded]
    together = run_ranks(4, _trained, name, _TOGETHER, *args, ranks_per_node=2, kwargs=settings)
    apart = run_ranks(4, _trained, name, _APART, *args, ranks_per_node=2, kwargs=settings)
    for (joined, most), (alone, _) in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(joined, alone, strict=True))
        if list(settings) == ["partition_size"]:
            assert most > 1  # or nothing was shown


# ---------------------------------------------------------------------------------------------
# Whoever needs gradients does not wait for more
# ---------------------------------------------------------------------------------------------


def _read_in_backward(joining: Joining) -> list[float]:
    """What a hook in the middle of a backward finds in the gradients of a block that is through."""
    torch.manual_seed(0)
    with _joining(joining, roomy=True):
        model = mics.shard(toys.Chain(3), partition_size=2)
    found: list[float] = []
    gradient = model.blocks[2].up.weight

    def read(*_: object) -> None:
        assert gradient.grad is not None
        found.append(gradient.grad.norm().item())

    model.blocks[0].norm.register_full_backward_hook(read)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    found.append(model.blocks[1].up.weight.grad.norm().item())
    return found


def test_a_hook_may_read_a_gradient_that_waits() -> None:
    together, apart = (run_ranks(4, _read_in_backward, joining) for joining in (_TOGETHER, _APART))
    assert together == apart and len(together[0]) == 2 and min(together[0]) > 0


def _after_a_failure(joining: Joining, error: type[BaseException], announced: bool) -> list[Tensor]:
    """Gradients of a step after one whose backward was broken off while units waited."""
    torch.manual_seed(0)
    with _joining(joining, roomy=True):
        model = mics.shard(toys.Chain(4), partition_size=2)

    def fail(*_: object) -> None:
        raise error("of the user")

    handle = model.blocks[1].register_full_backward_hook(fail)
    batches = [toys.floats(0, 0, dist.get_rank())]
    for batch in mics.microsteps(model, batches) if announced else batches:
        loss = model(*batch)
        with pytest.raises(error, match="of the user"):
            loss.backward()
    handle.remove()
    hops = engine_of(model).hops
    assert (hops._batch is not None) == (joining == _TOGETHER)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    for step in range(2):
        model(*toys.floats(step, 1, dist.get_rank())).backward()
        assert hops._batch is None and not hops._crossing
        states = {engine_of(model).shown.of(unit).state for unit in hops.units}
        assert states == {GradState.PARTIAL}
        optimizer.step()
        optimizer.zero_grad()
    return [unit.master.detach().clone() for unit in engine_of(model).units]


@pairwise.parametrize(strength=1, error=[ValueError, KeyboardInterrupt], announced=[True, False])
def test_a_backward_that_is_broken_off_leaves_nothing(error: type[BaseException], announced: bool) -> None:
    """By an error or by Ctrl-C, on all ranks: what waited is not counted in the next step."""
    together, apart = (
        run_ranks(4, _after_a_failure, joining, error, announced) for joining in (_TOGETHER, _APART)
    )
    for joined, alone in zip(together, apart, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(joined, alone, strict=True))


def _kept_buffers() -> list[int]:
    """Elements of the largest reduce buffer after each unit, where buffers are freed at once."""
    with _joining(Joining(hop_1_nbytes=1 << 30)):
        model = mics.shard(ManyLayers(num_layers=4), partition_size=2, units=[Layer], low_memory=True)
    hops = engine_of(model).hops
    hops._reduction_share = lambda rows: 0.0
    found: list[int] = []
    model.layers[0].linear.register_full_backward_hook(
        lambda *_: found.append(max((buffer.full.numel() for buffer in hops.buffers), default=0))
    )
    model(torch.arange(8).view(2, 4)).backward()
    found.append(sum(buffer.full.numel() for buffer in hops.buffers))
    return found


def test_low_memory_keeps_only_the_buffer_of_tiny_units() -> None:
    for waiting, after in run_ranks(2, _kept_buffers):
        layer = 50 * 50 + 50
        assert layer <= waiting < 8 * layer
        assert after in (0, waiting)

"""Memory per rank is a sum of named terms; each is read off the real tensors."""

from __future__ import annotations

import gc
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn as nn

import mics
from mics.choices import Choices
from mics.cost.clusters import find_cluster
from mics.engine import engine_of
from mics.models import GPT, GPTConfig
from tests import pairwise, tiers
from tests.ranks import run_ranks


class Block(nn.Module):
    """A block of two matrices that do not divide evenly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 3 * width + 1)
        self.down = nn.Linear(3 * width + 1, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class Stack(nn.Module):
    """Blocks that can be inspected while one of them runs."""

    def __init__(self, width: int, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def _storage_nbytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of distinct memory behind ``tensors``."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def _has_memory(tensor: torch.Tensor) -> bool:
    """Not so: wrappers (their parts are tensors too), and what a compiler left on this rank of the pool."""
    try:
        tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):  # no storage of its own, or none at all
        return False
    return True


def _live_nbytes() -> int:
    """Bytes of distinct memory behind every tensor of this process."""
    for _ in range(3):  # an optimizer's end is what lets go of its model: cycles die in turn
        gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, torch.Tensor) and o.device.type == "cpu"]
    return _storage_nbytes([tensor for tensor in tensors if _has_memory(tensor)])


def _train_and_measure(
    partition_size: int, optimizer_sharding: str, width: int, num_blocks: int, prefetch: int
) -> dict[str, float]:
    before = _live_nbytes()
    model = Stack(width, num_blocks)
    mics.shard(
        model,
        partition_size=partition_size,
        optimizer_sharding=optimizer_sharding,
        precision=mics.Precision(param_dtype=torch.bfloat16),
        prefetch=prefetch,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    engine = engine_of(model)
    peak_gathered = 0

    def gathered_now(*_: object) -> None:
        nonlocal peak_gathered
        peak_gathered = max(peak_gathered, _storage_nbytes([u.whole.flat for u in engine.units]))

    for block in model.blocks:
        block.up.register_forward_hook(gathered_now)
        block.up.register_full_backward_hook(gathered_now)
    for _ in range(3):
        model(torch.randn(2, width)).float().sum().backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    engine.mesh.lanes.drain()  # what the next step would begin with is on its way, and holds its memory
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    scalars = [t for state in optimizer.state.values() for t in state.values() if t.dim() == 0]
    units = engine.units
    buffers = list(engine.hops.buffers)
    terms = {
        "params": _storage_nbytes([u.param_shard for u in units]),
        "masters": _storage_nbytes([u.master for u in units]),
        "grads": _storage_nbytes([engine.shown.of(u).shard for u in units]),
        "moments": sum(t.shape.numel() * t.element_size() for t in moments),
        "reduce": _storage_nbytes([t for b in buffers for t in (b.full, b.shard)]),
        "staging": engine.mesh.staging_nbytes(),
        "moves": 0 if engine.step.moved is None else engine.step.moved.nbytes,
        "gathered_after_step": _storage_nbytes([u.whole.flat for u in units if u.whole.is_own]),
    }
    named = sum(terms.values()) + _storage_nbytes(scalars)
    return terms | {
        "peak_gathered": peak_gathered,
        "unnamed": _live_nbytes() - before - named,
        "numel": sum(u.spec.layout.params_numel for u in units),
        "padded_numel": sum(u.spec.layout.numel for u in units),
        "largest_numel": max(u.spec.layout.numel for u in units),
        "num_params": sum(len(u.shards) for u in units),
    }


@pairwise.parametrize(
    strength=1,
    full_strength=2,
    sizes=[(4, 2), (4, 4), (6, 3), (4, 1)],
    optimizer_sharding=["world", "partition"],
    prefetch=[0, 2],
)
def test_every_term_equals_its_formula(
    sizes: tuple[int, int], optimizer_sharding: str, prefetch: int
) -> None:
    """2P/p parameters, 4P/p gradients, 12P/(pR) or 12P/p optimizer; units gathered and on their way; buffers.

    One gathered unit without prefetch; with it homes for those ahead. A reduce buffer for each stage.
    """
    world_size, partition_size = sizes
    results = run_ranks(
        world_size, _train_and_measure, partition_size, optimizer_sharding, 37, 5, prefetch, ranks_per_node=2
    )
    replicas = world_size // partition_size
    for terms in results:
        padded = terms["padded_numel"]
        over = partition_size * (replicas if optimizer_sharding == "world" else 1)
        assert terms["params"] == 2 * padded / partition_size
        assert terms["grads"] == 4 * padded / partition_size
        assert terms["masters"] == 4 * padded / over
        # Moments exist for parameters' elements, not for padding, so they lie a little below 8P/(pR).
        assert 8 * padded / over - 8 * (padded - terms["numel"]) <= terms["moments"] <= 8 * padded / over
        if partition_size > 1:
            # Homes for the one at work and those ahead; one more for the first block, whose input needs no
            # gradient, so that nobody sees its backward end. Without prefetch none stays.
            unit_nbytes = 2 * terms["largest_numel"]
            homes = (2 + prefetch) * -(-unit_nbytes // 512) * 512
            assert terms["gathered_after_step"] == (homes if prefetch else 0)
            assert terms["peak_gathered"] == (homes if prefetch else unit_nbytes)
        num_buffers = 2 if prefetch and partition_size == 4 else 1  # four ranks on two nodes: two stages
        assert terms["reduce"] == num_buffers * 4 * terms["largest_numel"] * (1 + 1 / partition_size)
        # Units with a large parameter begin, and are cut, at multiples of 256.
        assert padded <= terms["numel"] + terms["num_params"] * 256 + 256 * world_size * 5


@pytest.mark.parametrize("partition_size", [2, pytest.param(4, marks=pytest.mark.full)])
def test_nothing_else_grows_with_the_model(partition_size: int) -> None:
    """Bytes of live tensors beyond the named terms do not depend on the width of the model."""
    unnamed = [
        run_ranks(4, _train_and_measure, partition_size, "world", width, 4, 2, ranks_per_node=2)[0]["unnamed"]
        for width in (24, 96)
    ]
    # Activations of two samples (the width, in float32) are all that may differ.
    assert abs(unnamed[1] - unnamed[0]) < 64 * (96 - 24)


_WIRES = (
    mics.Precision(),
    mics.Precision(param_dtype=torch.bfloat16),
    mics.Precision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, replica_reduce_dtype=torch.bfloat16
    ),
)


def _arena(
    tied: bool, num_frozen: int, activations: mics.Activations | None, low_memory: bool
) -> tuple[int | None, ...]:
    config = GPTConfig(
        vocab_size=512, num_layers=6, num_heads=2, hidden_size=64, seq_len=16, tie_weights=tied
    )
    model = GPT(config)
    if num_frozen:
        for module in (model.embedding, model.positions, *model.blocks[:num_frozen]):
            if module is not None:
                module.requires_grad_(False)
    with patch.object(Choices, "room", lambda choices: 1e12):  # the loss needs none of the arena
        mics.shard(model, partition_size=2, activations=activations, low_memory=low_memory)
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    for _ in range(6):
        model(torch.randint(0, 512, (2, 16))).float().logsumexp(-1).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    term = mics.memory_report(model, show=False)["gathered units"]
    return term.predicted, term.measured


@pairwise.thin(
    "tied, num_frozen, activations, low_memory",
    [
        (tied, num_frozen, activations, low_memory)
        for number, (tied, num_frozen) in enumerate([(False, 0), (True, 0), (False, 1), (False, 4)])
        for activations in [None, mics.Activations()]
        for low_memory in [False, True]
        if (activations is None) == (low_memory == (number % 2 == 0))  # all pairs meet
    ],
    strength=1,
)
def test_gathered_units_of_models_that_are_no_plain_chain(
    tied: bool, num_frozen: int, activations: mics.Activations | None, low_memory: bool
) -> None:
    """Tied to the head the embedding leads back to the first block; frozen blocks are not in the backward."""
    for predicted, measured in run_ranks(2, _arena, tied, num_frozen, activations, low_memory):
        assert predicted == measured > 0


class Nested(nn.Module):
    """A block with parameters of its own around two others."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mix = nn.Linear(width, width)
        self.inner = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(self.mix(x))
        for block in self.inner:
            y = block(y)
        return x + y


def _nested_arena(prefetch: int, activations: mics.Activations | None) -> tuple[int | None, ...]:
    model = nn.Sequential(nn.Linear(48, 48), *(Nested(48) for _ in range(4)))
    settings: dict[str, Any] = {"units": [Nested, Block], "activations": activations, "low_memory": False}
    mics.shard(model, partition_size=2, prefetch=prefetch, **settings)
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(6):
        model(torch.rand(4, 48)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    term = mics.memory_report(model, show=False)["gathered units"]
    return term.predicted, term.measured


@pytest.mark.parametrize(
    ("prefetch", "activations"),
    tiers.first(list(product([2, 1], [mics.Activations(checkpoint=Nested), mics.Activations(), None]))),
)
def test_gathered_units_inside_others(prefetch: int, activations: mics.Activations | None) -> None:
    """The outer one is there as long as they are; what is recomputed is gathered for that, too."""
    for predicted, measured in run_ranks(2, _nested_arena, prefetch, activations):
        assert predicted == pytest.approx(measured, rel=0.02)


def _wire(partition_size: int, sharding: str, low_memory: bool) -> list[tuple[int | None, int | None]]:
    found = []
    for precision in _WIRES:
        model = Stack(37, 3)
        mics.shard(
            model,
            partition_size=partition_size,
            optimizer_sharding=sharding,
            low_memory=low_memory,
            precision=precision,
            hierarchical=True,
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        for _ in range(2):
            model(torch.randn(2, 37)).float().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        term = mics.memory_report(model, show=False)["wire"]
        found.append((term.predicted, term.measured))
    return found


@pairwise.parametrize(
    strength=1,
    full_strength=2,
    partition_size=[1, 2, 4],
    sharding=["world", "partition"],
    low_memory=[False, True],
)
def test_chunks_on_their_way(partition_size: int, sharding: str, low_memory: bool) -> None:
    """Flat and in two stages, with replicas, with masters that are cast, with a narrower wire."""
    for found in run_ranks(4, _wire, partition_size, sharding, low_memory, ranks_per_node=2):
        for precision, (predicted, measured) in zip(_WIRES, found, strict=True):
            assert predicted is not None and measured is not None and measured > 10_000
            # The ranks' agreement at the boundary passes through a little memory too.
            assert predicted <= measured <= predicted + 4096, precision


def test_imagined_ranks_put_nothing_on_the_wire() -> None:
    with mics.emulate(find_cluster("dgx-h100:1")):
        model = mics.shard(Stack(8, 3), partition_size=8)
        model(torch.rand(4, 8)).sum().backward()
        term = mics.memory_report(model, show=False)["wire"]
    assert term.predicted == term.measured == 0

"""What user code reads of a sharded model is right on every rank, or refused by our own error."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn as nn

import mics
from tests import readings, tiers
from tests.ranks import run_ranks

NUM_READINGS = 150


class Net(nn.Module):
    """Matrices, vectors, a scalar, an uneven size and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.head = nn.Linear(6, 5)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.still = nn.Linear(6, 6).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + self.still(x)
        return self.head(x * self.scale)


def _loss(model: nn.Module, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(3, 6, generator=generator).to(next(model.parameters()).device)
    return model(x).square().mean()


def whole_model(world_size: int, device: str = "cpu") -> Net:
    """The model of one process with the gradients of all ranks."""
    model = Net().to(device)
    (sum(_loss(model, rank) for rank in range(world_size)) / world_size).backward()
    return model


def read_all(
    partition_size: int,
    optimizer_sharding: Literal["world", "partition"],
    device: str = "cpu",
    in_turn: bool = False,
) -> tuple[int, list[str]]:
    """On one rank: readings of a sharded model; how many, and what is wrong.

    Of each kind of tensor all readings of all parameters, or `in_turn` each reading of one of them.
    """
    rank, world_size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    whole = whole_model(world_size, device)
    precision = mics.Precision(param_dtype=torch.float32)
    model = mics.shard(
        Net().to(device),
        partition_size=partition_size,
        optimizer_sharding=optimizer_sharding,
        precision=precision,
    )
    _loss(model, rank).backward()
    named, state, tensors = dict(model.named_parameters()), model.state_dict(), dict(whole.named_parameters())
    kinds = {
        "parameter": [(name, named[name], tensor) for name, tensor in tensors.items()],
        "entry": [(name, state[name], tensor.detach()) for name, tensor in tensors.items()],
        "gradient": [
            (n, named[n].grad, tensor.grad) for n, tensor in tensors.items() if tensor.requires_grad
        ],
    }
    wrong: list[str] = []
    count = 0
    for shift, (kind, items) in enumerate(kinds.items()):
        for number, (what, reading) in enumerate(readings.ONE.items()):
            turn = (number + shift) % len(items)
            for name, piece, tensor in items[turn : turn + 1] if in_turn else items:
                count += 1
                wrong += _compare(f"{what} of the {kind} {name}", reading, piece, tensor)
    lists = {
        "parameters": (list(model.parameters()), list(whole.parameters())),
        "gradients": (
            [p.grad for p in model.parameters() if p.requires_grad],
            [p.grad for p in whole.parameters() if p.requires_grad],
        ),
        "blocks": ([block.weight for block in model.blocks], [block.weight for block in whole.blocks]),
    }
    for kind, (pieces, wholes) in lists.items():
        for what, reading in readings.MANY.items():
            count += 1
            wrong += _compare(f"{what} of {kind}", reading, pieces, wholes)
    return count, wrong


def _compare(what: str, reading: Any, piece: Any, tensor: Any) -> list[str]:
    kind, found = readings.read(reading, piece)
    if kind == "ours":
        return [f"{what}: {found}"] if reading in map(readings.ONE.get, readings.ANSWERED) else []
    reference, expected = readings.read(reading, tensor)
    if kind == "torch":
        return [] if reference == "torch" else [f"{what}: {found}"]
    if reference == "torch" and tensor.numel() == 1:
        return []  # a scalar's piece has one dim
    if reference != "answer" or not _same(found, expected):
        return [f"{what}: {found}, on the whole tensor {expected}"]
    return []


def _same(found: Any, expected: Any) -> bool:
    found, expected = (value if isinstance(value, list) else [value] for value in (found, expected))
    if len(found) != len(expected):
        return False
    return all(
        a == b
        or (
            isinstance(a, float | np.floating | np.ndarray)
            and (math.isclose(a, b, rel_tol=1e-5, abs_tol=1e-6) or a != a != b != b)
        )
        for a, b in zip(found, expected, strict=True)
    )


@pytest.mark.parametrize(
    ("partition_size", "optimizer_sharding"),
    [
        pytest.param(1, "world", marks=pytest.mark.full),
        pytest.param(4, "world", marks=pytest.mark.full),
        (2, "partition"),
    ],
)
def test_every_reading_is_right_or_refused(partition_size: int, optimizer_sharding: Any) -> None:
    """Readings of parameters, gradients, state dict entries and lists of them: no rank's own numbers.

    `--long` makes each reading of all parameters, else of one after the other.
    """
    args = (partition_size, optimizer_sharding, "cpu", not tiers.long)
    for count, wrong in run_ranks(4, read_all, *args):
        assert not wrong
        assert count >= NUM_READINGS


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize(("partition_size", "optimizer_sharding"), [(2, "world"), (2, "partition")])
def test_every_reading_is_right_or_refused_on_a_gpu(partition_size: int, optimizer_sharding: Any) -> None:
    """The same over NCCL."""
    options = {"backend": "nccl"}
    for count, wrong in run_ranks(4, read_all, partition_size, optimizer_sharding, "cuda", **options):
        assert not wrong
        assert count >= NUM_READINGS

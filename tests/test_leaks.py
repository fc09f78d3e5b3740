"""What is dropped is freed: graphs at once, models when they are collected."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn as nn

import mics
from tests.ranks import run_ranks


class Block(nn.Module):
    """A block whose activations can be followed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x


class Marker:
    """Something to hang on a node of the graph."""


def _model() -> nn.Module:
    return mics.shard(nn.Sequential(*(Block() for _ in range(3))))


def _activations_left(*, backward: bool) -> int:
    """Activations still alive right after a forward (and a backward) whose result is dropped."""
    model = _model()
    alive: list[weakref.ref[Marker]] = []

    def mark(module: nn.Module, args: object, output: torch.Tensor) -> None:
        marker = Marker()
        output.grad_fn.metadata["marker"] = marker  # lives as long as the graph's node
        alive.append(weakref.ref(marker))

    for block in model.children():
        block.register_forward_hook(mark)
    loss = model(torch.randn(4, 8)).sum()
    if backward:
        loss.backward()
    del loss
    assert len(alive) == 3
    return sum(reference() is not None for reference in alive)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_dropped_forward_frees_its_graph(world_size: int, backward: bool) -> None:
    """Hooks on activations keep no graph alive, also when backward never comes."""
    assert run_ranks(world_size, _activations_left, kwargs={"backward": backward}) == [0] * world_size


def _models_left(*, zero_grad: bool) -> int:
    """Models still alive after training and dropping three."""
    alive = []
    for _ in range(3):
        model = _model()
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.randn(4, 8)).sum().backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        if zero_grad:
            optimizer.zero_grad()
        alive.append(weakref.ref(model))
        del model, optimizer
    for _ in range(3):
        gc.collect()
    return sum(reference() is not None for reference in alive)


@pytest.mark.parametrize("zero_grad", [False, True])
def test_a_dropped_model_is_freed(zero_grad: bool) -> None:
    """Neither the tables behind the optimizer hooks nor the guarded gradients keep a model."""
    assert run_ranks(2, _models_left, kwargs={"zero_grad": zero_grad}) == [0, 0]

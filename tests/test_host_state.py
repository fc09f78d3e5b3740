"""Optimizer state in host memory: the same bits as on the device, whatever is done with it."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from tests import toys
from tests.ranks import run_ranks

_NARROW = mics.Precision(param_dtype=torch.bfloat16)


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    named = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for _, param in named if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for _, param in named if param.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    first: int = 0,
    steps: int = 3,
    accumulation: int = 2,
) -> list[Tensor]:
    """Losses and norms. The spare layer is used from the second step on."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = []
    for step in range(first, first + steps):
        for micro in mics.microsteps(model, range(accumulation)):
            loss = model(*toys.language_batch(step, micro, dist.get_rank())) / accumulation
            loss.backward()
            found.append(loss.detach())
        found.append(mics.clip_grad_norm_(model, 0.5))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def _outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return (
        mics.full_state_dict(model, rank0_only=False),
        mics.full_optimizer_state_dict(model, optimizer, rank0_only=False),
    )


def _built(where: str, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    return mics.shard(toys.Language(), optimizer_state=where, **settings)


def _trained(where: str, make: Any = _adamw, *, accumulation: int = 2, **settings: Any) -> Any:
    model = _built(where, **settings)
    optimizer = make(model)
    losses = _train(model, optimizer, accumulation=accumulation)
    return losses, *_outcome(model, optimizer)


def _assert_same_bits(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=False)


def _compare(settings: dict[str, Any]) -> None:
    _assert_same_bits(_trained("host", **settings), _trained("device", **settings))


@pytest.mark.parametrize("size", [1, 2])
def test_trains_to_the_bits_of_state_on_the_device(size: int) -> None:
    """Parameters in bfloat16: masters leave the device with the state."""
    run_ranks(2, _compare, {"partition_size": size, "precision": _NARROW})

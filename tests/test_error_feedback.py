"""What rounding between replicas loses: which gradients it is sent with, and which it is left out with."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mics
from tests.ranks import run_ranks
from tests.tiers import first

_STEPS = 40


class _Two(nn.Module):
    """Two parameters in one unit, with small gradients beside a large one: rounding to 8 bits loses those."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(256)), nn.Parameter(torch.zeros(256))
        self.register_buffer("given", torch.full((256,), 0.003))
        self.given[::64] = 1.0

    def forward(self, factor: float = 1.0) -> Tensor:
        return factor * (self.given * self.a).sum() + (self.given * self.b).sum()


def _leave_out_a(model: nn.Module, how: str) -> None:
    if how == "cleared":
        model.a.grad = None
    elif how == "zeroed":
        model.a.grad.zero_()
    elif how == "filled":
        model.a.grad.fill_(0)
    elif how == "zeroed together":
        torch._foreach_zero_([model.a.grad])


def _one_left_out(how: str, announced: bool, **settings: Any) -> dict[str, Tensor]:
    """Every second step has huge gradients of one parameter, and only that one is left out."""
    model = mics.shard(_Two(), compression=mics.Compression(hop2="int8"), **settings)
    of_a, of_b = (torch.optim.SGD([p], lr=1.0, fused=how == "on the device") for p in (model.a, model.b))
    for step in range(_STEPS):
        is_huge = step % 2 == 1
        micros: Iterable[int] = mics.microsteps(model, range(2)) if announced else range(2)
        for _ in micros:
            (model(1e9 if is_huge else 1.0) / 2).backward()
        mics.clip_grad_norm_(model, float("inf"))  # looks at them
        if is_huge:
            _leave_out_a(model, how)
        if how == "on the device":
            of_a.found_inf = torch.tensor([float(is_huge)])
        if how != "not stepped" or not is_huge:
            of_a.step()
        of_b.step()
        for optimizer in (of_a, of_b):
            optimizer.zero_grad(set_to_none=how != "not stepped" or step % 4 == 1)
    return mics.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    ("how", "announced", "settings"),
    first(
        [
            ("cleared", True, {"partition_size": 1}),
            ("zeroed", False, {"partition_size": 2}),
            ("not stepped", True, {"partition_size": 1, "optimizer_sharding": "partition"}),
            ("on the device", True, {"partition_size": 2}),
            ("zeroed together", True, {"partition_size": 1}),
            ("filled", True, {"partition_size": 2, "optimizer_sharding": "partition"}),
        ],
        num=4,
    ),
)
def test_one_parameter_is_left_out(how: str, announced: bool, settings: dict[str, Any]) -> None:
    """Nothing of its huge gradients is sent later. What is kept of the other one is, all the same."""
    for whole in run_ranks(4, _one_left_out, how, announced, ranks_per_node=2, kwargs=settings):
        assert whole["a"][1].abs() < 0.003 * _STEPS
        assert whole["b"][1].item() == pytest.approx(-0.003 * _STEPS, abs=0.01)

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


class _Rows(nn.Module):
    """Half of it has no gradient, as rows of an embedding that no batch uses: the part of one replica."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(512))
        self.register_buffer("given", torch.zeros(512))
        self.given[256:] = 0.003
        self.given[256::64] = 1.0

    def forward(self) -> Tensor:
        return (self.given * self.weight).sum()


def _looked_at(how: str) -> float:
    """How far a step of 100 micro-steps moves an element, with a look at the gradients after each."""
    model = mics.shard(_Rows(), partition_size=1, compression=mics.Compression(hop2="int8"))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for _ in range(100):
        model().backward()
        if how == "mics":
            mics.clip_grad_norm_(model, float("inf"))
        else:  # writes to gradients
            torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf"))
    optimizer.step()
    return mics.full_state_dict(model, rank0_only=False)["weight"][300].item()


@pytest.mark.parametrize("how", ["mics", "torch"])
def test_a_part_without_gradients_is_not_zeroed(how: str) -> None:
    """What a rank whose own part is zero keeps for other replicas is sent to them."""
    for found in run_ranks(2, _looked_at, how):
        assert found == pytest.approx(-0.3, abs=0.01)


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(4096)), nn.Parameter(torch.zeros(40))
        self.register_buffer("given", torch.randn(4096, generator=torch.Generator().manual_seed(0)))

    def forward(self, factor: float) -> Tensor:
        return factor * ((self.given * self.a).sum() + self.b.sum())


def _first_counts(num_micros: int, **settings: Any) -> dict[str, Tensor]:
    """A step in which only the first micro-step has gradients worth mentioning, and each is looked at."""
    model = mics.shard(_Scaled(), partition_size=1, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for micro in range(num_micros):
        model(1e-9 if micro else 1.0).backward()
        mics.clip_grad_norm_(model, float("inf"))
    optimizer.step()
    return mics.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    ("hop2", "optimizer_sharding"),
    first([("int8", "world"), ("int4", "partition"), ("bf16", "world")], num=2),
)
def test_nothing_is_rounded_twice(hop2: str, optimizer_sharding: str) -> None:
    """What hop 2 has brought in a step stays as it is when hop 2 runs again in that step."""
    settings = {
        "compression": mics.Compression(hop2=hop2, hop2_error_feedback=False),  # type: ignore[arg-type]
        "optimizer_sharding": optimizer_sharding,
    }
    once, often = (run_ranks(2, _first_counts, num, kwargs=settings) for num in (1, 16))
    for expected, found in zip(once, often, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=0, atol=1e-6)


def _with_events(hop2: str | None, **settings: Any) -> dict[str, Tensor]:
    """Looks, and gradients that are cleared between looks, of whole numbers that bfloat16 has exactly."""
    compression = None if hop2 is None else mics.Compression(hop2=hop2)  # type: ignore[arg-type]
    model = mics.shard(_Scaled(), compression=compression, **settings)
    with torch.no_grad():
        model.given.copy_(torch.arange(4096) % 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for step in range(2):
        for event in ("look", "", "clear b", "look", "", "clear all", "look", "", "look", "clear b", ""):
            model(4.0).backward()
            if event == "look":
                mics.clip_grad_norm_(model, float("inf"))
            elif event == "clear b":
                model.b.grad = None
            elif event == "clear all":
                optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step == 0)
    return mics.full_state_dict(model, rank0_only=False)


@pytest.mark.parametrize(
    "settings",
    first(
        [
            {"partition_size": 2},
            {"partition_size": 1, "optimizer_sharding": "partition"},
            {"partition_size": 1, "low_memory": True},
        ]
    ),
    ids=str,
)
def test_what_is_put_aside_counts_once(settings: dict[str, Any]) -> None:
    """Sums over several looks are those of gradients that are sent as they are, to the bit."""
    for found, expected in zip(
        *(run_ranks(4, _with_events, each, ranks_per_node=2, kwargs=settings) for each in ("bf16", None)),
        strict=True,
    ):
        assert all(torch.equal(found[name], value) for name, value in expected.items())

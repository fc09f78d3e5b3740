"""Whole parameters out of a sharded model, one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import toys
from tests.ranks import run_expecting_error, run_ranks
from tests.reference import adamw

Found = list[tuple[str, Tensor]]


def _model(build: Any = toys.Language, *, steps: int = 0, bf16: bool = False, **options: Any) -> nn.Module:
    import mics

    torch.manual_seed(0)
    precision = mics.Precision(param_dtype=torch.bfloat16 if bf16 else torch.float32)
    model = mics.shard(build(), precision=precision, **options)
    optimizer = adamw(model)
    for step in range(steps):
        model(*toys.language_batch(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def _named(model: nn.Module, **options: Any) -> Found:
    """What comes, and what should: the state dict's, cast, in the order of the parameters."""
    import mics

    state = mics.full_state_dict(model, rank0_only=False)
    expected = [(name, state[name]) for name, _ in model.named_parameters()]
    if "dtype" in options and options["dtype"] is not None:
        expected = [(name, value.to(options["dtype"])) for name, value in expected]
    return expected


def _same(found: Found, expected: Found) -> bool:
    return [name for name, _ in found] == [name for name, _ in expected] and all(
        type(one) is Tensor and one.dtype == two.dtype and one.shape == two.shape and torch.equal(one, two)
        for (_, one), (_, two) in zip(found, expected, strict=True)
    )


def _streams(settings: list[dict[str, Any]], **options: Any) -> list[str]:
    """Which of these settings do not stream what they should."""
    import mics

    model = _model(**options)
    wrong = []
    for setting in settings:
        expected = _named(model, **setting)
        for rank in (None, 0, dist.get_world_size() - 1):
            found = list(mics.iter_full_params(model, rank=rank, **setting))
            if not _same(found, expected if rank in (None, dist.get_rank()) else []):
                wrong.append(f"{setting} to {rank}")
    return wrong


_SETTINGS = [
    {"bucket_nbytes": nbytes, "dtype": dtype}
    for nbytes, dtype in [(1, None), (700, torch.bfloat16), (1 << 20, torch.float64), (400, torch.float16)]
]


@pytest.mark.parametrize(
    ("partition_size", "optimizer_sharding", "bf16", "options"),
    [
        (1, "world", True, {}),
        (2, "world", False, {}),
        (2, "world", True, {}),
        (2, "partition", True, {}),
        (2, "partition", True, {"low_memory": True}),
        (4, "world", False, {"hierarchical": True}),
        (4, "world", True, {"hierarchical": False, "prefetch": 0}),
    ],
)
def test_values_are_those_of_the_state_dict(
    partition_size: int, optimizer_sharding: str, bf16: bool, options: dict[str, Any]
) -> None:
    """To all ranks, to the first and to the last; masters or copies, cast before or after they travel."""
    options = {**options, "partition_size": partition_size, "optimizer_sharding": optimizer_sharding}
    wrong = run_ranks(4, _streams, _SETTINGS, ranks_per_node=2, kwargs={"steps": 1, "bf16": bf16, **options})
    assert wrong == [[]] * 4

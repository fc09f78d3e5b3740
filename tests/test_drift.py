"""Copies of parameters that one rank has changed for itself: the next step overwrites them, also with moves.

Code in a forward that writes to ``weight.data`` changes what its rank has of all ranks' values, and nobody is
told. So does a bit that flips. New parameters that come as values overwrite that. Moves must end there too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.comm.moves import Moves
from mics.engine import units_of
from tests.ranks import run_expecting_error, run_ranks

_DIM = 64
_STAYING = mics.Prefetch(units=1, stay_nbytes=1 << 30)
_LAYOUTS: dict[str, dict[str, Any]] = {
    "replicas of one rank": {"partition_size": 1},
    "replicas of two ranks": {"partition_size": 2},
    "units that stay": {"partition_size": 4, "prefetch": _STAYING},
}
Writes = Callable[[nn.Module, int, int], None]
"""To a model's parameters, on a rank, in a step: before a forward, while modules hold whole parameters."""


class _Writing(nn.Module):
    """An embedding and a layer, to which a forward writes."""

    def __init__(self, writes: Writes) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, _DIM)
        self.up = nn.Linear(_DIM, _DIM)
        nn.init.zeros_(self.up.bias)
        self.embedding.register_forward_pre_hook(lambda *_: writes(self.embedding, self.rank, self.step))
        self.up.register_forward_pre_hook(lambda *_: writes(self.up, self.rank, self.step))
        self.rank = self.step = 0

    def forward(self, ids: Tensor) -> Tensor:
        return self.up(self.embedding(ids)).float()


def _ids(rank: int, step: int) -> Tensor:
    """None that the rank has masters of: it looks up those of the others."""
    return 16 * (rank ^ 2) + torch.arange(step % 5, 16, 3)


def _renormalise(module: nn.Module, rank: int, step: int) -> None:
    """As nn.Embedding(max_norm=...) does: the rows that this rank looks up."""
    if isinstance(module, nn.Embedding):
        torch.embedding_renorm_(module.weight.data, _ids(rank, step), 7.5, 2.0)


def _write_signs(module: nn.Module, rank: int, step: int) -> None:
    """Zeros of the other sign, which compare as equal, while the optimizer moves nothing yet."""
    if isinstance(module, nn.Linear) and step in (3, 4):
        zeros = module.bias.data
        zeros.copy_(torch.where(zeros == 0, torch.full_like(zeros, -0.0 if rank % 2 else 0.0), zeros))


def _mask(module: nn.Module, rank: int, step: int) -> None:
    """All ranks alike: moves begin there, too. And what is left of it shows, once it has ended."""
    if isinstance(module, nn.Linear) and step < 7:
        module.weight.data[::7].zero_()


def _flip(module: nn.Module, rank: int, step: int) -> None:
    """A low bit of a value, on one rank."""
    if isinstance(module, nn.Linear) and (rank, step) == (1, 5):
        module.weight.data.view(torch.int16)[1, 5].bitwise_xor_(1)


def _train(refresh: Literal["lossless"] | None, writes: Writes, **settings: Any) -> tuple[list[Any], int]:
    """Losses and whole parameters, and for how many units and steps moves were decoded."""
    torch.manual_seed(0)
    model = _Writing(writes)
    decode = Moves.decode
    with patch.object(Moves, "decode", autospec=True, side_effect=decode) as decoded:
        mics.shard(
            model,
            units=[model.embedding, model.up],
            precision=mics.Precision(param_dtype=torch.bfloat16),
            compression=mics.Compression(refresh=refresh),
            **{"audit_interval": 0, **settings},
        )
        model.rank = dist.get_rank()
        frozen = [model.up.bias] if writes is _write_signs else []
        params = [param for param in model.parameters() if not any(param is one for one in frozen)]
        optimizer = torch.optim.AdamW(params, lr=1e-4)
        found: list[Any] = []
        for model.step in range(10):
            loss = (model(_ids(model.rank, model.step)) - 1).square().mean()
            loss.backward()
            found.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        found += [unit.arrived_params().clone() for unit in units_of(model)]
        found += mics.full_state_dict(model, rank0_only=False).values()
    return found, decoded.call_count


def _equal(one: list[Any], other: list[Any]) -> bool:
    return all(
        torch.equal(a.view(torch.uint8), b.view(torch.uint8)) if isinstance(a, Tensor) else a == b
        for a, b in zip(one, other, strict=True)
    )


def _compare(writes: Writes, settings: dict[str, Any]) -> tuple[bool, int]:
    """Whether all bits are those without moves, and how many were decoded."""
    (moved, num_decoded), (plain, _) = (_train(refresh, writes, **settings) for refresh in ("lossless", None))
    return _equal(moved, plain), num_decoded


@pytest.mark.parametrize(
    ("writes", "layout"),
    [
        (_renormalise, "replicas of one rank"),
        (_renormalise, "units that stay"),
        (_write_signs, "replicas of one rank"),
        (_flip, "units that stay"),
        (_mask, "units that stay"),
        *(
            pytest.param(each, "replicas of two ranks", marks=pytest.mark.full)
            for each in (_renormalise, _mask)
        ),
        *(pytest.param(each, "replicas of one rank", marks=pytest.mark.full) for each in (_flip, _mask)),
        pytest.param(_write_signs, "units that stay", marks=pytest.mark.full),
    ],
)
def test_what_one_rank_writes_is_overwritten(writes: Writes, layout: str) -> None:
    """To values of other ranks, of which only this rank's copies change; other units still move."""
    found = run_ranks(4, _compare, writes, _LAYOUTS[layout], ranks_per_node=2)
    assert all(is_equal for is_equal, _ in found)
    assert all(num_decoded > 0 for _, num_decoded in found), found


def _renormalised_by_torch(refresh: Literal["lossless"] | None, settings: dict[str, Any]) -> None:
    model = nn.Sequential(nn.Embedding(64, _DIM, max_norm=7.5), nn.Linear(_DIM, _DIM))
    mics.shard(
        model,
        units=list(model),
        precision=mics.Precision(param_dtype=torch.bfloat16),
        compression=mics.Compression(refresh=refresh),
        **settings,
    )
    model(_ids(dist.get_rank(), 0)).sum().backward()


@pytest.mark.parametrize("refresh", ["lossless", None])
def test_an_embedding_that_renormalises_its_weight_is_refused(refresh: Literal["lossless"] | None) -> None:
    """It writes to the weight itself and not to ``weight.data``, so it is told that this would be lost."""
    for settings in _LAYOUTS.values():
        error = run_expecting_error(4, _renormalised_by_torch, refresh, settings, ranks_per_node=2)
        assert "expected a forward that reads its parameters, found one that wrote to it" in str(error)

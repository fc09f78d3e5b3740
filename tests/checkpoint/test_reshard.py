"""What one cluster saved, another loads: all sizes in pairs, and with `--long` every pair of clusters."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mics
from tests import pairwise, tiers
from tests.checkpoint.runs import loaded, loads, trained_and_saved
from tests.ranks import run_ranks

SIZES = [1, 2, 4, 8]
PAIRS = [(p, r) for p in SIZES for r in SIZES if p * r <= 8]


Pair = tuple[int, int]
Saved = Callable[[Pair], tuple[str, dict[str, Any]]]

# For `make test`: one rank, two replicas, one partition group, both, and both on eight ranks.
_QUICK = [(1, 1), (1, 2), (4, 1), (2, 2), (4, 2)]


def _thinned(pairs: list[Pair]) -> set[tuple[int, ...]]:
    """(p, R) that loads and (p, R) that saved: any two of the four sizes meet as they do in all loads."""
    loads = [(*into, *source) for into in pairs for source in pairs]
    return {loads[index] for index in pairwise.cover(loads)}


_THINNED = {True: _thinned(_QUICK), False: _thinned(PAIRS)}


def _name(pair: Pair) -> str:
    return f"p{pair[0]}R{pair[1]}"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A checkpoint of any pair, and what was in it."""
    root = tmp_path_factory.mktemp("saved")

    @cache
    def save(pair: Pair) -> tuple[str, dict[str, Any]]:
        path = str(root / _name(pair))
        return path, run_ranks(pair[0] * pair[1], trained_and_saved, path, pair[0])[0]

    return save


@pytest.mark.parametrize(
    "pair",
    [pytest.param(pair, marks=() if pair in _QUICK else pytest.mark.full) for pair in PAIRS],
    ids=_name,
)
def test_loads_what_every_other_saved(pair: Pair, saved: Saved) -> None:
    """Parameters, buffers, optimizer state and settings, to the bit."""
    p, r = pair
    sources = [source for source in PAIRS if tiers.long or (*pair, *source) in _THINNED[tiers.quick]]
    paths, expected = zip(*map(saved, sources), strict=True)
    for rank, found in enumerate(run_ranks(p * r, loads, list(paths), list(expected), p)):
        assert all(found), (rank, [source for source, equal in zip(sources, found, strict=True) if not equal])


@pytest.mark.parametrize(
    "pair", [(2, 2), *(pytest.param(pair, marks=pytest.mark.full) for pair in [(1, 1), (1, 4)])], ids=_name
)
def test_training_goes_on(pair: Pair, saved: Saved) -> None:
    """To the bit on the same layout, and up to the order of additions on another."""
    p, r = pair
    sources = [pair, (4, 1), (4, 2)]
    found = run_ranks(p * r, loaded, [saved(source)[0] for source in sources], p, (0, 1, 2))[0]
    for source, values in zip(sources, found, strict=True):
        expected = saved(source)[1]["after"]
        assert values["after"] == (expected if source == pair else pytest.approx(expected, rel=1e-4))


class _Gained(nn.Module):
    """A parameter without dimensions, as CLIP's ``logit_scale``."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain, self.linear = nn.Parameter(torch.ones(())), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gain * self.linear(x)


def _steps(model: nn.Module, optimizer: torch.optim.Optimizer, num: int) -> None:
    for number in range(num):
        model(torch.ones(2, 4) * (number + 1)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def _gained(
    kind: Any, folder: str, given: dict[str, Any] | None = None
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Two steps and a checkpoint, or with one or another program's state two more steps."""
    model = mics.shard(_Gained())
    optimizer = kind(model.parameters(), lr=0.1)
    if given is not None:
        mics.load_full_state_dict(model, given["model"])
        optimizer.load_state_dict(given["optimizer"])
    elif Path(folder).exists():
        mics.load(folder, model, optimizer)
    _steps(model, optimizer, 2)
    if given is None and not Path(folder).exists():
        mics.save(folder, model, optimizer)
    state = mics.full_optimizer_state_dict(model, optimizer, rank0_only=False)["gain"]
    return mics.full_state_dict(model, rank0_only=False), state


@pytest.mark.parametrize("kind", tiers.first([torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adagrad]))
def test_a_parameter_without_dimensions(kind: Any, tmp_path: Path) -> None:
    """From one rank to several and back, and from a plain program: state has its shape or is a number."""
    plain = _Gained()
    optimizer = kind(plain.parameters(), lr=0.1)
    _steps(plain, optimizer, 2)
    given = deepcopy({"model": plain.state_dict(), "optimizer": optimizer.state_dict()})
    _steps(plain, optimizer, 2)
    for num_saved in (1, 2):
        folder = str(tmp_path / str(num_saved))
        run_ranks(num_saved, _gained, kind, folder)
        for num_loaded in (1, 2, 4):
            for found in (
                run_ranks(num_loaded, _gained, kind, folder),
                run_ranks(num_loaded, _gained, kind, folder, given),
            ):
                for params, state in found:
                    torch.testing.assert_close(params, plain.state_dict())
                    torch.testing.assert_close(state, optimizer.state[plain.gain])

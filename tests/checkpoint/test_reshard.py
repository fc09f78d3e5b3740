"""What one cluster saved, another loads: all sizes in pairs, and with `--long` every pair of clusters."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest

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

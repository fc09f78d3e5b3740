"""What one cluster saved, another loads: every pair of (partition size, replicas)."""

from __future__ import annotations

import pytest

from tests.checkpoint.runs import loaded, loads, trained_and_saved
from tests.ranks import run_ranks

SIZES = [1, 2, 4, 8]
PAIRS = [(p, r) for p in SIZES for r in SIZES if p * r <= 8]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], tuple[str, dict]]:
    """A checkpoint of every pair, and what was in it."""
    root = tmp_path_factory.mktemp("saved")
    found = {}
    for p, r in PAIRS:
        path = str(root / f"{p}x{r}")
        found[p, r] = path, run_ranks(p * r, trained_and_saved, path, p)[0]
    return found


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"p{pair[0]}R{pair[1]}")
def test_loads_what_every_other_saved(pair: tuple[int, int], saved: dict) -> None:
    """Parameters, buffers, optimizer state and settings, to the bit."""
    p, r = pair
    paths, expected = zip(*saved.values(), strict=True)
    for rank, found in enumerate(run_ranks(p * r, loads, list(paths), list(expected), p)):
        assert all(found), (rank, [source for source, equal in zip(saved, found, strict=True) if not equal])


@pytest.mark.parametrize("pair", [(1, 1), (2, 2), (1, 4)], ids=lambda pair: f"p{pair[0]}R{pair[1]}")
def test_training_goes_on(pair: tuple[int, int], saved: dict) -> None:
    """To the bit on the same layout, and up to the order of additions on another."""
    p, r = pair
    sources = [pair, (4, 1), (2, 4)]
    found = run_ranks(p * r, loaded, [saved[source][0] for source in sources], p, (0, 1, 2))[0]
    for source, values in zip(sources, found, strict=True):
        expected = saved[source][1]["after"]
        assert values["after"] == (expected if source == pair else pytest.approx(expected, rel=1e-4))

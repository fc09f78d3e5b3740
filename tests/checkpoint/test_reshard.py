"""What one cluster saved, another loads: every pair of (partition size, replicas)."""

from __future__ import annotations

import pytest

from tests.checkpoint.runs import loaded, same, trained_and_saved
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
    """Parameters, optimizer state and settings are equal to the bit, and training goes on."""
    p, r = pair
    paths = [path for path, _ in saved.values()]
    own = list(saved).index(pair)
    everybody = run_ranks(p * r, loaded, paths, p, (own, (own + 1) % len(paths)))
    for number, (source, (_, expected)) in enumerate(saved.items()):
        for found in (of_rank[number] for of_rank in everybody):
            for what in ("model", "optimizer", "lr"):
                assert same(found[what], expected[what]), (source, what)
            assert found["extra"] == {"step": 3}
            if source == pair:
                assert found["after"] == expected["after"]
            elif found["after"] is not None:
                assert found["after"] == pytest.approx(expected["after"], rel=1e-4)

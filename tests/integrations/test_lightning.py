"""Programs of Lightning with only the strategy changed: the losses of one process, in every layout."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.integrations.lightning_runs import OnMeta, Regression, TwoOptimizers, fit, mean_of
from tests.ranks import run_expecting_error, run_ranks
from tests.tiers import some

TOLERANCE = 1e-5


@cache
def plain(kind: type[Regression] = Regression, **options: Any) -> dict[str, list[float]]:
    """One process, no strategy, the same global batches."""
    [(seen, _)] = run_ranks(1, fit, 1, None, options, kind, launch="none")
    return seen


def sharded(
    world_size: int,
    settings: dict[str, Any],
    kind: type[Regression] = Regression,
    kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, list[float]]:
    return mean_of(run_ranks(world_size, fit, world_size, settings, options, kind, kwargs=kwargs))


def check(found: dict[str, list[float]], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=TOLERANCE, abs=TOLERANCE), name


@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_norms_and_validation_are_those_of_one_process(accumulation: int) -> None:
    """Over partition sizes; an epoch of six batches also ends within an accumulation of four."""
    options = {"accumulate_grad_batches": accumulation}
    expected = plain(**options)
    assert len(expected["norm"]) == 12 // accumulation and len(expected["val"]) == 2
    for partition_size in some([1, 2, 4]):
        check(sharded(4, {"partition_size": partition_size}, **options), expected)

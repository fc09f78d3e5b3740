"""torchtitan's Trainer with only its config passed through ``with_mics``: the numbers of one process."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiers import some

if find_spec("torchtitan") is None or find_spec("triton") is None:
    pytest.skip("needs torchtitan, whose models import triton", allow_module_level=True)

from tests.integrations import torchtitan_runs as runs

pytestmark = [
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def first_weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("first")


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, first_weights: Path) -> Any:
    @cache
    def found(**options: Any) -> dict[str, list[float]]:
        folder = tmp_path_factory.mktemp("plain")
        return run_ranks(1, runs.one_process, folder, first_weights, kwargs=options)[0]

    return found


def check(found: list[dict[str, list[float]]], expected: dict[str, list[float]]) -> None:
    for name, values in expected.items():
        assert values, name
        for rank in found:
            assert rank[name] == pytest.approx(values, rel=1e-5), name


@pytest.mark.parametrize("accumulation", [1, 3])
def test_losses_norms_and_validation_are_those_of_one_process(
    accumulation: int, plain: Any, first_weights: Path, tmp_path: Path
) -> None:
    options = {"accumulation": accumulation}
    expected = plain(**options)
    for size in some([1, 2, 4]):
        check(run_ranks(4, runs.with_partitions, tmp_path / str(size), size, first_weights, options), expected)

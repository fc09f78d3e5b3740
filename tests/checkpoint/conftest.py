"""Checkpoints that the tests of hostile files alter copies of."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.hostile import Trained, save, save_stock, trained


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("ours") / "c")


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_stock(tmp_path_factory.mktemp("stock") / "c")


@pytest.fixture(scope="module")
def target() -> Trained:
    return trained(seed=1)

"""What every test shares: one thread per process, deterministic hypothesis, tiers, the rank pool's end.

torch is imported where tests run: the process that deals them out does without, and begins seconds earlier.
"""

from __future__ import annotations

import gc
import os
import sys

import pytest
from hypothesis import HealthCheck, Phase, settings

from tests import tiers

# Programs that tests start then compile mics once, not each of them for itself: half a second of a core.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

settings.register_profile(
    "mics",
    derandomize=True,
    deadline=None,
    database=None,
    phases=(Phase.explicit, Phase.generate),  # a failing case is small as drawn; shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
settings.load_profile("mics")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--grid",
        choices=("quick", "full"),
        default="quick",
        help="exactness grid: 'quick' covers every pair of settings, 'full' every combination",
    )
    parser.addoption("--quick", action="store_true", help="what `make test` runs: nothing marked 'full'")
    parser.addoption("--long", action="store_true", help="also what takes minutes, and all layouts")


def pytest_configure(config: pytest.Config) -> None:
    tiers.quick, tiers.long = config.getoption("--quick"), config.getoption("--long")
    if hasattr(config, "workerinput") or not config.getoption("numprocesses", None):
        import torch

        torch.set_num_threads(1)  # the references must use the kernels the ranks use


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    items.sort(key=lambda item: item.get_closest_marker("timeout") is None)  # the longest begin first
    if tiers.quick:
        left_out = [item for item in items if item.get_closest_marker("full")]
        items[:] = [item for item in items if not item.get_closest_marker("full")]
        config.hook.pytest_deselected(items=left_out)
    if not config.getoption("--long"):
        for item in items:
            if "long" in item.keywords:
                item.add_marker(
                    pytest.mark.skip(reason="takes long, or another test shows most of it: run with --long")
                )
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    gc.freeze()  # what is imported stays, and need not be looked through at each collection


_GRID_SIZES: dict[str, int] = {}


@pytest.fixture(scope="session")
def grid_sizes() -> dict[str, int]:
    """Number of cases each part of the exactness grid trained; shown at the end of the run."""
    return _GRID_SIZES


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _GRID_SIZES:
        parts = ", ".join(f"{name}: {size}" for name, size in _GRID_SIZES.items())
        terminalreporter.write_line(f"exactness grid: {sum(_GRID_SIZES.values())} cases ({parts})")


def pytest_sessionfinish() -> None:
    if "tests.ranks" in sys.modules:
        sys.modules["tests.ranks"].POOL.close()

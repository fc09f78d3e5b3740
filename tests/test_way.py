"""How many files one gather and one gradient go through, on their way from a hook to the network."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import mics
from tests import toys
from tests.ranks import run_ranks

_ROOT = Path(mics.__file__).parent
_SENDS = {"send", "recv", "isend", "irecv"}


def _ways() -> list[list[str]]:
    """The files of ours on the stack, from the hook down, whenever something is sent."""
    found: dict[tuple[str, ...], None] = {}

    def look(frame: FrameType, event: str, function: Any) -> None:
        if event == "c_call" and function.__name__ in _SENDS:
            files: list[str] = []
            here: FrameType | None = frame
            while here is not None:
                path = Path(here.f_code.co_filename)
                if path.is_relative_to(_ROOT):
                    files.append(path.relative_to(_ROOT).as_posix())
                here = here.f_back
            found[tuple(dict.fromkeys(reversed(files)))] = None

    torch.manual_seed(0)
    model = mics.shard(toys.Chain(), partition_size=2, prefetch=0)
    optimizer = torch.optim.AdamW(model.parameters())
    for step in range(2):
        sys.setprofile(look)
        try:
            model(*toys.floats(step, 0, 0)).backward()
        finally:
            sys.setprofile(None)
        optimizer.step()
    return [list(files) for files in found]


@pytest.fixture(scope="module")
def ways() -> list[list[str]]:
    return run_ranks(4, _ways, ranks_per_node=2)[0]


def test_one_gather(ways: list[list[str]]) -> None:
    """As docs/design.md lists it."""
    found = [files for files in ways if "schedule/residency.py" in files]
    expected = ["schedule/autograd.py", "schedule/residency.py", "comm/lanes.py", "comm/group.py"]
    assert [[*expected, "comm/calls.py", "comm/messages.py"]] == found


def test_one_gradient(ways: list[list[str]]) -> None:
    found = [files for files in ways if "gradients/hops.py" in files]
    expected = ["schedule/autograd.py", "gradients/hops.py", "comm/lanes.py", "comm/group.py"]
    assert [[*expected, "comm/calls.py", "comm/messages.py"]] == found

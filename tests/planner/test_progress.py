"""A long search says how far it is; a short one is quiet, and its answer is not touched."""

from __future__ import annotations

import json
from functools import partial

import pytest

import mics.planner.command as command
from mics.cli import main
from mics.cost.shapes import named_shape
from mics.planner.answer import answer, num_stages
from mics.planner.hardware import planned_cluster
from mics.planner.search import Request
from mics.utils.progress import long_work
from tests import tiers


@pytest.mark.parametrize("curves", tiers.first([False, True]))
def test_all_stages_are_counted(curves: bool) -> None:
    """Sizes that fit and sizes that do not, and the curves: at the end all are done."""
    cluster = planned_cluster("p4d.24xlarge:2")
    request = Request(model=named_shape("gpt-13b"), cluster=cluster, global_batch=64)
    done = []
    found = answer(request, curves=curves, advance=lambda: done.append(1))
    assert len(done) == num_stages(cluster, curves=curves)
    too_large = list(found.found.too_large)
    assert too_large and len(too_large) < num_stages(cluster, curves=False) - 1


@pytest.mark.full
def test_lines_go_beside_the_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["plan", "--model", "gpt-3.6b", "--cluster", "p4d.24xlarge", "--nodes", "1", "2", "--json"]
    args += ["--global-batch", "64"]
    assert main(args) == 0
    quiet = capsys.readouterr()
    assert quiet.err == ""
    monkeypatch.setattr(command, "long_work", partial(long_work, interval=0.02))
    assert main(args) == 0
    told = capsys.readouterr()
    assert json.loads(told.out) == json.loads(quiet.out)
    assert told.err.startswith("plan: ") and " stages in 0 s" in told.err

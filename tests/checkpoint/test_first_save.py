"""The first save and load of a run, and the last: groups that are not made yet, and groups that are gone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import mics
from mics.errors import CheckpointError, SettingsError
from tests.checkpoint.hostile import refuses, save_stock, trained
from tests.checkpoint.runs import build
from tests.ranks import RankPool

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Ranks of their own: an error dissolves their group, so each of these tests begins in a new one."""
    with RankPool() as made:
        yield made


def _first(path: str, case: str) -> None:
    """A call that rank 1 alone cannot take part in, the first of its world."""
    import torch.distributed as dist

    from mics.comm import join_world

    model, optimizer = build(1)
    assert join_world()._host is None, "no save before this one"
    odd = dist.get_rank() == 1
    calls: dict[str, Any] = {
        "state": lambda: mics.save(path, model, optimizer, {"x": object() if odd else 1}),
        "state later": lambda: mics.save(path, model, optimizer, {"x": object() if odd else 1}, wait=False),
        "step": lambda: mics.save(path, model, optimizer, step=1.5 if odd else 1),
        "path": lambda: mics.save(5 if odd else path, model, optimizer),
        "optimizer": lambda: mics.save(path, model, "adam" if odd else optimizer),
        "model": lambda: mics.save(path, torch.nn.Linear(2, 2) if odd else model, optimizer),
        "load nothing": lambda: mics.load(path, model, optimizer),
        "load state": lambda: mics.load(path, model, optimizer, 7 if odd else None),
        "load optimizer": lambda: mics.load(path, model, torch.optim.SGD if odd else optimizer),
    }
    calls[case]()


@pytest.mark.parametrize(
    "case",
    [
        "state",
        "state later",
        "step",
        "path",
        "optimizer",
        "model",
        "load nothing",
        "load state",
        "load optimizer",
    ],
)
def test_one_rank_alone_cannot(tmp_path: Path, pool: RankPool, case: str) -> None:
    """An error on all ranks at once, though nothing of this kind was ever called; nothing is written."""
    path = tmp_path / "c"
    if case in ("load state", "load optimizer"):
        pool.run(2, _save, str(path))
        pool._dissolve_group()
    before = sorted(tmp_path.iterdir())
    errors = pool.run_expecting_error(2, _first, str(path), case)
    assert all(error.is_a("SettingsError") or error.is_a("CheckpointError") for error in errors), errors
    assert sorted(tmp_path.iterdir()) == before


def _save(path: str) -> None:
    mics.save(path, *build(1))


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_the_place_is_taken(tmp_path: Path, pool: RankPool, kind: str) -> None:
    """The first rank looks at it, and the others do not wait."""
    path = tmp_path / "c"
    if kind == "file":
        path.write_text("x")
    else:
        path.mkdir()
        (path / "thesis.txt").write_text("x")
    for error in pool.run_expecting_error(2, _save, str(path)):
        assert error.is_a("SettingsError") and "expected no folder there" in error.message


# -- arguments ------------------------------------------------------------------------------------------


def _itself() -> dict[str, Any]:
    value: dict[str, Any] = {}
    value["self"] = value
    return value


@pytest.mark.parametrize(
    "wrong",
    [
        {"step": 1e3},
        {"step": True},
        {"step": float("nan")},
        {"step": "3"},
        {"step": -1},
        {"step": 10**30},
        {"step": np.bool_(True)},
        {"step": np.float64(3)},
        {"step": torch.tensor(True)},
        {"step": torch.tensor(1.5)},
        {"step": torch.tensor([1, 2])},
        {"step": 1, "keep": 1.5},
        {"step": 1, "keep": 0},
        {"step": 1, "keep": True},
        {"keep": 2},
        {"path": b"bytes"},
        {"path": 5},
        {"path": None},
        {"path": ""},
        {"path": "a\0b"},
        {"optimizer": "adam"},
        {"optimizer": [1]},
        {"optimizer": {}},
        {"optimizer": torch.optim.AdamW},
        {"extra_state": [1]},
        {"extra_state": 0},
        {"extra_state": "x"},
        {"extra_state": {"x": _itself()}},
        {"extra_state": {"x": 10**5000}},
        {"extra_state": {"x": {10**30: 1}}},
        {"extra_state": {"x": torch.ones(3, device="meta")}},
        {"extra_state": {"x": torch.eye(3).to_sparse()}},
        {"extra_state": {"x": np.zeros(2, dtype=[("a", "f4")])}},
    ],
    ids=lambda wrong: " ".join(wrong),
)
def test_arguments_of_wrong_types(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    """Refused before anything is written."""
    monkeypatch.chdir(tmp_path)
    model, optimizer, _ = trained()
    given: dict[str, Any] = {"path": tmp_path / "c", "optimizer": optimizer, **wrong}
    with pytest.raises(SettingsError, match=r"expected .* found"):
        mics.save(given.pop("path"), model, given.pop("optimizer"), given.pop("extra_state", None), **given)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("three", [3, np.int64(3), np.uint8(3), torch.tensor(3)], ids=repr)
def test_integers_of_any_kind(tmp_path: Path, three: Any) -> None:
    """Are steps, and numbers of checkpoints to keep."""
    model, optimizer, _ = trained()
    mics.save(tmp_path, model, optimizer, {"n": 3}, step=three, keep=three)
    assert (tmp_path / "latest").read_text() == "step-3\n"
    assert mics.load(tmp_path, model, optimizer) == {"n": 3}


# -- another optimizer ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Adam", "RAdam", "NAdam", "SGD", "Adagrad"])
def test_an_optimizer_of_another_class(tmp_path: Path, kind: str) -> None:
    """Also of one with the same state and settings: AdamW's are Adam's, and would decay other weights."""
    model, optimizer, counter = trained("AdamW")
    mics.save(tmp_path / "c", model, optimizer, {"counter": counter})
    target = trained(kind, seed=1)

    refuses(tmp_path / "c", rf"expected the state of {kind}", target)


def test_the_state_of_another_class_from_elsewhere(tmp_path: Path) -> None:
    """torch.distributed.checkpoint keeps no classes: the entries tell."""

    save_stock(tmp_path / "c", "Adagrad")
    refuses(
        tmp_path / "c", r"expected the state of AdamW \(step, exp_avg, exp_avg_sq\), found", trained(seed=1)
    )


def test_other_parameter_groups(tmp_path: Path) -> None:
    """More, fewer, or with other parameters in them; another order is the same."""
    model, optimizer, _ = trained()
    mics.save(tmp_path / "one", model, optimizer)
    weight, bias = model.parameters()
    two = torch.optim.AdamW([{"params": [weight]}, {"params": [bias], "lr": 0.5}], lr=0.1)
    mics.save(tmp_path / "two", model, two)
    before = mics.full_state_dict(model)
    with pytest.raises(CheckpointError, match="expected the parameter groups that were saved, 1 of 2"):
        mics.load(tmp_path / "one", model, two)
    with pytest.raises(CheckpointError, match="expected the parameter groups that were saved, 2 of 1, 1"):
        mics.load(tmp_path / "two", model, optimizer)
    with pytest.raises(CheckpointError, match="expected the parameter groups that were saved"):
        mics.load(tmp_path / "two", model, torch.optim.AdamW([weight], lr=0.1))
    assert all(torch.equal(value, before[name]) for name, value in mics.full_state_dict(model).items())
    turned = torch.optim.AdamW([{"params": [bias]}, {"params": [weight]}], lr=1.0)
    mics.load(tmp_path / "two", model, turned)
    assert [group["lr"] for group in turned.param_groups] == [0.5, 0.1]


# -- the end of a script --------------------------------------------------------------------------------

_SCRIPT = """
import errno, sys
import torch, torch.distributed as dist
import mics
from mics.checkpoint import blocks

dist.init_process_group("gloo")
if sys.argv[2] == "full" and dist.get_rank() == 1:
    def full(self, content):
        raise OSError(errno.ENOSPC, "No space left on device")
    blocks.BlockWriter.write = full
torch.manual_seed(0)
model = mics.shard(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), partition_size=2)
mics.save(sys.argv[1], model, wait=False)
dist.destroy_process_group()
"""


def _run_script(path: Path, case: str) -> list[subprocess.CompletedProcess[str]]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _SCRIPT, str(path), case],
            env={**os.environ, **place, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=240) for rank in ranks]
    return [
        subprocess.CompletedProcess(rank.args, rank.returncode, *output)
        for rank, output in zip(ranks, outputs, strict=True)
    ]


@pytest.mark.long
@pytest.mark.full
def test_a_script_that_leaves_its_group_still_has_its_checkpoint(tmp_path: Path) -> None:
    """destroy_process_group right after save(wait=False): the ranks finish it."""
    for done in _run_script(tmp_path / "c", "good"):
        assert done.returncode == 0 and not done.stdout, done.stderr
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 64) for _ in range(8)]
    expected = torch.nn.Sequential(*layers).state_dict()
    expected = {name: value.clone() for name, value in expected.items()}
    torch.manual_seed(1)
    model = mics.shard(torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(8)]), partition_size=1)
    mics.load(tmp_path / "c", model)
    assert all(torch.equal(value, expected[name]) for name, value in mics.full_state_dict(model).items())


@pytest.mark.full
def test_a_script_that_lost_its_checkpoint_fails(tmp_path: Path) -> None:
    """Nobody waited for it, and the exit code of all ranks tells."""
    for done in _run_script(tmp_path / "c", "full"):
        assert done.returncode == 1, done.stderr
        assert "the script ended without this checkpoint" in done.stderr
        assert "rank 1 could not write its part: No space left on device" in done.stderr

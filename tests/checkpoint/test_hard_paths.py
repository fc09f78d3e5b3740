"""What could be lost, or silently wrong: each of these once was."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.checkpoint.runs import build, everything, same, train
from tests.ranks import run_expecting_error, run_ranks


def _save_over(path: str, step: int | None) -> None:
    import mics

    mics.save(path, build(1)[0], step=step)


@pytest.mark.parametrize("kind", ["folder", "steps", "file", "step folder"])
def test_nothing_else_is_ever_replaced(tmp_path: Path, kind: str) -> None:
    """A folder of somebody's, a folder of checkpoints, a file: refused, and left as they are."""
    path, step, thing = tmp_path / "there", None, tmp_path / "there" / "thesis.txt"
    if kind == "file":
        thing = path
    elif kind == "steps":
        run_ranks(1, _save_over, str(path), 1)
        thing = path / "step-1" / "mics.json"
    elif kind == "step folder":
        step, thing = 5, path / "step-5" / "thesis.txt"
    thing.parent.mkdir(parents=True, exist_ok=True)
    thing.exists() or thing.write_text("x")
    before = thing.read_bytes()
    for error in run_expecting_error(1, _save_over, str(path), step):
        assert error.is_a("SettingsError") and "expected no folder there" in error.message
    assert thing.read_bytes() == before


_LAST_LINE = """
import sys, torch, mics
from torch import nn
mics.save(sys.argv[1], mics.shard(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(40)])), wait=False)
"""


@pytest.mark.full
@pytest.mark.long  # test_stores.py has the same over HTTP, test_first_save.py without a group
def test_a_script_that_ends_still_has_its_checkpoint(tmp_path: Path) -> None:
    """Also one of many blocks, whose writing takes longer than the interpreter's threads live."""
    command = [sys.executable, "-c", _LAST_LINE, str(tmp_path / "c")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    run_ranks(1, _load_wide, str(tmp_path / "c"))


def _load_wide(path: str) -> None:
    import mics

    mics.load(path, mics.shard(nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(40)])))


def _two_models(path: str) -> bool:
    import mics

    (a, first), (b, second) = build(2), build(1, seed=3)
    before = everything(a, first), everything(b, second)
    savings = [mics.save(f"{path}/a", a, first, wait=False), mics.save(f"{path}/b", b, second, wait=False)]
    c, third = build(2, seed=4)
    mics.load(f"{path}/a", c, third)
    for saving in savings:
        saving.wait()
    d, fourth = build(2, seed=5)
    mics.load(f"{path}/b", d, fourth)
    return same(everything(c, third), before[0]) and same(everything(d, fourth), before[1])


def test_two_models_save_at_the_same_time(tmp_path: Path) -> None:
    """And one loads meanwhile: their ranks do not take each other's messages."""
    assert all(run_ranks(2, _two_models, str(tmp_path)))


def _full_later(path: str) -> str:
    """The disk is full after the first archive."""
    import mics
    from mics.checkpoint import blocks

    model = mics.shard(nn.Sequential(*[nn.Linear(1500, 1500) for _ in range(6)]))

    def full(self: Any, block: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    patch = pytest.MonkeyPatch()
    patch.setattr(blocks.BlockWriter, "_put", full)
    try:
        mics.save(path, model)
    except mics.CheckpointError as error:
        return str(error)
    finally:
        patch.undo()
    return ""


def test_a_disk_that_fills_up_later_is_named_too(tmp_path: Path) -> None:
    """torch.save has its own complaint about an archive that it could not end: not that one."""
    (message,) = run_ranks(1, _full_later, str(tmp_path / "c"))
    assert "No space left on device" in message


def _same_step_again(path: str) -> tuple[int, list[str]]:
    """A save of a step that is there is killed between the moves of the old and of the new folder."""
    import mics

    model, optimizer = build(1)
    mics.save(path, model, optimizer, {"n": 1}, step=5)
    rename = Path.rename

    def killed(self: Path, target: Path) -> Any:
        if self.name.endswith(".partial"):
            raise KeyboardInterrupt
        return rename(self, target)

    patch = pytest.MonkeyPatch()
    patch.setattr(Path, "rename", killed)
    with pytest.raises(KeyboardInterrupt):
        mics.save(path, model, optimizer, {"n": 2}, step=5)
    patch.undo()
    found = mics.load(path, *build(1))["n"]
    mics.save(path, model, optimizer, {"n": 3}, step=6)
    return found, sorted(each.name for each in Path(path).iterdir())


def test_a_step_that_is_saved_again(tmp_path: Path) -> None:
    """The old one loads, and is put back by the next save."""
    assert run_ranks(1, _same_step_again, str(tmp_path)) == [(1, ["latest", "step-5", "step-6"])]


def _going_back(path: str) -> list[str]:
    import mics

    model, optimizer = build(1)
    for step in (100, 200, 300, 110, 120):
        mics.save(path, model, optimizer, {"n": step}, step=step, keep=2)
    (Path(path) / "latest").write_bytes(b"\xff\xfe broken")
    assert mics.load(path, *build(1))["n"] == 120
    (Path(path) / "step-007").mkdir()
    mics.save(path, model, optimizer, {"n": 130}, step=130, keep=2)
    return sorted(each.name for each in Path(path).iterdir())


def test_a_run_that_went_back_keeps_its_own(tmp_path: Path) -> None:
    """The last that were saved stay, not the highest; a broken latest or a strange folder does not matter."""
    assert run_ranks(1, _going_back, str(tmp_path)) == [["latest", "step-007", "step-120", "step-130"]]


class _Keeps(nn.Module):
    """Extra state that is a tensor, a hook that hides parameters, a buffer that repeats itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 3)
        self.amax = torch.zeros(3)
        self.register_buffer("wide", torch.rand(1, 4).expand(3, 4))
        self._register_state_dict_hook(_clones)

    def get_extra_state(self) -> torch.Tensor:
        return self.amax

    def set_extra_state(self, state: torch.Tensor) -> None:
        self.amax = state.clone()


def _clones(module: nn.Module, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    for name in list(state):
        if isinstance(state[name], torch.Tensor):
            state[name] = state[name].clone()


def _odd_module(path: str) -> bool:
    import mics

    torch.manual_seed(0)
    model = mics.shard(_Keeps(), partition_size=2)
    model.amax = torch.arange(3.0)
    mics.save(path, model)
    torch.manual_seed(1)
    other = mics.shard(_Keeps(), partition_size=2)
    with torch.inference_mode():
        mics.load(path, other)
    whole = [mics.full_state_dict(each, rank0_only=False) for each in (model, other)]
    with mics.summon_full_params(model), mics.summon_full_params(other):
        equal = torch.equal(model.inner.weight, other.inner.weight)
    return equal and torch.equal(other.amax, torch.arange(3.0)) and same(whole[0]["wide"], whole[1]["wide"])


def test_modules_that_keep_things_for_themselves(tmp_path: Path) -> None:
    """What get_extra_state returns may be a tensor; hooks on the state dict do not hide parameters."""
    assert all(run_ranks(2, _odd_module, str(tmp_path / "c")))


def _refused(path: str, case: str) -> None:
    import mics

    model, optimizer = build(1)
    if case == "summon":
        with mics.summon_full_params(model):
            mics.save(path, model)
    elif case == "optimizer in extra_state":
        mics.save(path, model, None, {"second": optimizer})
    else:
        mics.save(path, mics.shard(nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})))
        mics.load(path, mics.shard(nn.Linear(3, 3)))


@pytest.mark.parametrize("case", ["summon", "optimizer in extra_state", "a part of another model"])
def test_what_would_be_silently_wrong_is_refused(tmp_path: Path, case: str) -> None:
    """A summoned model, an optimizer as a plain value, a model whose names happen to fit."""
    for error in run_expecting_error(1, _refused, str(tmp_path / "c"), case):
        assert error.is_a("SettingsError") or error.is_a("CheckpointError")


def _two_optimizers(path: str, first: bool) -> dict[str, Any]:
    import mics

    def made(seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
        model, _ = build(2, seed=seed)
        params = [p for p in model.parameters() if p.requires_grad]
        return model, [torch.optim.SGD(params[:3], 0.1, momentum=0.9), torch.optim.AdamW(params[3:], 0.01)]

    model, optimizers = made(0 if first else 1)
    if first:
        batch = build.__globals__["toys"].language_batch(0, 0, 0)
        model(*batch).backward()
        for each in optimizers:
            each.step()
        mics.save(path, model, optimizers)
    else:
        mics.load(path, model, optimizers)
    return {
        str(i): mics.full_optimizer_state_dict(model, o, rank0_only=False) for i, o in enumerate(optimizers)
    }


def test_several_optimizers_on_another_world(tmp_path: Path) -> None:
    """A model may be shared out over optimizers; all of them are resharded."""
    saved = run_ranks(2, _two_optimizers, str(tmp_path / "c"), True)[0]
    assert all(saved.values())
    for found in run_ranks(4, _two_optimizers, str(tmp_path / "c"), False):
        assert same(found, saved)


def _half_loaded(path: str) -> list[bool]:
    """What can be found wrong before values are read leaves the model alone."""
    import mics

    model, optimizer = build(2)
    train(model, optimizer, 0, 1)
    mics.save(path, model, optimizer, {"n": 1})
    other, theirs = build(2, seed=1)
    before = everything(other, theirs)
    with pytest.raises(mics.CheckpointError, match="expected extra_state 'missing'"):
        mics.load(path, other, theirs, {"missing": 1})
    one_group = torch.optim.AdamW(other.parameters(), lr=1.0)
    with pytest.raises(mics.CheckpointError, match="same settings"):
        mics.load(path, other, one_group)
    groups = [{"params": group["params"]} for group in theirs.param_groups]
    of_another_class = torch.optim.SGD(groups, lr=1.0)
    with pytest.raises(mics.CheckpointError, match="expected the state of SGD"):
        mics.load(path, other, of_another_class)
    return [same(everything(other, theirs), before)]


def test_a_load_that_fails_early_changes_nothing(tmp_path: Path) -> None:
    """Missing extra state and settings that do not fit are found before parameters are touched."""
    assert run_ranks(2, _half_loaded, str(tmp_path / "c")) == [[True]] * 2


class _Colour(str, Enum):  # noqa: UP042 - as people write them
    RED = "red"


def test_values_come_back_as_they_were() -> None:
    """Frozen sets, also as keys; enums as what they are used as."""
    from mics.checkpoint.values import decode, encode

    value = {frozenset([1, 2]): {3}, "plain": frozenset(["a"]), "colour": _Colour.RED, _Colour.RED: 1}
    found = decode(json.loads(json.dumps(encode(value, "value"))))
    assert found == value and type(found["plain"]) is frozenset and type(found["colour"]) is str


def _bad_file(index: dict[str, Any]) -> None:
    index["files"]["../outside"] = index["files"].pop("rank-0.json")


def _bad_chunk(index: dict[str, Any]) -> None:
    next(iter(index["tensors"].values()))["chunks"][0][3] = 1 << 60


def _overlap(index: dict[str, Any]) -> None:
    entry = next(e for e in index["tensors"].values() if len(e["chunks"]) > 1)
    entry["chunks"][1] = list(entry["chunks"][0])


def _no_digests(index: dict[str, Any]) -> None:
    index["files"]["__0_0.distcp"]["digests"] = []


def _no_tensors(index: dict[str, Any]) -> None:
    del index["tensors"]


def _huge(index: dict[str, Any]) -> None:
    index["files"]["rank-0.json"]["nbytes"] = 1 << 60


@pytest.mark.parametrize("alter", [_bad_file, _bad_chunk, _overlap, _no_digests, _no_tensors, _huge])
def test_an_index_that_does_not_fit_together(tmp_path: Path, alter: Callable[[dict[str, Any]], None]) -> None:
    """Whoever wrote it: nothing outside of the folder is read, nothing is allocated, one clear error."""
    import hashlib

    from mics.checkpoint.index import read_index
    from mics.errors import CheckpointError

    run_ranks(2, _save_two, str(tmp_path / "c"))
    file = tmp_path / "c" / "mics.json"
    index = json.loads(file.read_text())
    alter(index)
    text = json.dumps(index).encode()
    file.write_bytes(text)
    file.with_name("mics.json.sha256").write_text(hashlib.sha256(text).hexdigest())
    with pytest.raises(CheckpointError, match=r"mics\.json"):
        read_index(tmp_path / "c")


def _save_two(path: str) -> None:
    import mics

    mics.save(path, *build(2))

"""Saving and loading on real ranks: what is written, what comes back, and what happens when it goes wrong."""

from __future__ import annotations

import errno
import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests import tiers, toys
from tests.checkpoint.runs import STEPS, build, everything, loaded, same, train, trained_and_saved
from tests.ranks import run_expecting_error, run_ranks

LAYOUTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "partition": {"optimizer_sharding": "partition"},
    "bf16": {"precision": "bf16"},
    "one unit": {"units": []},
}


def _options(layout: str) -> dict[str, Any]:
    import mics

    options = dict(LAYOUTS[layout])
    if options.pop("precision", None):
        options["precision"] = mics.Precision(param_dtype=torch.bfloat16)
    return options


def _save_in(layout: str, path: str, partition_size: int) -> dict[str, Any]:
    return trained_and_saved(path, partition_size, **_options(layout))


def _load_in(layout: str, paths: list[str], partition_size: int) -> list[dict[str, Any]]:
    return loaded(paths, partition_size, **_options(layout))


def _same_values(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Frozen parameters have no masters: they are in the format of the layout."""
    formats = {
        name: min(found[name].dtype, value.dtype, key=lambda d: d.itemsize)
        for name, value in expected.items()
    }
    return all(torch.equal(found[n].to(formats[n]), value.to(formats[n])) for n, value in expected.items())


def test_layouts_load_each_other(tmp_path: Path) -> None:
    """Optimizer sharding, formats and units may differ between the run that saves and the one that loads."""
    sources = tiers.some(list(LAYOUTS), 2)
    paths = [str(tmp_path / source.replace(" ", "-")) for source in sources]
    saved = [run_ranks(4, _save_in, *item, 2)[0] for item in zip(sources, paths, strict=True)]
    for layout in tiers.some(list(LAYOUTS)[::-1]):
        for found in run_ranks(4, _load_in, layout, paths, 2):
            for source, values, expected in zip(sources, found, saved, strict=True):
                for what in ("optimizer", "lr"):
                    assert same(values[what], expected[what]), (layout, source, what)
                assert _same_values(values["model"], expected["model"]), (layout, source)


# ---------------------------------------------------------------------------------------------
# What is on disk
# ---------------------------------------------------------------------------------------------


def _save_wide(path: str, partition_size: int) -> int:
    """Save a model large enough for padding and archives to be small beside it; the bytes of this rank."""
    import mics

    torch.manual_seed(0)
    model = mics.shard(nn.Sequential(*[nn.Linear(129, 257) for _ in range(4)]), partition_size=partition_size)
    return mics.save(path, model).nbytes


@pytest.mark.parametrize("partition_size", [1, 2, 4])
def test_every_byte_is_written_once_and_evenly(tmp_path: Path, partition_size: int) -> None:
    """Replicas share the writing: ranks write the same number of bytes, in all those of the model."""
    written = run_ranks(4, _save_wide, str(tmp_path / "c"), partition_size)
    assert sum(written) == 4 * 4 * (129 * 257 + 257)
    padding = 4 * 256  # elements: of a unit with a large parameter at most 256 for each rank
    assert max(written) - min(written) <= 4 * 4 * padding
    sizes = [file.stat().st_size for file in (tmp_path / "c").glob("*.distcp")]
    assert len(sizes) == 4 and sum(sizes) < 1.25 * sum(written)


def _save_twice(path: str) -> dict[str, Any]:
    """Save in the background, train on, save again; what was there at each save."""
    import mics

    model, optimizer = build(2)
    expected = []
    for step in (1, 2, 3, 4):
        train(model, optimizer, step, step + 1)
        saving = mics.save(path, model, optimizer, {"step": step}, step=step, keep=2, wait=False)
        expected.append((step, everything(model, optimizer)))
    assert saving.wait() == Path(path) / "step-4" and saving.done and saving.stall > 0
    found = {}
    for step, values in expected[-2:]:
        mics.load(Path(path) / f"step-{step}", model, optimizer)
        found[step] = same(everything(model, optimizer), values)
    return found | {"latest": mics.load(path, model, optimizer)["step"]}


def test_background_saves_keep_the_last(tmp_path: Path) -> None:
    """Values of the moment of the save are written while training goes on; the last two stay."""
    for found in run_ranks(4, _save_twice, str(tmp_path)):
        assert found == {3: True, 4: True, "latest": 4}
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-3", "step-4"]


class _Counter:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


def _own_state(path: str) -> dict[str, Any]:
    import torch.distributed as dist

    import mics

    model, optimizer = build(2)
    rank, counter = dist.get_rank(), _Counter()
    counter.count = 10 + rank
    torch.manual_seed(rank)
    extra = {"counter": counter, "tuple": (1, b"x", {2: None}), "tensor": torch.arange(3.0), "rank": rank}
    mics.save(path, model, optimizer, extra)
    drawn = (torch.rand(2).tolist(), random.random())
    counter.count = 0
    found = mics.load(path, model, optimizer, {"counter": counter})
    assert torch.equal(found.pop("tensor"), torch.arange(3.0))
    again = (torch.rand(2).tolist(), random.random())
    return {"found": found, "count": counter.count, "same random": drawn == again}


def test_each_rank_has_its_own_state_back(tmp_path: Path) -> None:
    """Random state, objects with state_dict and plain values, for every rank what it had."""
    for rank, found in enumerate(run_ranks(2, _own_state, str(tmp_path / "c"))):
        assert found["same random"] and found["count"] == 10 + rank
        assert found["found"] == {
            "counter": {"count": 10 + rank},
            "tuple": (1, b"x", {2: None}),
            "rank": rank,
        }


def _unsaveable(path: str) -> None:
    import mics

    model, optimizer = build(1)
    mics.save(path, model, optimizer, {"what": [object()]})


def _one_cannot(path: str, what: str) -> None:
    import torch.distributed as dist

    import mics

    model, optimizer = build(1)
    odd = dist.get_rank() == 1
    if what == "state":
        mics.save(path, model, optimizer, {"x": object() if odd else 1}, wait=False)
    else:
        mics.save(path, model, optimizer, step=2 if odd else 1)


@pytest.mark.parametrize(
    ("what", "words"), [("state", "rank 1 cannot"), ("step", "same path, step and keep")]
)
def test_ranks_that_disagree_do_not_wait_for_each_other(tmp_path: Path, what: str, words: str) -> None:
    """One rank that cannot save, or means another folder, is an error on all of them, at once."""
    errors = run_expecting_error(2, _one_cannot, str(tmp_path / "c"), what)
    assert len(errors) == 2 and all(error.is_a("SettingsError") for error in errors)
    assert words in errors[0].message


def test_what_cannot_be_saved_is_named(tmp_path: Path) -> None:
    """Nothing is pickled: an object that is no plain value is refused, by its name."""
    for error in run_expecting_error(2, _unsaveable, str(tmp_path / "c")):
        assert error.is_a("SettingsError") and "extra_state.what[0]" in error.message


# ---------------------------------------------------------------------------------------------
# Models and optimizers
# ---------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 1e-3, "amsgrad": True},
    "Adagrad": {"lr": 1e-2},
    "ASGD": {"lr": 1e-2},
    "RMSprop": {"lr": 1e-3, "centered": True},
}


def _round_trip(path: str, kind: str) -> bool:
    import mics

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = mics.shard(toys.Language(), partition_size=2)
        return model, getattr(torch.optim, kind)(model.parameters(), **OPTIMIZERS[kind])

    model, optimizer = made(0)
    train(model, optimizer, 0, 2)
    mics.save(path, model, optimizer)
    other, theirs = made(1)
    mics.load(path, other, theirs)
    return (
        same(everything(model, optimizer), everything(other, theirs))
        and train(model, optimizer, 2, 4) == train(other, theirs, 2, 4)
        and same(everything(model, optimizer), everything(other, theirs))
    )


@pytest.mark.parametrize(
    "kind",
    tiers.first(["Adam", *(kind for kind in OPTIMIZERS if kind != "Adam")], 1, 3),
)
def test_optimizers_come_back(tmp_path: Path, kind: str) -> None:
    """Whatever state an optimizer keeps, and it trains on to the bit."""
    assert all(run_ranks(4, _round_trip, str(tmp_path / "c"), kind))


def _special(path: str, name: str) -> bool:
    """Frozen, tied and buffered modules; a scalar parameter; optimizers that do not have all parameters."""
    import mics

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.rand(()))
            self.inner = getattr(toys, name)()
            self.norm = nn.BatchNorm1d(3)
            self.register_buffer("table", torch.rand(3, 2).t())  # not contiguous

        def get_extra_state(self) -> dict[str, Any]:
            return {"words": ["a", 1]}

        def set_extra_state(self, state: dict[str, Any]) -> None:
            self.words = state["words"]

    def made(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = mics.shard(Odd(), partition_size=2)
        return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)

    model, optimizer = made(0)
    for param in model.parameters():
        if param.requires_grad:
            optimizer.state[param] = {"step": torch.tensor(3.0), "exp_avg": torch.rand(param.shape)}
            optimizer.state[param]["exp_avg_sq"] = torch.rand(param.shape)
    mics.save(path, model, optimizer)
    other, theirs = made(1)
    mics.load(path, other, theirs)
    return same(everything(model, optimizer), everything(other, theirs)) and other.words == ["a", 1]


@pytest.mark.parametrize("name", tiers.first(["LoRA", "TiedBlocks", "FrozenMiddle"]))
def test_special_models(tmp_path: Path, name: str) -> None:
    """Tied and frozen parameters, buffers, scalars and what modules keep for themselves."""
    assert all(run_ranks(4, _special, str(tmp_path / "c"), name))


# ---------------------------------------------------------------------------------------------
# What goes wrong
# ---------------------------------------------------------------------------------------------


def _load_only(path: str, model: str = "Language") -> None:
    import mics

    sharded, optimizer = build(2, model=model)
    mics.load(path, sharded, optimizer)


def test_altered_and_torn_files_are_named(tmp_path: Path) -> None:
    """A flipped bit anywhere in any file, a file that is too short: all ranks raise, and name the file."""
    run_ranks(4, trained_and_saved, str(tmp_path / "c"), 2)
    generator = random.Random(0)
    names = sorted(file.name for file in (tmp_path / "c").iterdir() if not file.name.startswith("."))
    assert len(names) == 4 + 4 + 2
    for name in tiers.some(names):
        file = tmp_path / "c" / name
        whole = file.read_bytes()
        at = generator.randrange(len(whole))
        for torn in (whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :], whole[:at]):
            file.write_bytes(torn)
            for error in run_expecting_error(4, _load_only, str(tmp_path / "c")):
                assert error.is_a("CheckpointError") and f"c/{name.removesuffix('.sha256')}" in error.message
        file.write_bytes(whole)
    run_ranks(4, _load_only, str(tmp_path / "c"))


def test_another_model_is_refused(tmp_path: Path) -> None:
    """By names and shapes, before anything is changed."""
    run_ranks(2, trained_and_saved, str(tmp_path / "c"), 2)
    for error in run_expecting_error(2, _load_only, str(tmp_path / "c"), "Chain"):
        assert error.is_a("CheckpointError") and "expected a checkpoint of this model" in error.message
    for error in run_expecting_error(2, _load_only, str(tmp_path / "nowhere")):
        assert error.is_a("CheckpointError") and "found no such folder" in error.message


def _full_disk(path: str, wait: bool) -> list[Any]:
    """Rank 1's disk is full at the second save, and has room again at the third."""
    import torch.distributed as dist

    import mics
    from mics.checkpoint import blocks

    model, optimizer = build(2)
    mics.save(path, model, optimizer, {"step": 1}, step=1)
    write = blocks.BlockWriter.write

    def full(self: Any, content: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if dist.get_rank() == 1:
        blocks.BlockWriter.write = full  # type: ignore[method-assign]
    error = ""
    try:
        mics.save(path, model, optimizer, {"step": 2}, step=2, wait=wait).wait()
    except mics.CheckpointError as caught:
        error = str(caught)
    blocks.BlockWriter.write = write  # type: ignore[method-assign]
    losses = train(model, optimizer, 0, 1)  # goes on
    latest = mics.load(path, *build(2))["step"]
    mics.save(path, model, optimizer, {"step": 3}, step=3, wait=wait).wait()
    return [error, losses, latest, mics.load(path, model, optimizer)["step"]]


@pytest.mark.parametrize("wait", [pytest.param(True, marks=pytest.mark.full), False])
def test_a_full_disk_loses_nothing(tmp_path: Path, wait: bool) -> None:
    """Every rank is told which one failed and why; the checkpoint before is intact, and training goes on."""
    for error, losses, before, after in run_ranks(4, _full_disk, str(tmp_path), wait):
        assert "rank 1 could not write its part: No space left on device" in error
        assert len(losses) == 1 and (before, after) == (1, 3)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["latest", "step-1", "step-3"]


def _killed_at_every_moment(path: str, stride: int) -> list[int]:
    """What loads after a save that ends at a call to the file system, as if the process were killed there.

    At each call, or one of `stride`. The last one is of a save that ends by itself.
    """
    import mics
    from mics.checkpoint import files, storage

    class Killed(BaseException):
        pass

    (model, optimizer), other = build(1), build(1)
    before = Path(path) / "before"
    for step in (1, 2):
        mics.save(before, model, optimizer, {"step": step}, step=step, keep=1)
    calls = moment = 0

    def counted(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls > moment:
                raise Killed
            return function(*args, **kwargs)

        return call

    found, finished = [], False
    while not finished:
        folder = Path(path) / str(moment)
        shutil.copytree(before, folder, symlinks=True)
        calls, finished = 0, True
        patch = pytest.MonkeyPatch()
        for place, name in [
            (Path, "rename"), (Path, "replace"), (os, "fsync"), (os, "open"), (storage.shutil, "rmtree"),
            (Path, "mkdir"), (storage, "write_durably"), (files, "sync_folder"),
        ]:  # fmt: skip
            patch.setattr(place, name, counted(getattr(place, name)))
        try:
            mics.save(folder, model, optimizer, {"step": 3}, step=3, keep=1)
        except Killed:
            finished = False
        finally:
            patch.undo()
        found.append(mics.load(folder, *other)["step"])
        mics.save(folder, model, optimizer, {"step": 4}, step=4, keep=1)
        assert mics.load(folder, *other)["step"] == 4
        assert sorted(each.name for each in folder.iterdir()) == [
            "latest",
            "step-4",
        ]  # nothing is left behind
        shutil.rmtree(folder)
        moment += stride
    return found


def test_a_kill_at_any_moment_leaves_a_checkpoint(tmp_path: Path) -> None:
    """At whatever call to the file system a save ends, what is there loads, and the next save works."""
    stride = 3 if tiers.quick else 1
    (found,) = run_ranks(1, _killed_at_every_moment, str(tmp_path), stride)
    assert len(found) * stride > 12  # there are that many calls, at least
    assert found == sorted(found) and set(found) == {2, 3}


def _replaced(path: str, moment: int) -> bool:
    """The same, for a checkpoint without steps that replaces the one before."""
    import mics
    from mics.checkpoint import storage

    model, optimizer = build(1)
    mics.save(path, model, optimizer, {"n": 1})
    calls = 0
    rename = Path.rename

    def killed(self: Path, target: Path) -> Any:
        nonlocal calls
        calls += 1
        if calls > moment:
            raise KeyboardInterrupt
        return rename(self, target)

    patch = pytest.MonkeyPatch()
    patch.setattr(Path, "rename", killed)
    patch.setattr(storage.shutil, "rmtree", lambda *args, **kwargs: None)
    try:
        mics.save(path, model, optimizer, {"n": 2})
    except KeyboardInterrupt:
        pass
    finally:
        patch.undo()
    return mics.load(path, *build(1))["n"] == (2 if moment >= 2 else 1)


def test_replacing_a_checkpoint_never_leaves_none(tmp_path: Path) -> None:
    """Also between the moment the old one goes and the new one comes."""
    assert all(run_ranks(1, _replaced, str(tmp_path / f"c{m}"), m)[0] for m in range(3))


def _without_pickle(path: str) -> int:
    import pickle

    import mics

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a pickle was loaded")

    model, optimizer = build(1)
    patch = pytest.MonkeyPatch()
    for place, name in [(pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")]:
        patch.setattr(place, name, refuse)
    try:
        return mics.load(path, model, optimizer)["step"]
    finally:
        patch.undo()


def test_no_pickle_is_loaded(tmp_path: Path) -> None:
    """Not even DCP's own metadata, which is one."""
    run_ranks(2, trained_and_saved, str(tmp_path / "c"), 2)
    assert (tmp_path / "c" / ".metadata").exists()
    assert run_ranks(1, _without_pickle, str(tmp_path / "c")) == [STEPS]


class _OverRanks:
    """Whose state is agreed on by all ranks."""

    def state_dict(self) -> dict[str, float]:
        import torch.distributed as dist

        total = torch.ones(())
        dist.all_reduce(total)
        return {"total": float(total)}


def _refused(folder: str) -> str:
    import mics
    from mics.errors import SettingsError

    model, optimizer = build(2)
    with pytest.raises(SettingsError) as caught:
        mics.save(folder, model, optimizer, {"own": _OverRanks()})
    train(model, optimizer, 0, 1)  # no rank is in a collective that others are not in
    return str(caught.value)


def test_a_folder_that_one_rank_refuses_keeps_no_other_waiting(tmp_path: Path) -> None:
    """Rank 0 looks at the folder before anybody's state_dict() is called: that may be collective."""
    (tmp_path / "mine.txt").touch()
    for found in run_ranks(2, _refused, str(tmp_path)):
        assert "found mine.txt" in found

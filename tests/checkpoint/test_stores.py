"""Checkpoints on object stores: what is promised there, over fsspec's own file systems and a server of S3."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mics
from mics.checkpoint import apart
from mics.checkpoint.arguments import as_place
from mics.checkpoint.command import checkpoint
from mics.checkpoint.folders import latest_in, steps_in
from mics.checkpoint.formats.dcp import METADATA_NAME
from mics.checkpoint.remote import RemotePath
from mics.checkpoint.storage import INDEX_NAME, read_file, storage_of
from mics.errors import CheckpointError, MissingExtraError, SettingsError
from tests import tiers
from tests.checkpoint.runs import STEPS, build, everything, has_part_of, same, train
from tests.ranks import run_ranks

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def memory() -> Iterator[str]:
    yield "memory://bucket/run"
    fsspec.filesystem("memory").store.clear()


def _names(url: str) -> list[str]:
    return sorted(each.name for each in RemotePath(url).iterdir())


# ---------------------------------------------------------------------------------------------
# One rank, in memory: what is there at each moment
# ---------------------------------------------------------------------------------------------


def test_steps_are_kept_and_the_latest_is_found(alone: None, memory: str) -> None:
    """The last two stay, index and files, and a step that is saved again is replaced."""
    model, optimizer = build(1)
    values = {}
    for step in (1, 2, 3, 3):
        train(model, optimizer, 0, 1)
        values[step] = everything(model, optimizer)
        saving = mics.save(memory, model, optimizer, {"step": step}, step=step, keep=2, wait=False)
        assert str(saving.wait()) == f"{memory}/step-{step}"
    assert _names(memory) == ["latest", "step-2", "step-3"]
    assert len(_names(f"{memory}/step-3")) == 4  # values, own state, index, DCP's index: of one save
    assert mics.load(memory, model, optimizer)["step"] == 3
    assert same(everything(model, optimizer), values[3])
    mics.load(f"{memory}/step-2", model, optimizer)
    assert same(everything(model, optimizer), values[2])


def test_a_torn_upload_is_passed_over(alone: None, memory: str) -> None:
    """Without an index it is no checkpoint, and the next save clears it away. A short object is torn."""
    model, optimizer = build(1)
    for step in (1, 2):
        mics.save(memory, model, optimizer, {"step": step}, step=step)
    store = fsspec.filesystem("memory")
    store.rm("/bucket/run/step-2/mics.json")
    assert mics.load(memory, model, optimizer)["step"] == 1
    mics.save(memory, model, optimizer, {"step": 3}, step=3)
    assert _names(memory) == ["latest", "step-1", "step-3"]
    values = next(each for each in _names(f"{memory}/step-3") if each.endswith(".distcp"))
    whole = store.cat_file(f"/bucket/run/step-3/{values}")
    store.pipe_file(f"/bucket/run/step-3/{values}", whole[:-1])
    with pytest.raises(CheckpointError, match=r"step-3/.*: expected .* bytes, found .*torn"):
        mics.load(memory, model, optimizer)
    store.pipe_file(f"/bucket/run/step-3/{values}", whole[:-9] + bytes(1) + whole[-8:])
    assert checkpoint(["verify", memory]) == 1
    store.pipe_file(f"/bucket/run/step-3/{values}", whole)
    assert checkpoint(["verify", memory]) == 0


def test_the_old_one_stays_until_the_index_is_put(
    alone: None, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is saved again and fails before its index leaves the one from before, and nothing else."""
    model, optimizer = build(1)
    mics.save(memory, model, optimizer, {"step": 1}, step=1)
    before, values = _names(f"{memory}/step-1"), everything(model, optimizer)
    train(model, optimizer, 0, 1)
    storage = type(storage_of(RemotePath(memory)))

    def cut(self: Any, place: Any, content: bytes) -> None:
        raise CheckpointError(f"{place}: could not be written: cut")

    with monkeypatch.context() as patch:
        patch.setattr(storage, "write", cut)
        with pytest.raises(CheckpointError, match="cut"):
            mics.save(memory, model, optimizer, {"step": 1}, step=1)
    assert _names(f"{memory}/step-1") == before
    mics.load(memory, model, optimizer)
    assert same(everything(model, optimizer), values)


@pytest.mark.parametrize("what", ["latest", "old files"])
def test_a_store_that_fails_after_the_index(
    alone: None, memory: str, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """What the index names stays, whatever fails after it was put."""
    model, optimizer = build(1)
    mics.save(memory, model, optimizer, {"step": 1}, step=1)
    train(model, optimizer, 0, 1)
    values = everything(model, optimizer)

    def cut(*args: Any, **kwargs: Any) -> None:
        raise CheckpointError(f"{what}: cut")

    with monkeypatch.context() as patch:
        if what == "latest":
            patch.setattr("mics.checkpoint.folders.point_latest", cut)
            with pytest.raises(CheckpointError, match="latest: cut"):
                mics.save(memory, model, optimizer, {"step": 2}, step=1)
        else:
            patch.setattr("mics.checkpoint.storage.remove", cut)
            mics.save(memory, model, optimizer, {"step": 2}, step=1)
    train(model, optimizer, 0, 1)
    assert mics.load(memory, model, optimizer)["step"] == 2
    assert same(everything(model, optimizer), values)
    mics.save(memory, model, optimizer, {"step": 2}, step=1)
    assert len(_names(f"{memory}/step-1")) == 4


def _dcp_files(url: str) -> set[str] | None:
    """The objects that DCP's index names; None: there is no such index."""
    found = RemotePath(f"{url}/{METADATA_NAME}")
    if not found.exists():
        return None
    content = read_file(found, most=1 << 24)
    return {name.decode() for name in re.findall(rb"__\d+_\d+-[0-9a-f]{12}\.distcp", content)}


@pytest.mark.parametrize("fails", [False, True])
def test_an_index_of_parts_replaces_the_index_of_dcp(
    alone: None, memory: str, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    """It has none for DCP: that of the save before goes, and before it goes all that it names is there."""
    model, optimizer = build(1)
    mics.save(memory, model, optimizer, {"step": 1})
    monkeypatch.setattr(apart, "MAX_GATHERED_ITEMS", 0)
    train(model, optimizer, 0, 1)
    values = everything(model, optimizer)
    removed: list[list[str]] = []

    def remove(places: list[RemotePath], **kwargs: Any) -> None:
        removed.append([each.name for each in places])
        named = _dcp_files(memory)
        assert named and named <= set(_names(memory))
        raise CheckpointError("cut")

    with monkeypatch.context() as patch:
        if fails:
            patch.setattr("mics.checkpoint.storage.remove", remove)
        mics.save(memory, model, optimizer, {"step": 2})
    train(model, optimizer, 0, 1)
    assert mics.load(memory, model, optimizer)["step"] == 2
    assert same(everything(model, optimizer), values)
    if fails:
        assert removed == [[METADATA_NAME]]
        mics.save(memory, model, optimizer, {"step": 2})
    assert _dcp_files(memory) is None
    assert len(_names(memory)) == 4  # values, own state, its part of the index, the index: of one save


def test_dcp_finds_a_whole_checkpoint_whatever_fails(
    alone: None, memory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save that fails before, at or after an object leaves an index for DCP whose files are there."""
    model, optimizer = build(1)
    mics.save(memory, model, optimizer, {"step": 1})
    storage = type(storage_of(RemotePath(memory)))
    put = storage.write
    for name in (INDEX_NAME, METADATA_NAME):

        def write(self: Any, place: Any, content: bytes, name: str = name) -> None:
            if place.name == name:
                raise CheckpointError(f"{place}: could not be written: cut")
            put(self, place, content)

        with monkeypatch.context() as patch:
            patch.setattr(storage, "write", write)
            with pytest.raises(CheckpointError, match="cut"):
                mics.save(memory, model, optimizer, {"step": 2})
        named = _dcp_files(memory)
        assert named and named <= set(_names(memory))
        mics.load(memory, model, optimizer)


def test_order_of_deletion(alone: None, memory: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is removed loses its index first."""
    model, _ = build(1)
    mics.save(memory, model, step=1)
    removed: list[str] = []
    store = type(fsspec.filesystem("memory"))
    real = store.rm
    monkeypatch.setattr(store, "rm", lambda self, paths: (removed.extend(paths), real(self, paths)))
    storage_of(RemotePath(memory)).remove(RemotePath(f"{memory}/step-1"))
    assert removed[0] == "/bucket/run/step-1/mics.json" and len(removed) == 4
    assert steps_in(RemotePath(memory)) == [] and latest_in(RemotePath(memory)) is None


def test_export_and_import_to_a_url(alone: None, memory: str, tmp_path: Path) -> None:
    """Safetensors are written to a store and read from it, and a checkpoint is imported to one."""
    model, _ = build(1)
    mics.save(memory, model)
    out = f"{memory}-export"
    assert checkpoint(["export", memory, out, "--shard-size", "10KB"]) == 0
    assert checkpoint(["export", memory, str(tmp_path / "out"), "--shard-size", "10KB"]) == 0
    assert _names(out) == sorted(each.name for each in (tmp_path / "out").iterdir())
    expected = everything(model, torch.optim.SGD(model.parameters()))["model"]
    assert checkpoint(["import", str(tmp_path / "out"), f"{memory}-imported"]) == 0
    for source in (out, f"{memory}-imported"):
        model, _ = build(1, seed=1)
        mics.load(source, model)
        assert same(everything(model, torch.optim.SGD(model.parameters()))["model"], expected)
    assert checkpoint(["show", memory]) == 0


# ---------------------------------------------------------------------------------------------
# What a URL may be
# ---------------------------------------------------------------------------------------------


def test_urls_and_paths() -> None:
    assert as_place("s3://bucket/run/", "x") == RemotePath("s3://bucket/run")
    assert as_place("runs/a", "x") == Path("runs/a")
    place = RemotePath("s3://bucket/run")
    assert str((place / "step-1").parent) == "s3://bucket/run" and place.with_name("b").name == "b"
    for wrong in (Path("s3://bucket/run"), "zip::s3://bucket/run"):
        with pytest.raises(SettingsError, match="give a URL as a str"):
            as_place(wrong, "mics.save")


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setattr("mics.utils.extras.find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match=r"pip install 'mics-torch\[gcs\]'"):
        RemotePath("gs://bucket/run").exists()
    with pytest.raises(CheckpointError, match="expected a protocol that fsspec knows"):
        RemotePath("nonsense://bucket/run").exists()


# ---------------------------------------------------------------------------------------------
# Several ranks
# ---------------------------------------------------------------------------------------------


def _save(url: str, environ: dict[str, str] | None = None) -> dict[str, Any]:
    os.environ.update(environ or {})
    model, optimizer = build(2)
    train(model, optimizer, 0, STEPS)
    for step in (1, 2):
        mics.save(url, model, optimizer, {"step": step}, step=step, keep=2, wait=False).wait()
    return everything(model, optimizer)


def _load(url: str, whole: dict[str, Any], environ: dict[str, str] | None = None) -> bool:
    os.environ.update(environ or {})
    model, optimizer = build(2, seed=1)
    return mics.load(url, model, optimizer)["step"] == 2 and has_part_of(whole, model, optimizer)


@pytest.mark.full
def test_ranks_save_and_fewer_load(tmp_path: Path) -> None:
    """Four ranks save through fsspec's local file system, two load."""
    url = f"file://{tmp_path}/run"
    whole = run_ranks(4, _save, url)[0]
    assert run_ranks(2, _load, url, whole) == [True, True]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """The URL of a bucket; where the server listens is in the environment."""
    pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    settings = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in settings.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem(skip_instance_cache=True).mkdir("bucket")
        yield "s3://bucket/run"
    server.stop()


@pytest.mark.full
def test_ranks_save_to_s3_and_fewer_load(s3: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Over real HTTP; then a bucket that is not there is an error, with its name."""
    environ = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    whole = run_ranks(4, _save, s3, environ)[0]
    assert run_ranks(2, _load, s3, whole, environ) == [True, True]
    assert checkpoint(["verify", s3]) == 0
    assert _names(s3) == ["latest", "step-1", "step-2"]
    assert "every block is what was written" in capsys.readouterr().out


_KILLED = """
import sys, time
import torch, torch.distributed as dist
import mics
from mics.checkpoint.remote import RemoteSink
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = mics.shard(torch.nn.Linear(1024, 1024), partition_size=1)
mics.save(sys.argv[1], model, None, {"step": 1}, step=1)
if sys.argv[2] == "kill":
    RemoteSink.finish = lambda self: (print("uploading", flush=True), time.sleep(60))
mics.save(sys.argv[1], model, None, {"step": 2}, step=2, wait=False)
"""


@pytest.mark.long
@pytest.mark.full
def test_a_script_ends_with_its_checkpoint(s3: str) -> None:
    """A save in the background is finished at the end of a script, also over HTTP with a name to look up."""
    environ = {
        **os.environ,
        "AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"].replace("0.0.0.0", "localhost"),
    }
    command = [sys.executable, "-c", _KILLED, f"{s3}-ended", "end"]
    found = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert str(latest_in(RemotePath(f"{s3}-ended"))) == f"{s3}-ended/step-2"


@pytest.mark.full
def test_killed_during_an_upload(s3: str) -> None:
    """What was there before is the latest."""
    command = [sys.executable, "-c", _KILLED, f"{s3}-killed", "kill"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as script:
        assert script.stdout is not None and script.stdout.readline() == "uploading\n"
        script.send_signal(signal.SIGKILL)
    assert str(latest_in(RemotePath(f"{s3}-killed"))) == f"{s3}-killed/step-1"


@pytest.mark.full
def test_errors_of_s3(s3: str, alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No bucket, and a server that does not answer: an error with its URL, soon."""
    import s3fs

    model, _ = build(1)
    with pytest.raises(CheckpointError, match=r"s3://nowhere/run.*bucket"):
        mics.save("s3://nowhere/run", model)
    s3fs.S3FileSystem.clear_instance_cache()
    if not tiers.long:
        monkeypatch.setenv("AWS_MAX_ATTEMPTS", "2")  # of five, which take ten seconds
    monkeypatch.setattr("mics.checkpoint.remote._connected", lambda protocol: s3fs.S3FileSystem(
        endpoint_url="http://127.0.0.1:9", use_listings_cache=False, skip_instance_cache=True))  # fmt: skip
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"s3://bucket/cut.*could not be"):
        mics.save("s3://bucket/cut", model)
    assert time.monotonic() - began < 120


def test_a_run_with_its_checkpoints_on_a_store(alone: None, memory: str) -> None:
    """A new run does not mix with the checkpoints of another; latest goes on, newest first."""
    from mics.train.checkpoints import _forget_later, find_candidates
    from mics.train.config import CheckpointSettings, TrainConfig

    def config(resume: str) -> TrainConfig:
        return TrainConfig(checkpoint=CheckpointSettings(folder=memory, resume=resume))

    root = RemotePath(memory)
    assert config("auto").checkpoint_dir == root
    assert find_candidates(config("auto"), restarted=False, environ={"TORCHELASTIC_RUN_ID": "a"}) == (
        [],
        True,
    )
    model, _ = build(1)
    for step in (1, 2):
        mics.save(memory, model, step=step)
    both = [root / "step-2", root / "step-1"]
    assert find_candidates(config("auto"), restarted=False, environ={"TORCHELASTIC_RUN_ID": "a"}) == (
        both,
        True,
    )
    with pytest.raises(SettingsError, match="expected no checkpoints of another run, found step-2"):
        find_candidates(config("auto"), restarted=False, environ={"TORCHELASTIC_RUN_ID": "b"})
    assert find_candidates(config("latest"), restarted=False, environ={}) == (both, True)
    _forget_later(config("latest"), root / "step-1", print)
    assert _names(memory) == ["job", "latest", "step-1"]
    assert latest_in(root) == root / "step-1"

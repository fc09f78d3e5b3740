"""One run at a time writes to a folder."""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from mics.errors import SettingsError
from mics.train.config import CheckpointSettings, TrainConfig
from mics.train.folders import NO_JOB, only_run
from mics.train.launch import _free_port
from tests.ranks import run_expecting_error
from tests.train.rank_runs import train


@pytest.mark.parametrize("shared", ["name", "checkpoint.folder"])
def test_a_second_run_is_refused_until_the_first_ends(shared: str, tmp_path: Path) -> None:
    """By who holds it; the ranks of a launcher are of its own job. What is left of a run does not block."""
    folder = CheckpointSettings(folder=str(tmp_path / "store"))
    first = TrainConfig(output_dir=tmp_path, checkpoint=folder)
    second = first if shared == "name" else TrainConfig(output_dir=tmp_path / "b", checkpoint=folder)
    for _ in range(2):
        with only_run(first, job="a b", is_launcher=True):
            for job in ("b", NO_JOB):
                expected = rf"{shared}: expected no other .* process {os.getpid()} on host .* --name demo-2$"
                with pytest.raises(SettingsError, match=expected), only_run(second, job=job):
                    pass
            with only_run(second, job="a b") as held:
                assert not held or shared != "name"
    with only_run(TrainConfig(output_dir=tmp_path, name="other"), job="b"), only_run(first, job=NO_JOB):
        pass


def _expect_refused(config: TrainConfig, setting: str, *, job: str) -> None:
    with pytest.raises(SettingsError, match=f"{setting}: expected no other run"), only_run(config, job=job):
        pass


def test_two_jobs_of_one_name_are_two_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one host. What another host held is free for its job: a file server may not know that it died."""
    config = TrainConfig(output_dir=tmp_path)
    with only_run(config, job="nightly"):
        _expect_refused(config, "name", job="nightly")
        monkeypatch.setattr("socket.gethostname", lambda: "another")
        with only_run(config, job="nightly") as held:
            assert not held


def test_checkpoints_of_a_run_are_locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where they are in its own folder, and by whatever path they are named."""
    monkeypatch.chdir(tmp_path)
    own = TrainConfig(output_dir=Path("runs"), name="x")
    (tmp_path / "link").symlink_to(tmp_path / "runs" / "x", target_is_directory=True)
    with only_run(own, job="a"):
        other = TrainConfig(name="y", checkpoint=CheckpointSettings(folder="link/checkpoints"))
        _expect_refused(other, r"checkpoint\.folder", job="b")
    with only_run(TrainConfig(checkpoint=CheckpointSettings(folder=".")), job="a") as held:
        assert len(held) == 2


@pytest.mark.parametrize("content", [b"\xff\xfe", b"", b"[1]", b"{}"])
def test_a_lock_that_says_nothing(tmp_path: Path, content: bytes) -> None:
    config = TrainConfig(output_dir=tmp_path)
    with only_run(config, job="a"):
        (config.run_dir / "lock").write_bytes(content)
        _expect_refused(config, "name", job="b")


def test_what_an_agent_still_holds_is_held(tmp_path: Path) -> None:
    """A launcher that is killed leaves agents behind, which end later. What is dead holds nothing."""
    config = TrainConfig(output_dir=tmp_path)
    with only_run(config, job="a") as locks:
        agent = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=locks)
    try:
        with pytest.raises(SettingsError, match=r"name: expected no other run"), only_run(config, job="b"):
            pass
    finally:
        agent.kill()
        agent.communicate()
    with only_run(config, job="b") as locks:
        assert len(locks) == 2


_KILLED = """
import os, signal, sys
from pathlib import Path
from mics.train.config import TrainConfig
from mics.train.folders import only_run
from mics.train.launch import LaunchPlan, _Job
config, logs = TrainConfig(output_dir=Path(sys.argv[1])), Path(sys.argv[1])
plan = LaunchPlan(device="cpu", num_nodes=1, ranks_per_node=1, ranks_per_gpu=1)
with only_run(config, job="a") as locks:
    job = _Job(config=config, plan=plan, args=[], name="a", locks=locks, console=None)
    agent = job._start_agent(["sleep", "100"], 0, logs)
    assert agent.poll() is None
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_launcher_that_is_killed_leaves_nothing_behind(tmp_path: Path) -> None:
    """Its agents are asked to end, and what they held is free."""
    ended = subprocess.run([sys.executable, "-c", _KILLED, str(tmp_path)], timeout=100)
    assert ended.returncode == -signal.SIGKILL
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            with only_run(TrainConfig(output_dir=tmp_path), job="b"):
                return
        except SettingsError:
            time.sleep(0.05)
    pytest.fail("an agent outlives its launcher")


def test_a_file_system_without_locks_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(file: int, how: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with only_run(TrainConfig(output_dir=tmp_path), job="a"):
        assert "lock: cannot be locked (No locks available)" in caplog.text


def test_ranks_of_any_launcher_refuse_a_folder_in_use(tmp_path: Path) -> None:
    """All of them, with one error, and nothing there has changed."""
    kept = tmp_path / "demo" / "metrics.jsonl"
    with only_run(TrainConfig(output_dir=tmp_path), job="a"):
        kept.write_text("{}")
        args = ["--output-dir", str(tmp_path)]
        for error in run_expecting_error(2, train, _free_port(), args, launch="variables"):
            assert error.type_name == "SettingsError" and f"process {os.getpid()}" in error.message
    assert kept.read_text() == "{}"

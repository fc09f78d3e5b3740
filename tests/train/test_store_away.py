"""An object store that goes away while `mics train` runs, and comes back."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mics.checkpoint.background import finish_all
from mics.checkpoint.command import checkpoint
from mics.checkpoint.folders import latest_in, steps_in
from mics.checkpoint.remote import RemotePath, _connected
from mics.train.launch import _free_port
from tests import tiers
from tests.ranks import run_ranks
from tests.train.rank_runs import _around, train


class _Gate:
    """Connections to a server. While the file ``closed`` is there, old ones are cut and new ones too."""

    def __init__(self, server: tuple[str, int], closed: Path) -> None:
        self._server = server
        self._closed = closed
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._listen, daemon=True).start()

    def close(self) -> None:
        self._listener.close()

    def _listen(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection(self._server)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with source:
            with suppress(OSError):
                while (content := source.recv(1 << 16)) and not self._closed.exists():
                    target.sendall(content)
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)  # the thread of the other direction closes it


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """With what ranks find a bucket behind a gate, which ``tmp_path/closed`` closes."""
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer(port=0, verbose=False)
    server.start()
    _, port = server.get_host_and_port()
    gate = _Gate(("127.0.0.1", port), tmp_path / "closed")
    found = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{gate.port}",
        "AWS_ACCESS_KEY_ID": "a",
        "AWS_SECRET_ACCESS_KEY": "b",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    if not tiers.long:
        found["AWS_MAX_ATTEMPTS"] = "2"  # of five, which take ten seconds
    for name, value in found.items():
        monkeypatch.setenv(name, value)
    _forget_connections()
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir("away")
    yield found
    _forget_connections()
    gate.close()
    server.stop()


def _forget_connections() -> None:
    """Another test had another server."""
    import s3fs

    _connected.cache_clear()
    s3fs.S3FileSystem.clear_instance_cache()


def _train(
    port: int, args: list[str], environ: dict[str, str], closed: str, away: tuple[int, int]
) -> tuple[int, str]:
    """Train while the store is away from the first step of ``away`` until the second."""
    from mics.data.prefetching import Prefetcher

    os.environ.update(environ)
    _forget_connections()

    def note_step(original: Any, feed: Any, step: int) -> Any:
        if int(os.environ["RANK"]) == 0 and step in away:
            finish_all()  # what was begun before
            Path(closed).touch() if step == away[0] else Path(closed).unlink()
        return original(feed, step)

    try:
        with _around(Prefetcher, "get", note_step):
            return train(port, args)
    finally:
        _forget_connections()


def _losses(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


@pytest.mark.full
@pytest.mark.long
def test_a_run_outlives_its_store(tmp_path: Path, environ: dict[str, str]) -> None:
    """Saves fail with a warning and training goes on; the last checkpoint is whole, and resumes exactly."""
    url, closed = "s3://away/run", tmp_path / "closed"
    args = ["--checkpoint.folder", url, "--checkpoint.resume", "latest"]
    # Ranks wait for the one that asks the store.
    args += ["--launch.timeout-seconds", "100", "--output-dir", str(tmp_path)]

    def run(name: str, *away: int) -> tuple[int, str]:
        given = [_free_port(), [*args, "--name", name], environ, str(closed), away]
        found = run_ranks(2, _train, *given, launch="variables", timeout_s=200)
        assert {code for code, _ in found} == {0}
        return found[0]

    _, shown = run("away", 6)  # saves of steps 8 and 12 fail
    told = " ".join(shown.split())
    for step in (8, 12):
        assert f"mics: warning: {url}/step-{step}: could not be " in told
    assert told.count("Training goes on without this checkpoint") == 2
    closed.unlink()
    assert latest_in(RemotePath(url)) == RemotePath(f"{url}/step-4")
    assert checkpoint(["verify", url]) == 0
    uninterrupted = _losses(tmp_path / "away")

    _, shown = run("again", 6, 10)  # that of step 8 fails, that of step 12 does not
    told = " ".join(shown.split())
    assert f"going on from {url}/step-4, after step 4" in told
    assert told.count("Training goes on without this checkpoint") == 1
    assert steps_in(RemotePath(url)) == [4, 12]
    assert latest_in(RemotePath(url)) == RemotePath(f"{url}/step-12")
    again = _losses(tmp_path / "again")
    assert sorted(again) == list(range(5, 13))
    assert again == {step: uninterrupted[step] for step in again}

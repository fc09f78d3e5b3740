"""Commands and calls that take long say how far they are; those that do not are quiet."""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import mics
import mics.checkpoint.command as command
from mics.checkpoint import telling
from mics.checkpoint.blocks import BlockReader, BlockWriter
from mics.cli import main
from mics.utils.progress import long_work
from tests.checkpoint.runs import build
from tests.ranks import run_ranks


def _slowly(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str) -> None:
    original = getattr(owner, name)

    def slow(*args: Any) -> Any:
        time.sleep(0.04)
        return original(*args)

    monkeypatch.setattr(owner, name, slow)


def _saved(folder: Path) -> Path:
    model, optimizer = build(1)
    mics.save(folder, model, optimizer)
    return folder


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_commands_have_lines_in_a_file_when_they_take_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = _saved(tmp_path / "saved")
    commands = {
        "verify": ["verify", str(saved)],
        "export": ["export", str(saved), str(tmp_path / "out"), "--config", str(tmp_path)],
        "import": ["import", str(tmp_path / "out"), str(tmp_path / "back")],
    }
    (tmp_path / "config.json").write_text("{}")
    assert main(["checkpoint", *commands["verify"]]) == 0
    assert capsys.readouterr().err == ""
    _slowly(monkeypatch, BlockReader, "_read")
    _slowly(monkeypatch, BlockWriter, "_put")
    monkeypatch.setattr(command, "long_work", partial(long_work, interval=0.01))
    for name, args in commands.items():
        assert main(["checkpoint", *args]) == 0
        told = capsys.readouterr().err.splitlines()
        assert told and all(line.startswith(f"{name}: ") and " of " in line for line in told)
        assert all(line.isprintable() for line in told)


def _save_and_load(folder: str, level: int) -> tuple[list[str], list[str]]:
    """What a rank logs when every pause is long, and what when none is."""
    log, told = logging.getLogger("mics"), []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler = Keep()
    log.addHandler(handler)
    log.setLevel(level)
    model, optimizer = build(1)
    found = []
    try:
        for seconds in (telling._SECONDS, 1e-4):
            telling._SECONDS = seconds
            told.clear()
            mics.save(folder, model, optimizer)
            mics.save(f"{folder}-background", model, optimizer, wait=False).wait()
            with pytest.MonkeyPatch.context() as patch:
                _slowly(patch, BlockReader, "_read")
                mics.load(folder, model, optimizer)
            found.append(list(told))
    finally:
        telling._SECONDS = 10.0
        log.setLevel(logging.NOTSET)
        log.removeHandler(handler)
    return found[0], found[1]


@pytest.mark.parametrize("level", [logging.INFO, pytest.param(logging.WARNING, marks=pytest.mark.full)])
def test_long_saves_and_loads_tell_the_log_of_the_first_rank(tmp_path: Path, level: int) -> None:
    (short, long), others = run_ranks(2, _save_and_load, str(tmp_path / "saved"), level)
    assert (short, others) == ([], ([], []))
    beginnings = {line.split(",")[0] for line in long}
    expected = {
        f"saving {tmp_path / 'saved'}",
        f"saving {tmp_path / 'saved-background'}",
        f"loading {tmp_path / 'saved'}",
    }
    assert beginnings == (expected if level == logging.INFO else set())
    assert all("part of rank 0: " in line and " in 0 s" in line for line in long)

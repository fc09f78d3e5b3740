"""The command line's frame: help, version, and exit codes."""

from __future__ import annotations

import logging
import os
import runpy
import signal
import subprocess
import sys
from enum import StrEnum
from pathlib import Path

import pytest

import mics
from mics.cli import COMMANDS, Command, main
from tests import tiers


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`mics --help` has a line for each command, with what it does."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    names = ["bench", "calibrate", "checkpoint", "data", "doctor", "emulate", "plan", "train"]
    assert sorted(COMMANDS) == names
    for name, command in COMMANDS.items():
        assert f"{name} {command.summary}" in lines


def test_python_m_mics(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is the command, with its exit code, as for torchrun's ``-m mics``."""
    monkeypatch.setattr(sys, "argv", ["mics", "--version"])
    with pytest.raises(SystemExit) as caught:
        runpy.run_module("mics", run_name="__main__")
    assert caught.value.code == 0 and capsys.readouterr().out == f"mics {mics.__version__}\n"


def _loaded_by(*args: str) -> set[str]:
    """Every module that a process has loaded when ``mics`` with these arguments ends."""
    program = (
        "import sys\nfrom mics.cli import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "except SystemExit as end:\n    assert not end.code\n"
        "print(*sys.modules, file=sys.stderr)"
    )
    command = [sys.executable, "-c", program, *args]
    return set(subprocess.run(command, check=True, capture_output=True, text=True).stderr.split())


@pytest.mark.parametrize("flag", ["--help", "--version"])
def test_help_and_version_load_nothing(flag: str) -> None:
    """Neither torch, whose import takes seconds, nor any command."""
    found = _loaded_by(flag)
    assert {"mics", "mics.cli"} <= found
    assert not {"torch", "numpy", "rich", "tyro", "yaml", "matplotlib"} & found
    ours = {name.removeprefix("mics.") for name in found if name.startswith("mics.")}
    assert ours == {"cli", "errors", "utils", "utils.deprecation", "utils.emulated_backend", "utils.extras"}


def test_what_torch_tells_the_authors_of_torchao_is_not_shown(tmp_path: Path) -> None:
    """transformers imports it, in every command that reads a model of Hugging Face. Other words pass."""
    from torch.utils._pytree import register_constant

    class Preference(StrEnum):
        AUTO = "auto"

    log, records = logging.getLogger("torch.utils._pytree"), []
    handler = logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    try:
        assert main(["data", "show", str(tmp_path)]) == 2
        register_constant(Preference)
        log.warning("another")
    finally:
        log.removeHandler(handler)
    assert [record.getMessage() for record in records] == ["another"]


_MODULES = {
    "bench": "mics.bench.command",
    "checkpoint": "mics.checkpoint.command",
    "data": "mics.data.command",
    "doctor": "mics.doctor.command",
    "plan": "mics.planner.command",
    "train": "mics.train.settings_file",
}


_HELPING = """
import os, sys
import torch  # once for all of them
from mics.cli import main
for name in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            main([name, "--help"])
        except SystemExit as end:
            assert not end.code
        print(name, *sys.modules, file=sys.stderr, flush=True)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.full
def test_help_of_a_command_loads_that_command_alone() -> None:
    """Not what runs it either: matplotlib, or the training loop."""
    names = tiers.some(list(_MODULES), 2)
    command = [sys.executable, "-c", _HELPING, *names]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    loaded = {name: set(modules) for name, *modules in map(str.split, done.stderr.splitlines())}
    assert list(loaded) == names
    for name, found in loaded.items():
        assert found & set(_MODULES.values()) == {_MODULES[name]}
        assert not {"matplotlib", "transformers", "mics.train.loop"} & found


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """`mics --version` is the package's version."""
    with pytest.raises(SystemExit) as caught:
        main(["--version"])
    assert caught.value.code == 0
    assert capsys.readouterr().out == f"mics {mics.__version__}\n"


@pytest.mark.parametrize("args", [[], ["fly"]])
def test_no_command_or_an_unknown_one_is_a_usage_error(
    args: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2, and the commands there are."""
    with pytest.raises(SystemExit) as caught:
        main(args)
    assert caught.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


_PRINTING = """
import sys
from mics import cli
cli.COMMANDS["plan"] = cli.Command(summary="", run=lambda args: print("line", flush=bool(args)) or 0)
sys.exit(cli.main(sys.argv[1:]))
"""


@pytest.mark.parametrize("args", [["--help"], ["plan"], ["plan", "at once"]])
def test_output_that_nobody_reads_ends_quietly(args: list[str]) -> None:
    """As `mics --help | head -1`: no traceback, and the exit code of other programs."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-c", _PRINTING, *args]
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environ, check=False
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_another_pipe_that_breaks_is_an_error(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Only what is printed may be lost in silence."""

    def fail(args: object) -> int:
        raise BrokenPipeError("a worker is gone")

    monkeypatch.setitem(COMMANDS, "plan", Command(summary="", run=fail))
    with pytest.raises(BrokenPipeError, match="a worker is gone"):
        main(["plan"])


def test_an_interrupt_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """While a command loads what it needs, which takes seconds."""

    def interrupt(args: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setitem(COMMANDS, "plan", Command(summary="", run=interrupt))
    assert main(["plan"]) == 130
    assert capsys.readouterr().err == "mics: interrupted\n"


def test_a_bad_setting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings errors never show a traceback."""
    file = tmp_path / "settings.yaml"
    file.write_text("stepz: 3\n")
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mics train: error: --config")
    assert error.count("\n") == 1

"""The command line's frame: help, version, and exit codes."""

from pathlib import Path

import pytest

import mics
from mics.cli import COMMANDS, main


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    """`mics --help` names each command with a line about it."""
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in text
        assert command.summary in text


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


def test_a_bad_setting_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Settings errors never show a traceback."""
    file = tmp_path / "settings.yaml"
    file.write_text("stepz: 3\n")
    assert main(["train", "--config", str(file)]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mics train: error: --config")
    assert error.count("\n") == 1

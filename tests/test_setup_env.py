"""scripts/setup_env.sh with an interpreter that only pretends: what a person sees while pip installs."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "setup_env.sh"

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(not SCRIPT.exists(), reason="the tests run without the scripts"),
]

# Has no torch; pip takes some seconds, and fails where it is told to.
_PYTHON = """#!/bin/bash
case "$1" in
    -) exit 1 ;;
    -c) [[ "$2" != *torch* ]] || echo 2.13.0+cpu ;;
    -m)
        if [[ "$*" == *{quick}* ]]; then sleep 0.5; else sleep {seconds}; fi
        [[ "$*" != *{bad}* ]] || {{ echo "no network" >&2; exit 1; }} ;;
esac
"""


def _environment(tmp_path: Path, *, seconds: float, bad: str = "nothing", quick: str = "nothing") -> Path:
    python = tmp_path / "env" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(_PYTHON.format(seconds=seconds, bad=bad, quick=quick))
    python.chmod(0o755)
    return tmp_path / "env"


def test_something_is_seen_every_few_seconds(tmp_path: Path) -> None:
    env = _environment(tmp_path, seconds=5.5, quick="editable")
    done = subprocess.run([SCRIPT, "python3", env], capture_output=True, text=True, timeout=60, check=True)
    torch = "setup: installing torch 2.13.0 (the one long download)"
    ours = "setup: installing mics and its development tools"
    assert done.stderr.splitlines() == [
        *(torch, f"{torch}: 5 s", ours),
        f"setup: ready in {env}",
    ]


def test_in_a_terminal_the_line_is_drawn_again(tmp_path: Path) -> None:
    env = _environment(tmp_path, seconds=2.5)
    ours, theirs = pty.openpty()
    process = subprocess.Popen([SCRIPT, "python3", env], stdout=theirs, stderr=theirs)
    os.close(theirs)
    content = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 4096):
            content += part
    os.close(ours)
    assert process.wait() == 0
    shown = content.decode()
    # A busy machine may miss the first second.
    assert re.search(r"\rsetup: installing torch 2.13.0 \(the one long download\): [12] s\r", shown)
    assert re.search(r"[23] s\r\x1b\[Ksetup: installing mics", shown)
    assert shown.endswith(f"setup: ready in {env}\r\n")


def test_pip_that_fails_is_not_hidden(tmp_path: Path) -> None:
    env = _environment(tmp_path, seconds=0, bad="editable")
    done = subprocess.run([SCRIPT, "python3", env], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    failed = "pip could not install: --editable .[dev] torch==2.13.0+cpu. Its own message"
    assert f"no network\nsetup: error: {failed}" in done.stderr

"""Long work shows how far it is, and short work shows nothing."""

from __future__ import annotations

import contextlib
import io
import os
import pty
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

import pytest

from mics.utils.numbers import clock, roughly
from mics.utils.progress import Amount, is_live, long_work

_NOBODY: Mapping[str, str] = {"TERM": "xterm-256color"}


class _Terminal(io.TextIOWrapper):
    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8")

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, True),
        ({"TERM": "dumb"}, False),
        ({"TERM": ""}, False),
        ({"NO_COLOR": "1"}, False),
        ({"NO_COLOR": ""}, True),
        ({"CI": "true"}, False),
        ({"CI": "false"}, True),
    ],
)
def test_plain_text_is_asked_for_by_the_environment(environ: dict[str, str], expected: bool) -> None:
    assert is_live(_Terminal(), {**_NOBODY, **environ}) is expected
    assert not is_live(io.StringIO(), {**_NOBODY, **environ})


def test_a_terminal_that_cannot_show_blocks_gets_lines() -> None:
    class Old(_Terminal):
        encoding = "latin-1"  # type: ignore[assignment]

    assert not is_live(Old(), _NOBODY)


def test_a_line_has_all_that_is_known() -> None:
    amount = Amount(what="verify", unit="bytes", done=12e9, total=48e9, seconds=30.0)
    assert amount.as_line() == "verify: 12.0 GB of 48.0 GB (25.0%) in 30 s, 400 MB/s, about 90 s left"
    begun = Amount(what="bench", unit="runs", done=0, total=12, seconds=600.0)
    assert begun.as_line() == "bench: 0 of 12 runs in 10 min"


@pytest.mark.parametrize(
    ("seconds", "as_clock", "in_words"),
    [(0, "0:00", "0 s"), (61.9, "1:01", "62 s"), (3600, "1:00:00", "60 min"), (93784, "26:03:04", "26.1 h")],
)
def test_times(seconds: float, as_clock: str, in_words: str) -> None:
    assert (clock(seconds), roughly(seconds)) == (as_clock, in_words)


def test_short_work_shows_nothing() -> None:
    stream = io.StringIO()
    with long_work("verify", 100, stream=stream) as work:
        work.advance(100)
    assert stream.getvalue() == ""
    assert "mics-progress" not in {thread.name for thread in threading.enumerate()}


def test_long_work_has_a_line_every_so_often_in_a_file() -> None:
    """Also while nothing advances; what else is said comes in between; threads add up."""
    stream = io.StringIO()
    with long_work("verify", 8e6, stream=stream, interval=0.05) as work:
        threads = [threading.Thread(target=work.advance, args=(1e6,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        time.sleep(0.18)
        work.say("a word")
    lines = stream.getvalue().splitlines()
    assert "a word" in lines
    told = [line for line in lines if line != "a word"]
    assert 1 <= len(told) <= 4
    assert all(line.startswith("verify: 4.00 MB of 8.00 MB (50.0%) in") for line in told)
    assert all(line.isprintable() for line in lines)


def test_an_error_inside_passes_and_ends_the_thread() -> None:
    def fail() -> None:
        with long_work("verify", 1, stream=io.StringIO(), interval=0.01):
            time.sleep(0.03)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fail()
    assert "mics-progress" not in {thread.name for thread in threading.enumerate()}


def test_a_reader_that_is_gone_does_not_stop_the_work() -> None:
    stream = io.StringIO()
    with long_work("verify", 1, stream=stream, interval=0.01) as work:
        stream.close()
        time.sleep(0.05)
        work.advance()
    assert work.amount().done == 1


def test_the_library_tells_a_log_instead() -> None:
    told: list[str] = []
    with long_work("saving", 10, unit="files", tell=told.append, interval=0.02):
        time.sleep(0.07)
    assert told and told[0] == "saving: 0 of 10 files in 0 s"


_PROGRAM = """
import sys, time
sys.modules.update(dict.fromkeys(sys.argv[1:]))
from mics.utils.progress import long_work
with long_work("verify", 100e6, patience=0.1, interval=0.1) as work:
    for _ in range(10):
        time.sleep(0.05)
        work.advance(10e6)
        if _ == 7:
            work.say("a word")
print("rich" in sys.modules and sys.modules["rich"] is not None)
"""


def _in_terminal(*without: str) -> str:
    """What a program writes to a terminal."""
    ours, theirs = pty.openpty()
    environ = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
    command = [sys.executable, "-c", _PROGRAM, *without]
    process = subprocess.Popen(command, stdout=theirs, stderr=theirs, env={**environ, **_NOBODY})
    os.close(theirs)
    content = b""
    with contextlib.suppress(OSError):  # the other end is closed
        while part := os.read(ours, 1 << 16):
            content += part
    os.close(ours)
    assert process.wait() == 0
    return content.decode()


def test_a_terminal_has_a_bar_that_goes_away() -> None:
    """The bar is drawn and erased, a line stays, and the cursor is there."""
    shown = _in_terminal()
    assert "━" in shown and "of 100 MB" in shown and "left" in shown and "a word" in shown
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "━" not in shown[shown.rindex("\x1b[2K") :]


def test_without_rich_there_are_lines() -> None:
    shown = _in_terminal("rich")
    assert "\x1b" not in shown and "verify: " in shown and shown.endswith("False\r\n")


def test_without_a_terminal_rich_is_not_loaded() -> None:
    done = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n" and "\x1b" not in done.stderr and "verify: " in done.stderr

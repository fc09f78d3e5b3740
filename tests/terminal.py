"""A program in a terminal: what it draws there, and what is on the screen at last."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from pathlib import Path

# It becomes the terminal's program, so that Ctrl-C reaches it.
_START = """
import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])
"""
_CODE = re.compile(r"\x1b\[([0-9;?]*)([a-zA-Z])")


class Terminal:
    """Runs a program in a terminal of a size. Use as a context manager: nothing of it is left."""

    def __init__(self, command: Sequence[str], *, columns: int = 100, lines: int = 40) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        environ = {name: value for name, value in os.environ.items() if name not in ("CI", "NO_COLOR")}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env={**environ, "TERM": "xterm-256color"},
            start_new_session=True,
        )
        os.close(theirs)
        self.content = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGTERM)
        self.process.wait(timeout=60)
        os.close(self._ours)

    def type(self, text: str) -> None:
        os.write(self._ours, text.encode())

    def read_until(self, text: str, *, timeout: float) -> None:
        """Wait until the program has written this."""
        deadline = time.monotonic() + timeout
        while text not in self.content:
            assert self._read(deadline - time.monotonic()), f"expected {text!r}, found:\n{self.screen()}"

    def wait(self, *, timeout: float) -> int:
        """Wait for the program's end; its exit code."""
        deadline = time.monotonic() + timeout
        while self._read(deadline - time.monotonic()):
            pass
        return self.process.wait(timeout=10)

    def _read(self, timeout: float) -> bool:
        if not select.select([self._ours], [], [], max(0.0, timeout))[0]:
            return False
        try:
            part = os.read(self._ours, 1 << 16)
        except OSError:  # the program is gone
            return False
        self.content += part.decode(errors="replace")
        return bool(part)

    @property
    def has_cursor(self) -> bool:
        """Whether the cursor is shown."""
        return self.content.rfind("\x1b[?25h") >= self.content.rfind("\x1b[?25l")

    def screen(self) -> str:
        """What a person sees, scrolled away or not. Lines are as long as they were written."""
        return "\n".join(line.rstrip() for line in drawn(self.content))


def drawn(content: str) -> list[str]:
    """The lines that a terminal has after all of this: moves up, erased lines and returns are obeyed."""
    lines, row, column = [""], 0, 0
    for piece in re.split(r"(\x1b\[[0-9;?]*[a-zA-Z]|\r|\n)", content):
        code = _CODE.fullmatch(piece)
        if piece == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif piece == "\r":
            column = 0
        elif code is not None and code[2] == "A":
            row = max(0, row - int(code[1] or 1))
        elif code is not None and code[2] == "K":
            lines[row] = "" if code[1] == "2" else lines[row][:column]
        elif code is None:
            lines[row] = lines[row].ljust(column)[:column] + piece + lines[row][column + len(piece) :]
            column += len(piece)
    return lines


def processes_with(word: str) -> list[int]:
    """Processes that have this word in their command."""
    found = []
    for cmdline in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = cmdline.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # it ended while we looked
            continue
        if word in command:
            found.append(int(cmdline.parent.name))
    return found

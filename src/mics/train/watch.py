"""The launcher's view of its ranks: it draws the live board, so that ranks spend no time on it.

Rank 0's own output comes through a pipe and is printed above the board; the figures come from the lines that
rank 0 writes to ``metrics.jsonl``. Whatever happens to a rank, the terminal belongs to the launcher.
"""

from __future__ import annotations

import codecs
import json
import os
import time
from collections.abc import Callable
from enum import Enum, auto
from pathlib import Path
from typing import IO, Any, Final, Protocol

from rich.console import Console, RenderableType
from rich.text import Text

from mics.train.board import Board
from mics.train.config import METRICS_FILE, TrainConfig
from mics.train.display import Waiting, open_live
from mics.train.metrics import Measurement

_FRAME_SECONDS: Final = 0.25
_BOARD_SECONDS: Final = 0.5
_READ_NBYTES: Final = 1 << 16
_LAST_WORDS_SECONDS: Final = 1.0


class Watching(Protocol):
    """Whoever looks at an attempt. Every method is called by the launcher's own thread."""

    def attach(self, output: IO[bytes]) -> None:
        """Rank 0's output is there."""

    def tick(self) -> None:
        """Some time has passed."""

    def stopping(self) -> None:
        """The ranks were asked to leave."""

    def close(self) -> None:
        """All processes are gone."""


class Nobody:
    """Rank 0 writes where the launcher does, and shows its own progress."""

    def attach(self, output: IO[bytes]) -> None:
        raise AssertionError("nobody takes the output")

    def tick(self) -> None: ...

    def stopping(self) -> None: ...

    def close(self) -> None: ...


class _Phase(Enum):
    """What is seen of an attempt. Each comes after the one before it; the last may come after any."""

    STARTING = auto()
    TRAINING = auto()
    ENDING = auto()


class TerminalWatch:
    """Draws one attempt in a terminal."""

    def __init__(self, console: Console, config: TrainConfig, *, num_ranks: int, on_gpu: bool) -> None:
        self._console = console
        self._rows = Tail(config.run_dir / METRICS_FILE)
        self._board = Board(
            num_steps=config.steps,
            on_gpu=on_gpu,
            checkpoint_dir=config.checkpoint_dir if config.checkpoint.interval else None,
        )
        self._output: IO[bytes] | None = None
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""  # of the output, not whole yet
        self._phase = _Phase.STARTING
        self._waiting = Waiting(f"starting {num_ranks} ranks")
        self._live = open_live(console, self._look)
        self._drawn = time.monotonic()
        self._is_blind = False  # the terminal is gone: the ranks may still save and leave

    def attach(self, output: IO[bytes]) -> None:
        os.set_blocking(output.fileno(), False)
        self._output = output

    def tick(self) -> None:
        self._take_output()
        self._take_rows()
        pause = _BOARD_SECONDS if self._phase is _Phase.TRAINING else _FRAME_SECONDS
        if time.monotonic() - self._drawn >= pause:
            self._drawn = time.monotonic()
            self._draw(self._live.refresh)

    def stopping(self) -> None:
        self._end("asked the ranks to leave; Ctrl-C again ends them at once")

    def close(self) -> None:
        deadline = time.monotonic() + _LAST_WORDS_SECONDS
        while self._take_output() and time.monotonic() < deadline:
            time.sleep(0.01)  # the pipe is open still, in a process that a rank has started
        if self._output is not None:
            self._output.close()
        if self._line:
            self._print(self._line)
        self._take_rows()
        self._leave()

    def _look(self) -> RenderableType:
        return self._board if self._phase is _Phase.TRAINING else self._waiting()

    def _end(self, what: str) -> None:
        """Leave the board as it is, and show below it what is waited for."""
        self._leave()
        self._phase, self._waiting = _Phase.ENDING, Waiting(what)

        def reopen() -> None:
            self._live = open_live(self._console, self._look)

        self._draw(reopen)

    def _leave(self) -> None:
        """The board stays on the screen; a line that something is waited for does not."""
        self._live.transient = self._phase is not _Phase.TRAINING
        self._draw(self._live.stop)

    def _take_output(self) -> bool:
        """Print what has come from rank 0. Whether more may come."""
        if self._output is None:
            return False
        while True:
            try:
                content = os.read(self._output.fileno(), _READ_NBYTES)
            except BlockingIOError:
                return True
            if not content:
                return False
            if self._phase is _Phase.STARTING:
                self._waiting = Waiting("first step")
            *lines, self._line = (self._line + self._decoder.decode(content)).split("\n")
            for line in lines:
                self._print(line)

    def _take_rows(self) -> None:
        for row in self._rows.read():
            if "loss" in row:
                self._board.note(Measurement(**row))
            elif "validation_loss" in row:
                self._board.validation = row["step"], row["validation_loss"]
            elif "checkpoint_stall_seconds" in row:
                self._board.saving_step = row["step"]
        last = self._board.measurement
        if last is not None and self._phase is _Phase.STARTING:
            self._phase = _Phase.TRAINING
        if last is not None and last.step == self._board.num_steps and self._phase is _Phase.TRAINING:
            self._end("writing results")

    def _print(self, line: str) -> None:
        self._draw(lambda: self._console.print(Text.from_ansi(line), soft_wrap=True))

    def _draw(self, action: Callable[[], object]) -> None:
        if self._is_blind:
            return
        try:
            action()
        except OSError:
            self._is_blind = True


class Tail:
    """The lines of a file of JSON that is being written, each once. One of before is not read."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._read_nbytes = 0
        self._before = self._stamp()  # the kernel's clock of files runs behind ours: compare it with itself

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size

    def read(self) -> list[dict[str, Any]]:
        """What has come since the last call."""
        found = self._stamp()
        if found is None or found == self._before or found[2] == self._read_nbytes:
            return []
        try:
            with self._path.open("rb") as file:
                file.seek(self._read_nbytes)
                content = file.read()
        except OSError:
            return []
        whole = content[: content.rfind(b"\n") + 1]
        self._read_nbytes += len(whole)
        rows = []
        for line in whole.splitlines():
            try:
                rows.append(json.loads(line))
            except ValueError:  # a disk that was full
                continue
        return rows

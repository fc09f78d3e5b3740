"""How far long work is: a bar in a terminal, a line every few seconds elsewhere, nothing if it is short.

One thread shows it, beside the thread that works: work that stands still is still shown.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Final, TextIO

from mics.utils.numbers import clock, percent, roughly, volume, whole

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

_PATIENCE_SECONDS: Final = 2.0  # shorter work shows nothing
_LINE_SECONDS: Final = 5.0
_FRAME_SECONDS: Final = 0.5
_NO_TERMINALS: Final = ("", "dumb", "unknown")


def is_live(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether lines on ``stream`` may be drawn again: on a terminal that can, if nobody asks for plain text.

    ``NO_COLOR`` and ``CI`` ask for that.
    """
    plain = bool(environ.get("NO_COLOR")) or environ.get("CI", "").lower() not in ("", "0", "false")
    utf8 = (getattr(stream, "encoding", None) or "").lower().replace("-", "") == "utf8"
    return stream.isatty() and utf8 and not plain and environ.get("TERM", "").lower() not in _NO_TERMINALS


@dataclass(frozen=True, kw_only=True)
class Amount:
    """How much is done of how much, and since when."""

    what: str
    """The work: ``verify``."""
    unit: str
    """What is counted: ``bytes``, or a plural such as ``runs``."""
    done: float
    total: float
    seconds: float

    @property
    def counted(self) -> str:
        """``12.3 GB of 48.0 GB``, ``3 of 12 runs``."""
        if self.unit == "bytes":
            return f"{volume(self.done)} of {volume(self.total)}"
        return f"{whole(self.done)} of {whole(self.total)} {self.unit}"

    @property
    def rate(self) -> str:
        """``410 MB/s``; nothing for what is counted in pieces."""
        return f"{volume(self.done / self.seconds)}/s" if self.unit == "bytes" and self.seconds else ""

    @property
    def seconds_left(self) -> float | None:
        """At the mean speed up to now; unknown as long as nothing is done."""
        return self.seconds * (self.total - self.done) / self.done if 0 < self.done <= self.total else None

    def as_line(self) -> str:
        """``verify: 12.3 GB of 48.0 GB (25.6%) in 30 s, 410 MB/s, about 87 s left``."""
        share = f" ({percent(self.done / self.total)})" if self.total and self.unit == "bytes" else ""
        parts = [f"{self.what}: {self.counted}{share} in {roughly(self.seconds)}", self.rate]
        if self.seconds_left:
            parts.append(f"about {roughly(self.seconds_left)} left")
        return ", ".join(filter(None, parts))


class LongWork:
    """Work under way. Any thread may advance it."""

    def __init__(self, what: str, total: float, *, unit: str, stream: TextIO | None) -> None:
        self._what = what
        self._total = total
        self._unit = unit
        self._stream = stream
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._done = 0.0
        self._bar: tuple[Progress, TaskID] | None = None

    def advance(self, amount: float = 1) -> None:
        """So much more is done."""
        with self._lock:
            self._done += amount

    def say(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        with self._lock:
            if self._bar is not None:
                self._bar[0].console.print(text, markup=False, highlight=False, soft_wrap=True)
            else:
                print(text, file=self._stream or sys.stderr, flush=True)

    def amount(self) -> Amount:
        """What is done by now."""
        with self._lock:
            return Amount(
                what=self._what,
                unit=self._unit,
                done=self._done,
                total=self._total,
                seconds=time.monotonic() - self._began,
            )

    def _draw(self) -> None:
        """Draw the bar, or draw it again."""
        amount = self.amount()
        left = f"{clock(amount.seconds_left)} left" if amount.seconds_left else ""
        with self._lock:
            if self._bar is None:
                self._bar = _make_bar(self._stream or sys.stderr, self._what, self._total)
            bar, task = self._bar
            bar.update(
                task,
                completed=amount.done,
                refresh=True,
                counted=amount.counted,
                rate=amount.rate,
                clock=clock(amount.seconds),
                left=left,
            )

    def _erase(self) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar[0].stop()
                self._bar = None


def _make_bar(stream: TextIO, what: str, total: float) -> tuple[Progress, TaskID]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn

    words = [
        TextColumn(text) for text in ("{task.fields[counted]}", "{task.fields[rate]}", "{task.fields[clock]}")
    ]
    bar = Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(bar_width=None),
        *words,
        TextColumn("[cyan]{task.fields[left]}"),
        console=Console(file=stream, highlight=False, emoji=False),
        auto_refresh=False,
        transient=True,
        expand=True,
    )
    task = bar.add_task(what, total=total, counted="", rate="", clock="", left="")
    bar.start()
    bar.console.show_cursor(True)  # whatever ends this process then leaves a terminal with a cursor
    return bar, task


@contextmanager
def long_work(
    what: str,
    total: float,
    *,
    unit: str = "bytes",
    stream: TextIO | None = None,
    tell: Callable[[str], object] | None = None,
    patience: float = _PATIENCE_SECONDS,
    interval: float = _LINE_SECONDS,
) -> Iterator[LongWork]:
    """Show how far the work inside is: a bar after ``patience`` seconds, or a line every ``interval``.

    They go to stderr unless ``stream`` is given. With ``tell`` it is lines alone, and they go there.
    """
    work = LongWork(what, total, unit=unit, stream=stream)
    live = tell is None and is_live(stream or sys.stderr) and find_spec("rich") is not None
    over = threading.Event()

    def show() -> None:
        pause = patience if live else interval
        while not over.wait(pause):
            pause = _FRAME_SECONDS if live else interval
            try:
                if live:
                    work._draw()
                else:
                    (tell or work.say)(work.amount().as_line())
            except (OSError, ValueError):  # nobody reads it any more: the work goes on
                return

    thread = threading.Thread(target=show, name="mics-progress", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is on its way out: the work is done, and not shown
        over.set()
    try:
        yield work
    finally:
        over.set()
        if thread.ident is not None:
            thread.join()
        work._erase()

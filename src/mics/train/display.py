"""What a run shows while it trains: a live board in a terminal, a plain line now and then anywhere else."""

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Final, Literal, Self

from rich.console import Console, RenderableType
from rich.live import Live
from rich.spinner import Spinner
from rich.text import Text

from mics.train.board import Board
from mics.utils.numbers import clock

_SECONDS_BETWEEN_LINES: Final = 5.0
_FRAMES_PER_SECOND: Final = 1  # by a thread of a rank, which has other things to do
Show = Literal["live", "lines", "none"]


class RankConsole(Console):
    """Where a rank prints. On ranks other than the first nothing comes of it."""

    def __init__(self, *, quiet: bool) -> None:
        super().__init__(quiet=quiet, highlight=False, soft_wrap=True, emoji=False)

    def on_broken_pipe(self) -> None:
        """Nobody reads it any more: whoever started the program decides, not rich."""
        raise BrokenPipeError

    @contextmanager
    def showing_log(self) -> Iterator[None]:
        """Show what the library logs about long saves and loads, and its warnings."""
        log, handler = logging.getLogger("mics"), _Handler(self)
        level = log.level
        log.addHandler(handler)
        log.setLevel(logging.INFO)
        try:
            yield
        finally:
            log.setLevel(level)
            log.removeHandler(handler)


class _Handler(logging.Handler):
    """Prints records as ``mics: warning: ...``."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        kind = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        self._console.print(f"mics: {kind}{record.getMessage()}", markup=False)


def open_live(
    console: Console, look: Callable[[], RenderableType], *, transient: bool = False, beside: bool = False
) -> Live:
    """A live area under what is printed. ``beside``: a thread draws it again, else whoever has the handle.

    The cursor stays where it is seen: a process that is killed cannot show it again.
    """
    live = Live(
        console=console,
        get_renderable=look,
        transient=transient,
        auto_refresh=beside,
        refresh_per_second=_FRAMES_PER_SECOND,
    )
    live.start(refresh=True)
    console.show_cursor(True)
    return live


class Waiting:
    """One line for what takes a while: what it is, and for how long already."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._began = time.monotonic()
        self._spinner = Spinner("dots", style="cyan")

    def __call__(self) -> RenderableType:
        passed = clock(time.monotonic() - self._began)
        self._spinner.text = Text.assemble(self._what, "  ", (passed, "dim"))
        return self._spinner


class Display:
    """Shows a board. Use as a context manager: leaving it gives the terminal back."""

    def __init__(self, console: Console, board: Board, *, show: Show) -> None:
        self._console = console
        self._board = board
        self._show = show
        self._last_line = 0.0
        self._live: Live | None = None

    def __enter__(self) -> Self:
        if self._show == "live":
            self._live = open_live(self._console, lambda: self._board, beside=True)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def update(self) -> None:
        """The board has a new measurement. Lines come some seconds after another, and at the last step."""
        assert self._board.measurement is not None
        if self._show != "lines":
            return
        now = time.monotonic()
        is_last = self._board.measurement.step == self._board.num_steps
        if is_last or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(self._board.as_line(), flush=True)

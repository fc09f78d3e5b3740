"""What is known of a run while it trains, and how it looks: a board in a terminal, or one line of text."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, cast

from rich.console import Console, ConsoleOptions, RenderResult
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mics.checkpoint.folders import latest_in
from mics.checkpoint.storage import Place
from mics.train.metrics import Measurement
from mics.utils.numbers import clock, fixed, memory, percent, roughly, tflops, volume, whole
from mics.utils.sparkline import Curve, sparkline

_NUM_ARRIVALS: Final = 20  # measurements that the time left is reckoned from
_LOOK_SECONDS: Final = 2.0  # between looks into the folder of checkpoints
_NARROW: Final = 66  # columns; below, and in few lines, the curve is one line
_LOW: Final = 16
_LABELS: Final = 7  # columns of the numbers beside the curve


@dataclass(kw_only=True)
class Board:
    """The state of a run. A renderable of rich: it looks as the run is when it is drawn."""

    num_steps: int
    on_gpu: bool
    checkpoint_dir: Place | None = None
    """None where the run saves none."""
    measurement: Measurement | None = None
    losses: Curve = field(default_factory=Curve)
    validation: tuple[int, float] | None = None
    """Step and loss."""
    saving_step: int | None = None
    """The last one whose saving was begun."""
    began: float = field(default_factory=time.monotonic)
    _arrivals: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=_NUM_ARRIVALS))
    _step_seconds: float | None = None
    _saved: tuple[float, str] = (-math.inf, "")  # when it was looked up, and what was found

    def note(self, measurement: Measurement, *, now: float | None = None) -> None:
        """A step was measured. Those of a run that goes on come all at once, and say nothing about speed."""
        now = time.monotonic() if now is None else now
        self.measurement = measurement
        self.losses.add(measurement.loss)
        if measurement.step == self.num_steps:
            self._saved = (-math.inf, "")  # what stays on the screen is true
        if self._arrivals and now - self._arrivals[-1][0] < 1e-3:
            self._arrivals.pop()
        self._arrivals.append((now, measurement.step))
        (first, first_step), (last, last_step) = self._arrivals[0], self._arrivals[-1]
        self._step_seconds = (last - first) / (last_step - first_step) if last_step > first_step else None

    def seconds_left(self, now: float) -> float | None:
        """By the wall clock, with validation and checkpoints; None before two measurements.

        A run that stands still does not come closer to its end.
        """
        if self.measurement is None or self._step_seconds is None:
            return None
        all_left = (self.num_steps - self.measurement.step) * self._step_seconds
        (before, _), (last, _) = self._arrivals[-2], self._arrivals[-1]
        return max(0.0, all_left - min(now - last, last - before))

    def as_line(self) -> str:
        """Everything in one line, for a file or a pipe."""
        assert self.measurement is not None
        found, now = self.measurement, time.monotonic()
        parts = [f"loss {found.loss:.3f}"]
        if self.validation is not None:
            parts.append(f"val {self.validation[1]:.3f}")
        parts += [f"norm {found.grad_norm:.2f}", f"lr {fixed(found.learning_rate)}"]
        parts += [f"{whole(found.tokens_per_second)} tokens/s", self._compute(found)]
        parts += [] if found.mfu is None else [f"MFU {percent(found.mfu)}"]
        parts.append(self._memory(found))
        sent = f"sent {volume(found.intra_nbytes)} intra-node"
        parts.append(f"{sent} + {volume(found.inter_nbytes)} inter-node" if found.inter_nbytes else sent)
        parts += [] if found.exposed is None else [f"exposed communication {percent(found.exposed)}"]
        saved = self._checkpoint(now)
        parts += [f"checkpoint {saved}"] if saved else []
        left = self.seconds_left(now)
        parts += [f"{roughly(left)} left"] if left else []
        step = f"step {found.step:>{len(str(self.num_steps))}}/{self.num_steps}"
        return " | ".join([step, *parts])

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width = min(options.max_width, 140)
        yield Text()
        yield self._header(width)
        if self.measurement is not None:
            rows = list(self._rows(self.measurement))
            if width < _NARROW or console.height < _LOW:
                yield Text(sparkline(self.losses.values, width - 2)[0], style="cyan", justify="left")
                yield _figures(rows)
            else:
                yield Text()
                yield self._wide(rows, width)
        yield Text()  # the cursor waits below, not behind the last figure

    def _header(self, width: int) -> Table:
        now = time.monotonic()
        step = 0 if self.measurement is None else self.measurement.step
        left = self.seconds_left(now)
        times = f"{clock(now - self.began)} elapsed" + (f", {clock(left)} left" if left else "")
        table = Table.grid(padding=(0, 2), expand=False)
        table.width = width
        table.add_column(no_wrap=True)
        table.add_column(ratio=1)
        table.add_column(no_wrap=True)
        table.add_column(no_wrap=True)
        table.add_row(
            Text(f"step {step:,}/{self.num_steps:,}", style="bold"),
            ProgressBar(total=self.num_steps, completed=step, complete_style="cyan", finished_style="green"),
            f"{step / self.num_steps:.0%}",
            Text(times, style="dim"),
        )
        return table

    def _wide(self, rows: list[tuple[str, str]], width: int) -> Table:
        """The curve on the left, the figures on the right."""
        figures = _figures(rows)
        right = max(len(value) for _, value in rows) + max(len(label) for label, _ in rows) + 2
        table = Table.grid(padding=(0, 3))
        table.add_row(self._curve(width - right - _LABELS - 4, len(rows)), figures)
        return table

    def _curve(self, width: int, height: int) -> Text:
        """The loss, with its highest and lowest value beside it."""
        curve = Text(no_wrap=True)
        finite = [loss for loss in self.losses.values if math.isfinite(loss)] or [math.nan]
        labels = [""] * height
        labels[0], labels[-1] = f"{max(finite):.2f} ", f"{min(finite):.2f} "
        for number, line in enumerate(sparkline(self._spread(width), width, height)):
            curve.append(labels[number].rjust(_LABELS), style="dim")
            curve.append(line.ljust(width) + ("\n" if number < height - 1 else ""), style="cyan")
        return curve

    def _spread(self, width: int) -> list[float]:
        """The losses, each as often as lets a short run fill the width when it ends."""
        step = 1 if self.measurement is None else self.measurement.step
        losses = self.losses.values
        in_all = len(losses) * self.num_steps / step
        return [loss for loss in losses for _ in range(max(1, int(width / max(1.0, in_all))))]

    def _rows(self, found: Measurement) -> Iterator[tuple[str, str]]:
        yield "loss", f"{found.loss:.3f}"
        if self.validation is not None:
            yield "validation", f"{self.validation[1]:.3f} (step {self.validation[0]:,})"
        yield "lr, norm", f"{fixed(found.learning_rate)}, {found.grad_norm:.2f}"
        yield "speed", f"{whole(found.tokens_per_second)} tokens/s"
        yield (
            ("compute", self._compute(found))
            if found.mfu is None
            else ("MFU", f"{percent(found.mfu)}, {self._compute(found)}")
        )
        yield "memory", self._memory(found)
        yield "intra-node", f"{volume(found.intra_nbytes)} sent per step"
        if found.inter_nbytes:
            yield "inter-node", f"{volume(found.inter_nbytes)} sent per step"
        if found.exposed is not None:
            yield "exposed", f"{percent(found.exposed)} of a step waits for communication"
        saved = self._checkpoint(time.monotonic())
        if saved:
            yield "checkpoint", saved

    def _compute(self, found: Measurement) -> str:
        return f"{tflops(found.tflops)} TFLOP/s" + ("/GPU" if self.on_gpu else "")

    def _memory(self, found: Measurement) -> str:
        return f"{memory(found.memory_nbytes)} {'GPU peak' if self.on_gpu else 'RSS'}"

    def _checkpoint(self, now: float) -> str:
        """``step 100, 12 s ago``: what is on disk, and what is on its way there."""
        if self.checkpoint_dir is None:
            return ""
        if not isinstance(self.checkpoint_dir, Path):  # nobody asks a store every other second
            return "" if self.saving_step is None else f"step {self.saving_step:,}, begun"
        if now - self._saved[0] >= _LOOK_SECONDS:
            self._saved = now, _latest(self.checkpoint_dir, self.saving_step)
        return self._saved[1]


def _latest(folder: Path, saving_step: int | None) -> str:
    latest = cast(Path | None, latest_in(folder))
    step = None if latest is None else int(latest.name.rpartition("-")[2])
    if saving_step is not None and step != saving_step:
        return f"step {saving_step:,}, being written"
    if latest is None or step is None:
        return ""
    try:
        age = max(0.0, time.time() - latest.stat().st_mtime)
    except OSError:  # replaced by a later one just now
        return f"step {step:,}"
    return f"step {step:,}, {roughly(age)} ago"


def _figures(rows: list[tuple[str, str]]) -> Table:
    table = Table.grid(padding=(0, 2))
    for label, value in rows:
        table.add_row(Text(label, style="dim"), Text(value, style="bold" if label == "loss" else ""))
    return table

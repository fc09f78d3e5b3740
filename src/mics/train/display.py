"""What rank 0 shows: one live line on a terminal, a plain line now and then anywhere else."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from mics.train.metrics import Measurement
from mics.utils.numbers import percent, tflops, volume, whole

_SECONDS_BETWEEN_LINES = 5.0


def format_measurement(measurement: Measurement, *, validation_loss: float | None) -> str:
    """The numbers of one measurement as one line."""
    parts = [f"loss {measurement.loss:.3f}"]
    if validation_loss is not None:
        parts.append(f"val {validation_loss:.3f}")
    parts.append(f"norm {measurement.grad_norm:.2f}")
    parts.append(f"{whole(measurement.tokens_per_second)} tokens/s")
    parts.append(f"{tflops(measurement.tflops)} TFLOP/s")
    if measurement.mfu is not None:
        parts.append(f"MFU {percent(measurement.mfu)}")
    parts.append(
        f"moved {volume(measurement.partition_nbytes)} partition"
        f" + {volume(measurement.replication_nbytes)} replication"
    )
    return " | ".join(parts)


class Display:
    """Progress of a run. Use as a context manager: leaving it gives the terminal back."""

    def __init__(self, console: Console, *, num_steps: int) -> None:
        self._console = console
        self._num_steps = num_steps
        self._last_line = 0.0
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                MofNCompleteColumn(),
                BarColumn(bar_width=16),
                TimeRemainingColumn(compact=True),
                TextColumn("{task.fields[numbers]}"),
                console=console,
            )
            self._task = self._progress.add_task("train", total=num_steps, numbers="starting")

    def __enter__(self) -> Self:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def update(self, measurement: Measurement, *, validation_loss: float | None) -> None:
        """Show a measurement; off a terminal only some seconds after the last line, or if it is the last."""
        numbers = format_measurement(measurement, validation_loss=validation_loss)
        if self._progress is not None:
            self._progress.update(self._task, completed=measurement.step, numbers=numbers)
            return
        now = time.monotonic()
        if measurement.step == self._num_steps or now - self._last_line >= _SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(
                f"step {measurement.step:>{len(str(self._num_steps))}}/{self._num_steps} | {numbers}",
                flush=True,
            )

"""What a run leaves behind: numbers, a picture, the weights, and a few lines on the screen."""

import json
import logging
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.padding import Padding
from rich.text import Text
from torch import Tensor

import mics
from mics.train.config import METRICS_FILE, TrainConfig
from mics.train.loggers import Logger, NoLogger, open_logger, scalars
from mics.train.metrics import Measurement
from mics.train.ranks import Rank
from mics.train.setup import Setup, describe_title
from mics.utils.numbers import duration, plural


@dataclass(kw_only=True)
class History:
    """All measurements of a run so far, in order. On rank 0 they also go to a file and to the logger."""

    measurements: list[Measurement] = field(default_factory=list)
    validations: list[tuple[int, float]] = field(default_factory=list)  # (step, loss)
    _file: TextIO | None = None
    _logger: Logger = field(default_factory=NoLogger)

    @contextmanager
    def recording(self, config: TrainConfig, me: Rank, *, after_step: int = 0) -> Iterator[None]:
        """Write every line as it is added, so that a run that is cut off keeps its numbers.

        A run that goes on after a step keeps the lines up to there: what came later is done again.
        """
        if me.rank != 0:
            yield
            return
        config.run_dir.mkdir(parents=True, exist_ok=True)
        file = config.run_dir / METRICS_FILE
        kept = _rows_up_to(file, after_step) if after_step else []
        for row in kept:
            if "loss" in row:
                self.measurements.append(Measurement(**row))
            elif "validation_loss" in row:
                self.validations.append((row["step"], row["validation_loss"]))
        _rewrite(file, kept)
        self._logger = open_logger(config, after_step=after_step)
        self._file = file.open("a")
        try:
            yield
        finally:
            with self._or_warn():
                self._file.close()
            self._file = None
            self._logger.close()

    def add(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)
        self._write(measurement.as_dict())

    def add_validation(self, step: int, loss: float) -> None:
        self.validations.append((step, loss))
        self._write({"step": step, "validation_loss": loss})

    def add_checkpoint(self, step: int, stall: float) -> None:
        self._write({"step": step, "checkpoint_stall_seconds": stall})

    @property
    def last_validation_loss(self) -> float | None:
        return self.validations[-1][1] if self.validations else None

    def _write(self, row: Mapping[str, Any]) -> None:
        if self._file is not None:
            with self._or_warn():
                print(json.dumps(row), file=self._file, flush=True)
            self._logger.log(row["step"], scalars(row))

    @contextmanager
    def _or_warn(self) -> Iterator[None]:
        """A full disk is no reason to end a run: what is not written is tried again with the next line."""
        assert self._file is not None
        try:
            yield
        except OSError as error:
            text = "%s: could not be written: %s. Training goes on"
            logging.getLogger("mics").warning(text, self._file.name, error.strerror or error)


def _rows_up_to(file: Path, step: int) -> list[dict[str, Any]]:
    rows = []
    for line in file.read_text().splitlines() if file.is_file() else []:
        try:
            row = json.loads(line)
        except json.JSONDecodeError:  # cut off while it was written
            continue
        if row["step"] <= step:
            rows.append(row)
    return rows


def _rewrite(file: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Replace the file as a whole: a run that is killed here has the old one or the new one."""
    partial = file.with_name(file.name + ".tmp")
    partial.write_text("".join(json.dumps(row) + "\n" for row in rows))
    partial.replace(file)


@dataclass(frozen=True, kw_only=True)
class ResultPaths:
    """Where everything went."""

    metrics: Path
    summary: Path
    picture: Path
    weights: Path | None
    events: Path | None
    """Of TensorBoard."""


def write_results(
    config: TrainConfig,
    setup: Setup,
    history: History,
    *,
    sample: str,
    weights: Mapping[str, Tensor],
    weights_folder: Path | None = None,
) -> ResultPaths:
    """Write the summary, the picture and the weights; the measurements are on disk already.

    ``weights_folder``: where the weights are already.
    """
    from mics.train.picture import draw_run  # matplotlib takes a while to import, and only rank 0 draws

    paths = ResultPaths(
        metrics=config.run_dir / METRICS_FILE,
        summary=config.run_dir / "run.json",
        picture=config.run_dir / "run.png",
        weights=config.run_dir / "model.pt" if weights else weights_folder,
        events=config.run_dir / "tensorboard" if config.report.logger == "tensorboard" else None,
    )
    last = history.measurements[-1]
    summary = {
        "mics": mics.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        **setup.as_dict(),
        "first_loss": history.measurements[0].loss,
        "final_loss": last.loss,
        "final_validation_loss": history.last_validation_loss,
        "training_seconds": last.seconds,
        "sample": sample,
        "last": last.as_dict(),
        "config": asdict(config),
    }
    paths.summary.write_text(json.dumps(summary, indent=2, default=str) + "\n")
    draw_run(
        paths.picture,
        measurements=history.measurements,
        validations=history.validations,
        title=describe_title(config, setup),
        on_gpu=setup.on_gpu,
    )
    if weights:
        torch.save(dict(weights), config.run_dir / "model.pt")
    return paths


def show_results(console: Console, history: History, *, sample: str, paths: ResultPaths) -> None:
    """The end of the run on the screen."""
    first, last = history.measurements[0], history.measurements[-1]
    held_out = history.last_validation_loss
    validation = "" if held_out is None else f", validation [bold]{held_out:.3f}[/bold]"
    console.print(
        f"\nloss {first.loss:.3f} -> [bold]{last.loss:.3f}[/bold]{validation}, after "
        f"{plural(last.step, 'step')} in {duration(last.seconds)}"
    )
    if sample:
        console.print("\nThe model writes:")
        console.print(Padding(Text(sample.strip(), style="italic"), (0, 0, 0, 2)), soft_wrap=False)
    console.print(f"\npicture  {paths.picture}\nnumbers  {paths.metrics}, {paths.summary}")
    if paths.weights is not None:
        console.print(f"weights  {paths.weights}")
    if paths.events is not None:
        console.print(f"events   {paths.events}; type: tensorboard --logdir {paths.events.parent}")

"""Other places for a run's scalars: TensorBoard and Weights & Biases. ``metrics.jsonl`` has them anyway."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, Protocol
from uuid import uuid4

from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.utils.numbers import GIB

_FLUSH_SECONDS: Final = 10  # what a run that is killed may lose of its events
_GB: Final = 1e9

# Keys of a line of metrics.jsonl: the scalar's name, and what its value is divided by.
_SCALARS: Final = {
    "loss": ("train/loss", 1.0),
    "learning_rate": ("train/lr", 1.0),
    "grad_norm": ("train/grad_norm", 1.0),
    "validation_loss": ("val/loss", 1.0),
    "tokens_per_second": ("perf/tokens_per_s", 1.0),
    "tflops": ("perf/tflops", 1.0),
    "mfu": ("perf/mfu", 1.0),
    "data_wait": ("perf/data_wait_s", 1.0),
    "memory_nbytes": ("perf/memory_gib", GIB),
    "intra_nbytes": ("comm/intra_gb", _GB),
    "inter_nbytes": ("comm/inter_gb", _GB),
    "partition_nbytes": ("comm/partition_gb", _GB),
    "replication_nbytes": ("comm/replication_gb", _GB),
    "exposed": ("comm/exposed", 1.0),
    "checkpoint_stall_seconds": ("checkpoint/stall_s", 1.0),
}


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The scalars of a line of ``metrics.jsonl``, under the names that loggers show."""
    known = {key: row[key] for key in _SCALARS if row.get(key) is not None}
    return {_SCALARS[key][0]: value / _SCALARS[key][1] for key, value in known.items()}


class Logger(Protocol):
    """Takes the scalars of a run, in the order of its steps."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class NoLogger:
    """The lines of ``metrics.jsonl`` are enough."""

    def log(self, step: int, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoardLogger:
    """Event files under ``<run>/tensorboard``."""

    def __init__(self, folder: Path, *, after_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # takes a second, which only this needs

        if after_step == 0:
            shutil.rmtree(folder, ignore_errors=True)  # of an earlier run of the same name
        # Readers drop what was written for these steps before: they are done again.
        purge_step = after_step + 1 if after_step else None
        self._writer = SummaryWriter(str(folder), purge_step=purge_step, flush_secs=_FLUSH_SECONDS)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class WandbLogger:
    """A run of Weights & Biases. Its id is kept in ``<run>/wandb-id``: a run that goes on is the same run.

    Steps that are done again are there already: Weights & Biases keeps the first value of a step.
    """

    def __init__(self, config: TrainConfig, *, after_step: int) -> None:
        import wandb

        file = config.run_dir / "wandb-id"
        if after_step == 0 or not file.is_file():
            file.write_text(uuid4().hex[:8] + "\n")
        try:
            self._run = wandb.init(
                project="mics",
                name=config.name,
                id=file.read_text().strip(),
                resume="allow",
                dir=str(config.run_dir),
                config=asdict(config),
                settings=wandb.Settings(console="off"),  # stdout is ours
            )
        except Exception as error:
            raise SettingsError(
                f"logger: expected Weights & Biases to start a run, found {type(error).__name__}: "
                f"{' '.join(str(error).split())}; type: wandb login, or set WANDB_MODE=offline"
            ) from error

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        self._run.finish()


def open_logger(config: TrainConfig, *, after_step: int) -> Logger:
    """The logger that the settings ask for, of a run that goes on after a step (0: that begins)."""
    if config.report.logger == "tensorboard":
        return TensorBoardLogger(config.run_dir / "tensorboard", after_step=after_step)
    if config.report.logger == "wandb":
        return WandbLogger(config, after_step=after_step)
    return NoLogger()

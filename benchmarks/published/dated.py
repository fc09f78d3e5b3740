"""Names of dated results."""

from __future__ import annotations

import datetime
import os
import platform
from pathlib import Path

import torch


def hardware() -> str:
    """``h200``, or ``cpu2-x86_64``: what results are named after."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name().replace("NVIDIA ", "").replace(" ", "-").lower()
    return f"cpu{os.cpu_count()}-{platform.machine()}"


def dated_file(folder: Path, theme: str, machine: str | None = None) -> Path:
    """``folder/THEME_HARDWARE_DATE.json``; None: this machine's hardware."""
    return folder / f"{theme}_{machine or hardware()}_{datetime.date.today():%Y-%m-%d}.json"


def by_date(folder: Path, theme: str) -> list[Path]:
    """Results of a theme, the newest last; of one date those of a GPU last."""
    return sorted(
        folder.glob(f"{theme}_*_*.json"),
        key=lambda file: (day_of(file), _on_gpu(file)),
    )


def day_of(file: Path) -> str:
    """``2026-11-18``, which a result's name ends in."""
    return file.stem.rpartition("_")[2]


def machine_of(file: Path) -> str:
    """``h200``, which comes before the day."""
    return file.stem.split("_", 1)[1].rpartition("_")[0]


def latest(folder: Path, theme: str) -> Path | None:
    """The newest result of a GPU, else of a CPU; None: there is none."""
    found = sorted(by_date(folder, theme), key=_on_gpu)  # which keeps the order of dates
    return found[-1] if found else None


def _on_gpu(file: Path) -> bool:
    return not machine_of(file).startswith(("cpu", "planner"))

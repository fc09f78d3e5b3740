"""The folders of checkpoints: one that is being written, those of steps, and which is the latest.

    runs/demo/checkpoints/
        latest              one line: step-200
        step-100/
        step-200/
        .step-300.partial/  being written, or left by a run that was killed

A folder gets its name when everything in it is on disk, and ``latest`` is moved after that: whatever moment a
run ends at, ``latest`` names a whole checkpoint.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Final

from mics.checkpoint.index import INDEX_NAME, sync_folder, write_durably
from mics.errors import CheckpointError

LATEST: Final = "latest"
_STEP: Final = re.compile(r"step-(\d+)")
_LEFTOVER: Final = re.compile(r"\.step-\d+\.(partial|removed)")


def partial_of(folder: Path) -> Path:
    """Where ``folder`` is written before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def _previous_of(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.previous")


def begin(folder: Path) -> Path:
    """An empty folder to write ``folder`` in."""
    partial = partial_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def publish(folder: Path) -> None:
    """Give a folder that is whole its name. One of that name is replaced: one is there at every moment."""
    partial, previous = partial_of(folder), _previous_of(folder)
    if folder.exists():
        shutil.rmtree(previous, ignore_errors=True)
        folder.rename(previous)
    partial.rename(folder)
    sync_folder(folder.parent)
    shutil.rmtree(previous, ignore_errors=True)


def abandon(folder: Path) -> None:
    """Remove what was written of a folder that will not be whole."""
    shutil.rmtree(partial_of(folder), ignore_errors=True)


def point_latest(root: Path, name: str) -> None:
    """Let ``latest`` name a checkpoint that is on disk."""
    write_durably(root / LATEST, f"{name}\n".encode())


def prune(root: Path, keep: int | None) -> None:
    """Remove all but the last ``keep`` steps, oldest first, and never the one that ``latest`` names."""
    if keep is None:
        return
    named = (root / LATEST).read_text().strip()
    for step in sorted(steps_in(root))[:-keep]:
        if step_name(step) != named:
            # A name of its own first: a folder that is half removed must not look like a checkpoint.
            doomed = root / f".{step_name(step)}.removed"
            shutil.rmtree(doomed, ignore_errors=True)
            (root / step_name(step)).rename(doomed)
            shutil.rmtree(doomed, ignore_errors=True)


def sweep(root: Path) -> None:
    """Remove what runs that were killed have left among the checkpoints of steps."""
    if root.is_dir():
        for each in root.iterdir():
            if _LEFTOVER.fullmatch(each.name):
                shutil.rmtree(each, ignore_errors=True)


def step_name(step: int) -> str:
    return f"step-{step}"


def steps_in(root: Path) -> list[int]:
    """The steps that have a whole checkpoint."""
    if not root.is_dir():
        return []
    found = ((_STEP.fullmatch(each.name), each) for each in root.iterdir())
    return sorted(int(match[1]) for match, each in found if match and (each / INDEX_NAME).is_file())


def latest_in(root: Path) -> Path | None:
    """The folder that ``latest`` names; where it names none that is whole, the last step that is."""
    pointer = root / LATEST
    if pointer.is_file():
        folder = root / pointer.read_text().strip()
        if (folder / INDEX_NAME).is_file():
            return folder
    steps = steps_in(root)
    return root / step_name(steps[-1]) if steps else None


def find_checkpoint(path: Path) -> Path:
    """The checkpoint that ``path`` means: itself, or the latest of the steps in it."""
    for folder in (path, _previous_of(path)):
        if any((folder / name).exists() for name in (INDEX_NAME, ".metadata")):
            return folder
        if any(folder.glob("*.safetensors")):
            return folder
    latest = latest_in(path)
    if latest is not None:
        return latest
    what = "an empty folder" if path.is_dir() else "no such folder"
    if path.is_dir() and any(path.iterdir()):
        what = f"a folder with {', '.join(sorted(each.name for each in path.iterdir())[:5])}"
    raise CheckpointError(
        f"{path}: expected a checkpoint ({INDEX_NAME}), a folder of them with {LATEST!r}, one of "
        f"torch.distributed.checkpoint (.metadata) or *.safetensors, found {what}"
    )

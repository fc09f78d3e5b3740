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

import logging
import re
import shutil
from pathlib import Path
from typing import Final

from mics.checkpoint.files import read_file, sync_folder, write_durably
from mics.checkpoint.index import INDEX_NAME
from mics.errors import CheckpointError, SettingsError

LATEST: Final = "latest"
_STEP: Final = re.compile(r"step-([0-9]{1,19})")  # a longer one is no number of ours
_LEFTOVER: Final = re.compile(r"\.(step-\d+)\.(partial|removed|previous)")
_OURS: Final = re.compile(r"__\d+_\d+\.distcp|rank-\d+\.json|\.metadata|mics\.json(\.sha256)?(\.tmp)?")
_MAX_LATEST_NBYTES: Final = 1 << 10
_LOG: Final = logging.getLogger("mics")


def partial_of(folder: Path) -> Path:
    """Where ``folder`` is written before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def previous_of(folder: Path) -> Path:
    """Where the one of that name waits while it is replaced."""
    return folder.with_name(f".{folder.name}.previous")


def check_replaceable(folder: Path) -> None:
    """Raise if something stands at ``folder`` that is no checkpoint: nothing else is ever removed."""
    if not folder.exists():
        return
    strange = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else ["a file"]
    strange = [name for name in strange if not _OURS.fullmatch(name)]
    if strange:
        raise SettingsError(
            f"{folder}: expected no folder there, an empty one or a checkpoint, found "
            f"{', '.join(strange[:3])}{', ...' if strange[3:] else ''}; give a path of its own, or step=... "
            "for a folder of checkpoints"
        )


def check_new(folder: Path) -> None:
    """Raise if anything stands at ``folder``."""
    if folder.exists():
        raise SettingsError(
            f"{folder}: expected a folder that is not there yet, found one; give another name"
        )


def begin(folder: Path) -> Path:
    """An empty folder to write ``folder`` in."""
    partial = partial_of(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    return partial


def publish(folder: Path) -> None:
    """Give a folder that is whole its name. One of that name is replaced: one is there at every moment."""
    partial, previous = partial_of(folder), previous_of(folder)
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
    """Remove all but the last ``keep`` that were saved, and never the one that ``latest`` names.

    The last that were saved, not the highest: a run that went back saves lower steps again.
    """
    if keep is None:
        return
    named = _pointed(root)
    for step in steps_in(root)[:-keep]:
        if step_name(step) != named:
            # A name of its own first: a folder that is half removed must not look like a checkpoint.
            doomed = root / f".{step_name(step)}.removed"
            try:
                shutil.rmtree(doomed, ignore_errors=True)
                (root / step_name(step)).rename(doomed)
                shutil.rmtree(doomed, ignore_errors=True)
            except OSError as error:
                _LOG.warning("%s: could not be removed: %s", root / step_name(step), error)


def sweep(root: Path) -> None:
    """Clear away what runs that were killed have left among the checkpoints of steps."""
    for each in list(root.iterdir()) if root.is_dir() else []:
        match = _LEFTOVER.fullmatch(each.name)
        if match and match[2] == "previous" and not (root / match[1]).exists():
            each.rename(root / match[1])  # killed between the two: the old one is the only one
        elif match:
            shutil.rmtree(each, ignore_errors=True)


def step_name(step: int) -> str:
    return f"step-{step}"


def steps_in(root: Path) -> list[int]:
    """The steps that have a whole checkpoint, in the order in which they were saved."""
    found = []
    for each in root.iterdir() if root.is_dir() else ():
        match, index = _STEP.fullmatch(each.name), each / INDEX_NAME
        if match and step_name(int(match[1])) == each.name and index.is_file():
            found.append((index.stat().st_mtime_ns, int(match[1])))
    return [step for _, step in sorted(found)]


def latest_in(root: Path) -> Path | None:
    """The folder that ``latest`` names; where it names none that is whole, the last that was saved."""
    named = _pointed(root)
    if named:
        for folder in (root / named, previous_of(root / named)):
            if (folder / INDEX_NAME).is_file():
                return folder
    steps = steps_in(root)
    return root / step_name(steps[-1]) if steps else None


def _pointed(root: Path) -> str:
    """The name in ``latest``, or nothing."""
    try:
        name = read_file(root / LATEST, most=_MAX_LATEST_NBYTES).decode(errors="replace").strip()
    except CheckpointError:
        return ""
    return name if _STEP.fullmatch(name) else ""

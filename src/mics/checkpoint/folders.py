"""The folders of checkpoints: one that is being written, those of steps, and which is the latest.

    runs/demo/checkpoints/
        latest              one line: step-200
        step-100/
        step-200/
        .step-300.partial/  being written, or left by a run that was killed

A folder gets its name when everything in it is on disk, and ``latest`` is moved after that: whatever moment a
run ends at, ``latest`` names a whole checkpoint. How that is done is the storage's.
"""

from __future__ import annotations

import logging
import re
from typing import Final

from mics.checkpoint.storage import INDEX_NAME, Place, homes_of, modified_ns, read_file, storage_of
from mics.errors import CheckpointError, SettingsError

LATEST: Final = "latest"
_STEP: Final = re.compile(r"step-([0-9]{1,19})")  # a longer one is no number of ours
_OURS: Final = re.compile(
    r"__\d+_\d+(-[0-9a-f]+)?\.distcp|rank-\d+(\.index)?(-[0-9a-f]+)?\.json|\.metadata"
    r"|mics\.json(\.sha256)?(\.tmp)?"
)
_MAX_LATEST_NBYTES: Final = 1 << 10
_LOG: Final = logging.getLogger("mics")


def check_replaceable(folder: Place) -> None:
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


def check_new(folder: Place) -> None:
    """Raise if anything stands at ``folder``."""
    if folder.exists():
        raise SettingsError(
            f"{folder}: expected a folder that is not there yet, found one; give another name"
        )


def point_latest(root: Place, name: str) -> None:
    """Let ``latest`` name a checkpoint that is whole."""
    storage_of(root).write(root / LATEST, f"{name}\n".encode())


def prune(root: Place, keep: int | None) -> None:
    """Remove all but the last ``keep`` that were saved, and never the one that ``latest`` names.

    The last that were saved, not the highest: a run that went back saves lower steps again.
    """
    if keep is None:
        return
    named = _pointed(root)
    for step in steps_in(root)[:-keep]:
        if step_name(step) != named:
            try:
                storage_of(root).remove(root / step_name(step))
            except (OSError, CheckpointError) as error:
                _LOG.warning("%s: could not be removed: %s", root / step_name(step), error)


def step_name(step: int) -> str:
    return f"step-{step}"


def steps_in(root: Place) -> list[int]:
    """The steps that have a whole checkpoint, in the order in which they were saved."""
    found = []
    for each in root.iterdir() if root.is_dir() else ():
        match, index = _STEP.fullmatch(each.name), each / INDEX_NAME
        if match and step_name(int(match[1])) == each.name and index.is_file():
            found.append((modified_ns(index), int(match[1])))
    return [step for _, step in sorted(found)]


def latest_in(root: Place) -> Place | None:
    """The folder that ``latest`` names; where it names none that is whole, the last that was saved."""
    named = _pointed(root)
    if named:
        for folder in homes_of(root / named):
            if (folder / INDEX_NAME).is_file():
                return folder
    steps = steps_in(root)
    return root / step_name(steps[-1]) if steps else None


def _pointed(root: Place) -> str:
    """The name in ``latest``, or nothing."""
    try:
        name = read_file(root / LATEST, most=_MAX_LATEST_NBYTES).decode(errors="replace").strip()
    except CheckpointError:
        return ""
    return name if _STEP.fullmatch(name) else ""

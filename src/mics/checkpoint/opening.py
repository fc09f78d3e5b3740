"""From a path to the index of a checkpoint, in our format or in another: a new format is added here."""

from __future__ import annotations

from mics.checkpoint.folders import LATEST, latest_in
from mics.checkpoint.formats.dcp import METADATA_NAME, open_dcp
from mics.checkpoint.formats.deepspeed_files import is_deepspeed, open_deepspeed
from mics.checkpoint.formats.safetensors_files import open_safetensors
from mics.checkpoint.index import read_index
from mics.checkpoint.records import Index
from mics.checkpoint.storage import INDEX_NAME, Place, homes_of
from mics.errors import CheckpointError


def find_checkpoint(path: Place) -> Place:
    """The checkpoint that ``path`` means: itself, or the latest of the steps in it."""
    for folder in homes_of(path):
        if (folder / INDEX_NAME).exists() or is_foreign(folder):
            return folder
    latest = latest_in(path)
    if latest is not None:
        return latest
    what = "an empty folder" if path.is_dir() else "no such folder"
    if path.is_dir() and any(path.iterdir()):
        what = f"a folder with {', '.join(sorted(each.name for each in path.iterdir())[:5])}"
    raise CheckpointError(
        f"{path}: expected a checkpoint ({INDEX_NAME}), a folder of them with {LATEST!r}, one of "
        f"torch.distributed.checkpoint ({METADATA_NAME}) or *.safetensors, found {what}"
    )


def open_checkpoint(folder: Place) -> Index:
    """The index of a checkpoint. Values are not looked at."""
    if (folder / INDEX_NAME).exists():
        return read_index(folder)
    if is_foreign(folder):
        return open_foreign(folder)
    raise CheckpointError(
        f"{folder}: expected {INDEX_NAME}, {METADATA_NAME} or *.safetensors, found none of them"
    )


def is_foreign(folder: Place) -> bool:
    """Whether a checkpoint of one of these formats is there."""
    return (folder / METADATA_NAME).exists() or is_deepspeed(folder) or any(folder.glob("*.safetensors"))


def open_foreign(folder: Place) -> Index:
    """The index of a checkpoint of one of these formats. Values are not looked at."""
    if (folder / METADATA_NAME).exists():
        return open_dcp(folder)
    return open_deepspeed(folder) if is_deepspeed(folder) else open_safetensors(folder)

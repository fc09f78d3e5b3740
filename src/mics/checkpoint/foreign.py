"""Checkpoints by whoever wrote them: ours, torch.distributed.checkpoint's, safetensors."""

from __future__ import annotations

from pathlib import Path

from mics.checkpoint.index import INDEX_NAME, Index, read_index
from mics.checkpoint.safetensors_files import open_safetensors
from mics.checkpoint.stock import METADATA_NAME, open_stock
from mics.errors import CheckpointError


def open_checkpoint(folder: Path) -> Index:
    """The index of a checkpoint. Values are not looked at."""
    if (folder / INDEX_NAME).exists():
        return read_index(folder)
    if (folder / METADATA_NAME).exists():
        return open_stock(folder)
    if any(folder.glob("*.safetensors")):
        return open_safetensors(folder)
    raise CheckpointError(
        f"{folder}: expected {INDEX_NAME}, {METADATA_NAME} or *.safetensors, found none of them"
    )

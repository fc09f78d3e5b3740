"""Checkpoints by whoever wrote them: ours, torch.distributed.checkpoint's, safetensors."""

from __future__ import annotations

from pathlib import Path

from mics.checkpoint.index import INDEX_NAME, Index, read_index


def open_checkpoint(folder: Path) -> Index:
    """The index of a checkpoint."""
    if (folder / INDEX_NAME).is_file():
        return read_index(folder)
    raise NotImplementedError

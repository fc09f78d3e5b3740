"""From a folder of safetensors to a checkpoint of mics, in one process and a fixed amount of memory.

``mics.load`` reads safetensors straight into shards; this makes a checkpoint of them, with digests.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Callable
from pathlib import Path

import torch

import mics.checkpoint.folders as folders
from mics.checkpoint.formats.dcp_writing import PickledValues
from mics.checkpoint.formats.safetensors_files import FORMAT
from mics.checkpoint.records import MODEL, Index, TensorPart
from mics.checkpoint.snapshot import Snapshot
from mics.checkpoint.storage import Place
from mics.comm.host_group import HostGroup
from mics.comm.world import World
from mics.errors import SettingsError


def import_safetensors(
    folder: Place, index: Index, out: Place, *, progress: Callable[[int], None] | None = None
) -> None:
    """Write the tensors of ``folder`` as a checkpoint of a model."""
    if index.about.get("format") != FORMAT:
        raise SettingsError(
            f"{folder}: expected a folder of safetensors, found another checkpoint; mics.load reads it as "
            "it is"
        )
    if not isinstance(folder, Path):
        raise SettingsError(
            f"{folder}: expected a folder of safetensors on a disk, found a URL; mics.load reads it as it is"
        )
    folders.check_new(out)
    mapped = {name: _mapped(folder / name) for name, file in index.files.items() if file.nbytes}
    Snapshot(
        root=out,
        folder=out,
        step=None,
        keep=None,
        world=World(rank=0, size=1, default_group=None),
        host=HostGroup(),
        parts=_parts(index, mapped),
        aliases={},
        about={
            "step": None,
            "world_size": 1,
            "partition_size": 1,
            "torch": torch.__version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "imported_from": FORMAT,
        },
        param_groups=None,
        module_state={},
        own=b"{}",
        values=PickledValues(),
        progress=progress,
    ).write()


def _mapped(file: Path) -> mmap.mmap:
    with file.open("rb") as stream:
        return mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory it could write


def _parts(index: Index, mapped: dict[str, mmap.mmap]) -> list[TensorPart]:
    """Every tensor where it lies in its file. Its pages are read when it is written."""
    parts = []
    for name, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            raw = torch.frombuffer(
                mapped[chunk.file], dtype=torch.uint8, offset=chunk.position, count=tensor.nbytes
            )
            values = raw.view(tensor.dtype)
            span = range(values.numel())
            parts.append(TensorPart(name=MODEL + name, shape=tensor.shape, span=span, values=values))
    return parts

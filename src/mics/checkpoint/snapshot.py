"""Writing a checkpoint: the steps that all ranks take together, from a plan to a folder with its name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import mics.checkpoint.folders as folders
from mics.checkpoint.blocks import BlockWriter
from mics.checkpoint.files import write_durably
from mics.checkpoint.formats.dcp import METADATA_NAME
from mics.checkpoint.formats.dcp_writing import ItemWriter, PickledValues, WrittenItem
from mics.checkpoint.index import write_index
from mics.checkpoint.own_state import own_file
from mics.checkpoint.records import Index, StoredChunk, StoredFile, StoredTensor, TensorPart
from mics.checkpoint.telling import told
from mics.checkpoint.together import together
from mics.comm.host_group import HostGroup
from mics.comm.world import World
from mics.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that is written, gathered while the model stood still."""

    root: Path
    folder: Path
    step: int | None
    keep: int | None
    rank: int
    world: World
    host: HostGroup
    parts: Sequence[TensorPart]
    aliases: dict[str, str]  # further names of tied parameters, as the checkpoint has them
    about: dict[str, Any]
    param_groups: list[dict[str, Any]] | None
    module_state: dict[str, Any]
    own: bytes  # this rank's own state
    values: PickledValues  # for DCP's readers; on the first rank
    ready: torch.cuda.Event | None = None  # when the parts are copied
    progress: Callable[[int], None] | None = None  # told how many bytes are written next

    def write(self) -> None:
        """Write it. Raises the same error on all ranks."""
        if self.ready is not None:
            self.ready.synchronize()
        try:
            with (
                self.world.explaining("save", str(self.folder)),
                self._told() as progress,
            ):
                self._write(
                    ItemWriter(self.parts, aliases=self.aliases, values=self.values, progress=progress)
                )
        except BaseException:
            if self.rank == 0:
                folders.abandon(self.folder)
            raise

    @property
    def parts_nbytes(self) -> int:
        """That this rank writes."""
        return sum(part.nbytes for part in self.parts)

    def _told(self) -> AbstractContextManager[Callable[[int], None] | None]:
        if self.progress is not None:
            return nullcontext(self.progress)
        return told("saving", self.folder, self.parts_nbytes, rank=self.rank)

    def _write(self, writer: ItemWriter) -> None:
        self._together(lambda: self._begin() if self.rank == 0 else None)
        plan = self._together(writer.plan)
        plans = self.host.gather(plan)
        metadata = self._together(lambda: None if plans is None else writer.describe(plans))
        reports = self.host.gather(self._together(lambda: self._write_files(writer, plan)))
        if metadata is None or reports is None:
            self._together(lambda: None)
        else:
            self._together(lambda: self._publish(writer, metadata, reports))

    def _begin(self) -> None:
        if self.step is not None:
            folders.sweep(self.root)
        folders.begin(self.folder)

    def _write_files(self, writer: ItemWriter, plan: SavePlan) -> _Report:
        """Write this rank's files, and have them on disk."""
        partial, files = folders.partial_of(self.folder), {}
        name = f"__{self.rank}_0.distcp"
        with BlockWriter(partial / name) as stream:
            items = writer.write(plan, name, stream)
            files[name] = stream.finish()
        name = own_file(self.rank)
        with BlockWriter(partial / name) as stream:
            stream.write(self.own)
            files[name] = stream.finish()
        tensors = {
            part.name: StoredTensor(dtype=part.values.dtype, shape=part.shape, chunks=(), whole=part.whole)
            for part in self.parts
        }
        return _Report(items=items, tensors=tensors, files=files)

    def _publish(self, writer: ItemWriter, metadata: Metadata, reports: Sequence[_Report]) -> None:
        partial = folders.partial_of(self.folder)
        items = (item for report in reports for item in report.items)
        write_durably(partial / METADATA_NAME, writer.pickled_metadata(metadata, items))
        write_index(partial, self._index(reports))
        folders.publish(self.folder)
        if self.step is not None:
            folders.point_latest(self.root, self.folder.name)
            folders.prune(self.root, self.keep)

    def _index(self, reports: Sequence[_Report]) -> Index:
        files = {name: file for report in reports for name, file in report.files.items()}
        partial = folders.partial_of(self.folder)
        for name, file in files.items():
            found = (partial / name).stat().st_size if (partial / name).exists() else None
            if found != file.nbytes:
                raise CheckpointError(
                    f"{partial / name}: expected the {file.nbytes:,} bytes that a rank wrote, found "
                    f"{found}; is this a folder that all nodes share?"
                )
        chunks: dict[str, list[StoredChunk]] = {}
        tensors: dict[str, StoredTensor] = {}
        for report in reports:
            tensors.update(report.tensors)
            for item in report.items:
                if item.chunk is not None:
                    chunks.setdefault(item.key.fqn, []).append(item.chunk)
        return Index(
            tensors={
                name: replace(tensor, chunks=tuple(chunks.get(name, ()))) for name, tensor in tensors.items()
            },
            files=files,
            aliases=self.aliases,
            about=self.about,
            param_groups=self.param_groups,
            module_state=self.module_state,
        )

    def _together(self, action: Callable[[], T]) -> T:
        return together(self.host, "mics.save", action, self._failed)

    def _failed(self, rank: int, error: Exception) -> CheckpointError:
        what = error.strerror if isinstance(error, OSError) else None
        return CheckpointError(
            f"{self.folder}: rank {rank} could not write its part: "
            f"{what or f'{type(error).__name__}: {error}'}. What was there before is still there; "
            "make room or mend the folder, and save again"
        )


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a rank tells the first about the files it wrote."""

    items: list[WrittenItem]
    tensors: dict[str, StoredTensor]  # that it wrote a part of; without chunks
    files: dict[str, StoredFile]

"""Writing a checkpoint: the steps that all ranks take together, from a plan to a folder with its name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan

import mics.checkpoint.apart as apart
import mics.checkpoint.folders as folders
from mics.checkpoint.blocks import BlockWriter, Worker
from mics.checkpoint.formats.dcp import METADATA_NAME
from mics.checkpoint.formats.dcp_writing import ITEM_NBYTES, ItemWriter, PickledValues, WrittenItem, divided
from mics.checkpoint.index import write_head, write_index
from mics.checkpoint.own_state import own_file
from mics.checkpoint.parts import WrittenPart, write_part
from mics.checkpoint.records import Index, StoredChunk, StoredFile, StoredTensor, TensorPart
from mics.checkpoint.storage import Draft, Place, sizes_in, storage_of
from mics.checkpoint.telling import told
from mics.checkpoint.together import together
from mics.comm.host_group import HostGroup
from mics.comm.world import World
from mics.errors import CheckpointError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Everything that is written, gathered while the model stood still."""

    root: Place
    folder: Place
    step: int | None
    keep: int | None
    world: World
    host: HostGroup
    parts: Sequence[TensorPart]
    aliases: dict[str, str]  # further names of tied parameters, as the checkpoint has them
    about: dict[str, Any]
    param_groups: list[dict[str, Any]] | None
    module_state: dict[str, Any]
    own: bytes  # this rank's own state
    values: PickledValues  # for DCP's readers; on the first rank
    position: int | None = None  # of the piece of every unit that it writes; None: units differ in that
    ready: torch.cuda.Event | None = None  # when the parts are copied
    progress: Callable[[int], None] | None = None  # told how many bytes are written next

    def write(self) -> None:
        """Write it. Raises the same error on all ranks."""
        if self.ready is not None:
            self.ready.synchronize()
        with self.world.explaining("save", str(self.folder)):
            begun = self._together(lambda: self._begin() if self.rank == 0 else None)
            draft: Draft = self.host.broadcast(begun)
            try:
                with self._told() as progress:
                    self._write(
                        draft,
                        ItemWriter(self.parts, aliases=self.aliases, values=self.values, progress=progress),
                    )
            except BaseException:
                if self.rank == 0:
                    storage_of(self.folder).abandon(draft)
                raise

    @property
    def rank(self) -> int:
        return self.host.rank

    @property
    def parts_nbytes(self) -> int:
        """That this rank writes."""
        return sum(part.nbytes for part in self.parts)

    def _told(self) -> AbstractContextManager[Callable[[int], None] | None]:
        if self.progress is not None:
            return nullcontext(self.progress)
        return told("saving", self.folder, self.parts_nbytes, rank=self.rank)

    def _write(self, draft: Draft, writer: ItemWriter) -> None:
        plan = self._together(writer.plan)
        told = self.host.all_gather((len(plan.items), self.position))
        writers = apart.writers_of([position for _, position in told])
        if writers is not None and sum(count for count, _ in told) > apart.MAX_GATHERED_ITEMS:
            self._write_apart(draft, writer, plan, writers)
            return
        plans = self.host.gather(plan)
        metadata = self._together(lambda: None if plans is None else writer.describe(plans))
        reports = self.host.gather(self._together(lambda: self._write_files(draft, writer, plan)))
        if metadata is None or reports is None:
            self._together(lambda: None)
        else:
            self._together(lambda: self._publish(draft, writer, metadata, reports))

    def _write_apart(
        self, draft: Draft, writer: ItemWriter, plan: SavePlan, writers: tuple[int, ...]
    ) -> None:
        """Each rank writes its part of the index. There is none for DCP's readers: it would be gathered."""
        tables = self.host.gather(
            self._together(lambda: apart.described(self.parts, writers, self.rank)),
        )
        tensors = self.host.broadcast(
            self._together(lambda: None if tables is None else apart.joined(tables))
        )
        self._together(lambda: apart.check_parts(self.parts, tensors, self.rank))
        plan = SavePlan([item for item in plan.items if item.tensor_data is not None])

        def write() -> WrittenPart:
            report = self._write_files(draft, writer, plan)
            return write_part(draft, self.rank, apart.items_of(self.parts, report.items), report.files)

        parts = self.host.gather(self._together(write))
        self._together(lambda: None if parts is None else self._publish_head(draft, tensors, parts))

    def _publish_head(
        self, draft: Draft, tensors: dict[str, StoredTensor], parts: Sequence[WrittenPart]
    ) -> None:
        _check_sizes(draft, {name: size for part in parts for name, size in part.files.items()})
        _check_sizes(draft, {part.name: part.nbytes for part in parts})
        write_head(draft, self._described(draft, tensors, {}), parts, ITEM_NBYTES)
        self._published(draft, without=[METADATA_NAME])

    def _begin(self) -> Draft:
        storage = storage_of(self.folder)
        if self.step is not None:
            storage.sweep(self.root)
        return storage.begin(self.folder)

    def _write_files(self, draft: Draft, writer: ItemWriter, plan: SavePlan) -> _Report:
        """Write this rank's files, and have them stay."""
        streams = divided(plan, storage_of(self.folder).num_streams(self.parts_nbytes))
        workers = [Worker("mics-stream") for _ in streams[1:]]
        rest = [
            worker.submit(self._write_stream, draft, writer, each, number)
            for number, (worker, each) in enumerate(zip(workers, streams[1:], strict=True), start=1)
        ]
        try:
            written = [self._write_stream(draft, writer, streams[0], 0)]
        finally:
            for worker in workers:
                worker.close()
        written += [each.result() for each in rest]
        items = [item for found, _, _ in written for item in found]
        files = {name: file for _, name, file in written}
        name = own_file(self.rank, draft.tag)
        with BlockWriter(draft.where / name) as stream:
            stream.write(self.own)
            files[name] = stream.finish()
        tensors = {
            part.name: StoredTensor(dtype=part.values.dtype, shape=part.shape, chunks=(), whole=part.whole)
            for part in self.parts
        }
        return _Report(items=items, tensors=tensors, files=files)

    def _write_stream(
        self, draft: Draft, writer: ItemWriter, plan: SavePlan, number: int
    ) -> tuple[list[WrittenItem], str, StoredFile]:
        name = draft.name(f"__{self.rank}_{number}", ".distcp")
        with BlockWriter(draft.where / name) as stream:
            return writer.write(plan, name, stream), name, stream.finish()

    def _publish(
        self, draft: Draft, writer: ItemWriter, metadata: Metadata, reports: Sequence[_Report]
    ) -> None:
        storage = storage_of(self.folder)
        items = (item for report in reports for item in report.items)
        metadata_of_all = writer.pickled_metadata(metadata, items)
        write_index(draft, self._index(draft, reports))
        # After the index: once that is put, files of this save stay whatever fails, as those of before do.
        storage.write(draft.where / METADATA_NAME, metadata_of_all)
        self._published(draft)

    def _published(self, draft: Draft, *, without: Sequence[str] = ()) -> None:
        storage_of(self.folder).publish(draft, without=without)
        if self.step is not None:
            folders.point_latest(self.root, self.folder.name)
            folders.prune(self.root, self.keep)

    def _index(self, draft: Draft, reports: Sequence[_Report]) -> Index:
        files = {name: file for report in reports for name, file in report.files.items()}
        _check_sizes(draft, {name: file.nbytes for name, file in files.items()})
        chunks: dict[str, list[StoredChunk]] = {}
        tensors: dict[str, StoredTensor] = {}
        for report in reports:
            tensors.update(report.tensors)
            for item in report.items:
                if item.chunk is not None:
                    chunks.setdefault(item.key.fqn, []).append(item.chunk)
        tensors = {
            name: replace(tensor, chunks=tuple(chunks.get(name, ()))) for name, tensor in tensors.items()
        }
        return self._described(draft, tensors, files)

    def _described(
        self, draft: Draft, tensors: dict[str, StoredTensor], files: dict[str, StoredFile]
    ) -> Index:
        return Index(
            tensors=tensors,
            files=files,
            aliases=self.aliases,
            about={**self.about, "tag": draft.tag} if draft.tag else self.about,
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


def _check_sizes(draft: Draft, sizes: Mapping[str, int]) -> None:
    """Every rank's files are where the first looks for them."""
    there = sizes_in(draft.where)
    for name, nbytes in sizes.items():
        if there.get(name) != nbytes:
            raise CheckpointError(
                f"{draft.where / name}: expected the {nbytes:,} bytes that a rank wrote, found "
                f"{there.get(name)}; save to a folder that all nodes share"
            )


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What a rank tells the first about the files it wrote."""

    items: list[WrittenItem]
    tensors: dict[str, StoredTensor]  # that it wrote a part of; without chunks
    files: dict[str, StoredFile]

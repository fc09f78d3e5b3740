"""torch.distributed.checkpoint's side of a checkpoint: its plans, its storage, its files.

A part's boxes are items of DCP, each an archive as ``torch.save`` writes it, so FSDP2 and DCP's tools read
what we write. Beside DCP's ``.metadata``, which is a pickle and which we never read, stands our index: it
knows where in the archives the values begin.
"""

from __future__ import annotations

import io
import pickle
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter
from torch.futures import Future

from mics.checkpoint.blocks import BlockReader, BlockWriter
from mics.checkpoint.boxes import Box, boxes_of, pieces, runs
from mics.checkpoint.contents import Part
from mics.checkpoint.index import BLOCK_NBYTES, Index, StoredChunk, StoredFile, StoredTensor, write_durably
from mics.checkpoint.stock import located
from mics.checkpoint.stock_values import StockValues, nested_path
from mics.errors import CheckpointError

_ITEM_NBYTES = 64 << 20
"""Larger boxes are written as several: an item is copied once on its way to the disk."""


@dataclass(frozen=True, kw_only=True)
class FileReport:
    """What a rank tells the first about the files it wrote."""

    chunks: list[tuple[MetadataIndex, _StorageInfo, StoredChunk | None]]  # None: for DCP's readers alone
    tensors: dict[str, StoredTensor]  # that it wrote a part of; without chunks
    files: dict[str, StoredFile]


class PartSavePlanner(SavePlanner):
    """Plans the parts of this rank as items of DCP."""

    def __init__(
        self,
        parts: Sequence[Part],
        aliases: dict[str, str],
        values: StockValues,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self._parts = parts
        self._aliases = aliases | values.aliases
        self._pickled = values.pickled
        self._progress = progress
        self._values: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the parts are known."""

    def create_local_plan(self) -> SavePlan:
        items = []
        for part in self._parts:
            for box, values in _items_of(part):
                index = MetadataIndex(part.name, box.offsets)
                self._values[index] = values
                items.append(_write_item(part, index, box))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._pickled]
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        plans, metadata = create_default_global_save_plan(all_plans)
        tensors = metadata.state_dict_metadata
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorStorageMetadata):
                _check_covered(name, tensor)
        for alias, name in self._aliases.items():
            if name in tensors:  # a parameter without elements is written by nobody
                tensors[alias] = tensors[name]
        # Where each name belongs in the nested dicts that DCP's tools make of it.
        metadata.planner_data = {name: nested_path(name) for name in tensors}
        return plans, metadata

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type == WriteItemType.BYTE_IO:
            return io.BytesIO(self._pickled[write_item.index.fqn])
        values = _alone(self._values[write_item.index].to("cpu"))
        if self._progress is not None:
            self._progress(values.nbytes)
        return values


def _alone(values: Tensor) -> Tensor:
    """The same memory as a storage of its own: torch.save would write all of the buffer that it lies in."""
    flat = torch.from_numpy(values.reshape(-1).view(torch.uint8).numpy())
    return flat.view(values.dtype).view(values.shape)


def _items_of(part: Part) -> Iterator[tuple[Box, Tensor]]:
    for start, box in boxes_of(part.shape, part.span):
        at = start - part.span.start
        for piece in pieces(box, _ITEM_NBYTES // part.values.element_size()):
            yield piece, part.values[at : at + piece.numel].view(piece.sizes)
            at += piece.numel


def _write_item(part: Part, index: MetadataIndex, box: Box) -> WriteItem:
    return WriteItem(
        index=index,
        type=WriteItemType.SHARD,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)),
            properties=TensorProperties(dtype=part.values.dtype),
            size=torch.Size(part.shape),
        ),
    )


def _check_covered(name: str, tensor: TensorStorageMetadata) -> None:
    written = sum(chunk.sizes.numel() for chunk in tensor.chunks)
    if written != tensor.size.numel():
        raise CheckpointError(
            f"{name}: expected ranks to have its {tensor.size.numel():,} elements once, found {written:,}; "
            "do all ranks save the same model and optimizer?"
        )


class PartWriter(StorageWriter):
    """Writes this rank's items to one file, and on the first rank DCP's metadata."""

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part],
        *,
        rank: int,
        state: bytes,
        aliases: dict[str, str],
        values: StockValues,
    ) -> None:
        self.folder = folder
        self.reports: list[FileReport] = []  # of all ranks, on the first
        self._parts = parts
        self._rank = rank
        self._state = state
        self._aliases = aliases | values.aliases

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a writer is used once."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing: the folder is there."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        name, chunks, files = f"__{self._rank}_0.distcp", [], {}
        path = self.folder / name
        with BlockWriter(path) as stream:
            for item in plan.items:
                start = stream.tell()
                values = planner.resolve_data(item)
                chunk = None
                if isinstance(values, Tensor):
                    assert item.tensor_data is not None
                    chunk = StoredChunk(box_of(item.tensor_data.chunk), name, stream.save(values))
                else:
                    stream.write(values.getbuffer())
                info = _StorageInfo(name, start, stream.tell() - start)
                chunks.append((item.index, info, chunk))
            files[name] = stream.finish()
        name = rank_file(self._rank)
        with BlockWriter(self.folder / name) as stream:
            stream.write(self._state)
            files[name] = stream.finish()
        tensors = {
            part.name: StoredTensor(dtype=part.values.dtype, shape=part.shape, chunks=(), whole=part.whole)
            for part in self._parts
        }
        done: Future[Any] = Future()
        done.set_result([FileReport(chunks=chunks, tensors=tensors, files=files)])
        return done

    def finish(self, metadata: Metadata, results: list[list[Any]]) -> None:
        self.reports = [report for each in results for report in each]
        storage = {index: info for report in self.reports for index, info, _ in report.chunks}
        by_name: dict[str, list[tuple[MetadataIndex, _StorageInfo]]] = {}
        for index, info in storage.items():
            by_name.setdefault(index.fqn, []).append((index, info))
        for alias, name in self._aliases.items():
            for index, info in by_name.get(name, ()):
                storage[MetadataIndex(alias, index.offset, index.index)] = info
        metadata.storage_data = storage
        metadata.storage_meta = StorageMeta()
        metadata.version = CURRENT_DCP_VERSION
        write_durably(self.folder / ".metadata", pickle.dumps(metadata))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


def rank_file(rank: int) -> str:
    """The file of what each rank has to itself: random state, the position in its data."""
    return f"rank-{rank}.json"


class PartLoadPlanner(LoadPlanner):
    """Plans to read the parts of this rank."""

    def __init__(self, index: Index, wanted: Sequence[tuple[Part, str]]) -> None:
        self._index = index
        self._wanted = wanted  # with the name that the checkpoint has for it
        self._values: dict[MetadataIndex, Tensor] = {}

    def set_up_planner(
        self, state_dict: Any, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Nothing: the parts are known."""

    def create_local_plan(self) -> LoadPlan:
        items: list[ReadItem] = []
        for number, (part, name) in enumerate(self._wanted):
            stored = self._index.find(name)
            assert stored is not None, name
            near = _Near(stored.chunks)
            found = 0
            for start, box in boxes_of(part.shape, part.span):
                at = start - part.span.start
                dest = MetadataIndex(part.name, box.offsets, number)
                self._values[dest] = part.values[at : at + box.numel].view(box.sizes)
                for chunk in near.to(box):
                    both = box.overlap(chunk.box)
                    if both is not None:
                        found += both.numel
                        items.append(_read_item(name, chunk.box, dest, box, both))
            if found != len(part.span):
                raise CheckpointError(
                    f"{name}: expected the checkpoint to have elements {part.span.start:,} to "
                    f"{part.span.stop:,}, found {found:,} of them"
                )
        return LoadPlan(items)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        return global_plan

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        return central_plan

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        target = self._values[read_item.dest_index]
        for dim, (start, size) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            target = target.narrow(dim, start, size)
        return target

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing: it was read into place."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise AssertionError("no bytes are asked for")


class _Near:
    """Finds the chunks of a tensor that a box can overlap, without looking at all that many ranks wrote."""

    def __init__(self, chunks: Sequence[StoredChunk]) -> None:
        self._chunks = sorted(chunks, key=lambda chunk: chunk.box.offsets)
        rows = [(chunk.box.offsets[0], chunk.box.sizes[0]) for chunk in self._chunks if chunk.box.offsets]
        self._starts = [start for start, _ in rows]
        self._stops = [start + size for start, size in rows]
        # Ranges in flat order are in order of their last rows too. Tiles of others may not be.
        self._in_order = bool(rows) and all(a <= b for a, b in pairwise(self._stops))

    def to(self, box: Box) -> Sequence[StoredChunk]:
        if not self._in_order:
            return self._chunks
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0]
        return self._chunks[bisect_right(self._stops, first) : bisect_left(self._starts, last)]


def _read_item(name: str, stored: Box, dest: MetadataIndex, box: Box, both: Box) -> ReadItem:
    return ReadItem(
        type=LoadItemType.TENSOR,
        dest_index=dest,
        dest_offsets=torch.Size(both.within(box).offsets),
        storage_index=MetadataIndex(name, stored.offsets),
        storage_offsets=torch.Size(both.within(stored).offsets),
        lengths=torch.Size(both.sizes),
    )


class IndexReader(StorageReader):
    """Reads the values of a checkpoint by its index: no pickle, no torch.load."""

    def __init__(self, folder: Path, index: Index, progress: Callable[[int], None] | None = None) -> None:
        self._folder = folder
        self._index = index
        self._progress = progress  # told how many bytes were read
        self._chunks: dict[tuple[str, tuple[int, ...]], StoredChunk] = {
            (name, chunk.box.offsets): chunk
            for name, tensor in index.tensors.items()
            for chunk in tensor.chunks
        }

    def reset(self, checkpoint_id: Any = None) -> None:
        """Nothing: a reader is of one checkpoint."""

    def read_metadata(self) -> Metadata:
        tensors = {name: _metadata_of(tensor) for name, tensor in self._index.tensors.items()}
        tensors.update({alias: tensors[name] for alias, name in self._index.aliases.items()})
        return Metadata(dict(tensors), planner_data={name: nested_path(name) for name in tensors})

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Nothing: the index is known."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[_Copy]] = {}
        for item in plan.items:
            name = self._index.aliases.get(item.storage_index.fqn, item.storage_index.fqn)
            offset = item.storage_index.offset
            dtype = self._index.tensors[name].dtype
            key = name, tuple(offset or ())
            chunk = self._chunks[key] = located(self._folder, name, dtype, self._chunks[key])
            target = planner.resolve_tensor(item).detach()
            part = Box(tuple(item.storage_offsets), tuple(item.lengths))
            copies = _copies(chunk, dtype, part, target)
            by_file.setdefault(chunk.file, []).extend(copies)
        for file, wanted in by_file.items():
            wanted.sort(key=lambda copy: copy.ranges[0].start)
            ranges = [each for copy in wanted for each in copy.ranges]
            with BlockReader(self._folder / file, self._index.files[file], ranges) as reader:
                for copy in wanted:
                    copy.run(reader)
                    if self._progress is not None:
                        self._progress(sum(map(len, copy.ranges)))
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        return True


@dataclass(frozen=True, kw_only=True)
class _Copy:
    """Bytes of a file that become values of a tensor."""

    ranges: list[range]  # in the file
    dtype: torch.dtype
    target: Tensor

    def run(self, reader: BlockReader) -> None:
        target = self.target
        straight = target.dtype == self.dtype and target.device.type == "cpu" and target.is_contiguous()
        values = target if straight else torch.empty(target.shape, dtype=self.dtype, device="cpu")
        left = memoryview(cast(Any, values.reshape(-1).view(torch.uint8).numpy()))
        for each in self.ranges:
            reader.read_into(each.start, left[: len(each)])
            left = left[len(each) :]
        if not straight:
            target.copy_(values)


def _copies(chunk: StoredChunk, dtype: torch.dtype, part: Box, target: Tensor) -> Iterator[_Copy]:
    """``part`` of a stored chunk, cut so that none of the copies needs much memory on the way."""
    size = dtype.itemsize
    for piece in pieces(part, BLOCK_NBYTES // size):
        inside = target
        for dim, (start, length) in enumerate(zip(piece.within(part).offsets, piece.sizes, strict=True)):
            inside = inside.narrow(dim, start, length)
        ranges = [
            range(chunk.position + run.start * size, chunk.position + run.stop * size)
            for run in runs(chunk.box.sizes, piece)
        ]
        yield _Copy(ranges=ranges, dtype=dtype, target=inside)


def _metadata_of(tensor: StoredTensor) -> TensorStorageMetadata:
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=tensor.dtype),
        size=torch.Size(tensor.shape),
        chunks=[
            ChunkStorageMetadata(torch.Size(chunk.box.offsets), torch.Size(chunk.box.sizes))
            for chunk in tensor.chunks
        ],
    )


def box_of(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))

"""torch.distributed.checkpoint's side of a checkpoint: its plans, its storage, its files.

A part's boxes are items of DCP, each an archive as ``torch.save`` writes it, so FSDP2 and DCP's tools read
what we write. Beside DCP's ``.metadata``, which is a pickle and which we never read, stands our index: it
knows where in the archives the values begin.
"""

from __future__ import annotations

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
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from mics.checkpoint.blocks import BlockReader, BlockWriter, open_stored
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


class PartWriter:
    """Writes this rank's parts as items of DCP, to one file, and on the first rank DCP's metadata."""

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part],
        *,
        rank: int,
        state: bytes,
        aliases: dict[str, str],
        values: StockValues,
        progress: Callable[[int], None] | None = None,
    ) -> None:
        self.folder = folder
        self._parts = parts
        self._rank = rank
        self._state = state
        self._aliases = aliases | values.aliases
        self._pickled = values.pickled
        self._progress = progress
        self._values: dict[MetadataIndex, Tensor] = {}

    def plan(self) -> SavePlan:
        """What this rank will write."""
        items = []
        for part in self._parts:
            for box, values in _items_of(part):
                index = MetadataIndex(part.name, box.offsets)
                self._values[index] = values
                items.append(_write_item(part, index, box))
        items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO) for name in self._pickled]
        return SavePlan(items)

    def describe(self, plans: list[SavePlan]) -> Metadata:
        """What all ranks will write; raises where that is not every element once."""
        _, metadata = create_default_global_save_plan(plans)
        tensors = metadata.state_dict_metadata
        for name, tensor in tensors.items():
            if isinstance(tensor, TensorStorageMetadata):
                _check_covered(name, tensor)
        for alias, name in self._aliases.items():
            if name in tensors:  # a parameter without elements is written by nobody
                tensors[alias] = tensors[name]
        # Where each name belongs in the nested dicts that DCP's tools make of it.
        metadata.planner_data = {name: nested_path(name) for name in tensors}
        return metadata

    def write(self, plan: SavePlan) -> FileReport:
        """Write this rank's files, and have them on disk."""
        name, chunks, files = f"__{self._rank}_0.distcp", [], {}
        with BlockWriter(self.folder / name) as stream:
            for item in plan.items:
                start = stream.tell()
                chunk = None
                if item.tensor_data is None:
                    stream.write(self._pickled[item.index.fqn])
                else:
                    position = stream.save(self._resolved(item.index))
                    chunk = StoredChunk(box_of(item.tensor_data.chunk), name, position)
                chunks.append((item.index, _StorageInfo(name, start, stream.tell() - start), chunk))
            files[name] = stream.finish()
        name = rank_file(self._rank)
        with BlockWriter(self.folder / name) as stream:
            stream.write(self._state)
            files[name] = stream.finish()
        tensors = {
            part.name: StoredTensor(dtype=part.values.dtype, shape=part.shape, chunks=(), whole=part.whole)
            for part in self._parts
        }
        return FileReport(chunks=chunks, tensors=tensors, files=files)

    def finish(self, metadata: Metadata, reports: Sequence[FileReport]) -> None:
        """Write what DCP's readers look for first."""
        storage = {index: info for report in reports for index, info, _ in report.chunks}
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

    def _resolved(self, index: MetadataIndex) -> Tensor:
        values = _alone(self._values[index].to("cpu"))
        if self._progress is not None:
            self._progress(values.nbytes)
        return values


def rank_file(rank: int) -> str:
    """The file of what each rank has to itself: random state, the position in its data."""
    return f"rank-{rank}.json"


class PartReader:
    """Reads parts of tensors by the index of a checkpoint: no pickle, no torch.load."""

    def __init__(self, folder: Path, index: Index, progress: Callable[[int], None] | None = None) -> None:
        self._folder = folder
        self._index = index
        self._progress = progress  # told how many bytes were read
        self._located: dict[tuple[str, StoredChunk], StoredChunk] = {}

    def plan(self, wanted: Sequence[tuple[Part, str]]) -> Reading:
        """What to read for parts, given with the names that the checkpoint has for them.

        Everything that can be found wrong without values is found here.
        """
        by_file: dict[str, list[_Copy]] = {}
        for part, name in wanted:
            for file, found in self._copies_of(part, name):
                by_file.setdefault(file, []).extend(found)
        for file, copies in by_file.items():
            copies.sort(key=lambda copy: copy.ranges[0].start)
            open_stored(self._folder / file, self._index.files[file]).close()
        return by_file

    def read(self, reading: Reading) -> None:
        """Read values into place."""
        for file, copies in reading.items():
            ranges = [each for copy in copies for each in copy.ranges]
            with BlockReader(self._folder / file, self._index.files[file], ranges) as reader:
                for copy in copies:
                    copy.run(reader)
                    if self._progress is not None:
                        self._progress(sum(map(len, copy.ranges)))

    def _copies_of(self, part: Part, name: str) -> Iterator[tuple[str, Iterator[_Copy]]]:
        stored = self._index.find(name)
        assert stored is not None, name
        near = _Near(stored.chunks)
        found = 0
        for start, box in boxes_of(part.shape, part.span):
            at = start - part.span.start
            values = part.values[at : at + box.numel].detach().view(box.sizes)
            for chunk in near.to(box):
                both = box.overlap(chunk.box)
                if both is not None:
                    found += both.numel
                    target = _narrowed(values, both.within(box))
                    key = name, chunk
                    if key not in self._located:
                        self._located[key] = located(self._folder, name, stored.dtype, chunk)
                    yield (
                        chunk.file,
                        _copies(self._located[key], stored.dtype, both.within(chunk.box), target),
                    )
        if found != len(part.span):
            raise CheckpointError(
                f"{name}: expected the checkpoint to have elements {part.span.start:,} to "
                f"{part.span.stop:,}, found {found:,} of them"
            )


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


Reading = dict[str, list[_Copy]]
"""By file what is read from it, in rising order."""


def _narrowed(values: Tensor, box: Box) -> Tensor:
    for dim, (start, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        values = values.narrow(dim, start, size)
    return values


def _copies(chunk: StoredChunk, dtype: torch.dtype, part: Box, target: Tensor) -> Iterator[_Copy]:
    """``part`` of a stored chunk, cut so that none of the copies needs much memory on the way."""
    size = dtype.itemsize
    for piece in pieces(part, BLOCK_NBYTES // size):
        inside = _narrowed(target, piece.within(part))
        ranges = [
            range(chunk.position + run.start * size, chunk.position + run.stop * size)
            for run in runs(chunk.box.sizes, piece)
        ]
        yield _Copy(ranges=ranges, dtype=dtype, target=inside)


def box_of(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))

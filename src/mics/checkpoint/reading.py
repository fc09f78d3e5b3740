"""Reading: parts of tensors from the files of a checkpoint, whoever wrote it and however it was divided."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor

from mics.checkpoint.blocks import BlockReader, open_stored
from mics.checkpoint.boxes import Box, boxes_of, pieces, runs
from mics.checkpoint.formats.dcp import located
from mics.checkpoint.records import BLOCK_NBYTES, Index, StoredChunk, TensorPart
from mics.checkpoint.storage import Place
from mics.errors import CheckpointError


class PartReader:
    """Reads parts of tensors by the index of a checkpoint: no pickle, no torch.load."""

    def __init__(self, folder: Place, index: Index) -> None:
        self._folder = folder
        self._index = index
        self._located: dict[tuple[str, StoredChunk], StoredChunk] = {}

    def plan(self, wanted: Sequence[tuple[TensorPart, str]]) -> Reading:
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

    def read(self, reading: Reading, progress: Callable[[int], None] | None = None) -> None:
        """Read values into place; ``progress`` is told how many bytes were read."""
        for file, copies in reading.items():
            ranges = [each for copy in copies for each in copy.ranges]
            with BlockReader(self._folder / file, self._index.files[file], ranges) as reader:
                for copy in copies:
                    copy.run(reader)
                    if progress is not None:
                        progress(copy.nbytes)

    def _copies_of(self, part: TensorPart, name: str) -> Iterator[tuple[str, Iterator[_Copy]]]:
        stored = self._index.find(name)
        assert stored is not None, name
        near = _Near(self._index.chunks_of(name, part.span))
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

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.ranges))

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


def nbytes_of(reading: Reading) -> int:
    """Bytes that will be read."""
    return sum(copy.nbytes for copies in reading.values() for copy in copies)


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

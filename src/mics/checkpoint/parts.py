"""The index of a checkpoint that many ranks wrote: a short head, and a part for each rank.

The boxes of a tensor that a rank wrote follow from where it lies in its unit: pieces of a unit are equally
long and each belongs to one rank. So ``mics.json`` says that of each tensor once, and a rank's own file
says where in its files the values begin, in the order of the boxes, with the digests. Nobody writes or
reads a list of what all ranks have of all tensors: for 10^12 parameters on 512 ranks it has a million
entries.

    mics.json            tensors: dtype, shape, place in the unit; ranks: name, length, digest of the part
    rank-0.index.json    items: of each tensor [file, start and length of the archive, position of the values]
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from mics.checkpoint.boxes import item_boxes
from mics.checkpoint.files import parse_json
from mics.checkpoint.records import (
    MAX_INDEX_NBYTES,
    StoredChunk,
    StoredFile,
    StoredTensor,
    count_of,
    file_of,
    file_to_json,
)
from mics.checkpoint.storage import Draft, Place, read_file, storage_of
from mics.errors import CheckpointError


@dataclass(frozen=True, kw_only=True)
class WrittenPart:
    """What a rank tells the first about its files: their lengths, and its part of the index."""

    name: str
    nbytes: int
    sha256: str
    files: dict[str, int]


@dataclass(frozen=True)
class Item:
    """Where a box of a tensor is: an archive of a file, and its values in it."""

    file: str
    start: int
    nbytes: int
    position: int


def write_part(
    draft: Draft, rank: int, items: Mapping[str, Sequence[Item]], files: Mapping[str, StoredFile]
) -> WrittenPart:
    """Write a rank's part of the index. ``items``: of each tensor, in the order of its boxes."""
    order = list(files)
    content = {
        "items": {
            name: [[order.index(each.file), each.start, each.nbytes, each.position] for each in found]
            for name, found in items.items()
        },
        "files": {name: file_to_json(file) for name, file in files.items()},
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    name = draft.name(f"rank-{rank}.index", ".json")
    storage_of(draft.where).write(draft.where / name, text)
    return WrittenPart(
        name=name,
        nbytes=len(text),
        sha256=hashlib.sha256(text).hexdigest(),
        files={name: file.nbytes for name, file in files.items()},
    )


class PartIndexes:
    """The parts of the ranks that wrote a checkpoint, each read when something of it is needed."""

    def __init__(self, folder: Place, written: Sequence[WrittenPart], item_nbytes: int) -> None:
        self._folder = folder
        self._written = written
        self._item_nbytes = item_nbytes
        self._read: dict[int, _Part] = {}
        self._writers = {name: rank for rank, part in enumerate(written) for name in part.files}

    @property
    def num_read(self) -> int:
        """How many were needed so far."""
        return len(self._read)

    def chunks_of(self, name: str, tensor: StoredTensor, span: range) -> Iterator[StoredChunk]:
        """The chunks that hold elements of ``span``."""
        assert tensor.division is not None
        for rank, written in tensor.division.spans(span, tensor.numel):
            part = self._part(rank)
            boxes = list(item_boxes(tensor.shape, written, self._item_nbytes // tensor.dtype.itemsize))
            items = part.items.get(name, [])
            if len(items) != len(boxes):
                raise CheckpointError(
                    f"{part.file}: {name}: expected {len(boxes)} boxes, found {len(items)}; take another "
                    "checkpoint"
                )
            for (file, position), box in zip(items, boxes, strict=True):
                if position + box.numel * tensor.dtype.itemsize > part.files[file].nbytes:
                    raise CheckpointError(f"{part.file}: {name}: a chunk outside of its file {file}")
                yield StoredChunk(box, file, position)

    def files(self) -> Mapping[str, StoredFile]:
        """All files, each described when it is looked at."""
        return _Files(self)

    def _part(self, rank: int) -> _Part:
        if rank not in self._read:
            self._read[rank] = self._parse(self._written[rank])
        return self._read[rank]

    def _parse(self, written: WrittenPart) -> _Part:
        file = self._folder / written.name
        text = read_file(file, most=MAX_INDEX_NBYTES)
        if len(text) != written.nbytes or hashlib.sha256(text).hexdigest() != written.sha256:
            raise CheckpointError(
                f"{file}: expected what was written, found something else (its digest differs); take another "
                "checkpoint"
            )
        found = parse_json(text, file)
        try:
            files = {name: file_of(name, entry) for name, entry in found["files"].items()}
            if {name: each.nbytes for name, each in files.items()} != written.files:
                raise CheckpointError("other files than the index says")
            order = list(files)
            items = {
                name: [(order[count_of(number)], count_of(position)) for number, _, _, position in each]
                for name, each in found["items"].items()
            }
        except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise CheckpointError(
                f"{file}: expected a part of an index, found something else: {error}"
            ) from None
        return _Part(file=file, items=items, files=files)


@dataclass(frozen=True, kw_only=True)
class _Part:
    file: Place
    items: dict[str, list[tuple[str, int]]]  # of each tensor file and position of its boxes, in order
    files: dict[str, StoredFile]


class _Files(Mapping[str, StoredFile]):
    def __init__(self, parts: PartIndexes) -> None:
        self._parts = parts

    def __getitem__(self, name: str) -> StoredFile:
        return self._parts._part(self._parts._writers[name]).files[name]

    def __contains__(self, name: object) -> bool:
        return name in self._parts._writers

    def __iter__(self) -> Iterator[str]:
        return iter(self._parts._writers)

    def __len__(self) -> int:
        return len(self._parts._writers)


_KEYS: Final = ("name", "nbytes", "sha256", "files")


def written_to_json(written: WrittenPart) -> list[Any]:
    return [getattr(written, key) for key in _KEYS]


def written_of(entry: Any) -> WrittenPart:
    """A rank's line of the head, by whoever wrote it."""
    name, nbytes, sha256, files = entry
    if not isinstance(name, str) or not isinstance(sha256, str) or not isinstance(files, dict):
        raise CheckpointError("expected the name, length, digest and files of a part")
    for each in (name, *files):
        file_of(each, {"nbytes": 0, "block_nbytes": 1, "digest": "", "digests": []})  # a plain name
    return WrittenPart(
        name=name,
        nbytes=count_of(nbytes),
        sha256=sha256,
        files={each: count_of(length) for each, length in files.items()},
    )


def check_division(name: str, tensor: StoredTensor, num_ranks: int) -> None:
    """Every element of it has a rank that wrote it."""
    division = tensor.division
    assert division is not None
    good = division.piece_numel > 0 and all(0 <= rank < num_ranks for rank in division.writers)
    if not good or (tensor.numel and division.piece_of(tensor.numel - 1) >= len(division.writers)):
        raise CheckpointError(f"{name}: a tensor of {tensor.numel:,} elements that ranks do not have all of")

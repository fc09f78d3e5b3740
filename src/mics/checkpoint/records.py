"""What a checkpoint holds and where: tensors by name, their chunks in files, and digests of the files.

Checkpoints of ours and of others are described by the same records. What saving, loading and ``formats/`` all
need stands here, and only here: they know no more of each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import torch
from torch import Tensor

from mics.checkpoint.boxes import Box, tiles
from mics.errors import CheckpointError

MODEL: Final = "model."
OPTIMIZER: Final = "optimizer."
_MAX_NAME_LENGTH: Final = 1 << 10  # prefixes of names are looked at one by one
_MAX_DIMS: Final = 64
_MAX_NUMBER: Final = 1 << 62  # positions and sizes, also multiplied by the width of a format
MAX_INDEX_NBYTES: Final = 512 << 20
"""That of a model of 10^12 parameters, written by thousands of ranks, has about half."""
_MAX_BLOCK_NBYTES: Final = 64 << 20
BLOCK_NBYTES: Final = 8 << 20
"""Hashed, read and checked together. Smaller blocks make the index long, larger ones small reads slow."""

_NAMES: Final = (
    *("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "bool"),
    *("int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8"),
    *("float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3fnuz", "float8_e5m2fnuz"),
)
DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _NAMES}


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor: its values, one after the other, in a file."""

    box: Box
    file: str
    position: int  # of the first value, in bytes
    archive_nbytes: int | None = None
    """Not None: the values lie somewhere in an archive of torch.save, which begins at ``position``."""


@dataclass(frozen=True)
class PieceWriters:
    """Which rank wrote which elements of a tensor: a unit's pieces are equally long, and each has a rank.

    unit      |  piece 0  |  piece 1  |  piece 2  |      piece_numel each, written by writers[0], [1], [2]
    tensor          ^ start
    """

    start: int  # of the tensor, in its unit
    piece_numel: int
    writers: tuple[int, ...]

    def piece_of(self, element: int) -> int:
        return (self.start + element) // self.piece_numel

    def span(self, piece: int, numel: int) -> range:
        """The elements, of ``numel``, that a piece has."""
        start = max(0, piece * self.piece_numel - self.start)
        return range(start, max(start, min(numel, (piece + 1) * self.piece_numel - self.start)))

    def spans(self, span: range, numel: int) -> Iterator[tuple[int, range]]:
        """The ranks that wrote elements of ``span``, each with all that it wrote of the tensor."""
        if span:
            for piece in range(self.piece_of(span.start), self.piece_of(span.stop - 1) + 1):
                yield self.writers[piece], self.span(piece, numel)


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...] = ()
    whole: bool = False
    """Not divided over ranks: an optimizer's step count, a buffer."""
    division: PieceWriters | None = None
    """In place of chunks: they are in the parts of the index that its ranks wrote."""

    @property
    def numel(self) -> int:
        return Box((), self.shape).numel

    @property
    def nbytes(self) -> int:
        return self.numel * self.dtype.itemsize

    @property
    def num_parts(self) -> int:
        """How many parts it was written in; with a division, by how many ranks."""
        if self.division is None:
            return len(self.chunks)
        return len(list(self.division.spans(range(self.numel), self.numel)))


class ChunkLookup(Protocol):
    """Finds the chunks of tensors whose index has a division in place of them."""

    def chunks_of(self, name: str, tensor: StoredTensor, span: range) -> Iterable[StoredChunk]: ...


@dataclass(frozen=True, kw_only=True)
class StoredFile:
    """A file of a checkpoint. Without digests it is somebody else's, and cannot be checked."""

    nbytes: int
    digest: str = ""
    """The kind of its digests."""
    digests: tuple[str, ...] = ()
    """Of every block of ``block_nbytes``, the last one shorter."""
    block_nbytes: int = BLOCK_NBYTES


@dataclass(frozen=True, kw_only=True)
class Index:
    """Everything in a checkpoint but the values."""

    tensors: dict[str, StoredTensor]
    files: Mapping[str, StoredFile]
    lookup: ChunkLookup | None = None
    """Where ranks have parts of the index."""
    model_prefix: str = MODEL
    """What stands before the names of the model's tensors."""
    beside: frozenset[str] = frozenset()
    """Names that begin so and are not the model's."""
    is_ours: bool = False
    """Written by mics from a sharded model, so names are exactly what they should be."""
    aliases: dict[str, str] = field(default_factory=dict)
    """Further names of tied parameters."""
    about: dict[str, Any] = field(default_factory=dict)
    """Who wrote it: world size, partition size, step, versions."""
    param_groups: list[dict[str, Any]] | None = None
    """The optimizer's settings, with parameters by name."""
    numbers: dict[str, float] = field(default_factory=dict)
    """Numbers of an optimizer's state that are no tensors in a file, by name."""
    module_state: dict[str, Any] = field(default_factory=dict)
    """What modules returned from get_extra_state, by name."""

    def find(self, name: str) -> StoredTensor | None:
        return self.tensors.get(self.aliases.get(name, name))

    def chunks_of(self, name: str, span: range) -> Sequence[StoredChunk]:
        """Chunks of a tensor that is there, among them all that hold elements of ``span``."""
        key = self.aliases.get(name, name)
        tensor = self.tensors[key]
        if tensor.division is None or self.lookup is None:
            return tensor.chunks
        return list(self.lookup.chunks_of(key, tensor, span))


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Elements ``span`` of a tensor, in flat order: what a rank writes, or reads into."""

    name: str
    shape: tuple[int, ...]
    span: range
    values: Tensor  # [len(span)], memory of the model or its optimizer
    whole: bool = False
    division: tuple[int, int] | None = None
    """Where the tensor begins in its unit, and the length of the unit's pieces; None: this rank has all."""

    @property
    def nbytes(self) -> int:
        return self.values.numel() * self.values.element_size()


def check_name(name: Any) -> None:
    """Of a tensor: text that can be printed, and no longer than names are."""
    if not isinstance(name, str):
        raise CheckpointError(f"expected the name of a tensor, found {type(name).__name__}")
    if len(name) > _MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError(
            f"expected a name of at most {_MAX_NAME_LENGTH:,} printable letters, found {name[:60]!r} of "
            f"{len(name):,}"
        )


def check_tensor(name: str, tensor: StoredTensor, files: Mapping[str, StoredFile]) -> None:
    """Chunks have every element of it once, and lie inside their files."""
    for chunk in tensor.chunks:
        file = files[chunk.file]
        if chunk.archive_nbytes is None:
            stop = chunk.position + chunk.box.numel * tensor.dtype.itemsize
        else:
            stop = chunk.position + chunk.archive_nbytes
        if chunk.position < 0 or stop > file.nbytes:
            raise CheckpointError(
                f"{name}: a chunk outside of its file {chunk.file}, "
                f"which has {file.nbytes:,} bytes: it is torn"
            )
    if not tiles([chunk.box for chunk in tensor.chunks], tensor.shape):
        raise CheckpointError(
            f"{name}: chunks that overlap, leave something out or lie outside of its shape {tensor.shape}"
        )


def file_to_json(file: StoredFile) -> dict[str, Any]:
    return {
        "nbytes": file.nbytes,
        "block_nbytes": file.block_nbytes,
        "digest": file.digest,
        "digests": file.digests,
    }


def file_of(name: Any, entry: Any) -> StoredFile:
    """A file of this folder with a digest for every byte, by whoever described it."""
    if not isinstance(name, str) or not name or "/" in name or name in (".", "..") or not name.isprintable():
        raise CheckpointError(f"{str(name)[:60]!r} is no plain file name")
    digest, digests = entry["digest"], entry["digests"]
    if not isinstance(digest, str) or not isinstance(digests, list):
        raise CheckpointError(f"{name}: expected digests, found {type(digests).__name__}")
    if not all(isinstance(each, str) for each in digests):
        raise CheckpointError(f"{name}: expected digests to be strings")
    stored = StoredFile(
        nbytes=count_of(entry["nbytes"]),
        block_nbytes=count_of(entry["block_nbytes"]),
        digest=digest,
        digests=tuple(digests),
    )
    if not 1 <= stored.block_nbytes <= _MAX_BLOCK_NBYTES:
        raise CheckpointError(f"{name}: {stored.nbytes} bytes in blocks of {stored.block_nbytes}")
    if len(stored.digests) != -(-stored.nbytes // stored.block_nbytes):
        raise CheckpointError(f"{name}: {len(stored.digests)} digests for {stored.nbytes:,} bytes")
    return stored


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: Any) -> torch.dtype:
    """The format of that name, if its elements are whole numbers of bytes that torch can copy."""
    if not isinstance(name, str) or name not in DTYPES:
        raise CheckpointError(f"expected a format of torch, found {name!r:.60}")
    return DTYPES[name]


def sizes_of(values: Any) -> tuple[int, ...]:
    """Sizes or offsets of a tensor, by whoever wrote them."""
    if not isinstance(values, list | tuple) or len(values) > _MAX_DIMS:
        raise CheckpointError(
            f"expected at most {_MAX_DIMS} sizes of a tensor, found {type(values).__name__}"
        )
    return tuple(count_of(value) for value in values)


def count_of(value: Any) -> int:
    """A number of elements or bytes."""
    if type(value) is not int or not 0 <= value < _MAX_NUMBER:
        shown = f"{value:.3g}" if isinstance(value, float) else type(value).__name__
        raise CheckpointError(f"expected a number of elements or bytes, found {shown}")
    return value

"""What a checkpoint holds and where: tensors by name, their chunks in files, and digests of the files.

Checkpoints of ours and of others are described by the same records. What saving, loading and ``formats/`` all
need stands here, and only here: they know no more of each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

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


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    chunks: tuple[StoredChunk, ...]
    whole: bool = False
    """Not divided over ranks: an optimizer's step count, a buffer."""

    @property
    def nbytes(self) -> int:
        return Box((), self.shape).numel * self.dtype.itemsize


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
    files: dict[str, StoredFile]
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
    module_state: dict[str, Any] = field(default_factory=dict)
    """What modules returned from get_extra_state, by name."""

    def find(self, name: str) -> StoredTensor | None:
        return self.tensors.get(self.aliases.get(name, name))


@dataclass(frozen=True, kw_only=True)
class TensorPart:
    """Elements ``span`` of a tensor, in flat order: what a rank writes, or reads into."""

    name: str
    shape: tuple[int, ...]
    span: range
    values: Tensor  # [len(span)], memory of the model or its optimizer
    whole: bool = False

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

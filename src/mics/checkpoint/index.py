"""What a checkpoint holds and where: tensors by name, their chunks in files, and digests of the files.

``mics.json`` is this index. It is written last, so a folder that has one is complete. Checkpoints of others
(torch.distributed.checkpoint, safetensors) are described by the same records: see ``foreign``.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from mics.checkpoint.boxes import Box, tiles
from mics.checkpoint.files import parse_json, read_file
from mics.errors import CheckpointError

INDEX_NAME: Final = "mics.json"
_DIGEST_NAME: Final = "mics.json.sha256"
FORMAT: Final = 1
_MAX_DIGEST_NBYTES: Final = 1 << 10
_MAX_NAME_LENGTH: Final = 1 << 10  # prefixes of names are looked at one by one
_MAX_BLOCK_NBYTES: Final = 64 << 20
_MAX_DIMS: Final = 64
_MAX_NUMBER: Final = 1 << 62  # positions and sizes, also multiplied by the width of a format
MAX_OWN_NBYTES: Final = 4 << 30
"""The most that a rank may have to itself: it is read as a whole."""
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
    model_prefix: str = "model."
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


def write_index(folder: Path, index: Index) -> None:
    """Write the index and its digest, and have both on disk."""
    text = json.dumps(_to_json(index), separators=(",", ":")).encode()
    write_durably(folder / _DIGEST_NAME, hashlib.sha256(text).hexdigest().encode())
    write_durably(folder / INDEX_NAME, text)


def read_index(folder: Path) -> Index:
    """The index of a checkpoint of mics."""
    file = folder / INDEX_NAME
    text = read_file(file, most=MAX_INDEX_NBYTES)
    expected = read_file(folder / _DIGEST_NAME, most=_MAX_DIGEST_NBYTES).strip()
    if hashlib.sha256(text).hexdigest().encode() != expected:
        raise CheckpointError(
            f"{file}: expected what was written, found something else (its digest differs); take another "
            "checkpoint"
        )
    found = parse_json(text, file)
    if not isinstance(found, dict) or "format" not in found:
        raise CheckpointError(f"{file}: expected an index of mics, found other JSON")
    if found["format"] != FORMAT:
        raise CheckpointError(
            f"{file}: expected format {FORMAT}, found {found['format']!r:.60}; it was written by another "
            "version of mics"
        )
    try:
        index = _from_json(found)
        for name, stored in index.files.items():
            _check_file(name, stored)
        for name, tensor in index.tensors.items():
            check_name(name)
            check_tensor(name, tensor, index.files)
        if not all(name in index.tensors for name in index.aliases.values()):
            raise CheckpointError("a further name for a tensor that is not there")
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{file}: expected an index that fits together, found one that does not: {error}"
        ) from None
    return index


def check_name(name: Any) -> None:
    """Of a tensor: text that can be printed, and no longer than names are."""
    if not isinstance(name, str):
        raise CheckpointError(f"expected the name of a tensor, found {type(name).__name__}")
    if len(name) > _MAX_NAME_LENGTH or not name.isprintable():
        raise CheckpointError(
            f"expected a name of at most {_MAX_NAME_LENGTH:,} printable letters, found {name[:60]!r} of "
            f"{len(name):,}"
        )


def _check_file(name: str, stored: StoredFile) -> None:
    """Of this folder, and with a digest for every byte."""
    if not name or name != Path(name).name or not name.isprintable():
        raise CheckpointError(f"{name[:60]!r} is no plain file name")
    if stored.nbytes < 0 or not 1 <= stored.block_nbytes <= _MAX_BLOCK_NBYTES:
        raise CheckpointError(f"{name}: {stored.nbytes} bytes in blocks of {stored.block_nbytes}")
    if len(stored.digests) != -(-stored.nbytes // stored.block_nbytes):
        raise CheckpointError(f"{name}: {len(stored.digests)} digests for {stored.nbytes:,} bytes")


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


def write_durably(file: Path, content: bytes) -> None:
    """Write a file so that it is either whole or not there, and still is after a power cut."""
    partial = file.with_name(file.name + ".tmp")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    partial.replace(file)
    sync_folder(file.parent)


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


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


def _to_json(index: Index) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "about": index.about,
        "tensors": {
            name: {
                "dtype": dtype_name(tensor.dtype),
                "shape": tensor.shape,
                "whole": tensor.whole,
                "chunks": [
                    [chunk.box.offsets, chunk.box.sizes, chunk.file, chunk.position]
                    for chunk in tensor.chunks
                ],
            }
            for name, tensor in index.tensors.items()
        },
        "aliases": index.aliases,
        "files": {
            name: {
                "nbytes": file.nbytes,
                "block_nbytes": file.block_nbytes,
                "digest": file.digest,
                "digests": file.digests,
            }
            for name, file in index.files.items()
        },
        "param_groups": index.param_groups,
        "module_state": index.module_state,
    }


def _from_json(found: Mapping[str, Any]) -> Index:
    groups = found["param_groups"]
    about = _a(dict, found["about"])
    return Index(
        tensors={name: _tensor_of(entry) for name, entry in _a(dict, found["tensors"]).items()},
        files={name: _file_of(entry) for name, entry in _a(dict, found["files"]).items()},
        is_ours="imported_from" not in about,
        aliases={alias: _a(str, name) for alias, name in _a(dict, found["aliases"]).items()},
        about=about,
        param_groups=None if groups is None else [_a(dict, group) for group in _a(list, groups)],
        module_state=_a(dict, found["module_state"]),
    )


def _tensor_of(entry: Any) -> StoredTensor:
    return StoredTensor(
        dtype=dtype_of(_a(str, entry["dtype"])),
        shape=sizes_of(entry["shape"]),
        whole=_a(bool, entry["whole"]),
        chunks=tuple(
            StoredChunk(Box(sizes_of(offsets), sizes_of(sizes)), _a(str, file), count_of(position))
            for offsets, sizes, file, position in _a(list, entry["chunks"])
        ),
    )


def _file_of(entry: Any) -> StoredFile:
    return StoredFile(
        nbytes=count_of(entry["nbytes"]),
        block_nbytes=count_of(entry["block_nbytes"]),
        digest=_a(str, entry["digest"]),
        digests=tuple(_a(str, digest) for digest in _a(list, entry["digests"])),
    )


_T = TypeVar("_T")


def _a(kind: type[_T], value: Any) -> _T:
    """A value of JSON, if it is of the kind that it should be."""
    if type(value) is not kind:
        raise CheckpointError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value

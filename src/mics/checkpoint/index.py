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
from typing import Any, Final

import torch

from mics.checkpoint.boxes import Box
from mics.errors import CheckpointError

INDEX_NAME: Final = "mics.json"
_DIGEST_NAME: Final = "mics.json.sha256"
FORMAT: Final = 1
BLOCK_NBYTES: Final = 8 << 20
"""Hashed, read and checked together. Smaller blocks make the index long, larger ones small reads slow."""


@dataclass(frozen=True)
class StoredChunk:
    """A box of a tensor: its values, one after the other, in a file."""

    box: Box
    file: str
    position: int  # of the first value, in bytes
    archive_nbytes: int = 0
    """Not 0: the values lie somewhere in an archive of torch.save, which begins at ``position``."""


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
    text = file.read_bytes()
    try:
        expected = (folder / _DIGEST_NAME).read_text().strip()
    except OSError:
        raise CheckpointError(
            f"{folder / _DIGEST_NAME}: expected the digest of {INDEX_NAME}, found no such file"
        ) from None
    if hashlib.sha256(text).hexdigest() != expected:
        raise CheckpointError(
            f"{file}: expected what was written, found something else (its digest differs); take another "
            "checkpoint"
        )
    try:
        found = json.loads(text)
        version = found["format"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file}: expected an index of mics, found something else: {error!r}") from None
    if version != FORMAT:
        raise CheckpointError(
            f"{file}: expected format {FORMAT}, found {version!r}; it was written by another version of mics"
        )
    try:
        index = _from_json(found)
        for name, stored in index.files.items():
            _check_file(name, stored)
        for name, tensor in index.tensors.items():
            _check_tensor(name, tensor, index.files)
    except (CheckpointError, KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: expected an index that fits together, found one that does not: {error}"
        ) from None
    return index


def _check_file(name: str, stored: StoredFile) -> None:
    """Of this folder, and with a digest for every byte."""
    if not name or name != Path(name).name:
        raise CheckpointError(f"{name!r} is no plain file name")
    if stored.nbytes < 0 or stored.block_nbytes < 1:
        raise CheckpointError(f"{name}: {stored.nbytes} bytes in blocks of {stored.block_nbytes}")
    if len(stored.digests) != -(-stored.nbytes // stored.block_nbytes):
        raise CheckpointError(f"{name}: {len(stored.digests)} digests for {stored.nbytes:,} bytes")


def _check_tensor(name: str, tensor: StoredTensor, files: Mapping[str, StoredFile]) -> None:
    """Chunks are ranges of its elements that follow each other, and lie inside their files."""
    strides = [1] * len(tensor.shape)
    for dim in range(len(tensor.shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * tensor.shape[dim]
    ranges = []
    for chunk in tensor.chunks:
        box = chunk.box
        bounds = zip(box.offsets, box.sizes, tensor.shape, strict=True)
        stop = chunk.position + box.numel * tensor.dtype.itemsize
        if not all(a >= 0 and n > 0 and a + n <= size for a, n, size in bounds):
            raise CheckpointError(f"{name}: a chunk outside of its shape {tensor.shape}")
        if chunk.position < 0 or stop > files[chunk.file].nbytes:
            raise CheckpointError(f"{name}: a chunk outside of its file {chunk.file}")
        ranges.append((sum(a * stride for a, stride in zip(box.offsets, strides, strict=True)), box.numel))
    at = 0
    for start, numel in sorted(ranges):
        if start != at:
            raise CheckpointError(f"{name}: chunks that overlap or leave something out")
        at += numel
    if at != Box((), tensor.shape).numel:
        raise CheckpointError(f"{name}: chunks for {at:,} of its elements")


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


def dtype_of(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"expected a format of torch, found {name!r}")
    return found


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
    return Index(
        tensors={
            name: StoredTensor(
                dtype=dtype_of(entry["dtype"]),
                shape=tuple(entry["shape"]),
                whole=entry["whole"],
                chunks=tuple(
                    StoredChunk(Box(tuple(offsets), tuple(sizes)), file, position)
                    for offsets, sizes, file, position in entry["chunks"]
                ),
            )
            for name, entry in found["tensors"].items()
        },
        files={
            name: StoredFile(
                nbytes=entry["nbytes"],
                block_nbytes=entry["block_nbytes"],
                digest=entry["digest"],
                digests=tuple(entry["digests"]),
            )
            for name, entry in found["files"].items()
        },
        is_ours="imported_from" not in found["about"],
        aliases=found["aliases"],
        about=found["about"],
        param_groups=found["param_groups"],
        module_state=found["module_state"],
    )

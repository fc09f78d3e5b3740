"""Checkpoints that ``torch.distributed.checkpoint.save`` wrote: FSDP2, torchtitan, or a plain model.

Their index is a pickle, ``.metadata``, and so is whatever is not a tensor. The index is read as data (see
``pickle_data``); values that are not tensors are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any, Final, TypeGuard

import torch

from mics.checkpoint.boxes import Box
from mics.checkpoint.formats.archive import Slice, describe_archive
from mics.checkpoint.formats.pickle_data import Name, Record, read_pickle
from mics.checkpoint.records import (
    MAX_INDEX_NBYTES,
    Index,
    StoredChunk,
    StoredFile,
    StoredTensor,
    check_name,
    check_tensor,
    count_of,
    dtype_of,
    sizes_of,
)
from mics.checkpoint.storage import Place, open_file, read_file, size_of
from mics.errors import CheckpointError

METADATA_NAME: Final = ".metadata"
_MAX_PATH_LENGTH: Final = 1 << 10
_MAX_DEPTH: Final = 64
_METADATA: Final = "torch.distributed.checkpoint.metadata"


def open_dcp(folder: Place) -> Index:
    """The index of a checkpoint of torch.distributed.checkpoint."""
    file = folder / METADATA_NAME
    content = read_file(file, most=MAX_INDEX_NBYTES)
    metadata = read_pickle(content, str(file))
    try:
        described = _fields(metadata, "Metadata")
        places = _places(_a_dict(described["storage_data"]))
        room = _Room(len(content))
        tensors, skipped = {}, []
        for name, entry in _a_dict(described["state_dict_metadata"]).items():
            check_name(name)
            if isinstance(entry, Record) and entry.is_a(_METADATA, "TensorStorageMetadata"):
                tensors[name] = _tensor(name, entry, places, room)
            else:
                skipped.append(name)
        paths = _paths(described.get("planner_data"), tensors)
        used = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
        files = {name: StoredFile(nbytes=size_of(folder / name)) for name in sorted(used)}
        for name, tensor in tensors.items():
            check_tensor(name, tensor, files)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise CheckpointError(
            f"{file}: expected the index of torch.distributed.checkpoint, found another pickle "
            f"({type(error).__name__}: {error})"
        ) from None
    return Index(
        tensors=tensors,
        files=files,
        model_prefix=_model_prefix(paths.values()),
        beside=frozenset(name for name, path in paths.items() if len(path) > 1 and "model" not in path[:-1]),
        about={"format": "torch.distributed.checkpoint", "not_read": _said_of(skipped)},
    )


def located(folder: Place, name: str, dtype: torch.dtype, chunk: StoredChunk) -> StoredChunk:
    """``chunk`` with the position of its first value, where so far only its archive was known."""
    if chunk.archive_nbytes is None:
        return chunk
    where = f"{folder / chunk.file}: {name}"
    with open_file(folder / chunk.file) as file:
        found = describe_archive(Slice(file, chunk.position, chunk.archive_nbytes), where)
    expected = chunk.box.numel * dtype.itemsize
    if found.sizes != chunk.box.sizes:
        raise CheckpointError(f"{where}: expected a tensor of shape {chunk.box.sizes}, found {found.sizes}")
    if not found.contiguous:
        raise CheckpointError(
            f"{where}: expected values one after the other, found strides {found.strides} from "
            f"{found.offset} on; save it again as tensor.contiguous()"
        )
    if found.dtype != dtype:
        raise CheckpointError(f"{where}: expected values in {dtype}, found {found.dtype}")
    if found.nbytes < expected:
        raise CheckpointError(f"{where}: expected {expected:,} bytes of values, found {found.nbytes:,}")
    return replace(chunk, position=chunk.position + found.position, archive_nbytes=None)


class _Room:
    """How many parts may be looked at: a pickle can name the same list of them any number of times."""

    def __init__(self, nbytes: int) -> None:
        self._left = nbytes  # each takes several bytes where it is written down

    def take(self, count: int) -> None:
        self._left -= count
        if self._left < 0:
            raise CheckpointError("expected each part of a tensor to be described once, found more")


def _tensor(name: str, entry: Record, places: _Places, room: _Room) -> StoredTensor:
    described = _a_dict(entry.state)
    shape = _size(described["size"])
    dtype = described["properties"].state[0]
    if not isinstance(dtype, Name) or dtype.module != "torch":
        raise CheckpointError(f"{name}: expected a format of torch, found {type(dtype).__name__}")
    parts = described["chunks"]
    if not isinstance(parts, list):
        raise CheckpointError(f"{name}: expected a list of parts, found {type(parts).__name__}")
    room.take(len(parts))
    chunks = []
    for each in parts:
        fields = _fields(each, "ChunkStorageMetadata")
        box = Box(_size(fields["offsets"]), _size(fields["sizes"]))
        if box.numel == 0:
            continue
        place = places.get((name, box.offsets))
        if place is None:
            raise CheckpointError(f"{name}: expected to be told where its part at {box.offsets} is, found no")
        chunks.append(StoredChunk(box, place[0], place[1], archive_nbytes=place[2]))
    return StoredTensor(dtype=dtype_of(dtype.name), shape=shape, chunks=tuple(chunks))


_Place = tuple[str, int, int]  # file, position of an archive in it, its length
_Places = dict[tuple[str, tuple[int, ...]], _Place]


def _places(storage: dict[Any, Any]) -> _Places:
    """Where the parts of tensors are, by name and offsets."""
    found: _Places = {}
    for key, value in storage.items():
        index, info = _fields(key, "MetadataIndex"), _a_dict(value.state)
        name, offset = index["fqn"], index.get("offset")
        check_name(name)
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{name}: expected values as torch.save writes them, found them transformed; save without "
                "extensions"
            )
        file, start, length = info["relative_path"], count_of(info["offset"]), count_of(info["length"])
        if not isinstance(file, str) or not file.isprintable() or len(file) > _MAX_PATH_LENGTH:
            raise CheckpointError(f"{name}: expected a file of this folder, found {type(file).__name__}")
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts:
            raise CheckpointError(f"expected a file of this folder, found {file!r}")
        place = name, () if offset is None else _size(offset)
        if place in found:
            raise CheckpointError(f"{name}: expected one place for its part at {place[1]}, found two")
        found[place] = (file, start, length)
    return found


def _fields(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, Record) or not record.is_a(_METADATA, name):
        raise CheckpointError(f"expected {_METADATA}.{name}, found {type(record).__name__}")
    return _a_dict(record.state)


def _a_dict(value: Any) -> dict[Any, Any]:
    if not isinstance(value, dict):
        raise CheckpointError(f"expected fields and their values, found {type(value).__name__}")
    return value


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Record) or not value.is_a("torch", "Size"):
        raise CheckpointError(f"expected a torch.Size, found {type(value).__name__}")
    (sizes,) = value.args
    return sizes_of(sizes)


_Path = tuple[str, ...]


def _paths(planned: Any, tensors: Iterable[str]) -> dict[str, _Path]:
    """Where each tensor was in the dicts that were saved.

    {"app": {"model": {"a.bias": ...}}} was flattened to app.model.a.bias; its path says app, model, a.bias.
    """
    found = planned if isinstance(planned, dict) else {}
    paths = {name: found.get(name) for name in tensors}
    return {name: tuple(map(str, path)) if _is_path(path) else (name,) for name, path in paths.items()}


def _is_path(path: Any) -> TypeGuard[tuple[str | int, ...]]:
    """Of a few names: what else a pickle may have there is not looked into, as it may hold itself."""
    return (
        isinstance(path, tuple)
        and len(path) <= _MAX_DEPTH
        and all(
            isinstance(each, str) or (type(each) is int and 0 <= each < _MAX_PATH_LENGTH) for each in path
        )
    )


def _model_prefix(paths: Iterable[_Path]) -> str:
    """What stands before the model's names."""
    for path in paths:
        if "model" in path[:-1]:
            return ".".join(path[: path.index("model") + 1]) + "."
    return ""


def _said_of(skipped: list[str]) -> str:
    groups = [name for name in skipped if "param_groups." in name]
    others = [name for name in skipped if name not in groups]
    said = []
    if groups:
        said.append(
            f"the optimizer's settings ({len(groups)} values) are pickled and not read; those of the "
            "optimizer stay as they are"
        )
    if others:
        listed = ", ".join(others[:5]) + (", ..." if len(others) > 5 else "")
        said.append(f"pickled and not read: {listed}")
    return "; ".join(said)

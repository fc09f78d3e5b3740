"""Checkpoints that ``torch.distributed.checkpoint.save`` wrote: FSDP2, torchtitan, or a plain model.

Their index is a pickle, ``.metadata``, and so is whatever is not a tensor. The index is read as data (see
``pickle_data``); values that are not tensors are passed over.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import Any, Final

import torch

from mics.checkpoint.archive import Slice, describe
from mics.checkpoint.boxes import Box
from mics.checkpoint.index import Index, StoredChunk, StoredFile, StoredTensor, dtype_of
from mics.checkpoint.pickle_data import Name, Record, read_pickle
from mics.errors import CheckpointError

METADATA_NAME: Final = ".metadata"
_METADATA: Final = "torch.distributed.checkpoint.metadata"


def open_stock(folder: Path) -> Index:
    """The index of a checkpoint of torch.distributed.checkpoint."""
    file = folder / METADATA_NAME
    metadata = read_pickle(file.read_bytes(), str(file))
    try:
        described = _fields(metadata, "Metadata")
        places = _places(described["storage_data"])
        entries: dict[str, Any] = described["state_dict_metadata"]
        tensors, skipped = {}, []
        for name, entry in entries.items():
            if isinstance(entry, Record) and entry.is_a(_METADATA, "TensorStorageMetadata"):
                tensors[name] = _tensor(name, entry, places)
            else:
                skipped.append(name)
        paths = _paths(described.get("planner_data"), tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{file}: expected the index of torch.distributed.checkpoint, found another pickle ({error!r})"
        ) from None
    used = {chunk.file for tensor in tensors.values() for chunk in tensor.chunks}
    return Index(
        tensors=tensors,
        files={name: _file(folder, name) for name in sorted(used)},
        model_prefix=_model_prefix(paths.values()),
        beside=frozenset(name for name, path in paths.items() if len(path) > 1 and "model" not in path[:-1]),
        about={"format": "torch.distributed.checkpoint", "not_read": _said_of(skipped)},
    )


def located(folder: Path, name: str, dtype: torch.dtype, chunk: StoredChunk) -> StoredChunk:
    """``chunk`` with the position of its first value, where so far only its archive was known."""
    if chunk.archive_nbytes == 0:
        return chunk
    where = f"{folder / chunk.file}: {name}"
    with (folder / chunk.file).open("rb", buffering=0) as file:
        found = describe(Slice(file, chunk.position, chunk.archive_nbytes), where)
    expected = chunk.box.numel * dtype.itemsize
    if found.sizes != chunk.box.sizes:
        raise CheckpointError(f"{where}: expected a tensor of shape {chunk.box.sizes}, found {found.sizes}")
    if not found.contiguous:
        raise CheckpointError(
            f"{where}: expected values one after the other, found strides {found.strides} from "
            f"{found.offset} on; save it again as tensor.contiguous()"
        )
    if found.nbytes < expected or found.position + expected > chunk.archive_nbytes:
        raise CheckpointError(f"{where}: expected {expected:,} bytes of values, found {found.nbytes:,}")
    return replace(chunk, position=chunk.position + found.position, archive_nbytes=0)


def _tensor(name: str, entry: Record, places: dict[tuple[str, tuple[int, ...]], _Place]) -> StoredTensor:
    described = entry.state
    shape = _size(described["size"])
    dtype = described["properties"].state[0]
    if not isinstance(dtype, Name) or dtype.module != "torch":
        raise CheckpointError(f"{name}: expected a format of torch, found {dtype}")
    chunks = []
    for each in described["chunks"]:
        fields = _fields(each, "ChunkStorageMetadata")
        box = Box(_size(fields["offsets"]), _size(fields["sizes"]))
        if len(box.offsets) != len(shape) or len(box.sizes) != len(shape):
            raise CheckpointError(f"{name}: expected a part of {shape}, found {box.sizes} at {box.offsets}")
        if box.numel == 0:
            continue
        place = places.get((name, box.offsets))
        if place is None:
            raise CheckpointError(f"{name}: expected to be told where its part at {box.offsets} is, found no")
        chunks.append(StoredChunk(box, place[0], place[1], archive_nbytes=place[2]))
    return StoredTensor(dtype=dtype_of(dtype.name), shape=shape, chunks=tuple(chunks))


_Place = tuple[str, int, int]  # file, position of an archive in it, its length


def _places(storage: dict[Record, Record]) -> dict[tuple[str, tuple[int, ...]], _Place]:
    """Where the parts of tensors are, by name and offsets."""
    found = {}
    for key, value in storage.items():
        index, info = _fields(key, "MetadataIndex"), value.state
        offset = index.get("offset")
        if info.get("transform_descriptors"):
            raise CheckpointError(
                f"{index['fqn']}: expected values as torch.save writes them, found them transformed by "
                f"{info['transform_descriptors']}; save without extensions"
            )
        file, start, length = info["relative_path"], info["offset"], info["length"]
        path = PurePosixPath(file)
        if path.is_absolute() or ".." in path.parts or min(start, length) < 0:
            raise CheckpointError(f"expected a file of this folder, found {file!r}")
        found[index["fqn"], () if offset is None else _size(offset)] = (file, start, length)
    return found


def _fields(record: Any, name: str) -> dict[str, Any]:
    if not isinstance(record, Record) or not record.is_a(_METADATA, name):
        raise CheckpointError(f"expected {_METADATA}.{name}, found {type(record).__name__}")
    state = record.state
    if not isinstance(state, dict):
        raise CheckpointError(f"expected the fields of {name}, found {type(state).__name__}")
    return state


def _size(value: Any) -> tuple[int, ...]:
    if not isinstance(value, Record) or not value.is_a("torch", "Size"):
        raise CheckpointError(f"expected a torch.Size, found {type(value).__name__}")
    (sizes,) = value.args
    if not isinstance(sizes, tuple | list) or not all(type(n) is int and n >= 0 for n in sizes):
        raise CheckpointError(f"expected a torch.Size, found {sizes!r}")
    return tuple(sizes)


def _file(folder: Path, name: str) -> StoredFile:
    try:
        return StoredFile(nbytes=(folder / name).stat().st_size)
    except OSError as error:
        raise CheckpointError(
            f"{folder / name}: expected a file of this checkpoint, found {error.strerror}"
        ) from None


_Path = tuple[str, ...]


def _paths(planned: Any, tensors: Iterable[str]) -> dict[str, _Path]:
    """Where each tensor was in the dicts that were saved.

    {"app": {"model": {"a.bias": ...}}} was flattened to app.model.a.bias; its path says app, model, a.bias.
    """
    found = planned if isinstance(planned, dict) else {}
    paths = {name: found.get(name) for name in tensors}
    return {
        name: tuple(map(str, path)) if isinstance(path, tuple) else (name,) for name, path in paths.items()
    }


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

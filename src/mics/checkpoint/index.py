"""``mics.json``: the index of a checkpoint of ours, as a file.

It is written after all that it names, so a folder that has one is complete.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, TypeVar

from mics.checkpoint.boxes import Box
from mics.checkpoint.files import parse_json
from mics.checkpoint.parts import PartIndexes, WrittenPart, check_division, written_of, written_to_json
from mics.checkpoint.records import (
    MAX_INDEX_NBYTES,
    Index,
    PieceWriters,
    StoredChunk,
    StoredTensor,
    check_name,
    check_tensor,
    count_of,
    dtype_name,
    dtype_of,
    file_of,
    file_to_json,
    sizes_of,
)
from mics.checkpoint.storage import INDEX_NAME, Draft, Place, read_file, storage_of
from mics.errors import CheckpointError

_DIGEST_NAME: Final = "mics.json.sha256"
_SEAL: Final = b',"sha256":"%s"}'
_FORMAT: Final = 1
_FORMAT_OF_PARTS: Final = 2
_LEAST_ITEM_NBYTES: Final = 1 << 10
_MAX_DIGEST_NBYTES: Final = 1 << 10


def write_index(draft: Draft, index: Index) -> None:
    """Write the index and its digest, and have both stay.

    On a disk the digest has a file of its own. On a store the index replaces that of an earlier save, and no
    other object can be replaced at the same time: the digest is its last entry.
    """
    text = json.dumps(_to_json(index), separators=(",", ":")).encode()
    storage = storage_of(draft.where)
    if draft.tag:
        text = sealed(text)
    else:
        storage.write(draft.where / _DIGEST_NAME, hashlib.sha256(text).hexdigest().encode())
    storage.write(draft.where / INDEX_NAME, text)


def write_head(draft: Draft, index: Index, written: Sequence[WrittenPart], item_nbytes: int) -> None:
    """Write the index of a checkpoint whose ranks have each a part of it: tensors are divided by formula."""
    divisions = [tensor.division for tensor in index.tensors.values() if tensor.division is not None]
    writers = {each: number for number, each in enumerate(dict.fromkeys(each.writers for each in divisions))}
    content = {
        "format": _FORMAT_OF_PARTS,
        "about": index.about,
        "tensors": {
            name: [
                dtype_name(tensor.dtype),
                tensor.shape,
                tensor.whole,
                division.start,
                division.piece_numel,
                writers[division.writers],
            ]
            for (name, tensor), division in zip(index.tensors.items(), divisions, strict=True)
        },
        "writers": list(writers),
        "item_nbytes": item_nbytes,
        "parts": [written_to_json(each) for each in written],
        "aliases": index.aliases,
        "param_groups": index.param_groups,
        "module_state": index.module_state,
    }
    text = json.dumps(content, separators=(",", ":")).encode()
    storage_of(draft.where).write(draft.where / INDEX_NAME, sealed(text))


def _from_head(folder: Place, found: Mapping[str, Any]) -> Index:
    parts = [written_of(entry) for entry in _a(list, found["parts"])]
    writers = [_ranks_of(each) for each in _a(list, found["writers"])]
    item_nbytes = count_of(found["item_nbytes"])
    if item_nbytes < _LEAST_ITEM_NBYTES:
        raise CheckpointError(f"items of {item_nbytes} bytes")
    tensors = {}
    for name, (dtype, shape, whole, start, piece_numel, number) in _a(dict, found["tensors"]).items():
        division = PieceWriters(count_of(start), count_of(piece_numel), writers[count_of(number)])
        tensors[name] = StoredTensor(
            dtype=dtype_of(dtype), shape=sizes_of(shape), whole=_a(bool, whole), division=division
        )
        check_division(name, tensors[name], len(parts))
    lookup = PartIndexes(folder, parts, item_nbytes)
    common = _from_json({**found, "tensors": {}, "files": {}})
    return replace(common, tensors=tensors, files=lookup.files(), lookup=lookup)


def _ranks_of(values: Any) -> tuple[int, ...]:
    """Ranks by number, by whoever wrote them."""
    return tuple(count_of(value) for value in _a(list, values))


def sealed(text: bytes) -> bytes:
    """A JSON object with the digest of all before it as its last entry."""
    return text[:-1] + _SEAL % hashlib.sha256(text).hexdigest().encode()


def read_index(folder: Place) -> Index:
    """The index of a checkpoint of mics."""
    file = folder / INDEX_NAME
    found = parse_json(_checked(folder, file), file)
    if not isinstance(found, dict) or "format" not in found:
        raise CheckpointError(f"{file}: expected an index of mics, found other JSON")
    if found["format"] not in (_FORMAT, _FORMAT_OF_PARTS):
        raise CheckpointError(
            f"{file}: expected format {_FORMAT} or {_FORMAT_OF_PARTS}, found {found['format']!r:.60}; it was "
            "written by another version of mics"
        )
    try:
        index = _from_json(found) if found["format"] == _FORMAT else _from_head(folder, found)
        for name, tensor in index.tensors.items():
            check_name(name)
            if tensor.division is None:
                check_tensor(name, tensor, index.files)
        if not all(name in index.tensors for name in index.aliases.values()):
            raise CheckpointError("a further name for a tensor that is not there")
    except (
        CheckpointError,
        KeyError,
        TypeError,
        ValueError,
        AttributeError,
        IndexError,
        RecursionError,
    ) as error:
        raise CheckpointError(
            f"{file}: expected an index that fits together, found one that does not: {error}"
        ) from None
    return index


def _checked(folder: Place, file: Place) -> bytes:
    """The text of an index that is what was written."""
    text = read_file(file, most=MAX_INDEX_NBYTES)
    whole, seal = text[: -len(_SEAL % bytes(64))] + b"}", text[-len(_SEAL % bytes(64)) :]
    if seal.startswith(_SEAL[:11]):
        good = seal == _SEAL % hashlib.sha256(whole).hexdigest().encode()
    else:
        expected = read_file(folder / _DIGEST_NAME, most=_MAX_DIGEST_NBYTES).strip()
        good = hashlib.sha256(text).hexdigest().encode() == expected
    if not good:
        raise CheckpointError(
            f"{file}: expected what was written, found something else (its digest differs); take another "
            "checkpoint"
        )
    return text


def _to_json(index: Index) -> dict[str, Any]:
    return {
        "format": _FORMAT,
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
        "files": {name: file_to_json(file) for name, file in index.files.items()},
        "param_groups": index.param_groups,
        "module_state": index.module_state,
    }


def _from_json(found: Mapping[str, Any]) -> Index:
    groups = found["param_groups"]
    about = _a(dict, found["about"])
    return Index(
        tensors={name: _tensor_of(entry) for name, entry in _a(dict, found["tensors"]).items()},
        files={name: file_of(name, entry) for name, entry in _a(dict, found["files"]).items()},
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


_T = TypeVar("_T")


def _a(kind: type[_T], value: Any) -> _T:
    """A value of JSON, if it is of the kind that it should be."""
    if type(value) is not kind:
        raise CheckpointError(f"expected a {kind.__name__}, found a {type(value).__name__}")
    return value

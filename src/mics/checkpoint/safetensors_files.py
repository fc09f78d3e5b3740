"""Files of safetensors: 8 bytes that are the length of a JSON header, the header, the values.

Read here and not through the library, because a rank reads ranges of a tensor's values into memory that it
has, and written here because a file may be larger than memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from mics.checkpoint.boxes import Box
from mics.checkpoint.index import Index, StoredChunk, StoredFile, StoredTensor
from mics.errors import CheckpointError

ONE_NAME: Final = "model.safetensors"
MAP_NAME: Final = "model.safetensors.index.json"
_MAX_HEADER_NBYTES: Final = 100_000_000  # as the library has it
_ALIGNMENT_NBYTES: Final = 8

_NAMES: Final = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "U16": "uint16",
    "U32": "uint32",
    "U64": "uint64",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_DTYPES: Final = {short: getattr(torch, name) for short, name in _NAMES.items() if hasattr(torch, name)}
_SHORT: Final = {dtype: short for short, dtype in _DTYPES.items()}


def open_safetensors(folder: Path) -> Index:
    """The index of a folder of safetensors."""
    weight_map = _weight_map(folder)
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
    elif (folder / ONE_NAME).is_file():
        names = [ONE_NAME]
    else:
        names = sorted(each.name for each in folder.glob("*.safetensors"))
    tensors: dict[str, StoredTensor] = {}
    files = {}
    for name in names:
        found, files[name] = _read_header(folder, name)
        both = next((each for each in found if each in tensors), None)
        if both is not None:
            raise CheckpointError(
                f"{folder}: expected each tensor in one file, found {both} in {tensors[both].chunks[0].file} "
                f"and in {name}; keep the files of one model in a folder"
            )
        tensors.update(found)
    missing = sorted(set(weight_map or {}) - set(tensors))
    if missing:
        raise CheckpointError(
            f"{folder}: expected {missing[0]} in {(weight_map or {})[missing[0]]}, as {MAP_NAME} says, found "
            "no such tensor there"
        )
    return Index(tensors=tensors, files=files, model_prefix="", about={"format": "safetensors"})


def _weight_map(folder: Path) -> dict[str, str] | None:
    """Which file has which tensor, where a model is more than one file."""
    found = [MAP_NAME] if (folder / MAP_NAME).is_file() else []
    found = found or sorted(each.name for each in folder.glob("*.safetensors.index.json"))
    if len(found) != 1:
        return None
    file = folder / found[0]
    try:
        weight_map = json.loads(file.read_bytes())["weight_map"]
        plain = all(Path(name).name == name for name in weight_map.values())
    except (ValueError, KeyError, TypeError, AttributeError):
        weight_map, plain = None, False
    if not plain:
        raise CheckpointError(f"{file}: expected a weight_map of tensors to files of this folder, found none")
    return dict(weight_map)


def _read_header(folder: Path, name: str) -> tuple[dict[str, StoredTensor], StoredFile]:
    file = folder / name
    try:
        nbytes = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if nbytes < 8 or length > min(nbytes - 8, _MAX_HEADER_NBYTES):
                raise _torn(file, f"a header of {length:,} bytes", nbytes)
            header = json.loads(stream.read(length))
    except OSError as error:
        raise CheckpointError(
            f"{file}: expected a file of this model, found {error.strerror or error}"
        ) from None
    except ValueError:
        raise CheckpointError(f"{file}: expected a header of JSON, found something else") from None
    tensors = {}
    for key, entry in header.items():
        if key != "__metadata__":
            tensors[key] = _tensor(file, key, entry, data_start=8 + length, nbytes=nbytes)
    return tensors, StoredFile(nbytes=nbytes)


def _tensor(file: Path, key: str, entry: Any, *, data_start: int, nbytes: int) -> StoredTensor:
    try:
        short, shape = entry["dtype"], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, start, stop))
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise CheckpointError(f"{file}: {key}: expected dtype, shape and data_offsets, found {entry!r:.200}")
    if short not in _DTYPES:
        raise CheckpointError(f"{file}: {key}: expected one of {', '.join(_DTYPES)}, found {short!r}")
    box = Box((0,) * len(shape), shape)
    expected = box.numel * _DTYPES[short].itemsize
    if stop - start != expected:
        raise CheckpointError(f"{file}: {key}: expected {expected:,} bytes of values, found {stop - start:,}")
    if data_start + stop > nbytes:
        raise _torn(file, f"{key} up to byte {data_start + stop:,}", nbytes)
    chunks = (StoredChunk(box, file.name, data_start + start),) if expected else ()
    return StoredTensor(dtype=_DTYPES[short], shape=shape, chunks=chunks)


def _torn(file: Path, expected: str, nbytes: int) -> CheckpointError:
    return CheckpointError(
        f"{file}: expected {expected}, found a file of {nbytes:,} bytes: it is torn; fetch it again"
    )


# -- writing ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A tensor of a file that is to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return Box((), self.shape).numel * self.dtype.itemsize


def plan_file(tensors: Iterable[Planned]) -> tuple[bytes, dict[str, int], int]:
    """The beginning of a file, where in it each tensor goes, and its length."""
    # Wide formats first: then each begins at a multiple of its own width.
    ordered = sorted(tensors, key=lambda tensor: (-tensor.dtype.itemsize, tensor.name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": short_name(tensor.dtype, tensor.name),
            "shape": tensor.shape,
            "data_offsets": [start, start + tensor.nbytes],
        }
        start += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT_NBYTES)
    beginning = len(text).to_bytes(8, "little") + text
    places = {tensor.name: len(beginning) + header[tensor.name]["data_offsets"][0] for tensor in ordered}
    return beginning, places, len(beginning) + start


def short_name(dtype: torch.dtype, tensor: str) -> str:
    """What safetensors call a format."""
    if dtype not in _SHORT:
        raise CheckpointError(
            f"{tensor}: expected a format that safetensors have, found {dtype}; export with another --dtype"
        )
    return _SHORT[dtype]


def map_text(files: Mapping[str, Iterable[Planned]]) -> str:
    """The JSON that says which file has which tensor."""
    total = sum(tensor.nbytes for tensors in files.values() for tensor in tensors)
    weight_map = {tensor.name: file for file, tensors in files.items() for tensor in tensors}
    return json.dumps(
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2
    )

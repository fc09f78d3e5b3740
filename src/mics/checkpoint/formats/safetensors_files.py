"""Files of safetensors: 8 bytes that are the length of a JSON header, the header, the values.

The library reads headers, and refuses what does not fit together. Values are read here, because a rank
reads ranges of a tensor's values into memory that it has, and written here because a file may be larger than
memory.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open

from mics.checkpoint.boxes import Box
from mics.checkpoint.files import parse_json
from mics.checkpoint.records import Index, StoredChunk, StoredFile, StoredTensor, check_name, sizes_of
from mics.checkpoint.storage import Place, open_file, read_file, read_part, size_of
from mics.errors import CheckpointError

FORMAT: Final = "safetensors"
ONE_NAME: Final = "model.safetensors"
MAP_NAME: Final = "model.safetensors.index.json"
_MAX_MAP_NBYTES: Final = 100_000_000  # as the library has it for headers
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


def open_safetensors(folder: Place) -> Index:
    """The index of a folder of safetensors."""
    weight_map = _weight_map(folder)
    if weight_map is not None:
        names = sorted(set(weight_map.values()))
    elif (folder / ONE_NAME).exists():
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
    return Index(tensors=tensors, files=files, model_prefix="", about={"format": FORMAT})


def _weight_map(folder: Place) -> dict[str, str] | None:
    """Which file has which tensor, where a model is more than one file."""
    found = [MAP_NAME] if (folder / MAP_NAME).exists() else []
    found = found or sorted(each.name for each in folder.glob("*.safetensors.index.json"))
    if len(found) != 1:
        return None
    file = folder / found[0]
    content = parse_json(read_file(file, most=_MAX_MAP_NBYTES), file)
    weight_map = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(weight_map, dict) or not all(map(_is_plain, weight_map.values())):
        raise CheckpointError(f"{file}: expected a weight_map of tensors to files of this folder, found none")
    return weight_map


def _is_plain(name: Any) -> bool:
    """Whether it is the name of a file in the same folder."""
    return isinstance(name, str) and bool(name) and name.isprintable() and Path(name).name == name


def _read_header(folder: Place, name: str) -> tuple[dict[str, StoredTensor], StoredFile]:
    file = folder / name
    nbytes = size_of(file)  # which looks at what kind of file it is
    try:
        with _on_disk(file, nbytes) as local, safe_open(local, framework="numpy"):
            pass  # sizes, places, and that tensors follow each other from the first byte to the last
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{file}: expected a file of safetensors, found one that is torn or was altered: {error}; "
            "fetch it again"
        ) from None
    with open_file(file) as stream:
        length = int.from_bytes(read_part(stream, 0, 8), "little")
        header = parse_json(
            read_part(stream, 8, length), file
        )  # of two entries of one name the library takes one
    tensors = {
        key: _tensor(file, key, entry, data_start=8 + length)
        for key, entry in header.items()
        if key != "__metadata__"
    }
    return tensors, StoredFile(nbytes=nbytes)


@contextmanager
def _on_disk(file: Place, nbytes: int) -> Iterator[Path]:
    """The file, or for one on a store a sparse one that is as long and has its header: no values."""
    if isinstance(file, Path):
        yield file
        return
    with NamedTemporaryFile(prefix="mics-header-") as copy, open_file(file) as stream:
        length = int.from_bytes(read_part(stream, 0, 8), "little")
        copy.write(read_part(stream, 0, 8 + min(length, _MAX_MAP_NBYTES)))
        copy.truncate(nbytes)
        copy.flush()
        yield Path(copy.name)


def _tensor(file: Place, key: str, entry: dict[str, Any], *, data_start: int) -> StoredTensor:
    """An entry of a header that the library has found good."""
    try:
        check_name(key)
        shape = sizes_of(entry["shape"])
    except CheckpointError as error:
        raise CheckpointError(f"{file}: {error}") from None
    dtype = _DTYPES.get(entry["dtype"])
    if dtype is None:
        raise CheckpointError(f"{file}: {key}: expected one of {', '.join(_DTYPES)}, found {entry['dtype']}")
    box = Box((0,) * len(shape), shape)
    chunks = (StoredChunk(box, file.name, data_start + entry["data_offsets"][0]),) if box.numel else ()
    return StoredTensor(dtype=dtype, shape=shape, chunks=chunks)


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

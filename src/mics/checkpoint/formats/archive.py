"""Archives as ``torch.save`` writes them: where in one the values of its tensors lie.

An archive is a zip file with nothing compressed. ``data.pkl`` describes what was saved, and ``data/0`` and so
on are the values of tensors. The description is read as data (see ``pickle_data``): ``torch.load`` is never
called.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, Final

import torch

from mics.checkpoint.formats.pickle_data import Name, Persistent, Record, read_pickle
from mics.checkpoint.records import count_of, dtype_of, sizes_of
from mics.checkpoint.storage import OpenFile
from mics.errors import CheckpointError

_MAX_DESCRIPTION_NBYTES: Final = 1 << 20
_MAX_WRAPPED: Final = 8
_STORAGES: Final = {  # what torch.save calls the storages of the formats it has had from the beginning
    "DoubleStorage": "float64",
    "FloatStorage": "float32",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexDoubleStorage": "complex128",
    "ComplexFloatStorage": "complex64",
}
_TENSOR: Final = (Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor_v3"))


class Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(
        self, file: OpenFile, start: int, length: int, *, most: int = _MAX_DESCRIPTION_NBYTES
    ) -> None:
        self._most = most  # that is read at once
        self._file = file
        self._start = start
        self._length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET, /) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        self._at = max(0, base + offset)
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1, /) -> bytes:
        """At most a description: zipfile believes what an archive says of its own length."""
        left = max(0, self._length - self._at)
        if min(left, size if size >= 0 else left) > self._most:
            raise CheckpointError("expected a short table of contents, found a long one")
        return super().read(min(left, size) if size >= 0 else left) or b""

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        got = self._file.read_into(view.cast("B"), self._start + self._at)
        self._at += got
        return got


@dataclass(frozen=True, kw_only=True)
class Described:
    """The tensor of an archive."""

    position: int  # of its values, in the archive
    nbytes: int  # that are there
    offset: int  # of its first value, in elements
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    @property
    def contiguous(self) -> bool:
        """Whether the values are all that is there, one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.sizes
            expected *= size
        return self.offset == 0


@dataclass(frozen=True, kw_only=True)
class Archive:
    """Everything in an archive but the values of tensors."""

    value: Any
    """What was saved, with records in place of objects."""
    values: dict[str, range]
    """Where the values of tensors lie, in bytes of the archive, by the names that records have for them."""

    def tensor(self, value: Any) -> Described:
        """What a record says about a tensor. Raises if it is the record of something else."""
        key, offset, sizes, strides, dtype = _tensor_of(value)
        where = self.values.get(key)
        if where is None:
            raise CheckpointError(f"expected the values of a tensor in data/{key:.20}, found no such record")
        return Described(
            position=where.start, nbytes=len(where), offset=offset, sizes=sizes, strides=strides, dtype=dtype
        )


def describe_archive(archive: Slice, where: str) -> Described:
    """What an archive says about its only tensor; ``where`` is its name in errors."""
    found = open_archive(archive, where)
    try:
        if len(found.values) != 1:
            raise CheckpointError(
                f"expected an archive with the values of one tensor, found {len(found.values)}"
            )
        return found.tensor(found.value)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None


def open_archive(archive: Slice, where: str, *, most: int = _MAX_DESCRIPTION_NBYTES) -> Archive:
    """An archive with a description of at most ``most`` bytes; ``where`` is its name in errors."""
    try:
        with zipfile.ZipFile(archive) as opened:
            description = opened.read(_record(opened, "/data.pkl", most=most))
            if _has(opened, "/byteorder") and opened.read(_record(opened, "/byteorder")) != b"little":
                raise CheckpointError("expected values in little-endian order, found another")
            values = {}
            for record in opened.infolist():
                _, is_value, key = record.filename.partition("/data/")
                if is_value:
                    position = _position_of(archive, _stored(record))
                    if position + record.file_size > opened.start_dir or key in values:
                        raise CheckpointError(
                            "expected the values before the table of contents, found them beyond it"
                        )
                    values[key] = range(position, position + record.file_size)
        return Archive(value=read_pickle(description, "data.pkl"), values=values)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except Exception as error:  # zipfile raises whatever it runs into
        raise CheckpointError(
            f"{where}: expected an archive of torch.save, found something else ({error}): the file is torn "
            "or was altered; take another checkpoint"
        ) from None


def _tensor_of(value: Any) -> tuple[str, int, tuple[int, ...], tuple[int, ...], torch.dtype]:
    """Name of its values, offset, sizes, strides and format of what the description rebuilds."""
    for _ in range(_MAX_WRAPPED):  # a parameter, a subclass of it; a record may also hold itself
        if not isinstance(value, Record):
            break
        if value.callee in _TENSOR:
            storage, offset, sizes, strides, *rest = value.args
            if not isinstance(storage, Persistent):
                break
            dtype = _dtype_of(storage, rest[2] if len(rest) > 2 else None)
            return str(storage.key[2]), count_of(offset), ints_of(sizes), ints_of(strides), dtype
        if value.is_a("torch._utils", "_rebuild_parameter"):
            value = value.args[0]
        elif value.is_a("torch._tensor", "_rebuild_from_type_v2"):
            callee, _, args, _ = value.args
            value = Record(callee, args)
        else:
            break
    found = value.callee if isinstance(value, Record) else None
    raise CheckpointError(
        f"expected a plain tensor, found {found if isinstance(found, Name) else type(value).__name__}"
    )


def _dtype_of(storage: Persistent, named: Any) -> torch.dtype:
    """The format of a tensor's values: that of its storage, or where this has none, the one beside it."""
    kind = storage.key[1] if isinstance(storage.key, tuple) and len(storage.key) == 5 else None
    if not isinstance(kind, Name):
        raise CheckpointError("expected the values of a tensor, found something else")
    if kind.name in _STORAGES:
        return dtype_of(_STORAGES[kind.name])
    if not isinstance(named, Name) or named.module != "torch":
        raise CheckpointError(f"expected values of a known format, found {kind}")
    return dtype_of(named.name)


def ints_of(values: Any) -> tuple[int, ...]:
    """Sizes, as a tuple or as torch's own class for them."""
    if isinstance(values, Record) and values.is_a("torch", "Size"):
        (values,) = values.args
    return sizes_of(values)


def _has(opened: zipfile.ZipFile, ending: str) -> bool:
    return any(each.filename.endswith(ending) for each in opened.infolist())


def _record(opened: zipfile.ZipFile, ending: str, *, most: int = _MAX_DESCRIPTION_NBYTES) -> zipfile.ZipInfo:
    """The one short record that is called so."""
    found = [each for each in opened.infolist() if each.filename.endswith(ending)]
    if len(found) != 1 or found[0].file_size > most:
        raise CheckpointError(f"expected one short record {ending}, found {len(found)}")
    return _stored(found[0])


def _stored(record: zipfile.ZipInfo) -> zipfile.ZipInfo:
    plain = record.compress_type == zipfile.ZIP_STORED and not record.flag_bits & 1
    if not plain or record.compress_size != record.file_size:
        raise CheckpointError("expected nothing compressed or encrypted")
    return record


def _position_of(archive: Slice, record: zipfile.ZipInfo) -> int:
    archive.seek(record.header_offset)
    header = archive.read(30)
    if len(header) != 30 or header[:4] != b"PK\3\4":
        raise CheckpointError("expected the values where the archive says, found something else there")
    name_length, extra_length = struct.unpack("<HH", header[26:30])
    return int(record.header_offset + 30 + name_length + extra_length)

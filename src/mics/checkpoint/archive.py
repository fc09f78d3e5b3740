"""Archives as ``torch.save`` writes them: where in one the values of its tensor lie.

An archive is a zip file with nothing compressed. ``data.pkl`` describes the tensor, and ``data/0`` is its
values. The description is read as data (see ``pickle_data``): ``torch.load`` is never called.
"""

from __future__ import annotations

import io
import struct
import zipfile
from dataclasses import dataclass
from typing import Any, BinaryIO, Final

from mics.checkpoint.pickle_data import Name, Persistent, Record, read_pickle
from mics.errors import CheckpointError

_MAX_DESCRIPTION_NBYTES: Final = 1 << 20
_TENSOR: Final = (Name("torch._utils", "_rebuild_tensor_v2"), Name("torch._utils", "_rebuild_tensor_v3"))


class Slice(io.RawIOBase):
    """A part of a file as a file of its own."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
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

    def readinto(self, buffer: Any, /) -> int:
        view = memoryview(buffer)[: max(0, self._length - self._at)]
        self._file.seek(self._start + self._at)
        got = self._file.readinto(view)  # type: ignore[attr-defined]
        self._at += got
        return int(got)


@dataclass(frozen=True, kw_only=True)
class Described:
    """The tensor of an archive."""

    position: int  # of its values, in the archive
    nbytes: int  # that are there
    offset: int  # of its first value, in elements
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def contiguous(self) -> bool:
        """Whether the values are all that is there, one after the other."""
        expected = 1
        for size, stride in zip(reversed(self.sizes), reversed(self.strides), strict=True):
            if size != 1 and stride != expected:
                return 0 in self.sizes
            expected *= size
        return self.offset == 0


def describe(archive: Any, where: str) -> Described:
    """What an archive says about its tensor; ``where`` is its name in errors."""
    try:
        with zipfile.ZipFile(archive) as opened:
            record = _values_record(opened)
            about = [each for each in opened.infolist() if each.filename.endswith("/data.pkl")]
            if len(about) != 1 or about[0].file_size > _MAX_DESCRIPTION_NBYTES:
                raise CheckpointError("expected one description of a tensor")
            if about[0].compress_type != zipfile.ZIP_STORED:
                raise CheckpointError("expected nothing compressed")
            description = opened.read(about[0])
            order = [each for each in opened.infolist() if each.filename.endswith("/byteorder")]
            if order and opened.read(order[0]) != b"little":
                raise CheckpointError("expected values in little-endian order, found another")
        offset, sizes, strides = _tensor_of(read_pickle(description, "data.pkl"))
        position = _position_of(archive, record)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (zipfile.BadZipFile, ValueError, EOFError, OSError, NotImplementedError, struct.error) as error:
        raise CheckpointError(
            f"{where}: expected an archive of torch.save, found something else ({error}): the file is torn "
            "or was altered; take another checkpoint"
        ) from None
    return Described(position=position, nbytes=record.file_size, offset=offset, sizes=sizes, strides=strides)


def _tensor_of(value: Any) -> tuple[int, tuple[int, ...], tuple[int, ...]]:
    """Offset, sizes and strides of what the description rebuilds."""
    while isinstance(value, Record):
        if value.callee in _TENSOR:
            storage, offset, sizes, strides, *_ = value.args
            if not isinstance(storage, Persistent):
                break
            return int(offset), _ints(sizes), _ints(strides)
        if value.is_a("torch._utils", "_rebuild_parameter"):
            value = value.args[0]
        elif value.is_a("torch._tensor", "_rebuild_from_type_v2"):
            callee, _, args, _ = value.args
            value = Record(callee, args)
        else:
            break
    found = value.callee if isinstance(value, Record) else type(value).__name__
    raise CheckpointError(f"expected a plain tensor, found {found}")


def _ints(values: Any) -> tuple[int, ...]:
    if isinstance(values, Record) and values.is_a("torch", "Size"):
        (values,) = values.args
    if not isinstance(values, tuple | list) or not all(type(v) is int and v >= 0 for v in values):
        raise CheckpointError("expected sizes of a tensor, found something else")
    return tuple(values)


def _values_record(opened: zipfile.ZipFile) -> zipfile.ZipInfo:
    records = [record for record in opened.infolist() if "/data/" in record.filename]
    if len(records) != 1 or records[0].compress_type != zipfile.ZIP_STORED:
        raise CheckpointError(f"expected an archive with the values of one tensor, found {len(records)}")
    return records[0]


def _position_of(archive: Any, record: zipfile.ZipInfo) -> int:
    archive.seek(record.header_offset)
    header = archive.read(30)
    name_length, extra_length = (
        int.from_bytes(header[26:28], "little"),
        int.from_bytes(header[28:30], "little"),
    )
    return int(record.header_offset + 30 + name_length + extra_length)

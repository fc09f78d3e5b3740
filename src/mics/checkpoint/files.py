"""Files that nobody should trust, opened and parsed so that they can do no harm; and files that stay.

Whatever stands in a checkpoint's folder was put there by somebody. A FIFO would be waited for, a sparse file
may be larger than any memory, JSON may be nested deeper than Python's stack: each is an error with its name.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO, Final

from mics.errors import CheckpointError

_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


def open_file(path: Path) -> BinaryIO:
    """A plain file, to read from; links to one are followed."""
    try:
        # A FIFO that nobody writes to would be waited for here.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        kind = stat.S_IFMT(os.fstat(descriptor).st_mode)
        if kind != stat.S_IFREG:
            os.close(descriptor)
            raise CheckpointError(f"{path}: expected a file, found {_KINDS.get(kind, 'something else')}")
        return os.fdopen(descriptor, "rb", buffering=0)
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{path}: expected a file of this checkpoint, found {found}") from None


def size_of(path: Path) -> int:
    """The length of a plain file."""
    with open_file(path) as file:
        return os.fstat(file.fileno()).st_size


def read_file(path: Path, *, most: int) -> bytes:
    """All of a file of at most ``most`` bytes."""
    with open_file(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > most:
            raise CheckpointError(f"{path}: expected at most {most:,} bytes, found {nbytes:,}")
        return read_part(file, path, nbytes)


def read_part(file: BinaryIO, path: Path, nbytes: int) -> bytes:
    """The next bytes of a file, or all that are left."""
    content = bytearray()
    try:
        while part := file.read(nbytes - len(content)):
            content += part
    except OSError as error:
        raise CheckpointError(f"{path}: could not be read: {error.strerror or error}") from None
    return bytes(content)


def parse_json(content: bytes, path: Path) -> Any:
    """What JSON says; a key that stands twice in an object is an error, as one of them would be lost."""
    try:
        return json.loads(content, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: expected JSON, found something else: {_short(error)}") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {twice[:200]!r} twice")
    return found


def _short(error: Exception) -> str:
    return f"{error}"[:300]


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

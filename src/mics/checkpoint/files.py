"""Files that nobody should trust, opened and parsed so that they can do no harm; and files that stay.

Whatever stands in a checkpoint's folder was put there by somebody. A FIFO would be waited for, a sparse file
may be larger than any memory, JSON may be nested deeper than Python's stack: each is an error with its name.
"""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from typing import Any, Final

from mics.errors import CheckpointError

_KINDS: Final = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class LocalFile:
    """A plain file, to read from; links to one are followed."""

    num_readers: Final = 2

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            # A FIFO that nobody writes to would be waited for here.
            self._descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            found = os.fstat(self._descriptor)
            kind = stat.S_IFMT(found.st_mode)
            if kind != stat.S_IFREG:
                os.close(self._descriptor)
                raise CheckpointError(f"{path}: expected a file, found {_KINDS.get(kind, 'something else')}")
            self.nbytes = found.st_size
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise CheckpointError(f"{path}: expected a file of this checkpoint, found {reason}") from None

    def read_into(self, view: memoryview, start: int) -> int:
        """Fill ``view`` with the bytes from ``start`` on; how many there were."""
        filled = 0
        try:
            while filled < len(view) and (
                got := os.preadv(self._descriptor, [view[filled:]], start + filled)
            ):
                filled += got
        except OSError as error:
            raise CheckpointError(f"{self._path}: could not be read: {error.strerror or error}") from None
        return filled

    def close(self) -> None:
        os.close(self._descriptor)


class LocalSink:
    """A file that is written from its beginning to its end."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)

    def write(self, content: memoryview) -> None:
        written = 0
        while written < len(content):
            written += self._file.write(content[written:])

    def flush(self) -> None:
        """Have what was written so far on disk; called beside ``write``."""
        os.fdatasync(self._file.fileno())

    def finish(self) -> None:
        """Have all of it on disk."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        self._file.close()


def parse_json(content: bytes, path: Any) -> Any:
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

"""Whether a node can write where checkpoints go, sees what others wrote there, and how fast both are.

Each node writes one file of its own and removes it. Folders that the doctor made go too.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from mics.checkpoint.remote import RemotePath, put, remove
from mics.checkpoint.storage import Place, read_file
from mics.doctor.facts import FolderFacts
from mics.errors import MicsError

_BOX_SECONDS: Final = 1.5
_CHUNK_NBYTES: Final = 4 << 20
_MAX_NBYTES: Final = 256 << 20
_VISIBLE_SECONDS: Final = 2.0
_OBJECT_NBYTES: Final = (1 << 20, 16 << 20)
_QUICK_SECONDS: Final = 0.25  # for the first, so that the second is worth it


@dataclass
class FolderProbe:
    """The folder as one node sees it."""

    folder: Path
    token: str
    """The same on all nodes of one call, and of no other call."""
    node: str
    _made: list[Path] = field(default_factory=list)

    def write(self) -> FolderFacts:
        """Write for a moment, and to the disk."""
        try:
            self._make()
            free = shutil.disk_usage(self.folder).free
            rate = self._timed_write(min(_MAX_NBYTES, free // 4))
        except OSError as error:
            return FolderFacts(error=f"{type(error).__name__}: {error.strerror or error}", sees_first=False)
        return FolderFacts(write_rate=rate, free_nbytes=free)

    def read(self, found: FolderFacts, *, first: str, other: str) -> FolderFacts:
        """Look for what the node of rank 0 wrote, and read what another node wrote."""
        sees_first = self._appears(self._file(first))
        try:
            rate = self._timed_read(self._file(other)) if sees_first else None
        except OSError:
            rate = None
        return replace(found, sees_first=sees_first, read_rate=rate)

    def remove_file(self) -> None:
        """Call it once all have read."""
        with contextlib.suppress(OSError):  # a folder that cannot be written holds nothing of ours
            self._file(self.node).unlink(missing_ok=True)

    def remove_folders(self) -> None:
        """Call it once all have removed their files."""
        for folder in reversed(self._made):
            try:
                folder.rmdir()
            except OSError:
                return

    def _file(self, node: str) -> Path:
        return self.folder / f".mics-doctor-{self.token}-{node.replace('/', '-')}"

    def _make(self) -> None:
        self._made = [each for each in reversed([self.folder, *self.folder.parents]) if not each.exists()]
        self.folder.mkdir(parents=True, exist_ok=True)

    def _timed_write(self, limit: int) -> float:
        chunk, written = os.urandom(_CHUNK_NBYTES), 0
        began = time.perf_counter()
        with self._file(self.node).open("wb", buffering=0) as file:
            while written < max(limit, 1) and time.perf_counter() - began < _BOX_SECONDS:
                written += file.write(chunk)
                os.fsync(file.fileno())
        return written / (time.perf_counter() - began)

    def _timed_read(self, path: Path) -> float:
        began, nbytes = time.perf_counter(), 0
        for chunk in _chunks(path):
            nbytes += len(chunk)
            if time.perf_counter() - began > _BOX_SECONDS:
                break
        return nbytes / (time.perf_counter() - began)

    def _appears(self, path: Path) -> bool:
        """Network file systems show a new file late."""
        deadline = time.monotonic() + _VISIBLE_SECONDS
        while not path.exists():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True


@dataclass
class StoreProbe:
    """The same for an object store: each node puts an object of its own."""

    folder: RemotePath
    token: str
    node: str

    def write(self) -> FolderFacts:
        """A small object; a larger one after it where the first was quick."""
        rate = 0.0
        try:
            for nbytes in _OBJECT_NBYTES:
                content, began = os.urandom(nbytes), time.perf_counter()
                put(self._object(self.node), content)
                took = time.perf_counter() - began
                rate = nbytes / took
                if took > _QUICK_SECONDS:
                    break
        except MicsError as error:
            return FolderFacts(error=str(error), sees_first=False)
        return FolderFacts(write_rate=rate)

    def read(self, found: FolderFacts, *, first: str, other: str) -> FolderFacts:
        """As of a folder."""
        try:
            sees_first = self._object(first).exists()
            began = time.perf_counter()
            nbytes = len(read_file(self._object(other), most=max(_OBJECT_NBYTES)))
        except MicsError:
            return replace(found, sees_first=self._object(first).exists())
        return replace(found, sees_first=sees_first, read_rate=nbytes / (time.perf_counter() - began))

    def remove_file(self) -> None:
        with contextlib.suppress(MicsError):
            remove([self._object(self.node)], attempts=1)

    def remove_folders(self) -> None:
        """There are none."""

    def _object(self, node: str) -> RemotePath:
        return self.folder / f".mics-doctor-{self.token}-{node.replace('/', '-')}"


def probe_of(folder: Place, *, token: str, node: str) -> FolderProbe | StoreProbe:
    """Of a folder on a disk or a store."""
    if isinstance(folder, RemotePath):
        return StoreProbe(folder=folder, token=token, node=node)
    return FolderProbe(folder=folder.absolute(), token=token, node=node)


def _chunks(path: Path) -> Iterator[bytes]:
    with path.open("rb", buffering=0) as file:
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)  # not from this host's memory
        while chunk := file.read(_CHUNK_NBYTES):
            yield chunk

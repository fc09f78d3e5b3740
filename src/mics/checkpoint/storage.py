"""Where checkpoints lie: a disk, or an object store. What differs between the two is here, and only here.

    disk     files go to a hidden folder, which is renamed when everything in it is on disk
    store    there is no rename, and no folder: files go to their place under names that no other save has,
             and the index, one object, is put when all of them are there

So on both the index of a checkpoint is there when all of it is, and a step that is saved again is replaced at
once. Small files (the index, ``latest``) are there whole or not at all.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

from mics.checkpoint.files import LocalFile, LocalSink, sync_folder, write_durably
from mics.checkpoint.remote import RemoteFile, RemotePath, RemoteSink, put, remove
from mics.errors import CheckpointError

Place = Path | RemotePath
INDEX_NAME: Final = "mics.json"
_LEFTOVER: Final = re.compile(r"\.(step-\d+)\.(partial|removed|previous)")
_STEP: Final = re.compile(r"step-\d+")
_TAGGED: Final = re.compile(r"(?:__\d+_\d+|rank-\d+(?:\.index)?)-([0-9a-f]{12})\.(?:distcp|json)")
_LOG: Final = logging.getLogger("mics")
_STREAM_NBYTES: Final = 64 << 20  # below it another upload at the same time is not worth its memory


class OpenFile(Protocol):
    """A file of a checkpoint, to read from."""

    nbytes: int

    @property
    def num_readers(self) -> int:
        """How many may read at the same time."""

    def read_into(self, view: memoryview, start: int) -> int:
        """Fill ``view`` with the bytes from ``start`` on; how many there were."""

    def close(self) -> None: ...


class Sink(Protocol):
    """A file that is written from its beginning to its end."""

    def write(self, content: memoryview) -> None: ...

    def flush(self) -> None:
        """Begin to make what was written stay; called beside ``write``."""

    def finish(self) -> None:
        """Have all of it stay."""

    def close(self) -> None:
        """Leave it. What was not finished is of no use to anybody."""


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A checkpoint that is being written."""

    folder: Place  # that it will have
    where: Place  # that its files are written to
    tag: str = ""  # in their names

    def name(self, stem: str, ending: str) -> str:
        """Of one of its files."""
        return f"{stem}-{self.tag}{ending}" if self.tag else stem + ending


class Storage(Protocol):
    """A kind of place for checkpoints."""

    def open(self, place: Place) -> OpenFile:
        """A file, to read from."""

    def create(self, place: Place) -> Sink:
        """A new file, to write."""

    def write(self, place: Place, content: bytes) -> None:
        """Write a small file so that it is either whole or not there, and stays."""

    def begin(self, folder: Place) -> Draft:
        """Make room to write the checkpoint ``folder``."""

    def publish(self, draft: Draft, *, without: Sequence[str] = ()) -> None:
        """Its index is written: let it be the checkpoint of its name, and remove the one from before.

        ``without``: files that one from before may have under the same name, and this one has not.
        """

    def abandon(self, draft: Draft) -> None:
        """Remove what was written of one that will not be whole."""

    def remove(self, folder: Place) -> None:
        """Remove a checkpoint. At no moment does a half of it look like one."""

    def sweep(self, root: Place) -> None:
        """Clear away what runs that were killed have left among the checkpoints of steps."""

    def num_streams(self, nbytes: int) -> int:
        """How many files a rank writes ``nbytes`` to at the same time."""


class LocalStorage:
    """A disk, or what is mounted as one."""

    def open(self, place: Place) -> OpenFile:
        return LocalFile(_local(place))

    def create(self, place: Place) -> Sink:
        return LocalSink(_local(place))

    def write(self, place: Place, content: bytes) -> None:
        write_durably(_local(place), content)

    def begin(self, folder: Place) -> Draft:
        partial = partial_of(_local(folder))
        partial.parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        return Draft(folder=folder, where=partial)

    def publish(self, draft: Draft, *, without: Sequence[str] = ()) -> None:
        """One is there at every moment."""
        folder = _local(draft.folder)
        partial, previous = partial_of(folder), previous_of(folder)
        if folder.exists():
            shutil.rmtree(previous, ignore_errors=True)
            folder.rename(previous)
        partial.rename(folder)
        sync_folder(folder.parent)
        shutil.rmtree(previous, ignore_errors=True)

    def abandon(self, draft: Draft) -> None:
        shutil.rmtree(_local(draft.where), ignore_errors=True)

    def remove(self, folder: Place) -> None:
        folder = _local(folder)
        # A name of its own first: a folder that is half removed must not look like a checkpoint.
        doomed = folder.with_name(f".{folder.name}.removed")
        shutil.rmtree(doomed, ignore_errors=True)
        folder.rename(doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def sweep(self, root: Place) -> None:
        root = _local(root)
        for each in list(root.iterdir()) if root.is_dir() else []:
            match = _LEFTOVER.fullmatch(each.name)
            if match and match[2] == "previous" and not (root / match[1]).exists():
                each.rename(root / match[1])  # killed between the two: the old one is the only one
            elif match:
                shutil.rmtree(each, ignore_errors=True)

    def num_streams(self, nbytes: int) -> int:
        return 1


class FsspecStorage:
    """An object store: whatever fsspec has a file system for."""

    _MAX_STREAMS: Final = 4

    def open(self, place: Place) -> OpenFile:
        return RemoteFile(_remote(place))

    def create(self, place: Place) -> Sink:
        return RemoteSink(_remote(place))

    def write(self, place: Place, content: bytes) -> None:
        put(_remote(place), content)

    def begin(self, folder: Place) -> Draft:
        return Draft(folder=folder, where=folder, tag=secrets.token_hex(6))

    def publish(self, draft: Draft, *, without: Sequence[str] = ()) -> None:
        """Putting the index has done it. Files of other saves are of no use any more.

        Those in ``without`` go first: they name the others.
        """
        try:
            there = list(_remote(draft.folder).iterdir())
            remove([each for each in there if each.name in without])
            found = ((each, _TAGGED.fullmatch(each.name)) for each in there)
            remove([each for each, match in found if match and match[1] != draft.tag])
        except CheckpointError as error:
            _LOG.warning("%s: files of an earlier save are left there: %s", draft.folder, error)

    def abandon(self, draft: Draft) -> None:
        """Not where its index is there: ranks may fail after that, and what the index names must stay."""
        folder = _remote(draft.folder)
        index = folder / INDEX_NAME
        try:
            if index.is_file() and draft.tag.encode() in read_file(index, most=size_of(index)):
                return
            found = ((each, _TAGGED.fullmatch(each.name)) for each in folder.iterdir())
            remove([each for each, match in found if match and match[1] == draft.tag], attempts=1)
        except CheckpointError:
            pass  # the next save sweeps it; why this one failed is what counts

    def remove(self, folder: Place) -> None:
        folder = _remote(folder)
        remove([folder / INDEX_NAME])
        remove([each for each in folder.iterdir() if each.name != INDEX_NAME])

    def sweep(self, root: Place) -> None:
        for folder in _remote(root).iterdir():
            if _STEP.fullmatch(folder.name):
                found = list(folder.iterdir())
                left = any(_TAGGED.fullmatch(each.name) for each in found)
                if left and not any(each.name == INDEX_NAME for each in found):
                    remove(found)

    def num_streams(self, nbytes: int) -> int:
        return max(1, min(self._MAX_STREAMS, nbytes // _STREAM_NBYTES))


_LOCAL: Final = LocalStorage()
_FSSPEC: Final = FsspecStorage()


def storage_of(place: Place) -> Storage:
    """What keeps the files of ``place``."""
    return _FSSPEC if isinstance(place, RemotePath) else _LOCAL


def _local(place: Place) -> Path:
    assert isinstance(place, Path), place
    return place


def _remote(place: Place) -> RemotePath:
    assert isinstance(place, RemotePath), place
    return place


def partial_of(folder: Path) -> Path:
    """Where ``folder`` is written on a disk before it is whole."""
    return folder.with_name(f".{folder.name}.partial")


def previous_of(folder: Path) -> Path:
    """Where the one of that name waits while it is replaced."""
    return folder.with_name(f".{folder.name}.previous")


def homes_of(folder: Place) -> tuple[Place, ...]:
    """Where a checkpoint may be found: at its name, or where it waits while it is replaced."""
    return (folder,) if isinstance(folder, RemotePath) else (folder, previous_of(folder))


def modified_ns(place: Place) -> int:
    """When a file was written. Stores count in whole seconds."""
    return int(place.modified() * 1e9) if isinstance(place, RemotePath) else place.stat().st_mtime_ns


def sizes_in(folder: Place) -> dict[str, int]:
    """The files of a folder, and their lengths."""
    if isinstance(folder, RemotePath):
        return folder.sizes()
    with os.scandir(folder) as found:
        return {each.name: each.stat().st_size for each in found if each.is_file()}


# -- files of either kind --------------------------------------------------------------------------------


@contextmanager
def open_file(place: Place) -> Iterator[OpenFile]:
    """A file, to read from."""
    file = storage_of(place).open(place)
    try:
        yield file
    finally:
        file.close()


def size_of(place: Place) -> int:
    """The length of a plain file."""
    with open_file(place) as file:
        return file.nbytes


def read_file(place: Place, *, most: int) -> bytes:
    """All of a file of at most ``most`` bytes."""
    with open_file(place) as file:
        if file.nbytes > most:
            raise CheckpointError(f"{place}: expected at most {most:,} bytes, found {file.nbytes:,}")
        return read_part(file, 0, file.nbytes)


def read_part(file: OpenFile, start: int, nbytes: int) -> bytes:
    """Bytes of a file, or all that are left."""
    content = bytearray(max(0, min(nbytes, file.nbytes - start)))
    got = file.read_into(memoryview(content), start)
    return bytes(content[:got])

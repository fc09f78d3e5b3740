"""Files on an object store, through fsspec: paths that are URLs, ranged reads, uploads in parts.

fsspec is imported when a URL is used. What it and the store's own package raise becomes a CheckpointError
with the URL. Calls that may succeed the next time (a connection that was cut) are tried a few times, unless
that took long already: the packages try each request several times themselves, and other ranks wait.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from typing import Any, Final, TypeVar

from mics.errors import CheckpointError, MicsError, MissingExtraError
from mics.utils.extras import require

T = TypeVar("T")
_URL: Final = re.compile(r"([a-z][a-z0-9+.\-]*)://.+")
_EXTRAS: Final = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}
_PART_NBYTES: Final = 32 << 20  # S3 has at most 10,000 parts of an object
_NUM_ATTEMPTS: Final = 3
_PAUSE_SECONDS: Final = 0.5
_PATIENCE_SECONDS: Final = 20.0
"""After so long a call is not tried again."""
_FINAL: Final = (
    FileNotFoundError,
    PermissionError,
    ImportError,
    ValueError,
    TypeError,
)  # no use to try again


def is_url(text: str) -> bool:
    return _URL.fullmatch(text) is not None


@dataclass(frozen=True)
class RemotePath:
    """A URL with what of ``pathlib.Path`` checkpoints need. Folders are prefixes: they need not be made."""

    url: str

    def __truediv__(self, name: str) -> RemotePath:
        return RemotePath(f"{self.url.rstrip('/')}/{name}")

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rstrip("/").rpartition("/")[2]

    @property
    def parent(self) -> RemotePath:
        return RemotePath(self.url.rstrip("/").rpartition("/")[0])

    def with_name(self, name: str) -> RemotePath:
        return self.parent / name

    def resolve(self) -> RemotePath:
        return RemotePath(self.url.rstrip("/"))

    def exists(self) -> bool:
        return self.info() is not None

    def is_file(self) -> bool:
        found = self.info()
        return found is not None and found["type"] == "file"

    def is_dir(self) -> bool:
        found = self.info()
        return found is not None and found["type"] == "directory"

    def iterdir(self) -> Iterator[RemotePath]:
        """What begins with this prefix, one level down."""
        found = asked(self, "listed", _listed)
        yield from (self / name for name in found)

    def sizes(self) -> dict[str, int]:
        """The objects with this prefix, one level down, and their lengths."""

        def look(store: Any, path: str) -> dict[str, int]:
            try:
                found = store.ls(path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return {}
            return {
                str(each["name"]).rpartition("/")[2]: int(each["size"])
                for each in found
                if each["type"] == "file"
            }

        return asked(self, "listed", look)

    def glob(self, pattern: str) -> Iterator[RemotePath]:
        yield from (each for each in self.iterdir() if fnmatchcase(each.name, pattern))

    def info(self) -> dict[str, Any] | None:
        """What the store says about it; None: there is nothing of this name."""

        def look(store: Any, path: str) -> dict[str, Any] | None:
            try:
                return dict(store.info(path))
            except (FileNotFoundError, NotADirectoryError):
                return None

        return asked(self, "looked at", look)

    def modified(self) -> float:
        """When it was put there, in seconds; 0 where it is not there any more."""

        def look(store: Any, path: str) -> float:
            try:
                return float(store.modified(path).timestamp())
            except FileNotFoundError:
                return 0.0

        return asked(self, "looked at", look)


def _listed(store: Any, path: str) -> list[str]:
    try:
        found = store.ls(path, detail=False)
    except (FileNotFoundError, NotADirectoryError):
        return []
    names = {
        str(each).rstrip("/").rpartition("/")[2] for each in found if str(each).strip("/") != path.strip("/")
    }
    return sorted(names)


def asked(
    place: RemotePath, done: str, action: Callable[[Any, str], T], *, attempts: int = _NUM_ATTEMPTS
) -> T:
    """Do something with the file system of a URL and its path there; ``done``: could not be ...

    A cut connection is tried again, an error that stays is a CheckpointError.
    """
    began = time.monotonic()
    for attempt in range(1, attempts + 1):
        try:
            store = _connected(place.url.partition("://")[0])
            return action(store, store._strip_protocol(place.url))
        except MicsError:
            raise
        except Exception as error:
            last = attempt == attempts or time.monotonic() - began > _PATIENCE_SECONDS
            if last or isinstance(error, _FINAL) or "Credentials" in type(error).__name__:
                raise could_not(place, done, error) from error
            time.sleep(_PAUSE_SECONDS * 2**attempt)
    raise AssertionError("the last attempt returns or raises")


def could_not(place: RemotePath, done: str, error: BaseException) -> CheckpointError:
    reason = str(error) or type(error).__name__
    if "Credentials" in type(error).__name__:
        reason += "; set the credentials that the store's package looks for (AWS_ACCESS_KEY_ID, ...)"
    elif isinstance(error, PermissionError):
        reason += "; check the credentials and the bucket's policy"
    elif isinstance(error, FileNotFoundError):
        reason += "; does the bucket exist?"
    return CheckpointError(f"{place}: could not be {done}: {reason}")


@cache
def _connected(protocol: str) -> Any:
    """The file system of a protocol. It lists anew each time: other ranks write there too."""
    extra = _EXTRAS.get(protocol)
    if extra is not None:
        require(extra, f"a checkpoint on {protocol}://")  # type: ignore[arg-type]
    try:
        import fsspec
    except ImportError:
        raise MissingExtraError(
            f"a checkpoint on {protocol}:// needs fsspec, found none; type: pip install 'mics-torch[s3]'"
        ) from None
    try:
        store = fsspec.filesystem(protocol, use_listings_cache=False, **_options(protocol))
    except ImportError as error:
        raise MissingExtraError(f"a checkpoint on {protocol}:// needs another package: {error}") from None
    except ValueError as error:
        raise CheckpointError(
            f"{protocol}://: expected a protocol that fsspec knows, such as s3 or gs, found: {error}"
        ) from None
    return store


def _options(protocol: str) -> dict[str, Any]:
    """Of fsspec's file systems that need some."""
    if protocol in ("file", "local"):
        return {"auto_mkdir": True}
    if protocol in ("s3", "s3a") and "AWS_MAX_ATTEMPTS" not in os.environ:
        # s3fs tries five times. botocore below it would try five times for each, for minutes.
        return {"config_kwargs": {"retries": {"total_max_attempts": 1}}}
    return {}


class RemoteFile:
    """An object, to read ranges of."""

    num_readers: Final = 8

    def __init__(self, place: RemotePath) -> None:
        self._place = place
        found = place.info()
        if found is None or found["type"] != "file":
            what = "no such object" if found is None else "a folder"
            raise CheckpointError(f"{place}: expected a file of this checkpoint, found {what}")
        self.nbytes = int(found["size"])

    def read_into(self, view: memoryview, start: int) -> int:
        """Fill ``view`` with the bytes from ``start`` on; how many there were."""
        stop = min(start + len(view), self.nbytes)
        if stop <= start:
            return 0
        got = asked(self._place, "read", lambda store, path: store.cat_file(path, start=start, end=stop))
        view[: len(got)] = got
        return len(got)

    def close(self) -> None:
        """Nothing is held open."""


class RemoteSink:
    """An object that is uploaded in parts while it is written. It is there when it is finished."""

    def __init__(self, place: RemotePath) -> None:
        self._place = place
        self._file = asked(
            place, "written", lambda store, path: store.open(path, "wb", block_size=_PART_NBYTES)
        )
        self._finished = False

    def write(self, content: memoryview) -> None:
        self._do(lambda: self._file.write(content))

    def flush(self) -> None:
        """Parts are sent as they are full."""

    def finish(self) -> None:
        """Have the store take it."""
        self._do(self._file.close)
        self._finished = True

    def close(self) -> None:
        """Where it is not finished, take back what was sent of it."""
        if self._finished:
            return
        for leave in ("discard", "close"):
            with suppress(Exception):
                getattr(self._file, leave)()
                self._file.closed = True  # else it is completed when it is collected
                return

    def _do(self, action: Callable[[], Any]) -> None:
        try:
            action()
        except MicsError:
            raise
        except Exception as error:
            raise could_not(self._place, "written", error) from error


def put(place: RemotePath, content: bytes) -> None:
    """Write a small object: all of it is there, or what was there before."""
    asked(place, "written", lambda store, path: store.pipe_file(path, content))


def remove(places: list[RemotePath], *, attempts: int = _NUM_ATTEMPTS) -> None:
    """Delete objects, in one request where the store has one for that."""

    def delete(store: Any, path: str) -> None:
        with suppress(FileNotFoundError):
            store.rm([store._strip_protocol(each.url) for each in places])

    if places:
        asked(places[0], "removed", delete, attempts=attempts)

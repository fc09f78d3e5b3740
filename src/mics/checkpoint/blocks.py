"""Files that are hashed block by block while they are written, and checked so while they are read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from types import TracebackType
from typing import IO, Any, Final, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from mics.checkpoint.digests import best_digest, digest_of
from mics.checkpoint.records import BLOCK_NBYTES, StoredFile
from mics.checkpoint.storage import OpenFile, Place, storage_of
from mics.errors import CheckpointError

T = TypeVar("T")
_FLUSH_NBYTES: Final = 64 << 20
_NUM_AHEAD: Final = 3


class Worker:
    """A thread that does one thing after the other.

    No pool of the standard library: those end before the handlers that a background save is finished in.
    """

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., T], *args: Any) -> Future[T]:
        future: Future[T] = Future()

        def job() -> None:
            try:
                future.set_result(function(*args))
            except BaseException as error:
                future.set_exception(error)

        self._jobs.put(job)
        return future

    def close(self) -> None:
        """Finish what was given to it."""
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()


class BlockWriter:
    """A stream that torch.save can write to. Hashing, writing and the disk run beside the caller."""

    def __init__(self, path: Place) -> None:
        self._sink = storage_of(path).create(path)
        self._writer = Worker("mics-write")
        self._disk = Worker("mics-fsync")
        self._error: BaseException | None = None
        self._name = best_digest()
        self._digest = digest_of(self._name)
        self._block = bytearray(BLOCK_NBYTES)  # that is being filled
        self._filled = 0
        self._leaving: deque[tuple[Future[str], bytearray]] = deque()  # blocks that are being written
        self._digests: list[str] = []
        self._nbytes = 0
        self._unflushed = 0
        self._flushing: Future[None] | None = None
        self._watched = 0  # an address, until what lies there is written
        self._seen_at = 0

    def __enter__(self) -> BlockWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()
        self._disk.close()
        self._sink.close()

    def write(self, content: Any) -> int:
        """Take bytes; what they lie in may be used again after that."""
        view = memoryview(content).cast("B")
        if self._watched and len(view) and np.frombuffer(view, np.uint8).ctypes.data == self._watched:
            self._seen_at, self._watched = self._nbytes, 0
        self._nbytes += len(view)
        left = view
        while len(left):
            part = left[: BLOCK_NBYTES - self._filled]
            self._block[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            left = left[len(part) :]
            if self._filled == BLOCK_NBYTES:
                self._send_block()
        return len(view)

    def tell(self) -> int:
        return self._nbytes

    def save(self, values: Tensor) -> int:
        """Append the archive that ``torch.save`` makes of a tensor; the position of its values.

        They are written as they lie in memory, which is how we know them.
        """
        self._watched = values.data_ptr()
        try:
            torch.save(values, cast(IO[bytes], self))
        except RuntimeError as error:
            # It ends its archive also when writing has failed, and then complains about that instead.
            raise self._error or error from None
        assert not self._watched, "torch.save copies what it writes"
        return self._seen_at

    def flush(self) -> None:
        """Blocks are written whole; the rest in ``finish``."""

    def finish(self) -> StoredFile:
        """Have everything on disk; what the index needs to know."""
        if self._filled:
            self._send_block()
        while self._leaving:
            self._await_block()
        if self._flushing is not None:
            self._flushing.result()
        self._sink.finish()
        return StoredFile(nbytes=self._nbytes, digest=self._name, digests=tuple(self._digests))

    def _send_block(self) -> None:
        block, filled = self._block, self._filled
        self._leaving.append((self._writer.submit(self._put, memoryview(block)[:filled]), block))
        self._block = self._await_block() if len(self._leaving) == _NUM_AHEAD else bytearray(BLOCK_NBYTES)
        self._filled = 0

    def _await_block(self) -> bytearray:
        """Wait for the oldest block, or raise what prevented it; its memory is free again."""
        future, block = self._leaving.popleft()
        try:
            self._digests.append(future.result())
        except (OSError, CheckpointError) as error:
            self._error = error
            raise
        return block

    def _put(self, block: memoryview) -> str:
        self._sink.write(block)
        self._flush_beside(len(block))
        return self._digest(block)

    def _flush_beside(self, nbytes: int) -> None:
        """Keep the disk busy: left to itself the system begins late, and the end waits for all of it."""
        self._unflushed += nbytes
        if self._unflushed < _FLUSH_NBYTES or (self._flushing is not None and not self._flushing.done()):
            return
        if self._flushing is not None:
            self._flushing.result()  # its error, if it had one
        self._unflushed = 0
        self._flushing = self._disk.submit(self._sink.flush)


def open_stored(path: Place, stored: StoredFile) -> OpenFile:
    """A file of a checkpoint, if it is as long as it should be and its digests can be checked."""
    file = storage_of(path).open(path)
    found = file.nbytes
    problem = ""
    if found != stored.nbytes:
        problem = (
            f"expected {stored.nbytes:,} bytes, found {found:,}: the file is torn; take another checkpoint"
        )
    try:
        if stored.digests:
            digest_of(stored.digest)
    except CheckpointError as error:
        problem = str(error)
    if problem:
        file.close()
        raise CheckpointError(f"{path}: {problem}")
    return file


class BlockReader:
    """Reads ranges of one file in rising order. Each block is read once, ahead of its use, and checked."""

    def __init__(self, path: Place, stored: StoredFile, ranges: Iterable[range]) -> None:
        self._path = path
        self._stored = stored
        self._file = open_stored(path, stored)
        self._digest = digest_of(stored.digest) if stored.digests else None
        self._workers = ThreadPoolExecutor(self._file.num_readers, thread_name_prefix="mics-read")
        self._wanted = self._blocks_of(ranges)
        self._coming: deque[tuple[int, Future[bytearray]]] = deque()
        self._current: tuple[int, bytearray] = (-1, bytearray())
        self._free: list[bytearray] = []

    def __enter__(self) -> BlockReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._workers.shutdown(cancel_futures=True)
        self._file.close()

    def read_into(self, start: int, target: memoryview) -> None:
        """Fill ``target`` with the bytes from ``start`` on, which must be in the ranges announced."""
        size = self._stored.block_nbytes
        while len(target):
            number, within = divmod(start, size)
            block = self._block(number)
            part = memoryview(block)[within : within + len(target)]
            assert len(part), "past the end of the file"
            target[: len(part)] = part
            target = target[len(part) :]
            start += len(part)

    def _block(self, number: int) -> bytearray:
        if number < self._current[0]:
            return self._read(number, bytearray())  # ranges that interleave: rare, and read again
        while self._current[0] != number:
            self._free.append(self._current[1])
            while len(self._coming) <= self._file.num_readers:
                following = next(self._wanted, None)
                if following is None:
                    break
                buffer = self._free.pop() if self._free else bytearray()
                self._coming.append((following, self._workers.submit(self._read, following, buffer)))
            arrived, future = self._coming.popleft()
            self._current = (arrived, future.result())
        return self._current[1]

    def _read(self, number: int, buffer: bytearray) -> bytearray:
        stored = self._stored
        start = number * stored.block_nbytes
        nbytes = min(stored.block_nbytes, stored.nbytes - start)
        if len(buffer) != nbytes:
            buffer = bytearray(nbytes)
        if self._file.read_into(memoryview(buffer), start) < nbytes:
            raise CheckpointError(f"{self._path}: expected {nbytes:,} bytes from {start:,} on, found the end")
        if self._digest is not None and self._digest(buffer) != stored.digests[number]:
            raise CheckpointError(
                f"{self._path}: expected what was written, found something else between bytes {start:,} and "
                f"{start + nbytes:,} (the digest differs): the file is torn or was altered; take another "
                "checkpoint"
            )
        return buffer

    def _blocks_of(self, ranges: Iterable[range]) -> Iterator[int]:
        """The blocks that ranges in rising order touch, each once."""
        last = -1
        for each in ranges:
            if each:
                size = self._stored.block_nbytes
                first = max(last + 1, each.start // size)
                for last in range(first, (each.stop - 1) // size + 1):
                    yield last


def verify_file(path: Place, stored: StoredFile, progress: Callable[[int], None] | None = None) -> None:
    """Read a whole file and raise if it is not what was written; ``progress`` is told the bytes read."""
    with BlockReader(path, stored, [range(stored.nbytes)]) as reader:
        for number in range(-(-stored.nbytes // stored.block_nbytes)):
            block = reader._block(number)
            if progress is not None:
                progress(len(block))

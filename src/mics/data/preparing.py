"""From files of text to a folder of token shards.

Two passes over the tokens, with the memory of one bucket: read, tokenize and put every document into a
bucket; then write bucket after bucket. The same files, tokenizer and seed give the same bytes.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

import numpy as np

from mics.data.documents import DocumentFormat, find_files, read_documents
from mics.data.index import TOKENIZER_FOLDER, Prepared, Shard, ShardIndex
from mics.data.shard_files import Buckets, ShardWriter, Tokens
from mics.data.tokenizer import Tokenizer
from mics.errors import SettingsError
from mics.utils.progress import LongWork, long_work

_BATCH_CHARACTERS: Final = 1 << 18
_BATCHES_PER_WORKER: Final = 2
_PARALLELISM: Final = "TOKENIZERS_PARALLELISM"


@dataclass(frozen=True, kw_only=True)
class Preparing:
    """What to make a folder of."""

    files: tuple[Path, ...]
    out: Path
    reading: DocumentFormat = field(default_factory=DocumentFormat)
    shard_tokens: int = 100_000_000
    validation_share: float = 0.01
    seed: int = 0
    workers: int = 1

    def __post_init__(self) -> None:
        for name, value, least in (
            ("--shard-tokens", self.shard_tokens, 1),
            ("--seed", self.seed, 0),
            ("--workers", self.workers, 1),
        ):
            if value < least:
                raise SettingsError(f"{name}: expected {least} or more, found {value}")
        if self.seed >> 64:
            raise SettingsError(f"--seed: expected less than 2^64, found {self.seed}")
        if not 0 <= self.validation_share < 1:
            raise SettingsError(
                f"--validation-share: expected a number in [0, 1), found {self.validation_share}"
            )


def prepare(asked: Preparing, tokenizer: Tokenizer) -> ShardIndex:
    """Make the folder. It appears when it is whole; what cannot be finished leaves nothing behind."""
    files = find_files(asked.files)
    with published(asked.out) as folder:
        dtype: np.dtype[np.unsignedinteger] = np.dtype("<u2" if tokenizer.vocab_size <= 1 << 16 else "<u4")
        nbytes = sum(file.stat().st_size for file in files)
        buckets = Buckets(folder / "buckets", dtype=dtype, nbytes=nbytes, seed=asked.seed)
        with long_work("tokenize", nbytes) as work, _one_thread_per_call():
            sources, num_unknown = _tokenize(files, asked, tokenizer, buckets, work)
        writers = _write_shards(folder, asked, buckets, dtype)
        shards = tuple(shard for writer in writers for shard in writer.shards)
        _check_complete(asked, shards, buckets)
        tokenizer.copy_files(folder / TOKENIZER_FOLDER)
        index = ShardIndex(
            dtype=np.dtype(dtype.type).name,
            vocab_size=tokenizer.vocab_size,
            special=tokenizer.special,
            tokenizer=tokenizer.digest,
            seed=asked.seed,
            num_documents=buckets.num_documents,
            shards=shards,
            sources=tuple(sources),
            num_unknown=num_unknown,
        )
        index.write(folder)
    return index


@contextmanager
def published(out: Path) -> Iterator[Path]:
    """A folder to write to, which takes the name ``out`` when all is done, and is removed if it fails."""
    if out.exists() or out.is_symlink():
        found = "a folder" if out.is_dir() else "a file" if out.is_file() else "a broken link"
        raise SettingsError(f"--out {out}: expected a name that is free, found {found}; name another")
    partial, lock = (out.with_name(out.name + suffix) for suffix in (".partial", ".partial.lock"))
    if partial.exists() and not lock.exists():
        raise SettingsError(
            f"--out {out}: expected {partial} to be free too, found what mics data has not left there; move "
            "it, or name another"
        )
    try:
        with _alone(out, lock):
            try:
                shutil.rmtree(partial, ignore_errors=True)  # of one that was killed
                partial.mkdir()
                yield partial
                partial.rename(out)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        way_out = (
            "; free some (making shards takes twice their size), or name another disk" if is_full else ""
        )
        raise SettingsError(
            f"--out {out}: could not be written: {error.strerror or error}{way_out}"
        ) from None


@contextmanager
def _alone(out: Path, lock: Path) -> Iterator[None]:
    """Hold the lock of a file, so that nobody else makes ``out`` meanwhile. A killed process leaves the file,
    and nobody holds it."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    while True:
        with lock.open("a") as held:
            try:
                fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SettingsError(
                    f"--out {out}: expected to be alone in making it, found that another mics data does so "
                    "now; wait for it, or name another"
                ) from None
            except OSError as error:  # some file systems of clusters have no locks
                logging.getLogger("mics").warning(
                    "%s: cannot be locked (%s): nothing keeps a second mics data from making it too",
                    out,
                    error.strerror or error,
                )
            if os.fstat(held.fileno()).st_nlink == 0:  # its owner has just ended
                continue
            try:
                yield
            finally:
                lock.unlink()
            return


@contextmanager
def _one_thread_per_call() -> Iterator[None]:
    """Our threads call the library side by side, so that --workers is how many cores are used."""
    before = os.environ.get(_PARALLELISM)
    os.environ[_PARALLELISM] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[_PARALLELISM]
        else:
            os.environ[_PARALLELISM] = before


def _tokenize(
    files: list[Path], asked: Preparing, tokenizer: Tokenizer, buckets: Buckets, work: LongWork
) -> tuple[list[Prepared], int]:
    """Fill the buckets, in the order of the files whatever the number of threads. Also returns how much of
    the text the tokenizer does not know."""
    dtype = buckets.dtype
    most = _BATCHES_PER_WORKER * asked.workers
    waiting: deque[Future[_Encoded]] = deque()
    sources = []
    num_unknown = 0

    def take() -> None:
        nonlocal num_unknown
        encoded = waiting.popleft().result()
        buckets.add(encoded.documents)
        num_unknown += encoded.num_unknown

    with ThreadPoolExecutor(asked.workers, thread_name_prefix="mics-tokenize") as workers:
        for file in files:
            num_documents = 0
            for batch in _batches(file, asked.reading, work):
                num_documents += len(batch)
                waiting.append(workers.submit(_encode, tokenizer, batch, dtype, file))
                if len(waiting) > most:
                    take()
            sources.append(Prepared(file=file.name, nbytes=file.stat().st_size, num_documents=num_documents))
        while waiting:
            take()
    return sources, num_unknown


class _Encoded(NamedTuple):
    documents: list[Tokens]
    num_unknown: int


def _encode(
    tokenizer: Tokenizer, texts: list[str], dtype: np.dtype[np.unsignedinteger], file: Path
) -> _Encoded:
    try:
        documents = tokenizer.encode_documents(texts, dtype)
    except SettingsError as error:
        raise SettingsError(f"{file}: {error}") from None
    return _Encoded(documents, sum(map(tokenizer.num_unknown, texts, documents)))


def _batches(file: Path, how: DocumentFormat, work: LongWork) -> Iterator[list[str]]:
    batch: list[str] = []
    size = 0
    for text in read_documents(file, how, advance=work.advance):
        batch.append(text)
        size += len(text)
        if size >= _BATCH_CHARACTERS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_shards(
    folder: Path, asked: Preparing, buckets: Buckets, dtype: np.dtype[np.unsignedinteger]
) -> tuple[ShardWriter, ShardWriter]:
    """The first documents of the shuffled order are for validation: as many as have their share of tokens."""
    train, validation = (
        ShardWriter(folder, split, shard_tokens=asked.shard_tokens, dtype=dtype)
        for split in ("train", "validation")
    )
    least = asked.validation_share * buckets.num_tokens
    done = 0
    with long_work("write shards", buckets.num_tokens * dtype.itemsize) as work:
        for tokens in buckets.documents():
            (validation if done < least else train).write(tokens)
            done += len(tokens)
            work.advance(tokens.nbytes)
        train.close()
        validation.close()
    if not train.shards:
        raise SettingsError(
            f"FILES: expected documents for training and for validation, found {buckets.num_documents}; give "
            "more text, --documents blank-line or line, or --validation-share 0"
        )
    return train, validation


def _check_complete(asked: Preparing, shards: tuple[Shard, ...], buckets: Buckets) -> None:
    """Every token that was written to the buckets came back: else something changed them."""
    found = sum(shard.num_tokens for shard in shards)
    if found != buckets.num_tokens:
        raise SettingsError(
            f"--out {asked.out}: expected shards of the {buckets.num_tokens:,} tokens that the files gave, "
            f"found {found:,}: something else changed {asked.out}.partial; prepare the data again"
        )

"""Writing: documents into buckets by a random key, then bucket after bucket into shards."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Final

import numpy as np
from numpy.typing import NDArray

from mics.data.hashing import draw
from mics.data.index import Shard, Split, digest_of

Tokens = NDArray[np.unsignedinteger]
_BUCKET_NBYTES: Final = 32 << 20
_MAX_BUCKET_BITS: Final = 12
_BUFFERED_NBYTES: Final = 64 << 20
_BUFFER_NBYTES: Final = 1 << 20
_SHUFFLE: Final = 1  # what a hash is drawn for


class Buckets:
    """Documents on disk in the order of their keys, with the memory of one bucket.

    A document's key is a hash of the seed and its number, and buckets divide the keys by their highest bits.
    So the order depends on neither the number of buckets nor who tokenized what.
    """

    def __init__(self, folder: Path, *, dtype: np.dtype[np.unsignedinteger], nbytes: int, seed: int) -> None:
        folder.mkdir(parents=True)
        self._folder = folder
        self.dtype = dtype
        self._seed = seed
        self._bits = min(_MAX_BUCKET_BITS, max(0, (nbytes // _BUCKET_NBYTES).bit_length()))
        self._waiting: dict[int, list[tuple[int, int, Tokens]]] = {}
        self._waiting_nbytes = 0
        self.num_documents = 0
        self.num_tokens = 0

    def add(self, documents: Sequence[Tokens]) -> None:
        numbers = np.arange(self.num_documents, self.num_documents + len(documents), dtype=np.uint64)
        keys = draw(self._seed, _SHUFFLE, numbers)
        for key, number, tokens in zip(keys.tolist(), numbers.tolist(), documents, strict=True):
            self._waiting.setdefault(key >> (64 - self._bits), []).append((key, number, tokens))
            self._waiting_nbytes += tokens.nbytes
            self.num_tokens += len(tokens)
        self.num_documents += len(documents)
        if self._waiting_nbytes > _BUFFERED_NBYTES:
            self._flush()

    def documents(self) -> Iterator[Tokens]:
        """All of them, shuffled. A bucket is gone from the disk when it is read."""
        self._flush()
        for bucket in range(1 << self._bits):
            heads, tokens = self._files(bucket)
            if not heads.exists():
                continue
            keys, numbers, lengths = np.fromfile(heads, dtype=np.uint64).reshape(-1, 3).T
            content = np.fromfile(tokens, dtype=self.dtype)
            ends = np.cumsum(lengths.astype(np.int64))
            for place in np.lexsort((numbers, keys)):
                yield content[ends[place] - int(lengths[place]) : ends[place]]
            heads.unlink()
            tokens.unlink()
        self._folder.rmdir()

    def _files(self, bucket: int) -> tuple[Path, Path]:
        return self._folder / f"{bucket:05}.documents", self._folder / f"{bucket:05}.tokens"

    def _flush(self) -> None:
        for bucket, waiting in self._waiting.items():
            heads, tokens = self._files(bucket)
            with heads.open("ab") as file:  # not NumPy's own tofile: what that raises does not say why
                rows = [(key, number, len(each)) for key, number, each in waiting]
                file.write(np.array(rows, dtype=np.uint64).tobytes())
            with tokens.open("ab") as file:
                file.write(np.concatenate([each for _, _, each in waiting]).tobytes())
        self._waiting.clear()
        self._waiting_nbytes = 0


class ShardWriter:
    """Writes the tokens of a split to .npy files of one length; the last one is shorter."""

    def __init__(
        self, folder: Path, split: Split, *, shard_tokens: int, dtype: np.dtype[np.unsignedinteger]
    ) -> None:
        self._folder = folder
        self._split: Split = split
        self._shard_tokens = shard_tokens
        self._dtype = dtype
        self._file: IO[bytes] | None = None
        self._num_tokens = 0  # in the open file
        self.shards: list[Shard] = []

    def write(self, tokens: Tokens) -> None:
        while len(tokens):
            if self._file is None:
                self._file = (self._folder / self._name).open("w+b", buffering=_BUFFER_NBYTES)
                self._write_header(0)
            piece = tokens[: self._shard_tokens - self._num_tokens]
            self._file.write(piece.tobytes())
            self._num_tokens += len(piece)
            tokens = tokens[len(piece) :]
            if self._num_tokens == self._shard_tokens:
                self.close()

    def close(self) -> None:
        """Finish the open file, if there is one."""
        if self._file is None:
            return
        self._file.seek(0)
        self._write_header(self._num_tokens)
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        path = self._folder / self._name
        self.shards.append(
            Shard(
                file=self._name,
                split=self._split,
                num_tokens=self._num_tokens,
                nbytes=path.stat().st_size,
                digest=digest_of(path),
            )
        )
        self._file, self._num_tokens = None, 0

    @property
    def _name(self) -> str:
        return f"{self._split}-{len(self.shards):05}.npy"

    def _write_header(self, num_tokens: int) -> None:
        """NumPy leaves room for a length that grows, so the header may be written again."""
        assert self._file is not None
        descr = np.lib.format.dtype_to_descr(self._dtype)
        header = {"descr": descr, "fortran_order": False, "shape": (num_tokens,)}
        np.lib.format.write_array_header_1_0(self._file, header)

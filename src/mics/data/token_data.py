"""Reading a folder of token shards: memory-mapped, so only the pages of the asked sequences are read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from mics.data.index import MEND, TOKENIZER_FOLDER, Shard, ShardIndex, Split, check_files, read_index
from mics.errors import SettingsError


class TokenStream:
    """The shards of a split as one long row of tokens. A window may reach over several of them.

    Args:
        shards: the tokens.
        files: what error messages call the shards.
        vocab_size: every token is below.
    """

    def __init__(
        self,
        shards: Sequence[NDArray[np.unsignedinteger]],
        *,
        files: Sequence[Path] = (),
        vocab_size: int = 1 << 32,
    ) -> None:
        self._shards = tuple(shards)
        self._files = files
        self._vocab_size = vocab_size
        self._ends = np.cumsum([0, *(len(shard) for shard in self._shards)])  # [shards + 1]

    def __len__(self) -> int:
        return int(self._ends[-1])

    def read(
        self, starts: NDArray[np.int64], *, into: NDArray[np.int64], rows: NDArray[np.int64] | None = None
    ) -> None:
        """Copy the windows that begin at ``starts`` to the given rows of ``into`` [row, token]."""
        length = into.shape[1]
        assert len(starts) == 0 or (starts.min() >= 0 and starts.max() + length <= len(self))
        firsts = np.searchsorted(self._ends, starts, side="right") - 1
        for place, (start, first) in enumerate(zip(starts, firsts, strict=True)):
            row = into[place if rows is None else rows[place]]
            done, shard = 0, int(first)
            while done < length:
                inside = int(start) + done - int(self._ends[shard])
                piece = self._shards[shard][inside : inside + length - done]
                if len(piece) and piece.max() >= self._vocab_size:
                    raise SettingsError(
                        f"{self._files[shard]}: expected tokens below {self._vocab_size:,}, found "
                        f"{piece.max():,}: it was changed after it was written; {MEND}"
                    )
                row[done : done + len(piece)] = piece
                done += len(piece)
                shard += 1


class TokenData:
    """A folder that ``mics data prepare`` has made, open for reading."""

    def __init__(self, folder: Path, index: ShardIndex) -> None:
        self.folder = folder
        self.index = index

    @classmethod
    def open(cls, folder: Path, *, check: bool = True) -> TokenData:
        """Raises a SettingsError that names the first shard that is missing or cut short.

        Args:
            folder: what ``mics data prepare`` has made.
            check: Compare the sizes of all shards, their digests if all of them have 250 MB or less, and the
                tokenizer's file. Without it, for ranks of a node on which another one does.
        """
        index = read_index(folder)
        if check:
            check_files(folder, index)
        return cls(folder, index)

    @property
    def tokenizer_folder(self) -> Path | None:
        """The tokenizer's own files, as ``AutoTokenizer.from_pretrained`` reads them; bytes have none."""
        found = self.folder / TOKENIZER_FOLDER
        return found if found.is_dir() else None

    def stream(self, split: Split) -> TokenStream:
        """All tokens of a split."""
        shards = self.index.of_split(split)
        return TokenStream(
            [self._map(shard) for shard in shards],
            files=[self.folder / shard.file for shard in shards],
            vocab_size=self.index.vocab_size,
        )

    def _map(self, shard: Shard) -> NDArray[np.unsignedinteger]:
        file = self.folder / shard.file
        try:
            found = np.load(file, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError, EOFError) as error:
            raise SettingsError(f"{file}: expected a .npy file of tokens, found: {error}") from None
        if found.shape != (shard.num_tokens,) or found.dtype != np.dtype(self.index.dtype):
            raise SettingsError(
                f"{file}: expected {shard.num_tokens:,} tokens of {self.index.dtype}, found shape "
                f"{found.shape} of {found.dtype}; {MEND}"
            )
        assert isinstance(found, np.ndarray)
        return found

"""From a window of the token stream to a model's input and targets, for both kinds of language model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from mics.data.hashing import Words, draw
from mics.data.index import ShardIndex, SpecialTokens
from mics.errors import SettingsError

Objective = Literal["causal", "masked"]
IGNORED: Final = -100
"""The target of a token that has none: PyTorch's cross entropy leaves it out."""
MASKED_SHARE: Final = 0.15
_KEPT: Final = np.uint64(26)  # of 256: about 10%
_SWAPPED: Final = np.uint64(51)  # the next 10%; the rest becomes the mask token
_PICK, _FATE, _OTHER = 1, 2, 3  # what a hash is drawn for


class PackedSequences(NamedTuple):
    """Sequences as a model takes them; both [sequence, token] int64."""

    tokens: NDArray[np.int64]
    targets: NDArray[np.int64]


class Packing(Protocol):
    """How sequences are cut out of a stream and made into input and targets."""

    @property
    def seq_len(self) -> int: ...

    @property
    def stride(self) -> int:
        """Tokens between the beginnings of two sequences."""
        ...

    @property
    def window(self) -> int:
        """Tokens that are read for a sequence."""
        ...

    def num_sequences(self, num_tokens: int) -> int: ...

    def pack(self, rows: NDArray[np.int64], keys: Words) -> PackedSequences:
        """``rows``: [sequence, window] tokens. ``keys``: what is random about each sequence."""
        ...


@dataclass(frozen=True, kw_only=True)
class CausalPacking:
    """Predict the next token: the targets are the tokens, one place on."""

    seq_len: int

    @property
    def stride(self) -> int:
        return self.seq_len

    @property
    def window(self) -> int:
        return self.seq_len + 1

    def num_sequences(self, num_tokens: int) -> int:
        return max(0, num_tokens - 1) // self.seq_len

    def pack(self, rows: NDArray[np.int64], keys: Words) -> PackedSequences:
        return PackedSequences(rows[:, :-1], rows[:, 1:])


class MaskedPacking:
    """Predict masked tokens, drawn anew in every epoch, as RoBERTa does.

    A sequence is ``<s>``, a window of the stream, ``</s>``, as far as the tokenizer has these. Of the window
    15% are targets, always the same number: then the mean over any batch weighs all sequences alike, and the
    loss is the same however they are dealt out to ranks. Of the targets 80% become the mask token, 10%
    another token, 10% stay.
    """

    def __init__(self, *, seq_len: int, vocab_size: int, special: SpecialTokens, name: str) -> None:
        if special.mask is None:
            raise SettingsError(
                f"{name}: expected a tokenizer with a mask token for a masked language model, found none; "
                "prepare the data with such a tokenizer (mics data tokenizer makes one)"
            )
        self.seq_len = seq_len
        self._mask = special.mask
        self._begin = [] if special.begin is None else [special.begin]
        self._end = [] if special.begin is None else [special.end_of_text]
        self.window = seq_len - len(self._begin) - len(self._end)
        if self.window < 1:
            raise SettingsError(f"model.seq_len: expected 3 or more, found {seq_len}")
        self.num_targets = max(1, round(MASKED_SHARE * self.window))
        self._is_special = np.zeros(vocab_size, dtype=np.bool_)
        self._is_special[list(special.all_ids)] = True
        self._ordinary = np.flatnonzero(~self._is_special).astype(np.int64)

    @property
    def stride(self) -> int:
        return self.window

    def num_sequences(self, num_tokens: int) -> int:
        return num_tokens // self.window

    def pack(self, rows: NDArray[np.int64], keys: Words) -> PackedSequences:
        key, place = keys[:, None], np.arange(self.window, dtype=np.uint64)[None]
        order = draw(key, _PICK, place)
        # The highest bit puts special tokens last, so that they are picked only where nothing else is left.
        special = self._is_special[rows]
        order = (order >> np.uint64(1)) | (special.astype(np.uint64) << np.uint64(63))
        picked = np.argpartition(order, self.num_targets - 1, axis=1)[:, : self.num_targets]
        lines = np.arange(len(rows))[:, None]
        is_target = ~special[lines, picked]
        old, picked_place = rows[lines, picked], picked.astype(np.uint64)
        fate = draw(key, _FATE, picked_place) >> np.uint64(56)
        other = self._ordinary[draw(key, _OTHER, picked_place) % np.uint64(self._ordinary.size)]
        new = np.where(fate < _KEPT, old, np.where(fate < _SWAPPED, other, self._mask))
        tokens = rows.copy()
        tokens[lines, picked] = np.where(is_target, new, old)
        targets = np.full_like(rows, IGNORED)
        targets[lines, picked] = np.where(is_target, old, IGNORED)
        return PackedSequences(
            self._framed(tokens, self._begin, self._end),
            self._framed(targets, [IGNORED] * len(self._begin), [IGNORED] * len(self._end)),
        )

    @staticmethod
    def _framed(rows: NDArray[np.int64], begin: Sequence[int], end: Sequence[int]) -> NDArray[np.int64]:
        count = len(rows)
        parts = [np.tile(np.asarray(each, dtype=np.int64), (count, 1)) for each in (begin, end)]
        return np.concatenate((parts[0], rows, parts[1]), axis=1)


def make_packing(objective: Objective, index: ShardIndex, *, seq_len: int, name: str) -> Packing:
    """What a kind of model needs; ``name`` is the folder, for errors."""
    if objective == "causal":
        return CausalPacking(seq_len=seq_len)
    return MaskedPacking(seq_len=seq_len, vocab_size=index.vocab_size, special=index.special, name=name)

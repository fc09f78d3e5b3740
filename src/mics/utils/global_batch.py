"""The global batch of an optimizer step, given in sequences or in tokens: one meaning for every command."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from mics.errors import SettingsError
from mics.utils.numbers import TokenCount, count, tokens

MAX_TOKENS: Final = 10**10
"""Of one optimizer step."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """Sequences of one optimizer step over all ranks, and the tokens that were asked for."""

    num_sequences: int
    seq_len: int
    asked_tokens: int | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.seq_len

    def __str__(self) -> str:
        """``global batch 1.05 M tokens = 512 sequences of 2,048``, and what it was rounded from."""
        text = (
            f"global batch {tokens(self.num_tokens)} = {self.num_sequences:,} sequences of {self.seq_len:,}"
        )
        if self.asked_tokens in (None, self.num_tokens):
            return text
        assert self.asked_tokens is not None
        return (
            f"{text} ({count(self.asked_tokens)} rounded by "
            f"{100 * (self.num_tokens / self.asked_tokens - 1):+.1f}%)"
        )


@dataclass(frozen=True, kw_only=True)
class AskedBatch:
    """What a user gave: sequences, tokens, or neither. Both are an error."""

    sequences: int | None = None
    tokens: TokenCount | int | None = None
    setting: str = "--global-batch"
    """How the command spells it; the one for tokens ends in ``tokens``."""

    def __post_init__(self) -> None:
        for name, given in ((self.setting, self.sequences), (self.tokens_setting, self.tokens)):
            if given is not None and given < 1:
                raise SettingsError(f"{name}: expected a number above 0, found {given}")
        if self.sequences is not None and self.tokens is not None:
            raise SettingsError(
                f"{self.setting}, {self.tokens_setting}: expected one of them, found both "
                f"({self.sequences:,} sequences and {tokens(self.tokens)}); leave one out"
            )

    @property
    def tokens_setting(self) -> str:
        return f"{self.setting}{'-' if '-' in self.setting else '_'}tokens"

    @property
    def given(self) -> bool:
        return self.sequences is not None or self.tokens is not None

    def check_size(self, seq_len: int) -> None:
        """Raise if a step is larger than anybody's: likely a slip."""
        most = MAX_TOKENS // max(1, seq_len)
        if self.sequences is not None and self.sequences > most:
            raise SettingsError(
                f"{self.setting}: expected at most {most:,} sequences of {seq_len:,} "
                f"({count(MAX_TOKENS)} tokens per step), found {self.sequences:,}; check its unit"
            )
        if self.tokens is not None and self.tokens > MAX_TOKENS:
            raise SettingsError(
                f"{self.tokens_setting}: expected at most {count(MAX_TOKENS)} tokens per step, found "
                f"{self.tokens:,}; check its unit"
            )

    def fit(self, *, seq_len: int, multiple: int, because: str) -> GlobalBatch:
        """The batch in sequences: of tokens the nearest multiple, of sequences exactly what was given.

        ``because``: where the multiple comes from, in words.
        """
        if self.tokens is None:
            assert self.sequences is not None
            nearest = max(1, round(self.sequences / multiple)) * multiple
            if self.sequences % multiple:
                raise SettingsError(
                    f"{self.setting}: expected a multiple of {multiple:,} sequences ({because}), found "
                    f"{self.sequences:,}; the nearest is {nearest:,}"
                )
            return GlobalBatch(num_sequences=self.sequences, seq_len=seq_len)
        rounded = round(self.tokens / (seq_len * multiple))
        if rounded == 0:
            raise SettingsError(
                f"{self.tokens_setting}: expected about {seq_len * multiple:,} tokens or more (sequences of "
                f"{seq_len:,}; {because}), found {self.tokens:,}; give "
                f"{count(seq_len * multiple)}, or use fewer ranks"
            )
        return GlobalBatch(
            num_sequences=rounded * multiple,
            seq_len=seq_len,
            asked_tokens=int(self.tokens),
        )

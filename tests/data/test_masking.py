"""Masked language modelling: how many tokens, which, and that nothing but the seed decides."""

from __future__ import annotations

import numpy as np
import pytest

from mics.data import Mixture, Source, TokenStream
from mics.data.index import SpecialTokens
from mics.data.packing import IGNORED, MaskedPacking
from mics.errors import SettingsError
from tests.data.folders import SPECIAL

_VOCAB = 5000


def _packing(seq_len: int = 128) -> MaskedPacking:
    return MaskedPacking(seq_len=seq_len, vocab_size=_VOCAB, special=SPECIAL, name="here")


def _mixture(seq_len: int = 128) -> Mixture:
    """Ordinary tokens, with the end of a document at every tenth place."""
    tokens = np.random.default_rng(0).integers(5, _VOCAB, 40_000).astype(np.uint16)
    tokens[::10] = SPECIAL.end_of_text
    return Mixture([Source(name="s", stream=TokenStream([tokens]))], _packing(seq_len), seed=1)


def test_statistics_are_those_of_roberta() -> None:
    """15% are targets; of them 80% are masked, 10% are other tokens, 10% stay."""
    packed = _mixture().batch(np.arange(300))
    is_target = packed.targets != IGNORED
    assert is_target.sum(axis=1).tolist() == [19] * 300  # of 126, in every sequence
    seen, hidden = packed.tokens[is_target], packed.targets[is_target]
    assert (seen == SPECIAL.mask).mean() == pytest.approx(0.8, abs=0.02)
    assert (seen == hidden).mean() == pytest.approx(0.1, abs=0.015)
    others = seen[(seen != SPECIAL.mask) & (seen != hidden)]
    assert len(others) / len(seen) == pytest.approx(0.1, abs=0.015)
    assert others.min() >= 5
    assert np.unique(others).size > 0.9 * len(others)
    # Every place of a sequence is as likely as any other.
    places = is_target[:, 1:-1].mean(axis=0)
    assert places.std() < 0.06


def test_special_tokens_are_never_targets() -> None:
    packed = _mixture().batch(np.arange(200))
    assert (packed.tokens[:, 0] == SPECIAL.begin).all()
    assert (packed.tokens[:, -1] == SPECIAL.end_of_text).all()
    targets = packed.targets[packed.targets != IGNORED]
    assert not np.isin(targets, SPECIAL.all_ids).any()


def test_what_is_no_target_is_untouched() -> None:
    """Putting the targets back gives the text."""
    rows = np.random.default_rng(0).integers(0, _VOCAB, (50, 126))
    packed = _packing().pack(rows, np.arange(50, dtype=np.uint64))
    restored = np.where(packed.targets == IGNORED, packed.tokens, packed.targets)
    assert np.array_equal(restored[:, 1:-1], rows)


def test_masks_are_the_same_for_any_division_and_new_in_every_epoch() -> None:
    mixture = _mixture()
    (size,) = mixture.sizes
    whole = mixture.batch(np.arange(2 * size))
    halves = [mixture.batch(np.arange(first, 2 * size, 2)) for first in (0, 1)]
    for first, half in enumerate(halves):
        assert np.array_equal(half.tokens, whole.tokens[first::2])
        assert np.array_equal(half.targets, whole.targets[first::2])
    texts = np.where(whole.targets == IGNORED, whole.tokens, whole.targets)
    first_epoch = {row.tobytes(): place for place, row in enumerate(texts[:size])}
    second = [(place, first_epoch[row.tobytes()]) for place, row in enumerate(texts[size:])]
    same = [np.array_equal(whole.targets[size + late], whole.targets[early]) for late, early in second]
    assert len(second) == size and not any(same)


def test_a_sequence_of_special_tokens_has_no_targets() -> None:
    rows = np.full((2, 126), SPECIAL.end_of_text, dtype=np.int64)
    packed = _packing().pack(rows, np.arange(2, dtype=np.uint64))
    assert (packed.targets == IGNORED).all()


def test_a_tokenizer_without_a_mask_token_is_named() -> None:
    with pytest.raises(SettingsError, match=r"here: expected a tokenizer with a mask token"):
        MaskedPacking(seq_len=8, vocab_size=256, special=SpecialTokens(end_of_text=0), name="here")

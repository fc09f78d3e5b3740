"""Data: the split, and batches that depend on nothing but the seed, the step and the place."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mics.data.packing import MaskedPacking
from mics.data.tokenizer import BytesTokenizer
from mics.errors import SettingsError
from mics.train.config import ModelSettings, TrainConfig
from mics.train.data import Batches, Dealing
from mics.train.sequences import ByteText, TextSequences, decode, encode, load_text
from mics.utils.numbers import TokenCount

TEXT = ByteText(train=torch.arange(200, dtype=torch.uint8), validation=torch.arange(50, dtype=torch.uint8))


def _batches(
    *, rank: int = 0, num_ranks: int = 1, batch_size: int = 2, micro_steps: int = 1, seed: int = 0
) -> Batches:
    return Batches(
        sequences=TextSequences(text=TEXT, seq_len=8, seed=seed),
        batch_size=batch_size,
        micro_steps=micro_steps,
        rank=rank,
        num_ranks=num_ranks,
        device=torch.device("cpu"),
    )


def test_the_text_that_ships_is_plain_and_long_enough() -> None:
    """The default text is ASCII (every byte a character a reader knows) and some tens of kilobytes."""
    text = load_text(None, validation_share=0.1, seq_len=64)
    whole = torch.cat((text.train, text.validation))
    assert len(whole) > 30_000
    assert whole.max() < 128
    assert len(text.validation) == len(whole) // 10


def test_the_split_is_disjoint_and_complete(tmp_path: Path) -> None:
    """Training and validation together are the text, in order."""
    file = tmp_path / "text.txt"
    file.write_bytes(bytes(range(100)))
    text = load_text(file, validation_share=0.25, seq_len=8)
    assert torch.cat((text.train, text.validation)).tolist() == list(range(100))
    assert len(text.validation) == 25


def test_a_text_that_is_too_short_says_so(tmp_path: Path) -> None:
    """The error names the setting, the need and the find."""
    file = tmp_path / "text.txt"
    file.write_text("short")
    with pytest.raises(SettingsError, match=r"data\.text: expected more than seq_len=64 bytes"):
        load_text(file, validation_share=0.1, seq_len=64)


def test_targets_are_the_next_tokens() -> None:
    """In a text of consecutive numbers every target is its token plus one."""
    for tokens, targets in _batches(micro_steps=3).train(step=5) + _batches().validation(2):
        assert tokens.shape == targets.shape == (2, 8)
        assert torch.equal(targets, tokens + 1)


def test_the_same_seed_and_step_give_the_same_batch() -> None:
    """Batches are a function: no state, so a run can be repeated or continued anywhere."""
    again = [_batches().train(step=4)[0][0] for _ in range(2)]
    assert torch.equal(*again)
    assert not torch.equal(again[0], _batches().train(step=5)[0][0])
    assert not torch.equal(again[0], _batches(seed=1).train(step=4)[0][0])


@settings(max_examples=25, deadline=None)
@given(num_ranks=st.sampled_from([1, 2, 4]), micro_steps=st.integers(1, 3), step=st.integers(1, 1000))
def test_a_step_is_the_same_for_any_number_of_ranks(num_ranks: int, micro_steps: int, step: int) -> None:
    """Eight sequences a micro-step, dealt to 1, 2 or 4 ranks: joined in rank order they are the same."""
    expected = _batches(batch_size=8, micro_steps=micro_steps).train(step)
    dealt = [
        _batches(rank=rank, num_ranks=num_ranks, batch_size=8 // num_ranks, micro_steps=micro_steps).train(
            step
        )
        for rank in range(num_ranks)
    ]
    for micro_step, (tokens, _) in enumerate(expected):
        assert torch.equal(torch.cat([mine[micro_step][0] for mine in dealt]), tokens)


def test_a_masked_model_takes_a_text_too() -> None:
    """Bytes are masked by one that no text has, the same ones on any number of ranks."""
    masking = MaskedPacking(seq_len=8, vocab_size=256, special=BytesTokenizer.special, name="")
    whole, *halves = (
        replace(_batches(rank=rank, num_ranks=num_ranks, batch_size=8 // num_ranks), sequences=sequences)
        for sequences in [TextSequences(text=TEXT, seq_len=8, seed=0, masking=masking)]
        for rank, num_ranks in ((0, 1), (0, 2), (1, 2))
    )
    ((tokens, targets),) = whole.train(step=3)
    assert ((targets != -100).sum(dim=1) == 1).all()
    restored = torch.where(targets == -100, tokens, targets)
    assert torch.equal(restored, restored[:, :1] + torch.arange(8))
    assert torch.equal(torch.cat([half.train(step=3)[0][0] for half in halves]), tokens)


def test_validation_covers_the_text_evenly_on_all_ranks() -> None:
    """The first window starts at the beginning, the last one ends at the end, whoever has them."""
    windows = [_batches(rank=rank, num_ranks=2).validation(3) for rank in range(2)]
    assert windows[0][0][0][0, 0] == 0
    assert windows[1][-1][1][-1, -1] == 49


def test_decode_undoes_encode_and_never_fails() -> None:
    """A model may produce any bytes, also tokens that are no bytes."""
    assert decode(encode("grün")) == "grün"
    assert decode([255, 104, 105, 5000]) == "\N{REPLACEMENT CHARACTER}hi"


def _dealt(num_ranks: int, before: Dealing | None = None, **given: Any) -> Dealing:
    config = TrainConfig(model=ModelSettings(seq_len=64), **given)
    return Dealing.asked(config, num_ranks=num_ranks, before=before)


def test_a_global_batch_gives_the_accumulation_steps() -> None:
    """In sequences exactly; in tokens rounded to whole micro-steps; without either two steps."""
    assert _dealt(4, global_batch=64) == Dealing(batch_size=4, micro_steps=4, num_ranks=4)
    assert _dealt(4, global_batch_tokens=TokenCount(4000)) == Dealing(
        batch_size=4, micro_steps=4, num_ranks=4
    )
    assert _dealt(4) == Dealing(batch_size=4, micro_steps=2, num_ranks=4)
    with pytest.raises(
        SettingsError, match=r"multiple of 16 sequences \(batch_size 4 on 4 ranks\), found 24"
    ):
        _dealt(4, global_batch=24)
    with pytest.raises(SettingsError, match="global_batch_tokens: expected about 1,024 tokens or more"):
        _dealt(4, global_batch_tokens=TokenCount(100))


def test_a_resumed_run_keeps_the_batch_that_its_tokens_came_to() -> None:
    """Rounding on other ranks would give another number of sequences."""
    tokens = TokenCount(4000)
    before = _dealt(4, global_batch_tokens=tokens)
    after = _dealt(32, before, global_batch_tokens=tokens)
    assert after == Dealing(batch_size=2, micro_steps=1, num_ranks=32)
    assert after.num_sequences == before.num_sequences == 64
    assert _dealt(2, before, global_batch=64).micro_steps == 8
    with pytest.raises(SettingsError, match="expected 64 sequences per step as in the checkpoint"):
        _dealt(4, before, global_batch_tokens=TokenCount(16000))

"""Numbers and batches as people write them and read them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics.errors import SettingsError
from mics.utils import numbers
from mics.utils.global_batch import AskedBatch, GlobalBatch
from mics.utils.numbers import parse_count

POSITIVE = st.floats(1e-6, 1e15, allow_nan=False)


@pytest.mark.parametrize(
    ("function", "number", "text"),
    [
        (numbers.count, 1e11, "100 B"),
        (numbers.count, 20.17e9, "20.2 B"),
        (numbers.count, 1_048_576, "1.05 M"),
        (numbers.count, 999_999_999, "1 B"),
        (numbers.count, 999_600, "1 M"),
        (numbers.count, 12_345, "12,345"),
        (numbers.count, 1.06e12, "1.06 T"),
        (numbers.count, 4.2e15, "4,200 T"),
        (numbers.tokens, 3e11, "300 B tokens"),
        (numbers.seconds, 12, "12.0 s"),
        (numbers.seconds, 6.4, "6.40 s"),
        (numbers.seconds, 1250, "1,250 s"),
        (numbers.seconds, 0.0358, "35.8 ms"),
        (numbers.seconds, 0.9999, "1.00 s"),
        (numbers.seconds, 120e-6, "120 us"),
        (numbers.seconds, 0, "0 s"),
        (numbers.hours, 2000 * 3600, "2,000 h"),
        (numbers.hours, 12.5 * 3600, "12.5 h"),
        (numbers.days, 4.5 * 86400, "4.5 days"),
        (numbers.duration, 90, "90.0 s"),
        (numbers.duration, 45 * 60, "45 min"),
        (numbers.duration, 2.3 * 3600, "2.3 h"),
        (numbers.duration, 30 * 86400, "30.0 days"),
        (numbers.dollars, 1.2e6, "$1.2 M"),
        (numbers.dollars, 12_300, "$12,300"),
        (numbers.dollars, 4.2, "$4.20"),
        (numbers.dollars, 999_800, "$1.0 M"),
        (numbers.dollars, 123.4e6, "$123 M"),
        (numbers.percent, 0.4312, "43.1%"),
        (numbers.percent, 0, "0.0%"),
        (numbers.percent, 1.2e-5, "0.0012%"),
        (numbers.memory, 36 * 2**30, "36.0 GiB"),
        (numbers.memory, 2**29, "512 MiB"),
        (numbers.memory, 5 * 2**20, "5.00 MiB"),
        (numbers.volume, 0, "0 B"),
        (numbers.volume, 999.6, "1.00 kB"),
        (numbers.volume, 12_345_678, "12.3 MB"),
        (numbers.volume, 5e15, "5,000 TB"),
        (numbers.fixed, 0.0451, "0.0451"),
        (numbers.fixed, 999.7, "1,000"),
        (numbers.fixed, math.inf, "infinite"),
    ],
)
def test_numbers_are_written_as_people_do(function: Callable[[float], str], number: float, text: str) -> None:
    assert function(number) == text


@given(POSITIVE)
def test_there_is_never_an_exponent_and_three_digits_are_right(number: float) -> None:
    shown = numbers.fixed(number)
    assert "e" not in shown
    assert float(shown.replace(",", "")) == pytest.approx(number, rel=6e-3)
    for function in (
        numbers.count, numbers.seconds, numbers.duration, numbers.hours, numbers.dollars, numbers.percent,
        numbers.memory, numbers.volume,
    ):  # fmt: skip
        assert not any(f"{digit}e" in function(number) for digit in range(10)), function.__name__


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("1M", 1_000_000),
        ("1.5B", 1_500_000_000),
        ("4e6", 4_000_000),
        ("4_000_000", 4_000_000),
        ("4,000,000", 4_000_000),
        ("300 B", 300_000_000_000),
        ("1e12", 10**12),
        ("2T", 2 * 10**12),
        ("512k", 512_000),
        ("7", 7),
    ],
)
def test_counts_are_read_as_they_are_written(text: str, number: int) -> None:
    assert parse_count(text, setting="--tokens") == number


@pytest.mark.parametrize(
    "text", ["", "many", "1Mi", "-1", "0", "1.5", "inf", "nan", "1e999", "M", "1M tokens"]
)
def test_what_is_no_count_is_said(text: str) -> None:
    with pytest.raises(SettingsError, match=r"--tokens: expected a whole number above 0, such as 1M.*found"):
        parse_count(text, setting="--tokens")


@given(st.integers(1, 10**15))
def test_every_way_to_write_a_whole_number_is_read(number: int) -> None:
    assert {parse_count(text, setting="x") for text in (f"{number}", f"{number:_}", f"{number:,}")} == {
        number
    }


@given(st.integers(1, 10**10), st.integers(1, 8192), st.integers(1, 4096))
def test_tokens_become_the_nearest_sequences(tokens: int, seq_len: int, ranks: int) -> None:
    asked = AskedBatch(tokens=tokens)
    if 2 * tokens < seq_len * ranks:
        with pytest.raises(SettingsError, match="--global-batch-tokens: expected about"):
            asked.fit(seq_len=seq_len, multiple=ranks, because="ranks")
    elif 2 * tokens > seq_len * ranks:
        found = asked.fit(seq_len=seq_len, multiple=ranks, because="ranks")
        assert found.num_sequences % ranks == 0
        assert 2 * abs(found.num_tokens - tokens) <= seq_len * ranks


def test_a_batch_says_how_it_was_rounded() -> None:
    assert str(GlobalBatch(num_sequences=512, seq_len=2048)) == (
        "global batch 1.05 M tokens = 512 sequences of 2,048"
    )
    rounded = AskedBatch(tokens=1_000_000).fit(seq_len=2048, multiple=64, because="64 GPUs")
    assert str(rounded).endswith("= 512 sequences of 2,048 (1 M rounded by +4.9%)")
    exact = AskedBatch(tokens=2**20).fit(seq_len=2048, multiple=64, because="64 GPUs")
    assert "rounded" not in str(exact)


def test_sequences_are_taken_as_given_or_refused() -> None:
    assert AskedBatch(sequences=96).fit(seq_len=8, multiple=32, because="32 GPUs").num_sequences == 96
    with pytest.raises(
        SettingsError, match=r"multiple of 32 sequences \(32 GPUs\), found 100; the nearest is 96"
    ):
        AskedBatch(sequences=100).fit(seq_len=8, multiple=32, because="32 GPUs")


def test_a_batch_is_given_once() -> None:
    with pytest.raises(
        SettingsError, match=r"expected one of them, found both \(8 sequences and 1 M tokens\)"
    ):
        AskedBatch(sequences=8, tokens=1_000_000)
    with pytest.raises(SettingsError, match="global_batch_tokens: expected a number above 0, found 0"):
        AskedBatch(tokens=0, setting="global_batch")
    assert not AskedBatch().given

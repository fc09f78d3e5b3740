"""Which sequence comes when: permutations, mixtures, windows over shards."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mics.data import Mixture, Source
from mics.data.hashing import draw, mix
from mics.data.packing import CausalPacking
from mics.data.permutation import permute
from mics.errors import SettingsError
from tests.data.folders import counting, read


def _mixture(*sizes: int, weights: tuple[float, ...] = (), seed: int = 0) -> Mixture:
    """Sources of so many sequences of four tokens."""
    sources = [
        Source(name=f"source {number}", stream=counting(4 * size + 1)) for number, size in enumerate(sizes)
    ]
    return Mixture(sources, CausalPacking(seq_len=4), weights=weights, seed=seed)


def test_hashes_are_the_published_ones() -> None:
    """SplitMix64 from the state 0 gives these numbers in every language, so data is the same everywhere."""
    first = mix(np.array([0], dtype=np.uint64))
    second = mix(np.array([0x9E3779B97F4A7C15], dtype=np.uint64))
    assert [int(first[0]), int(second[0])] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 3000), seed=st.integers(0, 2**64 - 1))
def test_a_permutation_has_every_place_once(size: int, seed: int) -> None:
    assert sorted(permute(np.arange(size), size, seed=seed).tolist()) == list(range(size))


def test_a_permutation_shuffles() -> None:
    """Other seeds give other orders, and neighbours are as far apart as in a random order: a third of it."""
    size = 10_000
    orders = [permute(np.arange(size), size, seed=seed) for seed in (1, 2)]
    assert (orders[0] == orders[1]).sum() < 10
    distance = np.abs(np.diff(orders[0])).mean() / size
    assert distance == pytest.approx(1 / 3, abs=0.02)


def test_a_permutation_of_a_place_does_not_need_the_others() -> None:
    size = 10**12
    places = np.array([0, 7, size - 1])
    together = permute(places, size, seed=3)
    assert [int(permute(places[[k]], size, seed=3)[0]) for k in range(3)] == together.tolist()


@settings(max_examples=25, deadline=None)
@given(
    weights=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=5),
    seed=st.integers(0, 1000),
    num_blocks=st.integers(1, 4),
)
def test_a_mixture_is_exact_after_every_block(weights: list[float], seed: int, num_blocks: int) -> None:
    """Counts are within one sequence of the weights, and every sequence of a source is taken in its turn."""
    mixture = _mixture(*[50] * len(weights), weights=tuple(weights), seed=seed)
    source, taken = mixture.choose(np.arange(num_blocks * mixture.block))
    for number, weight in enumerate(weights):
        mine = taken[source == number]
        assert len(mine) == pytest.approx(weight / sum(weights) * num_blocks * mixture.block, abs=1.01)
        assert sorted(mine.tolist()) == list(range(len(mine)))


def test_weights_whose_sum_is_infinite_are_shares_too() -> None:
    places = np.arange(50)
    large, small = (_mixture(30, 30, weights=each).choose(places) for each in ((1e308, 1.5e308), (1, 1.5)))
    assert all(np.array_equal(*pair) for pair in zip(large, small, strict=True))


def test_without_weights_every_sequence_comes_once_an_epoch() -> None:
    """And in another order in the next one."""
    mixture = _mixture(96, 32)
    epochs = [mixture.batch(np.arange(first, first + 128)).tokens[:, 0].tolist() for first in (0, 128)]
    expected = sorted([*range(0, 4 * 96, 4), *range(0, 4 * 32, 4)])
    assert sorted(epochs[0]) == sorted(epochs[1]) == expected
    assert epochs[0] != epochs[1]


def test_a_batch_does_not_depend_on_what_is_asked_with_it() -> None:
    """So ranks may divide the indices in any way."""
    mixture = _mixture(100, 30, 7, weights=(1, 2, 0.1), seed=5)
    whole = mixture.batch(np.arange(200)).tokens
    parts = [mixture.batch(np.array(part)).tokens for part in np.array_split(np.arange(200), 7)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert not np.array_equal(
        _mixture(100, 30, 7, weights=(1, 2, 0.1), seed=6).batch(np.arange(200)).tokens, whole
    )


def test_windows_reach_over_shards() -> None:
    stream = counting(100, cuts=(10, 11, 50))
    assert len(stream) == 100
    assert read(stream, [5, 49, 90], 10).tolist() == [list(range(start, start + 10)) for start in (5, 49, 90)]


def test_targets_are_the_next_tokens_and_windows_cover_the_stream() -> None:
    packing = CausalPacking(seq_len=8)
    assert [packing.num_sequences(count) for count in (8, 9, 16, 17)] == [0, 1, 1, 2]
    mixture = _mixture(16)
    packed = mixture.batch(np.arange(16))
    assert np.array_equal(packed.targets, packed.tokens + 1)
    assert sorted(packed.tokens.reshape(-1).tolist()) == list(range(64))


def test_what_cannot_be_mixed_is_named() -> None:
    with pytest.raises(
        SettingsError, match=r"source 1: expected 5 tokens or more for one sequence of 4, found 1"
    ):
        _mixture(3, 0)
    with pytest.raises(SettingsError, match=r"data\.weights: expected shares .* found 0\.0000000.* source 2"):
        _mixture(3, 3, weights=(1, 1e-9))


def test_draws_depend_on_every_part() -> None:
    assert len({int(draw(*parts)[0]) for parts in ((1, 2), (2, 1), (0, 1, 2), (1, 2, 0), (1,))}) == 5

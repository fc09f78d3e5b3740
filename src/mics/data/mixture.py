"""Which sequence of which source is the i-th of a run: a function of i, the seed and the weights."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from mics.data.hashing import draw
from mics.data.packing import PackedSequences, Packing
from mics.data.permutation import permute
from mics.data.token_data import TokenStream
from mics.errors import SettingsError

_SCALE: Final = 1 << 32  # weights are whole numbers of this, so that shares are exact
_LEAST_PER_BLOCK: Final = 4
_SMALLEST_BLOCK: Final = 16
_LARGEST_BLOCK: Final = 1 << 20
_CHOICE, _EPOCH, _MASK = 1, 2, 3  # what a hash is drawn for


@dataclass(frozen=True, kw_only=True)
class Source:
    """One split of one folder, and what error messages call it."""

    name: str
    stream: TokenStream


class Mixture:
    """Sequences of several sources by weight.

    The indices of a run are cut into blocks. Every block takes as many sequences of each source as its weight
    says: after any number of whole blocks the counts are exact to one sequence. Inside a block the order is
    permuted. The k-th sequence that is taken from a source is its sequence ``k % n``, permuted anew in every
    epoch ``k // n``. So a source is read once before it is read again, but for one block at the turn.
    """

    def __init__(
        self, sources: Sequence[Source], packing: Packing, *, weights: Sequence[float] = (), seed: int
    ) -> None:
        self._sources = tuple(sources)
        self._packing = packing
        self._seed = seed
        self.sizes = tuple(packing.num_sequences(len(source.stream)) for source in self._sources)
        for source, size in zip(self._sources, self.sizes, strict=True):
            if size < 1:
                raise SettingsError(
                    f"{source.name}: expected {packing.window:,} tokens or more for one sequence of "
                    f"{packing.seq_len:,}, found {len(source.stream):,}; prepare more text, or use a shorter "
                    "seq_len"
                )
        self._bounds = _cumulative(weights or self.sizes)
        shares = np.diff(self._bounds) / _SCALE
        self.block = min(
            _LARGEST_BLOCK, max(_SMALLEST_BLOCK, 1 << math.ceil(math.log2(_LEAST_PER_BLOCK / min(shares))))
        )

    @property
    def num_sequences(self) -> int:
        """Of all sources, each once."""
        return sum(self.sizes)

    def choose(self, indices: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """For each index of the run: which source, and how many sequences were taken from it before."""
        if len(self._sources) == 1:
            return np.zeros_like(indices), indices
        source, taken = np.empty_like(indices), np.empty_like(indices)
        blocks, places = np.divmod(indices, self.block)
        for block in np.unique(blocks):
            here = blocks == block
            before, after = (self._counts(int(each)) for each in (block, block + 1))
            edges = np.cumsum([0, *(late - early for early, late in zip(before, after, strict=True))])
            slots = permute(places[here], self.block, seed=draw(self._seed, _CHOICE, int(block)))
            found = np.searchsorted(edges, slots, side="right") - 1
            source[here] = found
            taken[here] = np.asarray(before, dtype=np.int64)[found] + slots - edges[found]
        return source, taken

    def batch(self, indices: NDArray[np.int64]) -> PackedSequences:
        """The sequences of a run that have these indices."""
        rows = np.empty((len(indices), self._packing.window), dtype=np.int64)
        keys = np.empty(len(indices), dtype=np.uint64)
        source, taken = self.choose(indices)
        for number, each in enumerate(self._sources):
            mine = np.flatnonzero(source == number)
            if mine.size == 0:
                continue
            epochs, places = np.divmod(taken[mine], self.sizes[number])
            seeds = draw(self._seed, _EPOCH, number, epochs)
            sequences = permute(places, self.sizes[number], seed=seeds)
            each.stream.read(sequences * self._packing.stride, into=rows, rows=mine)
            keys[mine] = draw(self._seed, _MASK, number, epochs, sequences)
        return self._packing.pack(rows, keys)

    def _counts(self, block: int) -> list[int]:
        """Sequences taken from each source in all blocks before this one."""
        ends = [(bound * block * self.block + _SCALE // 2) // _SCALE for bound in self._bounds]
        return [late - early for early, late in itertools.pairwise(ends)]


def _cumulative(weights: Sequence[float]) -> list[int]:
    """0, the first weight's share of the scale, the first two's, ..., the scale."""
    _, exponent = math.frexp(max(weights))
    weights = [math.ldexp(weight, -exponent) for weight in weights]  # exact, and no sum of them is infinite
    total = math.fsum(weights)
    bounds = [round(math.fsum(weights[:number]) / total * _SCALE) for number in range(len(weights) + 1)]
    least = _SCALE * _LEAST_PER_BLOCK // _LARGEST_BLOCK
    for number, (early, late) in enumerate(itertools.pairwise(bounds)):
        if late - early < least:
            raise SettingsError(
                f"data.weights: expected shares of {least / _SCALE:.6f} or more, found "
                f"{weights[number] / total:.9f} for source {number + 1}; leave that source out"
            )
    return bounds

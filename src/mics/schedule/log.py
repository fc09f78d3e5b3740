"""Which units this rank gathered and reduced since the last boundary: all ranks must do the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Final

from mics.comm.journal import Action, different_ways
from mics.sharding.spec import UnitSpec

GATHERED: Final = 0
REDUCED: Final = 1
PREFETCHED: Final = 2
_NUM_KINDS: Final = 4
# Numbers that fit a float32 exactly, so that the digest can travel with other small floats.
_DIGEST_MODULUS: Final = 1 << 24
_MAX_ENTRIES: Final = 4096  # a long evaluation goes on without being written down
_END: Final = -1


class StepLog:
    """A digest that ranks compare at each boundary, and what it was made of, for when it differs."""

    def __init__(self, specs: Iterable[UnitSpec]) -> None:
        self._labels = {spec.index: spec.label for spec in specs}
        self._digest = 0
        self._entries: list[int] = []

    def note(self, index: int, kind: int) -> None:
        entry = _NUM_KINDS * index + kind
        self._digest = (self._digest * 1_000_003 + entry + 1) % _DIGEST_MODULUS
        if len(self._entries) < _MAX_ENTRIES:
            self._entries.append(entry)

    def take(self) -> tuple[int, list[int]]:
        """Digest and entries, which begin anew."""
        taken = self._digest, self._entries
        self._digest, self._entries = 0, []
        return taken

    def first_difference(self, logs: Mapping[tuple[int, ...], Sequence[int]]) -> str:
        """What each of several groups of ranks did at the first place where their entries differ."""
        for entries in zip_longest(*logs.values(), fillvalue=_END):
            if len(set(entries)) > 1:
                done: dict[Action, list[int]] = {}
                for ranks, entry in zip(logs, entries, strict=True):
                    done.setdefault(self._describe(entry), []).extend(ranks)
                if len(done) > 1:
                    return different_ways(done)
        return ""

    def _describe(self, entry: int) -> Action:
        if entry == _END:
            return "step", "the optimizer step"
        index, kind = divmod(entry, _NUM_KINDS)
        return "reduce-scatter" if kind == REDUCED else "all-gather", self._labels[index]

"""Other systems beside ours, each at its own best: the cells of a table, for the terminal and the page."""

from __future__ import annotations

from typing import Final

from mics.planner.answer import Answer
from mics.planner.search import Choice, Peer, Shortage
from mics.planner.sweep import setting_in_words
from mics.utils.numbers import fixed, in_gib, times

TITLE: Final = "systems, each at the setting that is best for it"
HEADS: Final = ("system", "best setting", "s/step", "times", "GiB", "same setting")
KEY: Final = (
    "times: of our step; same setting: our micro-batch and activations, which may not be best for it, and "
    "our p for hsdp (the others span all GPUs)"
)


def peer_cells(found: Answer) -> list[list[str]]:
    """A row for each system, ours first."""
    ours = found.best.step_seconds
    rows = [["mics", *_of(found.best, ours), times(1.0)]]
    return rows + [[name, *_best(peer, ours), _same(peer, ours)] for name, peer in found.peers.items()]


def _of(choice: Choice, ours: float) -> list[str]:
    seconds = choice.step_seconds
    return [setting_in_words(choice), fixed(seconds), times(seconds / ours), in_gib(choice.memory.peak)]


def _best(peer: Peer, ours: float) -> list[str]:
    if peer.choice is None:
        return [f"does not fit: needs {peer.shortage}", "", "", ""]
    return _of(peer.choice, ours)


def _same(peer: Peer, ours: float) -> str:
    if isinstance(peer.same, Shortage):
        return "does not fit"
    return times(peer.same.step_seconds / ours)

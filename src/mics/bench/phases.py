"""Which part of a training step is under way: loops say so, and whoever records a step listens."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

PhaseKind = Literal["forward", "backward", "optimizer"]


@dataclass(frozen=True)
class Phase:
    """It lasts until the next one begins."""

    kind: PhaseKind
    micro_batch: int = 0
    """Counts from 0; of the optimizer: 0."""

    def __str__(self) -> str:
        return self.kind if self.kind == "optimizer" else f"{self.kind} {self.micro_batch + 1}"


_listener: Callable[[Phase], None] | None = None


def begin(kind: PhaseKind, micro_batch: int = 0) -> None:
    """Say that a phase begins. Costs nothing while nobody listens."""
    if _listener is not None:
        _listener(Phase(kind, micro_batch))


@contextmanager
def listening(listener: Callable[[Phase], None]) -> Iterator[None]:
    """Inside, ``listener`` is told of every phase as it begins."""
    global _listener
    before, _listener = _listener, listener
    try:
        yield
    finally:
        _listener = before

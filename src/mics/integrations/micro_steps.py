"""Micro-steps of a loop that is not ours: it says of each one whether the optimizer follows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn

from mics.engine import engines_of


@contextmanager
def micro_step(model: nn.Module, *, last: bool) -> Iterator[None]:
    """Run one forward and backward, as ``mics.microsteps`` does for a whole step."""
    parts = [engine.progress for engine in engines_of(model)]
    for progress in parts:
        progress.announce(last=last)
    try:
        yield
    finally:
        for progress in parts:
            progress.announce(last=None)

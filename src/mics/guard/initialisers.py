"""``torch.nn.init`` on pieces: refused, as each rank would draw numbers of its own for another shape."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch.nn as nn

from mics.guard.rules import refusal
from mics.guard.tensors import pieces_in

P = ParamSpec("P")
R = TypeVar("R")

_CONSTANTS = {"zeros_", "ones_", "constant_"}  # initialisers that do not look at shapes


def guard_initialisers() -> None:
    """Have ``torch.nn.init`` refuse pieces: some of it skips empty ones, or divides by their rows."""
    for name, initialise in list(vars(nn.init).items()):
        is_public = name.endswith("_") and not name.startswith("_") and callable(initialise)
        if is_public and name not in _CONSTANTS and not hasattr(initialise, "__wrapped__"):
            setattr(nn.init, name, _of_whole(initialise))


def _of_whole(initialise: Callable[P, R]) -> Callable[P, R]:
    @wraps(initialise)
    def checked(*args: P.args, **kwargs: P.kwargs) -> R:
        piece = next(pieces_in((args, kwargs)), None)
        if piece is not None and not piece.shard_layout.parts[0].alone:
            raise refusal(initialise.__name__, piece.shard_layout, "it has another shape than the whole")
        return initialise(*args, **kwargs)

    return checked

"""The guard: what user code sees of a sharded model is right, or it raises."""

from mics.guard.initialisers import guard_initialisers
from mics.guard.layout import Layout, Part, ShardOwner
from mics.guard.tensors import (
    HostTensor,
    ShardGrad,
    ShardParameter,
    ShardTensor,
    pieces_in,
    plainly,
    run_plainly,
    show_guarded,
    show_plain,
)
from mics.guard.watched import norms

__all__ = [
    "HostTensor",
    "Layout",
    "Part",
    "ShardGrad",
    "ShardOwner",
    "ShardParameter",
    "ShardTensor",
    "guard_initialisers",
    "norms",
    "pieces_in",
    "plainly",
    "run_plainly",
    "show_guarded",
    "show_plain",
]

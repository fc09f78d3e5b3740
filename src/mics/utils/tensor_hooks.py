"""Hooks on tensors, in an order of our own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

Hook = Callable[[Tensor], Any]


def hooks_of(tensor: Tensor) -> list[Hook]:
    """What autograd calls when ``tensor`` has its gradient, in that order."""
    return list((tensor._backward_hooks or {}).values())


def hook_first(tensor: Tensor, hook: Hook) -> None:
    """Have ``hook`` called before those that ``tensor`` has already."""
    handle = tensor.register_hook(hook)
    hooks = tensor._backward_hooks
    assert hooks is not None  # it has one now
    for key in [key for key in hooks if key != handle.id]:
        hooks[key] = hooks.pop(key)  # autograd calls the oldest key first; handles still find theirs

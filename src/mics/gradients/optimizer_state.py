"""Optimizer state in one buffer for each of its entries.

Optimizers make a tensor for each parameter and entry when they first step, in the middle of whatever memory
training has left. Each entry's tensors are brought together once, after that step: as parameters and
gradients, optimizer state then is a few large pieces that never move.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mics.sharding.contiguous import Contiguous


def make_contiguous(optimizer: Optimizer, params: Iterable[nn.Parameter]) -> None:
    """Bring the state of ``params`` together, entry by entry: one of them exists twice for a moment."""
    entries: dict[str, list[tuple[nn.Parameter, Tensor]]] = {}
    for param in params:
        for key, value in optimizer.state.get(param, {}).items():
            if isinstance(value, Tensor) and value.shape == param.shape and _stands_alone(value):
                entries.setdefault(key, []).append((param, value))
    on_gpu = any(value.is_cuda for found in entries.values() for _, value in found)
    for key, found in entries.items():
        if len(found) == 1:
            continue
        store = Contiguous(found[0][1].device)
        parts = [(param, value, store.reserve(value.dtype, value.numel())) for param, value in found]
        found.clear()
        while parts:
            param, value, part = parts.pop()
            home = part.tensor().view(value.shape)
            optimizer.state[param][key] = home.copy_(value)
    if on_gpu:
        torch.cuda.empty_cache()  # once: the pieces that are empty now would be in the way of larger ones


def _stands_alone(value: Tensor) -> bool:
    """Whether nobody else can have a view of it."""
    return value.is_contiguous() and value.untyped_storage().nbytes() == value.numel() * value.element_size()

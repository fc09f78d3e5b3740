"""Module buffers: equal on all ranks, as under DDP, at no cost while nobody writes to them."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm import Collectives


class BufferSync:
    """Brings rank 0's buffers to all ranks before a forward, when one has been written since.

    DDP sends every buffer in every forward. Masks and tables never change; running statistics do, on
    every rank in the same forwards, so the ranks agree on which buffers to send without asking.
    """

    def __init__(self, model: nn.Module, world: Collectives) -> None:
        self._model = model
        self._world = world
        self._seen: dict[str, tuple[int, int]] = {}

    def __call__(self) -> None:
        if self._world.size == 1:
            return
        changed = [
            buffer
            for name, buffer in self._model.named_buffers()
            if self._seen.get(name) != (id(buffer), buffer._version)
        ]
        if changed:
            broadcast_together(changed, self._world)
            self.mark()

    def mark(self) -> None:
        """Take the buffers as they are for equal."""
        self._seen = {name: (id(b), b._version) for name, b in self._model.named_buffers()}


def broadcast_together(tensors: list[Tensor], world: Collectives) -> None:
    """Give every rank the tensors of rank 0: one broadcast for each format."""
    with torch.no_grad():
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype is dtype]
            packed = torch.cat([tensor.reshape(-1) for tensor in same])
            world.broadcast(packed, "the module's buffers")
            for tensor, values in zip(same, torch.split(packed, [t.numel() for t in same]), strict=True):
                tensor.copy_(values.view(tensor.shape))

"""Module buffers: equal on all ranks, as under DDP, at no cost while nobody writes to them."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm import Collectives
from mics.comm.lanes import Lanes, Work


class BufferSync:
    """Brings rank 0's buffers to all ranks before a forward, when one has been written since.

    DDP sends every buffer in every forward. Masks and tables never change; running statistics do, on
    every rank in the same forwards, so the ranks agree on which buffers to send without asking.
    """

    def __init__(self, model: nn.Module, world: Collectives, lanes: Lanes) -> None:
        self._world = world
        self._lanes = lanes
        self._model = model
        self._modules: list[nn.Module] = []
        self._norms: list[nn.Module] = []
        # Tensors themselves, not their ids: an id may come back on some ranks only.
        self._seen: dict[int, list[tuple[Tensor, int]]] = {}
        self._trained: set[int] = set()  # norms that the latest forward wrote to
        self.look_again()
        self._mark()

    def look_again(self) -> None:
        """Modules were put into the model, or taken out."""
        self._modules = [module for module in self._model.modules() if module._buffers]
        self._norms = [module for module in self._modules if keeps_statistics(module)]

    def __call__(self) -> None:
        if self._world.size == 1 or not self._modules:
            return
        written = [
            module
            for module in self._modules
            if id(module) in self._trained or not _unchanged(module, self._seen.get(id(module), []))
        ]
        if written:
            buffers = [buffer for module in written for buffer in _to_write(module)]
            here = self._lanes.here(Work("world", "broadcast", "the module's buffers"))
            here.submit(partial(broadcast_together, buffers, self._world))
            self._mark()
        # torch's kernels write running statistics without raising the buffers' version.
        self._trained = {id(norm) for norm in self._norms if norm.training}

    def _mark(self) -> None:
        self._seen = {id(module): _versions(module) for module in self._modules}


def keeps_statistics(module: nn.Module) -> bool:
    """Whether a norm module writes running statistics to its buffers."""
    return isinstance(module, nn.modules.batchnorm._NormBase) and module.track_running_stats


def _buffers(module: nn.Module) -> list[Tensor]:
    return [buffer for buffer in module._buffers.values() if buffer is not None]


def _to_write(module: nn.Module) -> list[Tensor]:
    """The buffers, to receive values. Those of a norm as torch's kernels write them: versions stay.

    Autograd saves running statistics, also where backward does not read them: several forwards may come
    before it, and evaluations.
    """
    return [buffer.data for buffer in _buffers(module)] if keeps_statistics(module) else _buffers(module)


def _versions(module: nn.Module) -> list[tuple[Tensor, int]]:
    return [(buffer, _version(buffer)) for buffer in _buffers(module)]


def _unchanged(module: nn.Module, seen: list[tuple[Tensor, int]]) -> bool:
    now = _versions(module)
    return len(now) == len(seen) and all(a is b and v == w for (a, v), (b, w) in zip(now, seen, strict=True))


def _version(buffer: Tensor) -> int:
    return 0 if buffer.is_inference() else buffer._version  # inference tensors keep no version


def broadcast_together(tensors: list[Tensor], world: Collectives) -> None:
    """Give every rank the tensors of rank 0: one broadcast for each format."""
    with torch.no_grad():
        for dtype in sorted({tensor.dtype for tensor in tensors}, key=str):
            same = [tensor for tensor in tensors if tensor.dtype is dtype]
            packed = torch.cat([tensor.reshape(-1) for tensor in same])
            world.broadcast(packed, "the module's buffers")
            for tensor, values in zip(same, torch.split(packed, [t.numel() for t in same]), strict=True):
                tensor.copy_(values.view(tensor.shape))

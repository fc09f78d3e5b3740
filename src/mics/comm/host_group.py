"""All ranks, for objects in host memory: what checkpoints are agreed on with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from pickle import dumps, loads
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed import BroadcastOptions, ProcessGroupGloo
from torch.distributed.distributed_c10d import Store

_GATHER_TAG: Final = 1


class HostGroup:
    """Every rank's objects, gathered over gloo, apart from the groups of the training.

    It is not among the groups that torch keeps: ``destroy_process_group`` leaves it alone, so what was begun
    in the background is finished after that. Without a ``backend`` there is one rank.
    """

    def __init__(self, backend: Any = None, *, rank: int = 0, size: int = 1) -> None:
        self._backend = backend
        self.rank = rank
        self.size = size

    @classmethod
    def join(cls, store: Store, *, rank: int, size: int, timeout: timedelta) -> HostGroup:
        """The group of all ranks; every rank calls it."""
        return cls(ProcessGroupGloo(store, rank, size, timeout), rank=rank, size=size)

    def all_gather(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        if self._backend is None:
            return [value]
        sizes, own = self._announced(value)
        places = _places(sizes)
        self._backend.allgather(places, own).wait()
        return _objects(places, sizes)

    def gather(self, value: Any) -> list[Any] | None:
        """``value`` of every rank, on the first; None on the others."""
        if self._backend is None:
            return [value]
        content = bytearray(dumps(value))
        sizes = self._sizes(len(content))
        # Each rank sends what it has: to pad all to the longest would take as much from every rank.
        if self.rank != 0:
            self._backend.send([torch.frombuffer(content, dtype=torch.uint8)], 0, _GATHER_TAG).wait()
            return None
        places = [torch.empty(size, dtype=torch.uint8, device="cpu") for size in sizes]
        arriving = [self._backend.recv([places[rank]], rank, _GATHER_TAG) for rank in range(1, self.size)]
        for each in arriving:
            each.wait()
        return [value, *_objects(places[1:], sizes[1:])]

    def broadcast(self, value: Any) -> Any:
        """``value`` of the first rank, on all."""
        if self._backend is None:
            return value
        content = bytearray(dumps(value) if self.rank == 0 else b"")
        (size, *_) = self._sizes(len(content))
        place = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(
            size, dtype=torch.uint8, device="cpu"
        )  # fmt: skip
        options = BroadcastOptions()
        options.rootRank = 0
        self._backend.broadcast([place], options).wait()
        return value if self.rank == 0 else _objects([place], [size])[0]

    def _announced(self, value: Any) -> tuple[list[int], Tensor]:
        """How many bytes each rank's value has, and those of this rank's, with room for the longest."""
        assert self._backend is not None
        content = bytearray(dumps(value))
        sizes = self._sizes(len(content))
        content.extend(bytes(max(sizes) - len(content)))
        return sizes, torch.frombuffer(content, dtype=torch.uint8)

    def _sizes(self, nbytes: int) -> list[int]:
        """How many bytes each rank has."""
        counts = [torch.empty(1, dtype=torch.int64, device="cpu") for _ in range(self.size)]
        self._backend.allgather(counts, torch.tensor([nbytes], dtype=torch.int64, device="cpu")).wait()
        return [int(each) for each in counts]


def _places(sizes: Sequence[int]) -> list[Tensor]:
    return [torch.empty(max(sizes), dtype=torch.uint8, device="cpu") for _ in sizes]


def _objects(places: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
    return [loads(place.numpy()[:size].tobytes()) for place, size in zip(places, sizes, strict=True)]

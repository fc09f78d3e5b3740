"""Which elements of a whole tensor this rank's piece holds, and who answers for the whole."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import Tensor

from mics.comm.protocol import Collectives


@dataclass(frozen=True, kw_only=True)
class Part:
    """A run of one tensor's elements, in flat order: ``[start, stop)`` of ``shape``."""

    name: str = field(compare=False)  # of the parameter
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    stop: int
    counts: bool  # whether this rank counts these elements: replicas of them must not count twice
    alone: bool = False  # this rank is the world: its piece is the whole tensor, in its own shape
    padding: int = 0  # elements behind them that nobody counts

    @property
    def whole_numel(self) -> int:
        return math.prod(self.shape)

    @property
    def local_shape(self) -> tuple[int, ...]:
        """``[n, 1, ...]``: as many dims as the whole tensor has, and one at least."""
        if self.alone:
            return self.shape
        return (self.stop - self.start + self.padding, *[1] * (len(self.shape) - 1))


@dataclass(frozen=True)
class Layout:
    """The parts that a piece consists of: one, or several that were concatenated.

    Two pieces of equal layout hold the same elements, so an elementwise operation on both is exact.
    """

    parts: tuple[Part, ...]

    @cached_property
    def whole_numel(self) -> int:
        return sum(part.whole_numel for part in self.parts)

    @cached_property
    def local_numel(self) -> int:
        return sum(part.stop - part.start for part in self.parts)

    @cached_property
    def padding(self) -> int:
        return self.parts[-1].padding

    def padded(self, padding: int) -> Layout:
        """The same elements of one tensor, with ``padding`` behind them."""
        return Layout((replace(self.parts[0], padding=padding),))

    @cached_property
    def counts(self) -> bool:
        return self.parts[0].counts

    @property
    def whole_shape(self) -> tuple[int, ...]:
        return self.parts[0].shape if len(self.parts) == 1 else (self.whole_numel,)

    def is_whole(self, tensor: Tensor) -> bool:
        """Whether a plain tensor has all elements of the one tensor that this is a part of."""
        return len(self.parts) == 1 and tuple(tensor.shape) == self.parts[0].shape

    def own_part_of(self, whole: Tensor) -> Tensor:
        """This rank's elements of a whole tensor, in the shape of a piece."""
        (part,) = self.parts
        return whole.reshape(-1)[part.start : part.stop].view(part.local_shape)

    def keeps(self, shape: tuple[int, ...]) -> bool:
        """Whether a piece of this shape still has its elements where a reduction over all dims finds them."""
        flat = (self.local_numel + self.padding,)
        return shape == flat or (len(self.parts) == 1 and shape == self.parts[0].local_shape)

    @property
    def label(self) -> str:
        first = self.parts[0].name
        return repr(first) if len(self.parts) == 1 else f"{first!r} and {len(self.parts) - 1} more"


@dataclass(eq=False, kw_only=True)
class ShardOwner:
    """What a guarded piece asks its model for. One for each sharded model."""

    members: Collectives  # of all ranks that hold pieces
    device: torch.device  # where these collectives run
    gradients_needed: list[Callable[[], None]] = field(default_factory=list)
    host_needed: list[Callable[[], None]] = field(default_factory=list)
    gradient_came: list[Callable[[str, Tensor], None]] = field(default_factory=list)

    @property
    def size(self) -> int:
        return self.members.size

    def synchronize(self) -> None:
        """Somebody looks at gradients: have them summed over all ranks."""
        for hear in self.gradients_needed:
            hear()

    def settle_host(self) -> None:
        """Somebody looks at values in host memory: have what is on its way arrive."""
        for hear in self.host_needed:
            hear()

    def take_gradient(self, name: str, gradient: Tensor) -> None:
        """A backward has come to this rank's piece of a parameter, given by name."""
        assert self.gradient_came, f"{name}: nobody takes gradients of shards"
        for hear in self.gradient_came:
            hear(name, gradient)

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        """Sum (or maximum) over all ranks that hold pieces, in place. ``p.cpu()`` is a piece too."""
        here = tensor.to(self.device)
        self.members.all_reduce(here, label, maximum=maximum)
        if here is not tensor:
            tensor.copy_(here)

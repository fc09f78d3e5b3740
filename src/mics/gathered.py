"""The memory of one unit's gathered parameters: its own, or a home in the arena."""

from __future__ import annotations

import torch
from torch import Tensor

from mics.layout import UnitLayout


class GatheredMemory:
    """Where the full parameters of a unit lie while it is gathered. It starts with memory of its own.

    Both places keep their address, or their storage, for good. Tensors that autograd saved in a forward point
    at the place of that forward: its backward must gather there again.
    """

    def __init__(
        self, layout: UnitLayout, dtype: torch.dtype, device: torch.device, *, whole: Tensor | None
    ) -> None:
        self._layout = layout
        # With one rank a group its shard is the whole unit: nothing to gather, nothing to allocate.
        self._own = torch.empty(layout.numel, dtype=dtype, device=device) if whole is None else whole
        self.is_own = whole is None
        self.nbytes = layout.numel * dtype.itemsize
        self._own_views = self._views_of(self._own)  # made while it has memory
        self._home: Tensor | None = None
        self._home_views: list[Tensor] = []
        self._neighbours: list[GatheredMemory] = []
        self.at_home = False  # which place is used
        self._lives_at_home = False  # the home is taken

    @property
    def flat(self) -> Tensor:
        """The gathered parameters, [numel]; memory only between acquire and release."""
        if not self.at_home:
            return self._own
        assert self._home is not None
        return self._home

    @property
    def has_home(self) -> bool:
        return self._home is not None

    def views(self) -> list[Tensor]:
        """Each parameter's place in ``flat``."""
        return self._home_views if self.at_home else self._own_views

    @property
    def home_is_free(self) -> bool:
        """Whether nobody else is at home there."""
        return not any(neighbour._lives_at_home for neighbour in self._neighbours)

    @property
    def is_free(self) -> bool:
        """Whether nobody else is in the place that is used."""
        return not self.at_home or self.home_is_free

    def acquire(self) -> None:
        """Have memory at ``flat``."""
        if self.at_home:
            assert self.is_free, "two units at one home"
            self._lives_at_home = True
        elif self.is_own:
            self._own.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        """Let others have the memory."""
        if self.at_home:
            self._lives_at_home = False
        elif self.is_own:
            self._own.untyped_storage().resize_(0)

    def move_in(self, home: Tensor, neighbours: list[GatheredMemory]) -> None:
        """Have a home (bytes), which overlaps the homes of ``neighbours``, and use it."""
        self._home = home.view(self._own.dtype)[: self._layout.numel]
        self._home_views = self._views_of(self._home)
        self._neighbours = neighbours
        self.at_home = True

    def move_out(self) -> None:
        """Have no home any more."""
        self._home, self._home_views, self._neighbours, self.at_home = None, [], [], False

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        # ``.data``: version counters of their own. Gathering writes through ``flat``, and must not look to
        # autograd like an edit of what it saved.
        return [flat[slot.start : slot.stop].view(slot.shape).data for slot in self._layout.slots]

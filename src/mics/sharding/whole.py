"""One unit's whole parameters, and their memory: its own, or a home in the arena."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn as nn
from torch import Tensor

from mics.errors import MicsError
from mics.sharding.float8 import Float8Scales, memory_behind, move_weight, whole_weight
from mics.sharding.spec import UnitSpec


class HomeSegment:
    """A part of the arena: memory in which several units have their homes.

    One that is freed while unused has memory only while a unit is gathered there. Its storage stays the same,
    so that tensors that autograd saved find it again; its address need not.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.memory = torch.empty(nbytes, dtype=torch.uint8, device=device)  # [nbytes]; gathers write to it
        self.is_freed = False
        self._num_gathered = 0  # units that are there

    def enter(self) -> None:
        """A unit is about to be gathered there."""
        storage = self.memory.untyped_storage()
        if not storage.nbytes():
            storage.resize_(self.memory.numel())
        self._num_gathered += 1

    def leave(self) -> None:
        """A unit is resharded."""
        self._num_gathered -= 1
        self.free_if_unused()

    def free_if_unused(self) -> None:
        """Let others have the memory, if they may and no unit is there."""
        if self.is_freed and self._num_gathered == 0:
            self.memory.untyped_storage().resize_(0)


class WholeParameters:
    """The whole parameters of a unit, and where they lie while it is gathered.

    They begin with memory of their own, and may be given a home. Both places keep their address, or their
    storage, for good. Tensors that autograd saved in a forward point at the place of that forward: its
    backward must gather there again.
    """

    def __init__(
        self,
        spec: UnitSpec,
        device: torch.device,
        *,
        given: Tensor | None,
        scales: Float8Scales | None = None,
    ) -> None:
        self._spec = spec
        self.nbytes = spec.gathered_nbytes
        # With one rank a group its shard is the whole unit, and ``given``: nothing to gather or to allocate.
        self.is_own = given is None
        if given is None:
            given = torch.empty(spec.layout.numel, dtype=spec.param_dtype, device=device)
        self._own = given
        self._own_views = self._views_of(self._own)  # made while it has memory
        self._home: Tensor | None = None
        self._home_views: list[Tensor] = []
        self._neighbours: list[WholeParameters] = []
        self._segment: HomeSegment | None = None  # that the home is in
        self.home_number = 0  # of the planning that gave the home; 0: none has
        self.at_home = False  # which place is used
        self._lives_at_home = False  # the home is taken
        self.params = self._make_params(scales)
        self.release()

    # -- memory -------------------------------------------------------------------------------------

    @property
    def flat(self) -> Tensor:
        """All of them, [numel]; memory only between acquire and release."""
        if not self.at_home:
            return self._own
        assert self._home is not None
        return self._home

    def acquire(self) -> None:
        """Have memory at ``flat``."""
        if self.at_home:
            assert self.is_free and self._segment is not None, "two units at one home"
            self._segment.enter()  # which may run out of memory
            self._lives_at_home = True
        elif self.is_own:
            self._own.untyped_storage().resize_(self.nbytes)

    def release(self) -> None:
        """Let others have the memory."""
        if self.at_home:
            assert self._segment is not None
            self._lives_at_home = False
            self._segment.leave()
        elif self.is_own:
            self._own.untyped_storage().resize_(0)

    def holds(self, tensor: Tensor) -> bool:
        """Whether ``tensor``, which has memory, is part of the whole parameters."""
        return memory_behind(tensor).untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()

    # -- places -------------------------------------------------------------------------------------

    @property
    def has_home(self) -> bool:
        return self._home is not None

    @property
    def place(self) -> int:
        """Which place is used: 0 is memory of their own, other numbers are homes."""
        return self.home_number if self.at_home else 0

    @property
    def home_is_free(self) -> bool:
        """Whether nobody else is at home there."""
        return not any(neighbour._lives_at_home for neighbour in self._neighbours)

    @property
    def is_free(self) -> bool:
        """Whether nobody else is in the place that is used."""
        return not self.at_home or self.home_is_free

    def use_place(self, *, at_home: bool) -> None:
        """Be gathered at home, or in memory of their own, from now on."""
        self.at_home = at_home
        views = self._home_views if at_home else self._own_views
        for param, view in zip(self.params, views, strict=True):
            move_weight(param, view)

    def move_in(
        self, segment: HomeSegment, offset: int, neighbours: Sequence[WholeParameters], *, number: int
    ) -> None:
        """Have a home at an offset (bytes), which overlaps the homes of ``neighbours``, and use it."""
        self._segment = segment
        home = segment.memory[offset : offset + self.nbytes]
        self._home = home.view(self._own.dtype)[: self._spec.layout.numel]
        self._home_views = self._views_of(self._home)
        self._neighbours = list(neighbours)
        self.home_number = number
        self.use_place(at_home=True)

    def move_out(self) -> None:
        """Have no home any more. Nobody may hold a graph of a forward of before."""
        self.use_place(at_home=False)
        self._home, self._home_views, self._neighbours, self.home_number = None, [], [], 0
        self._segment = None

    def _make_params(self, scales: Float8Scales | None) -> list[nn.Parameter]:
        spec, views = self._spec, self._own_views
        if scales is None or spec.float8 is None:
            return [nn.Parameter(view, requires_grad=spec.trainable) for view in views]
        each = zip(views, scales.values.unbind(), spec.refs, strict=True)
        return [whole_weight(view, scale, ref, spec.float8) for view, scale, ref in each]

    def _views_of(self, flat: Tensor) -> list[Tensor]:
        # ``.data``: version counters of their own. Gathering writes through ``flat``, and must not look to
        # autograd like an edit of what it saved.
        return [flat[slot.start : slot.stop].view(slot.shape).data for slot in self._spec.layout.slots]

    # -- what backward and the user's modules leave ---------------------------------------------------

    def has_gradients(self) -> bool:
        """Whether backward left gradients on them."""
        return any(param.grad is not None for param in self.params)

    def drop_gradients(self) -> None:
        """Forget gradients: they are reduced, or will not be (a backward that failed)."""
        for param in self.params:
            param.grad = None

    def check_unwritten(self) -> None:
        """Raise if a module wrote to them: that would be lost."""
        if any(param._version for param in self.params):
            written = [held.name for held, p in zip(self._spec.refs, self.params, strict=True) if p._version]
            for param in self.params:
                torch._C._autograd._unsafe_set_version_counter((param,), (0,))
            raise MicsError(
                f"{written[0]}: expected a forward that reads its parameters, found one that wrote to it in "
                "place (as nn.Embedding(max_norm=...) does); the change would be lost, make it in "
                "mics.summon_full_params(model, write=True)"
            )

"""The masters of one unit: what an optimizer updates, on the device or in host memory."""

from __future__ import annotations

import math
from weakref import ref

import torch
from torch import Tensor

from mics.guard import ShardOwner, ShardParameter, plainly
from mics.sharding.float8 import Float8Scales
from mics.sharding.spec import Share, UnitSpec


class Masters:
    """This rank's masters, and the parameters that modules and optimizers hold for them.

    In host memory they are not what modules hold: that is one number on the device, expanded to the shape of
    each parameter. It has no memory, and is where users expect a parameter and its gradient to be.
    """

    def __init__(
        self, flat: Tensor, spec: UnitSpec, share: Share, *, device: torch.device, owner: ShardOwner
    ) -> None:
        self.flat = flat  # [numel/p/R], or [numel/p] if they are not sharded over replicas; the optimizer's
        self.device = device
        self.scales = None if spec.float8 is None else Float8Scales(spec.layout, spec.float8, device)
        self._span = share.master_span(spec)
        # Where optimizer state is.
        self.state_device = torch.device("cpu") if spec.state_on_host else device
        self._nowhere = flat
        if spec.masters_on_host:
            self._nowhere = torch.full((), math.nan, dtype=flat.dtype, device=device)
        self.shards: list[ShardParameter] = [
            ShardParameter.standing_for(view, self._nowhere.expand(view.shape), layout, ref(owner))
            if spec.masters_on_host
            else ShardParameter.of(view, layout, ref(owner), trainable=spec.trainable)
            for view, layout in zip(share.views_of(spec, flat), share.layouts_of(spec), strict=True)
        ]
        # What has their values: they themselves, or others in host memory.
        self.values: list[ShardParameter] = [
            shard if shard.on_host is None else shard.on_host for shard in self.shards
        ]

    def num_edits(self) -> int:
        """A number that grows with every write."""
        with plainly():
            return sum(values._version for values in self.values)

    def here(self) -> Tensor:
        """All of them on the device: a copy, if they are in host memory."""
        return self.flat.to(self.device)  # which the host waits for: it may write next

    def carry_into(self, params: Tensor) -> None:
        """Bring their values to ``params``, in its format."""
        if self.scales is None:
            params.copy_(self.here())
        else:
            self.scales.cast(params, self.flat, self._span)
            self.scales.are_new = False

    def are_intact(self) -> bool:
        """Whether nobody has given the parameters other memory."""
        home = self._nowhere.untyped_storage().data_ptr()
        with plainly():
            return all(shard.untyped_storage().data_ptr() == home for shard in self.shards)

    def show_at(self, index: int, place: Tensor | None) -> None:
        """Let a parameter without memory be ``place`` on the device, for an optimizer; None: none again."""
        shard = self.shards[index]
        shard.data = self._nowhere.expand(shard.shape) if place is None else place

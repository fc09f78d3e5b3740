"""One unit: its shard, and the memory of its gathered parameters.

What is where, and nothing about when: ``schedule/residency.py`` moves a unit from state to state.

Tensors of a unit of ``numel`` elements (padding included) on one rank, with p chunks and R pieces::

    param_shard  [numel/p]          param format     this rank's chunk; what gathers read (``master`` itself
                                                     where they cast it on the way)
    master       [numel/p/R]        master format    what the optimizer updates ([numel/p] if it is not
                                                     sharded over replicas); the very memory of
                                                     ``param_shard`` where the formats agree; in host memory
                                                     with ``optimizer_state="host"`` where they do not
    gradients    [numel/p]          master format    hop 1 adds every micro-step to it (gradients/shards.py)
    whole.flat   [numel]            param format     the gathered parameters; at its home in the arena, or in
                                                     memory of its own that comes and goes
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm.journal import in_call
from mics.comm.lanes import DONE, Ticket
from mics.comm.protocol import Action
from mics.comm.world import UnitGroups
from mics.errors import UNCOPYABLE, MicsError, SettingsError
from mics.guard import ShardOwner, plainly
from mics.sharding.contiguous import Contiguous
from mics.sharding.float8 import as_sent, marks_of
from mics.sharding.held import HeldParameters
from mics.sharding.host_memory import HostPool
from mics.sharding.masters import Masters
from mics.sharding.spec import Share, UnitSpec
from mics.sharding.whole import WholeParameters


class State(enum.Enum):
    """Where a unit's parameters are. Residency (schedule/residency.py) changes it, and nobody else."""

    SHARDED = "sharded"  # no memory; modules hold shards
    GATHERING = "gathering"  # values are on their way, or wait for their use; modules hold shards
    GATHERED = "gathered"  # modules hold whole parameters
    OLD = "old"  # values of before an optimizer step, which will be moved; modules hold shards


class Refresh:
    """New values on their way into ``param_shard``."""

    def __init__(self) -> None:
        self.latest: Ticket = DONE
        self.confirm: Action | None = None  # to be called first: whether they are right is not known yet

    def begin(self, ticket: Ticket, confirm: Action | None = None) -> None:
        self.latest, self.confirm = ticket, confirm

    def ticket(self) -> Ticket:
        """Of the right values. The host may wait for them to be made."""
        if self.confirm is not None:
            self.confirm()
        return self.latest


class UnitMemory:
    """The memory of all units' shards on one rank: a buffer for each purpose."""

    def __init__(
        self, specs: Sequence[UnitSpec], share: Share, device: torch.device, *, pool: HostPool | None = None
    ) -> None:
        """``pool``: of host memory, for the masters."""
        self.device = device
        params, masters = Contiguous(device), Contiguous(device, pool=pool)
        self.param_parts = {
            spec.index: params.reserve(spec.param_dtype, spec.layout.chunk_numel)
            for spec in specs
            if not spec.casts_masters
        }
        self.master_parts = {
            spec.index: masters.reserve(spec.master_dtype, share.master_numel(spec))
            for spec in specs
            if spec.has_masters
        }


class Unit:
    """The parameters that are gathered and resharded together."""

    def __init__(
        self,
        spec: UnitSpec,
        share: Share,
        *,
        groups: UnitGroups,
        memory: UnitMemory,
        owner: ShardOwner,
    ) -> None:
        self.spec = spec
        self.share = share
        self.groups = groups
        self.device = memory.device
        self.state = State.SHARDED
        self.num_refreshes = 0
        self._versions = 0
        # Lanes work on these beside the computation; whoever touches the memory waits for its ticket.
        self.gathered_at: Ticket = DONE  # the last gather: writes ``whole.flat``, reads ``param_shard``
        self.refresh = Refresh()  # the last one: writes ``param_shard``

        if spec.casts_masters:
            master = self.param_shard = self.own_params = memory.master_parts[spec.index].tensor()
        else:
            self.param_shard = memory.param_parts[spec.index].tensor()
            self.own_params = share.own_of(spec, self.param_shard)  # what ``master`` is the master of
            master = memory.master_parts[spec.index].tensor() if spec.has_masters else self.own_params
        self.layouts = share.layouts_of(spec)  # which elements each of ``shards`` holds
        self.masters = Masters(master, spec, share, device=self.device, owner=owner)
        self.shards = self.masters.shards
        given = self.param_shard if groups.gather.size == 1 else None
        self.whole = WholeParameters(spec, self.device, given=given, scales=self.masters.scales)
        for old, shard, full in zip(spec.refs, self.shards, self.whole.params, strict=True):
            # Marks that users hang on parameters, such as "no weight decay".
            shard.__dict__.update(marks_of(old.param))
            full.__dict__.update(marks_of(old.param))
        self.held = HeldParameters(spec, self)

    @property
    def master(self) -> Tensor:
        """What the optimizer updates."""
        return self.masters.flat

    @property
    def gathered(self) -> bool:
        """Whether modules hold whole parameters."""
        return self.state is State.GATHERED

    @property
    def is_waiting(self) -> bool:
        """Whether it has memory ahead of its use."""
        return self.state is State.GATHERING

    # -- whole parameters -----------------------------------------------------------------------------

    def own_chunk(self) -> Tensor:
        """This rank's chunk of the gathered parameters."""
        span = self.share.chunk_span(self.spec.layout)
        return self.whole.flat[span.start : span.stop]

    def gather_pair(self) -> tuple[Tensor, Tensor]:
        """Where a gather puts the whole parameters, and this rank's part of them."""
        chunk = self.own_chunk() if self.spec.casts_masters else self.param_shard
        return as_sent(self.whole.flat), as_sent(chunk)

    def cast_pair(self) -> tuple[Tensor, Tensor] | None:
        """What is to be copied first, where to and from: masters that a gather casts on their way."""
        return (self.own_chunk(), self.param_shard) if self.spec.casts_masters else None

    def show_whole(self) -> None:
        """Let modules hold whole parameters."""
        self.held.check(self.shards)
        with plainly():
            for shard, full in zip(self.shards, self.whole.params, strict=True):
                if shard.requires_grad != full.requires_grad:
                    self._follow_requires_grad(shard, full)
        self.held.show(self.whole.params)

    def show_shards(self) -> None:
        """Let modules hold shards. Raises if one wrote to whole parameters, which is lost."""
        self.held.show(self.shards)
        is_whole = self.groups.gather.size == self.groups.replication.size == 1
        if not (is_whole and self.master is self.param_shard):
            self.whole.check_unwritten()

    # -- values -------------------------------------------------------------------------------------

    def num_edits(self) -> int:
        """A number that grows with every write to the masters."""
        return self.masters.num_edits()

    def masters_changed(self) -> bool:
        """Whether somebody wrote to ``shards`` since the last refresh (load_state_dict, in-place edits)."""
        return self._versions != self.num_edits()

    def holds_edit(self) -> bool:
        """Whether such a write stands in this rank's ``param_shard``, and not yet in the other replicas'."""
        in_place = not self.spec.has_masters and self.share.masters_over_replicas
        return in_place and self.masters_changed()

    def arrived_params(self) -> Tensor:
        """``param_shard`` to read, with the other replicas' pieces of the last refresh."""
        self.refresh.ticket().wait()
        return self.param_shard

    def __reduce__(self) -> Any:
        raise MicsError(UNCOPYABLE)

    def __del__(self) -> None:
        """Let the computation wait for what lanes still do with this unit's memory: others get it next.

        On a GPU alone: a thread's job keeps its tensors, and might wait for ranks that are gone.
        """
        if self.device.type == "cuda":
            for ticket in (self.gathered_at, self.refresh.latest):
                with suppress(Exception):  # the interpreter may be on its way out
                    ticket.wait()

    def check_intact(self) -> None:
        """Raise if the optimizer's parameters no longer are the memory of ``master``."""
        if not self.masters.are_intact():
            raise MicsError(
                f"{self.spec.label}: expected its parameters where mics.shard() put them, found them "
                "replaced, so this step "
                "would change nothing; do not call model.to(), .half() or .float() after mics.shard()"
            )

    def load(self, flat: Tensor) -> None:
        """Take this rank's part of ``flat``, all values of the unit in flat order."""
        self.held.drop_copies(self.shards)
        self.settle_params()
        chunk, scales = self.share.chunk_span(self.spec.layout), self.masters.scales
        own = flat[chunk.start : chunk.stop]
        if scales is not None:
            scales.set(scales.largest(flat, range(self.spec.layout.numel)))
            scales.cast(self.param_shard, own, chunk)
        elif not self.spec.casts_masters:
            self.param_shard.copy_(own)
        if self.spec.trainable:
            span = self.share.master_span(self.spec)
            self.master.copy_(flat[span.start : span.stop])
        note_refresh(self)

    def full_of_masters(self, masters: Tensor) -> Tensor:
        """All ranks' ``masters`` (laid out as ``self.master``) as one flat buffer: [numel].

        Also of what has a value for each block of the masters.
        """
        layout = self.spec.layout
        # Lanes write to what is made here, and they are outside that mode.
        with torch.inference_mode(False), torch.no_grad():
            chunk = masters = masters.to(self.device)
            if self.share.masters_over_replicas:
                chunk = masters.new_empty(masters.numel() * layout.num_pieces)
                self.groups.replication.all_gather(chunk, masters, in_call(self.spec.label)).wait()
            flat = masters.new_empty(chunk.numel() * layout.num_chunks)
            self.groups.gather.all_gather(flat, chunk, in_call(self.spec.label)).wait()
        return flat

    def views_of(self, masters: Tensor) -> list[Tensor]:
        """Each parameter's part of a tensor laid out as ``self.master``, shaped like ``shards``."""
        return self.share.views_of(self.spec, masters)

    # -- inside -------------------------------------------------------------------------------------

    def carry(self, masters: Tensor) -> None:
        """Have new values, which an optimizer made of masters on the host, in ``param_shard``."""
        self.settle_params()
        self.own_params.copy_(masters)

    def settle_params(self) -> None:
        """Wait for the lanes: from here on the caller may write to ``param_shard``.

        What was gathered ahead of its use has the values of before then: ``num_refreshes`` tells.
        """
        refreshed = self.refresh.ticket()  # which may have moves sent, into what is gathered
        self.gathered_at.wait()
        refreshed.wait()
        self.gathered_at = DONE
        self.refresh.begin(DONE)

    def _follow_requires_grad(self, shard: nn.Parameter, full: nn.Parameter) -> None:
        if shard.requires_grad and not self.spec.trainable:
            raise SettingsError(
                f"{self.spec.label}: expected its parameters to stay frozen, found requires_grad=True; they "
                "were frozen when mics.shard() ran, so there is no room for their gradients. Shard the model "
                "with requires_grad=True, and freeze what is to be trained later after mics.shard()"
            )
        full.requires_grad_(shard.requires_grad)


def note_refresh(unit: Unit) -> None:
    """The values of the masters are on their way to ``param_shard``, of all replicas."""
    unit._versions = unit.num_edits()
    unit.num_refreshes += 1

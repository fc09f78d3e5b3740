"""One unit's shard of its gradients: its memory, what it holds, and what of it the optimizer sees."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from contextlib import suppress
from functools import cached_property, partial

import torch
from torch import Tensor

from mics.comm.codec import Codec
from mics.comm.lanes import DONE, Ticket
from mics.comm.protocol import Action
from mics.comm.quantized import WithErrors
from mics.guard import ShardGrad, plainly
from mics.sharding.contiguous import Reserved
from mics.sharding.unit import Unit


class GradState(enum.Enum):
    """What the gradient shard holds. EMPTY -> PARTIAL (hop 1) -> REDUCED (hop 2) -> EMPTY (zero_grad).

    More backwards after hop 2 lead from REDUCED back to PARTIAL.
    """

    EMPTY = enum.auto()
    PARTIAL = enum.auto()
    REDUCED = enum.auto()


class UnitGradients:
    """The sums of one unit's gradients on this rank."""

    def __init__(self, unit: Unit, memory: Reserved, errors: Reserved | None = None) -> None:
        """``errors``: memory for what rounding in hop 2 loses, if that is kept."""
        self.unit = unit
        self.state = GradState.EMPTY
        self.divisor: float = unit.groups.divisor  # of the sum over all ranks
        self.used = [False] * len(unit.spec.refs)  # parameters with a gradient on this rank since zero_grad
        self.ticket: Ticket = DONE  # of the last job on the shard; lanes work beside the computation
        self.untaken: set[int] = set()  # parameters of which no optimizer was shown what hop 2 brought
        self.aside: Tensor | None = None  # what hop 2 has brought and must not round again
        self._memory = memory
        self._errors = errors
        self._shard: Tensor | None = None  # [chunk_numel], made when it is first needed
        self._own: Tensor | None = None  # the part of it that the masters cover
        self._views: list[Tensor] = []  # of that part, for each of the unit's shards

    def __del__(self) -> None:
        """Let the computation wait for what lanes still do with this memory: others get it next."""
        if self.unit.device.type == "cuda":
            with suppress(Exception):  # the interpreter may be on its way out
                self.ticket.wait()

    # -- memory -------------------------------------------------------------------------------------

    def allocate(self) -> Tensor:
        """The gradient shard: hop 1 adds every micro-step to it."""
        if self._shard is None:
            share, spec = self.unit.share, self.unit.spec
            self._shard = self._memory.tensor()
            self._own = share.own_of(spec, self._shard)
            self._views = share.views_of(spec, self._own)
        return self._shard

    def release(self) -> None:
        """Hold no memory until the next gradient comes. The user has cleared what there was."""
        self.drop_cleared()
        assert self.state is GradState.EMPTY, "there are gradients"
        self.settle()
        self._shard, self._own, self._views = None, None, []

    @property
    def shard(self) -> Tensor | None:
        return self._shard

    @property
    def views(self) -> list[Tensor]:
        """What the optimizer sees, for each of the unit's shards."""
        return self._views

    def step_gradient(self) -> Tensor:
        """The part of the shard that the optimizer uses."""
        assert self._own is not None
        return self._own

    def unique_gradient(self) -> Tensor:
        """The piece of the reduced gradient that no other rank counts: norms add these up."""
        assert self.state is GradState.REDUCED and self._shard is not None
        return self._piece_of(self._shard)

    # -- hop 2 --------------------------------------------------------------------------------------

    @cached_property
    def errors(self) -> Tensor | None:
        """What rounding in hop 2 has lost so far, and later steps send: bfloat16 [chunk_numel]."""
        with torch.inference_mode(False):  # a memory report may be the first to ask
            return None if self._errors is None else self._errors.tensor()

    @cached_property
    def hop_2(self) -> Codec:
        """What is sent to the other replicas."""
        codec = self.unit.spec.hop_2
        return codec if self.errors is None else WithErrors(codec, self.errors)

    def forget_errors(self) -> None:
        """Start with nothing that rounding has lost. What is kept from here on is not of these gradients."""
        self.untaken.clear()
        if self.errors is not None:
            self.settle()
            self.errors.zero_()

    def take(self, indices: Iterable[int], left_out: Tensor | float | None = None) -> None:
        """What hop 2 brought of these parameters is an optimizer's, or nobody's where ``left_out`` is 1.

        What rounding lost of gradients that are left out may be huge: it is not sent. ``left_out`` may be on
        the device: the host need not know.
        """
        found = sorted(self.untaken.intersection(indices))
        self.untaken.difference_update(found)
        if found and left_out is not None and self.errors is not None:
            self.settle()
            if isinstance(left_out, Tensor):
                left_out = left_out.to(self.errors).view(())
            torch._foreach_mul_([self._range_of(index, self.errors) for index in found], 1 - left_out)

    def keep_unused(self, index: int) -> None:
        """Keep for later steps what hop 2 brought for a parameter that no rank used: what was lost before.

        Of a block with a NaN that is NaN too, also for those beside it: then there is nothing to keep.
        """
        assert self._shard is not None and self.errors is not None
        self.untaken.discard(index)
        self.settle()
        share, spec = self.unit.share, self.unit.spec
        view, whole = self._views[index], torch.zeros_like(self._shard)
        share.views_of(spec, share.own_of(spec, whole))[index].copy_(view)
        whole.nan_to_num_(0.0, posinf=0.0, neginf=0.0)
        self._piece_of(self.errors).add_(self._piece_of(whole))
        view.zero_()

    # -- values -------------------------------------------------------------------------------------

    def adding(self, total: Tensor, scale: float) -> Action:
        """What adds a micro-step's sum to what earlier ones left, on the lane of the reduction."""
        shard = self.allocate()
        spec = self.unit.spec
        rounds = self.unit.groups.replication.size > 1 and spec.hop_2.changes(spec.grad_dtype)
        if self.state is GradState.REDUCED and rounds and self.aside is None:
            self.aside = torch.empty_like(self.step_gradient())
        return partial(self._add, shard, total, scale, self.state, self.aside)

    def _add(
        self, shard: Tensor, total: Tensor, scale: float, state: GradState, aside: Tensor | None
    ) -> None:
        if state is GradState.REDUCED and aside is not None:
            aside.copy_(self.step_gradient())  # hop 2 would round it once more, and adds it later
            state = GradState.EMPTY
        if state is GradState.EMPTY:
            if total.dtype is shard.dtype:
                torch.mul(total, scale, out=shard)
            else:
                shard.copy_(total).mul_(scale)
        else:
            if state is GradState.REDUCED:
                self._keep_one_copy(shard)
            shard.add_(total, alpha=scale)

    def add_local(self, index: int, gradient: Tensor) -> None:
        """Add a gradient that the ranks computed for their own pieces alone: a penalty on parameters."""
        self.drop_cleared()
        if self.state is GradState.EMPTY:
            self.allocate().zero_()
            self.state = GradState.PARTIAL
        self.settle()
        assert self._shard is not None and self._own is not None
        self.used[index] = True
        share = self.unit.share
        if self.state is GradState.PARTIAL and not share.masters_over_replicas:
            # Hop 2 adds up what all replicas have: each gives its piece.
            whole = torch.zeros_like(self._own)
            share.views_of(self.unit.spec, whole)[index].copy_(gradient)
            self._piece_of(self._shard).add_(self._piece_of(whole))
        else:
            self._views[index].add_(gradient)

    def note_used(self, indices: Iterable[int]) -> None:
        """This rank has gradients for these parameters."""
        for index in indices:
            self.used[index] = True

    def settle(self) -> None:
        """Wait for the lanes: from here on the caller may use the shard."""
        self.ticket.wait()
        self.ticket = DONE
        if self.state is not GradState.PARTIAL:
            self.aside = None  # hop 2 has added it, or the user has cleared it

    def drop_cleared(self) -> None:
        """Zero what the user cleared: a parameter whose ``grad`` is None again starts anew.

        What rounding lost of a gradient that was cleared or zeroed, and not taken, goes with it.
        """
        if self.state is GradState.EMPTY:
            return
        with plainly():
            grads = [shard.grad for shard in self.unit.shards]
            cleared = [
                index
                for index, shard in enumerate(self.unit.shards)
                if shard.grad is None and shard.requires_grad
            ]
        zeroed = [index for index, grad in enumerate(grads) if isinstance(grad, ShardGrad) and grad.is_zeroed]
        if all(grad is None for grad in grads):
            self.take(range(len(grads)), left_out=1)
            self.state = GradState.EMPTY
            self.used = [False] * len(self.used)
            if self.aside is not None:
                self.settle()
            return
        self.take([*cleared, *zeroed], left_out=1)
        if cleared:
            assert self._shard is not None
            self.settle()
            for index in cleared:
                self._range_of(index, self._shard).zero_()
                if self.aside is not None:
                    self.unit.views_of(self.aside)[index].zero_()
                self.used[index] = False

    # -- inside -------------------------------------------------------------------------------------

    def _range_of(self, index: int, chunk: Tensor) -> Tensor:
        """A parameter's part of a [chunk_numel] tensor."""
        layout = self.unit.spec.layout
        span = self.unit.share.chunk_span(layout)
        overlap = layout.slots[index].overlap(span)
        return chunk[overlap.start - span.start : overlap.stop - span.start]

    def _piece_of(self, chunk: Tensor) -> Tensor:
        return self.unit.share.piece_of(self.unit.spec, chunk)

    def _keep_one_copy(self, shard: Tensor) -> None:
        """Before adding to a reduced gradient: leave it on one replica only, so that hop 2 counts it once."""
        if self.unit.groups.replication.size == 1:
            return
        keep = self._piece_of(shard).clone()
        shard.zero_()
        self._piece_of(shard).copy_(keep)

"""One unit's gradients: from autograd through hop 1 and hop 2 to what the optimizer sees."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm.lanes import DONE, LanedCollectives, Ticket
from mics.comm.world import MeshCollectives
from mics.contiguous import Part
from mics.errors import MicsError
from mics.guard import plainly
from mics.reduce_buffer import ReduceBuffer, ReduceViews
from mics.unit_spec import Share, UnitSpec, label_of


class GradState(enum.Enum):
    """What the gradient shard holds. EMPTY -> PARTIAL (hop 1) -> REDUCED (hop 2) -> EMPTY (zero_grad).

    More backwards after hop 2 lead from REDUCED back to PARTIAL.
    """

    EMPTY = enum.auto()
    PARTIAL = enum.auto()
    REDUCED = enum.auto()


@dataclass(eq=False)
class InUse:
    """Tensors that a lane reads beside the computation: their memory must not be given to others before."""

    tensors: list[Tensor]
    read: Ticket
    age: int = 0

    def let_go(self) -> None:
        """The computation waits for the lane, and may have the memory from there on."""
        self.read.wait()
        self.tensors.clear()


class UnitGradients:
    """Gradients of one unit: of its full parameters during backward, and its shard of them after."""

    def __init__(
        self,
        spec: UnitSpec,
        share: Share,
        *,
        mesh: MeshCollectives,
        full: Sequence[nn.Parameter],
        shards: Sequence[nn.Parameter],
        memory: Part | None,
    ) -> None:
        self.wire = spec.replica_dtype
        self.over_replicas = share.masters_over_replicas  # who updates which part
        self.state = GradState.EMPTY
        self.used = [False] * len(spec.refs)  # parameters that got a gradient on this rank since zero_grad
        self.spec = spec
        self._share = share
        self._mesh = mesh
        self._full = full
        self._shards = shards
        self._memory = memory
        self._shard: Tensor | None = None  # [chunk_numel], made when it is first needed
        self._own: Tensor | None = None  # the part of it that the masters cover
        self._views: list[Tensor] = []  # of that part, for each entry of ``shards``
        self.ticket: Ticket = DONE  # of the last job on the shard; lanes work beside the computation

    # -- memory -------------------------------------------------------------------------------------

    def allocate(self) -> Tensor:
        """The gradient shard: hop 1 adds every micro-step to it."""
        if self._shard is None:
            assert self._memory is not None, "a frozen unit has no gradients"
            self._shard = self._memory.tensor()
            self._own = self._share.own_of(self.spec, self._shard)
            self._views = self._share.views_of(self.spec, self._own)
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
        return self._share.piece_of(self.spec, self._shard)

    # -- hops ---------------------------------------------------------------------------------------

    def on_full(self) -> bool:
        """Whether backward left gradients on the full parameters."""
        return any(param.grad is not None for param in self._full)

    def drop_full(self) -> None:
        """Forget gradients that will not be reduced (a backward that failed)."""
        for param in self._full:
            param.grad = None

    def reduce(self, buffer: ReduceBuffer, scale: float) -> InUse:
        """Hop 1: add ``scale`` times the partition group's sum of gradients to the shard.

        Returns the full gradients, which a lane still reads.
        """
        views = buffer.views_for(self.spec.index, self.spec.layout)
        shard = self.allocate()
        self.drop_cleared()
        full = [param.grad for param in self._full]
        total = views.full if self._mesh.reduce.size == 1 else views.shard
        laid_out, self.ticket = self._mesh.reduce.reduce_scatter(
            total,
            views.full,
            self.spec.label,
            prepare=(partial(_lay_out, views, full), (buffer.emptied,)),
            after=(self.ticket,),
            then=partial(self._add, shard, total, scale, self.state),
        )
        buffer.emptied = self.ticket
        self.state = GradState.PARTIAL
        for index, param in enumerate(self._full):
            self.used[index] |= param.grad is not None
            param.grad = None
        return InUse([grad for grad in full if grad is not None], laid_out)

    def add_local(self, index: int, gradient: Tensor) -> None:
        """Add a gradient that the ranks computed for their own pieces alone: a penalty on parameters."""
        self.drop_cleared()
        if self.state is GradState.EMPTY:
            self.allocate().zero_()
            self.state = GradState.PARTIAL
        self.settle()
        assert self._shard is not None and self._own is not None
        self.used[index] = True
        if self.state is GradState.PARTIAL and not self.over_replicas:
            # Hop 2 adds up what all replicas have: each gives its piece.
            whole = torch.zeros_like(self._own)
            self._share.views_of(self.spec, whole)[index].copy_(gradient)
            self._share.piece_of(self.spec, self._shard).add_(self._share.piece_of(self.spec, whole))
        else:
            self._views[index].add_(gradient)

    def settle(self) -> None:
        """Wait for the lanes: from here on the caller may use the shard."""
        self.ticket.wait()
        self.ticket = DONE

    def make_reduced(self) -> None:
        """Bring the gradients to the state after hop 2, zero if there were none."""
        reduce_over_replicas([self], self._mesh.replication)
        self.settle()
        if self.state is GradState.EMPTY:
            self.allocate().zero_()
            self.state = GradState.REDUCED

    def drop_cleared(self) -> None:
        """Zero what the user cleared: a parameter whose ``grad`` is None again starts anew."""
        if self.state is GradState.EMPTY:
            return
        with plainly():
            shown = any(shard.grad is not None for shard in self._shards)
            cleared = [
                index
                for index, shard in enumerate(self._shards)
                if shard.grad is None and shard.requires_grad
            ]
        if not shown:
            self.state = GradState.EMPTY
            self.used = [False] * len(self.used)
        elif cleared:
            assert self._shard is not None
            self.settle()
            span = self._share.chunk_span(self.spec.layout)
            for index in cleared:
                overlap = self.spec.layout.slots[index].overlap(span)
                self._shard[overlap.start - span.start : overlap.stop - span.start].zero_()
                self.used[index] = False

    def check_unhooked(self, index: int) -> None:
        """Raise if the user hooked a parameter: autograd never sees shards, so the hook would not run."""
        shard = self._shards[index]
        with plainly():
            hooked = bool(shard._post_accumulate_grad_hooks or shard._backward_hooks)
        if hooked:
            raise MicsError(
                f"{self.spec.refs[index].name}: expected no hooks on parameters of a sharded model, "
                "found one, which "
                "would never run; change gradients between backward and optimizer.step() instead"
            )

    # -- inside -------------------------------------------------------------------------------------

    def _add(self, shard: Tensor, total: Tensor, scale: float, state: GradState) -> None:
        """Add this micro-step's sum to what earlier ones left. On the lane of the reduction."""
        if state is GradState.EMPTY:
            if total.dtype is shard.dtype:
                torch.mul(total, scale, out=shard)
            else:
                shard.copy_(total).mul_(scale)
        else:
            if state is GradState.REDUCED:
                self._keep_one_copy(shard)
            shard.add_(total, alpha=scale)

    def _keep_one_copy(self, shard: Tensor) -> None:
        """Before adding to a reduced gradient: leave it on one replica only, so that hop 2 counts it once."""
        if self._mesh.replication.size == 1:
            return
        keep = self._share.piece_of(self.spec, shard).clone()
        shard.zero_()
        self._share.piece_of(self.spec, shard).copy_(keep)


def _lay_out(views: ReduceViews, grads: Sequence[Tensor | None]) -> None:
    """Copy full gradients to their places in the reduce buffer. On the lane of the reduction."""
    present = [(view, grad) for view, grad in zip(views.params, grads, strict=True) if grad is not None]
    # Another unit's gradients are still in the buffer: what this one does not write must become zero.
    blank = views.gaps + [view for view, grad in zip(views.params, grads, strict=True) if grad is None]
    if blank:
        torch._foreach_zero_(blank)
    torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])


def reduce_over_replicas(gradients: Sequence[UnitGradients], replicas: LanedCollectives) -> None:
    """Hop 2 of several units at once: the part that the optimizer uses becomes the sum over the world."""
    for each in gradients:
        each.drop_cleared()
    partial_sums = [each for each in gradients if each.state is GradState.PARTIAL]
    for each in partial_sums:
        each.state = GradState.REDUCED
    if replicas.size == 1:  # hop 1 was all there is
        return
    for wire in dict.fromkeys(each.wire for each in partial_sums):
        _send_together([each for each in partial_sums if each.wire is wire], replicas, wire)


def _send_together(gradients: Sequence[UnitGradients], replicas: LanedCollectives, wire: torch.dtype) -> None:
    label = label_of([each.spec for each in gradients])
    before = tuple(each.ticket for each in gradients)
    shards = [each.allocate() for each in gradients]
    if gradients[0].over_replicas:
        pairs = [(each.step_gradient(), shard) for each, shard in zip(gradients, shards, strict=True)]
        ticket = replicas.reduce_together(pairs, label, after=before, wire=wire)
    else:
        ticket = replicas.all_reduce_together(shards, label, after=before, wire=wire)
    for each in gradients:
        each.ticket = ticket

"""Hop 1 and hop 2: gradients of whole units are summed over the partition group, then over replicas.

Hop 1 divides by all ranks whose gradients are averaged (``comm/world.py: UnitGroups``); hop 2 only adds.

Hop 1 runs when backward is through with a unit, hop 2 in the last micro-step if that was announced, and
otherwise when somebody first needs the gradients (step.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from mics.comm.codec import Codec
from mics.comm.lanes import DONE, Ticket
from mics.comm.world import UnitGroups
from mics.cost.memory import QUICK_SHARE
from mics.gradients.reduce_buffers import ReduceBuffers, ReduceViews
from mics.gradients.shards import GradState, UnitGradients
from mics.gradients.shown import ShownGradients
from mics.guard import plainly
from mics.schedule.events import Event, Events, Progress, What
from mics.schedule.log import REDUCED, StepLog
from mics.sharding.contiguous import Contiguous
from mics.sharding.spec import label_of
from mics.sharding.unit import Unit

_NUM_UNITS_TO_READ = 2  # gathers after which a lane has surely read what it was given before


@dataclass(eq=False)
class _InUse:
    """Full gradients that a lane reads beside the computation: others must not have their memory before."""

    tensors: list[Tensor]
    read: Ticket
    age: int = 0


class Hops:
    """Takes each unit's gradients from backward to the sum over the world."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        events: Events,
        progress: Progress,
        log: StepLog,
        shown: ShownGradients,
        memory: Contiguous,
        buffers: ReduceBuffers,
        low_memory: bool = False,
        reduction_share: Callable[[int], float] = lambda rows: math.inf,
        batch_nbytes: int = 0,
    ) -> None:
        self.units = list(units)  # that are trained
        self.buffers = buffers
        self.lends_memory = low_memory  # of gradients while there are none, of buffers while they are idle
        self.num_changes = 0  # grows whenever gradients change
        self.fresh = False  # a backward has run since the ranks last agreed
        self._progress = progress
        self._log = log
        self._shown = shown
        self._memory = memory
        self._reduction_share = reduction_share  # of a unit's forward over so many rows
        self._batch_nbytes = batch_nbytes  # units that cross replicas together, where nobody waits for each
        self._in_use: _InUse | None = None
        events[What.FORWARD_BEGINS].append(self._begin_forward)
        events[What.NEEDED].append(self._grow_older)
        events[What.GRADIENTS_READY].append(self._reduce)

    # -- hop 1 --------------------------------------------------------------------------------------

    def _reduce(self, event: Event) -> None:
        """Hop 1 of a unit whose backward is over, and hop 2 if this micro-step is the last."""
        unit = event.unit
        assert unit is not None
        gradients = self._shown.of(unit)
        self._log.note(unit.spec.index, REDUCED)
        self._shown.guard_again()  # an optimizer's step that was broken off
        gradients.note_used(self._shown.adopt_assigned(unit, self.finish))
        self._shown.leave_cleared(unit)
        self._free_full()
        self._hop_1(gradients)
        self._shown.show(unit)
        self.note_change()
        if self._progress.announced:
            # At once: waiting for company would save latency, and leave the network idle meanwhile.
            hop_2([gradients])
        if self.lends_memory and self._reduction_share(self._progress.rows) <= QUICK_SHARE:
            self._lend_buffers()

    def _hop_1(self, gradients: UnitGradients) -> None:
        """Add the sum of the partition group's gradients, divided by ``UnitGroups.divisor``, to the shard."""
        unit = gradients.unit
        groups, buffer = unit.groups, self.buffers.next_for(unit.spec)
        views = buffer.views_for(unit.spec.index, unit.spec.layout)
        shard = gradients.allocate()
        gradients.drop_cleared()
        full = [param.grad for param in unit.whole.params]
        total = views.full if groups.reduce.size == 1 else views.shard
        laid_out, gradients.ticket = groups.reduce.reduce_scatter(
            total,
            views.full,
            unit.spec.label,
            prepare=(partial(_lay_out, views, full), (buffer.emptied,)),
            after=(gradients.ticket,),
            codec=unit.spec.hop_1,
            then=partial(gradients.add, shard, total, 1.0 / groups.divisor, gradients.state),
        )
        buffer.emptied = gradients.ticket
        gradients.state = GradState.PARTIAL
        for index, grad in enumerate(full):
            gradients.used[index] |= grad is not None
        unit.whole.drop_gradients()
        if laid_out is not DONE:
            self._in_use = _InUse([grad for grad in full if grad is not None], laid_out)

    def note_change(self) -> None:
        """There are gradients that the ranks have not agreed on."""
        self.fresh = True
        self.num_changes += 1

    # -- hop 2 --------------------------------------------------------------------------------------

    def reduce_left(self) -> None:
        """Hop 2 of every unit that has only had hop 1."""
        left = [unit for unit in self.units if self._shown.of(unit).state is GradState.PARTIAL]
        for batch in self.batches(left):
            hop_2([self._shown.of(unit) for unit in batch])

    def batches(self, units: Sequence[Unit]) -> Iterator[list[Unit]]:
        """Units that cross the replication group together: a batch of bytes, but for the first and the last.

        The first goes alone, because somebody waits for it. Towards the end a batch takes no more than half
        of what is left: what comes last is waited for too.
        """
        left = _nbytes_of(units)
        batch: list[Unit] = []
        for number, unit in enumerate(units):
            batch.append(unit)
            found = _nbytes_of(batch)
            if number == 0 or found >= min(self._batch_nbytes, left / 2):
                yield batch
                batch, left = [], left - found
        if batch:
            yield batch

    def settle(self) -> None:
        """Wait for the lanes: from here on the caller may use gradients."""
        self._free_full()
        for unit in self.units:
            self._shown.of(unit).settle()

    def finish(self, gradients: UnitGradients) -> None:
        """Bring one unit's gradients to the state after hop 2, zero if there were none."""
        hop_2([gradients])
        gradients.settle()
        if gradients.state is GradState.EMPTY:
            gradients.allocate().zero_()
            gradients.state = GradState.REDUCED

    # -- memory -------------------------------------------------------------------------------------

    def _begin_forward(self, event: Event) -> None:
        """Have the memory of all gradients before training fills the device's memory with other things.

        Or leave it to the forward, whose logits and activations are gone when the first gradients come.
        """
        if self.lends_memory:
            self._lend_memory()
        elif torch.is_grad_enabled():
            for unit in self.units:
                self._shown.of(unit).allocate()
            for unit in self.units:
                self.buffers.allocate(unit.spec)

    def _grow_older(self, event: Event) -> None:
        """A unit is gathered. Full gradients that were reduced some units ago have been read by now."""
        if self._in_use is not None:
            self._in_use.age += 1
            if self._in_use.age > _NUM_UNITS_TO_READ:
                self._free_full()

    def _free_full(self) -> None:
        """The computation waits for the lane, and may have the memory of full gradients from there on."""
        if self._in_use is not None:
            self._in_use.read.wait()
            self._in_use = None

    def _lend_buffers(self) -> None:
        self._free_full()
        self.buffers.release()

    def _lend_memory(self) -> None:
        self._lend_buffers()
        with plainly():
            has_gradients = any(shard.grad is not None for unit in self.units for shard in unit.shards)
        if (
            has_gradients or self._shown.is_plain
        ):  # of earlier micro-steps, or an optimizer is at work on them
            return
        self._shown.forget()
        for unit in self.units:
            self._shown.of(unit).release()
        self._memory.release()


def hop_2(gradients: Sequence[UnitGradients]) -> None:
    """Sum over replicas, of several units at once: what the optimizer uses is the sum over the world then."""
    for each in gradients:
        each.drop_cleared()
    partial_sums = [each for each in gradients if each.state is GradState.PARTIAL]
    for each in partial_sums:
        each.state = GradState.REDUCED
    together: dict[tuple[UnitGroups, Codec], list[UnitGradients]] = {}
    for each in partial_sums:
        if each.unit.groups.replication.size > 1:  # else hop 1 was all there is
            together.setdefault((each.unit.groups, each.unit.spec.hop_2), []).append(each)
    for (groups, codec), members in together.items():
        _send_together(members, groups, codec)


def _send_together(gradients: Sequence[UnitGradients], groups: UnitGroups, codec: Codec) -> None:
    label = label_of([each.unit.spec for each in gradients])
    before = tuple(each.ticket for each in gradients)
    shards = [each.allocate() for each in gradients]
    if gradients[0].unit.share.masters_over_replicas:
        pairs = [(each.step_gradient(), shard) for each, shard in zip(gradients, shards, strict=True)]
        ticket = groups.replication.reduce_together(pairs, label, after=before, codec=codec)
    else:
        ticket = groups.replication.all_reduce_together(shards, label, after=before, codec=codec)
    for each in gradients:
        each.ticket = ticket


def _lay_out(views: ReduceViews, grads: Sequence[Tensor | None]) -> None:
    """Copy full gradients to their places in the reduce buffer. On the lane of the reduction."""
    present = [(view, grad) for view, grad in zip(views.params, grads, strict=True) if grad is not None]
    # Another unit's gradients are still in the buffer: what this one does not write must become zero.
    blank = views.gaps + [view for view, grad in zip(views.params, grads, strict=True) if grad is None]
    if blank:
        torch._foreach_zero_(blank)
    torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])


def _nbytes_of(units: Sequence[Unit]) -> int:
    return sum(unit.spec.layout.chunk_numel * unit.spec.param_dtype.itemsize for unit in units)

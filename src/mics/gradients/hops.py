"""Hop 1 and hop 2: gradients of whole units are summed over the partition group, then over replicas.

Hop 1 divides by all ranks whose gradients are averaged (``comm/world.py: UnitGroups``); hop 2 only adds.

Hop 1 runs when backward is through with a unit, hop 2 in the last micro-step if that was announced, and
otherwise when somebody first needs the gradients (step.py).

A unit whose reduction would be all latency waits for those that follow, in the reduce buffer, and one
collective takes them all. The end of the backward is the latest. What waits follows from the order of units
and their sizes alone, so all ranks decide alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from mics.comm.codec import Codec
from mics.comm.lanes import DONE, Ticket
from mics.comm.protocol import Action
from mics.comm.world import UnitGroups
from mics.cost.memory import QUICK_SHARE
from mics.gradients.reduce_buffers import Places, ReduceBuffers, ReduceViews
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


@dataclass(frozen=True, kw_only=True)
class Joining:
    """Bytes below which a hop waits for the next unit: about where latency is half of a collective's time."""

    hop_1_nbytes: int = 0  # of the reduce buffer
    hop_2_nbytes: int = 0  # of gradient shards on the wire


@dataclass(eq=False)
class _Batch:
    """Units whose gradients are laid out, and wait to be reduced by one collective."""

    places: Places
    announced: bool  # hop 2 follows
    gradients: list[UnitGradients] = field(default_factory=list)
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # results, and what is reduced
    after: list[Ticket] = field(default_factory=list)
    adding: list[Action] = field(default_factory=list)  # results to gradient shards
    nbytes: int = 0

    def takes(self, unit: Unit) -> bool:
        """Whether ``unit`` may be one of them."""
        mine, spec = self.gradients[0].unit, unit.spec
        alike = mine.groups is unit.groups and mine.spec.reduce_dtype is spec.reduce_dtype
        return alike and mine.spec.hop_1 == spec.hop_1 and self.places.has_room(spec)

    def add_results(self) -> None:
        """On the lane of the reduction."""
        for add in self.adding:
            add()


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
        joining: Joining = Joining(),
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
        self._joining = joining
        self._in_use: _InUse | None = None
        self._batch: _Batch | None = None  # has had no hop 1 yet
        self._crossing: list[UnitGradients] = []  # have had no hop 2 yet
        events[What.FORWARD_BEGINS].append(self._begin_forward)
        events[What.BACKWARD_BEGINS].append(self._hear_turn)  # the one before may have failed
        events[What.BACKWARD_ENDS].insert(0, self._hear_turn)  # before the gathers that follow
        events[What.NEEDED].append(self._grow_older)
        events[What.GRADIENTS_READY].append(self._reduce)

    # -- hop 1 --------------------------------------------------------------------------------------

    def _reduce(self, event: Event) -> None:
        """Hop 1 of a unit whose backward is over, and hop 2 if this micro-step is the last."""
        unit = event.unit
        assert unit is not None
        gradients = self._shown.of(unit)
        if self._waits(gradients):
            self.send_waiting()  # backward has come to it again
        self._log.note(unit.spec.index, REDUCED)
        self._shown.guard_again()  # an optimizer's step that was broken off
        gradients.note_used(self._shown.adopt_assigned(unit, self.finish))
        self._shown.leave_cleared(unit)
        self._free_full()
        batch = self._lay_out(gradients)
        self._shown.show(unit)
        self.note_change()
        # The buffer of a tiny unit takes next to nothing, so that it may wait where memory is short.
        may_wait = self.buffers.is_tiny(unit.spec) or not self.lends_memory
        if not may_wait or batch.nbytes >= self._joining.hop_1_nbytes:
            self._send_batch()
        if self.lends_memory and self._reduction_share(self._progress.rows) <= QUICK_SHARE:
            self._lend_buffers()

    def _lay_out(self, gradients: UnitGradients) -> _Batch:
        """Copy full gradients to the reduce buffer, beside others that wait there: with whom they go."""
        unit = gradients.unit
        if self._batch is not None and not self._batch.takes(unit):
            self._send_batch()
        batch = self._batch or _Batch(Places(self.buffers), self._progress.announced)
        groups = unit.groups
        buffer, views = batch.places.take(unit.spec)
        gradients.drop_cleared()
        full = [param.grad for param in unit.whole.params]
        total = views.full if groups.reduce.size == 1 else views.shard
        laid_out = groups.reduce.lay_out(partial(_copy_to, views, full), unit.spec.label, (buffer.emptied,))
        self._batch = batch
        batch.gradients.append(gradients)
        batch.pairs.append((total, views.full))
        batch.after += [gradients.ticket, laid_out]
        batch.adding.append(gradients.adding(total, 1.0 / gradients.divisor))
        batch.nbytes += views.full.nbytes
        gradients.ticket = laid_out
        gradients.state = GradState.PARTIAL
        for index, grad in enumerate(full):
            gradients.used[index] |= grad is not None
        unit.whole.drop_gradients()
        if laid_out is not DONE:
            self._in_use = _InUse([grad for grad in full if grad is not None], laid_out)
        return batch

    def _send_batch(self) -> None:
        """Add the partition group's sums, divided by ``UnitGradients.divisor``, to the gradient shards."""
        batch, self._batch = self._batch, None
        if batch is None:
            return
        specs = [each.unit.spec for each in batch.gradients]
        ticket = batch.gradients[0].unit.groups.reduce.reduce_together(
            batch.pairs, label_of(specs), after=batch.after, codec=specs[0].hop_1, then=batch.add_results
        )
        for each in batch.gradients:
            each.ticket = ticket
        for buffer in batch.places.used:
            buffer.emptied = ticket
        if batch.announced:
            self._crossing += batch.gradients
            if sum(each.unit.spec.hop_2_nbytes for each in self._crossing) >= self._joining.hop_2_nbytes:
                self._send_crossing()

    def _send_crossing(self) -> None:
        crossing, self._crossing = self._crossing, []
        hop_2(crossing)

    def send_waiting(self) -> None:
        """Wait for no other unit: somebody needs the gradients, or no more will come."""
        self._send_batch()
        self._send_crossing()

    def _hear_turn(self, event: Event) -> None:
        self.send_waiting()

    def _waits(self, gradients: UnitGradients) -> bool:
        """Whether this unit's gradients wait for others, before hop 1 or hop 2."""
        return gradients in self._crossing or (self._batch is not None and gradients in self._batch.gradients)

    def note_change(self) -> None:
        """There are gradients that the ranks have not agreed on."""
        self.fresh = True
        self.num_changes += 1

    # -- hop 2 --------------------------------------------------------------------------------------

    def reduce_left(self) -> None:
        """Hop 2 of every unit that has only had hop 1."""
        self.send_waiting()
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
        self.send_waiting()
        self._free_full()
        for unit in self.units:
            self._shown.of(unit).settle()

    def finish(self, gradients: UnitGradients) -> None:
        """Bring one unit's gradients to the state after hop 2, zero if there were none."""
        self.send_waiting()
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
        self.send_waiting()
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
        self.buffers.release(but=() if self._batch is None else self._batch.places.used)

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
        each.state, each.untaken = GradState.REDUCED, set(range(len(each.used)))
    together: dict[tuple[UnitGroups, Codec], list[UnitGradients]] = {}
    for each in partial_sums:
        if each.unit.groups.replication.size > 1:  # else hop 1 was all there is
            together.setdefault((each.unit.groups, each.hop_2), []).append(each)
    for (groups, codec), members in together.items():
        _send_together(members, groups, codec)


def _send_together(gradients: Sequence[UnitGradients], groups: UnitGroups, codec: Codec) -> None:
    label = label_of([each.unit.spec for each in gradients])
    before = tuple(each.ticket for each in gradients)
    shards = [each.allocate() for each in gradients]
    asides = [(each.step_gradient(), each.aside) for each in gradients if each.aside is not None]
    then = partial(_add_asides, asides) if asides else None
    if gradients[0].unit.share.masters_over_replicas:
        pairs = [(each.step_gradient(), shard) for each, shard in zip(gradients, shards, strict=True)]
        ticket = groups.replication.reduce_together(pairs, label, after=before, codec=codec, then=then)
    else:
        ticket = groups.replication.all_reduce_together(shards, label, after=before, codec=codec, then=then)
    for each in gradients:
        each.ticket = ticket


def _add_asides(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """What earlier hops 2 of this step brought. On the lane of this one."""
    for gradient, aside in pairs:
        gradient.add_(aside)


def gather_errors(shown: ShownGradients) -> None:
    """Have what rounding lost on any replica in the errors of the replica whose piece it is of.

    The sum over replicas is all that counts: what is left is as long as the parameters, and can be saved.
    """
    for each in shown.with_errors:
        assert each.errors is not None
        each.drop_cleared()  # nothing is kept of gradients that were left out
        each.settle()
        spec, share = each.unit.spec, each.unit.share
        label = f"what rounding lost of {spec.label}"
        with torch.inference_mode(False), torch.no_grad():  # lanes are outside that mode
            wide = each.errors.float()
            piece = share.piece_of(spec, wide)
            each.unit.groups.replication.reduce_together([(piece, wide)], label).wait()
            each.errors.zero_()
            share.piece_of(spec, each.errors).copy_(piece)


def _copy_to(views: ReduceViews, grads: Sequence[Tensor | None]) -> None:
    """Copy full gradients to their places in the reduce buffer. On the lane of the reduction."""
    present = [(view, grad) for view, grad in zip(views.params, grads, strict=True) if grad is not None]
    # Another unit's gradients are still in the buffer: what this one does not write must become zero.
    blank = views.gaps + [view for view, grad in zip(views.params, grads, strict=True) if grad is None]
    if blank:
        torch._foreach_zero_(blank)
    torch._foreach_copy_([view for view, _ in present], [grad for _, grad in present])


def _nbytes_of(units: Sequence[Unit]) -> int:
    return sum(unit.spec.layout.chunk_numel * unit.spec.param_dtype.itemsize for unit in units)

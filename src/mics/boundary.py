"""The boundary: hop 2, agreement of the ranks, clipping, and the optimizer's step on shards.

``Boundary`` belongs to one sharded model. ``optimizer_hooks.py`` calls it around every optimizer step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Final
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor

from mics.agreement import Agreement
from mics.audit import ReplicaAudit
from mics.comm.lanes import DONE
from mics.comm.world import MeshCollectives
from mics.contiguous import Contiguous
from mics.errors import MicsError
from mics.guard import Layout, ShardGrad, ShardOwner, ShardTensor, plainly, show_guarded, show_plain
from mics.planner.memory import QUICK_SHARE, TINY_SHARE
from mics.plans import Prefetch
from mics.reduce_buffer import ReduceBuffer
from mics.schedule import Schedule
from mics.unit import Unit, refresh_together
from mics.unit_gradients import GradState, InUse, reduce_over_replicas

_NUM_UNITS_TO_READ = 2  # gathers after which a lane has surely read what it was given before
_one: Final = [object()]
_NOT_HELD: Final = sys.getrefcount(_one[0])  # of what a list alone refers to


class Boundary:
    """Takes each unit's gradients from backward to the optimizer, and its new values back."""

    def __init__(
        self,
        units: Sequence[Unit],
        *,
        mesh: MeshCollectives,
        world_size: int,
        device: torch.device,
        num_reduce_buffers: int,
        audit: ReplicaAudit,
        owner: ShardOwner,
        gradient_memory: Contiguous,
        lends_memory: bool = False,
        reduction_share: Callable[[int], float] = lambda rows: math.inf,
        replica_batch_nbytes: int = 0,
        choose_prefetch: Callable[[Sequence[int], int], Prefetch] | None = None,
    ) -> None:
        self.units = list(units)
        self.trainable = [unit for unit in units if unit.spec.trainable]
        self.audit = audit
        self.announced = False  # the micro-step under way is the last one before the optimizer
        self._mesh = mesh
        self._device = device
        self._gradient_memory = gradient_memory
        # To the computation: the memory of gradients while there are none, of buffers while they are idle.
        self.lends_memory = lends_memory
        self._reduction_share = reduction_share  # of a unit's forward over so many rows
        self._scale = 1.0 / world_size  # gradients are averaged over ranks, as under DDP
        self._buffers: dict[tuple[torch.dtype, bool], list[ReduceBuffer]] = {}  # by format and tininess
        self._num_buffers = num_reduce_buffers
        self._largest_numel = max((unit.spec.layout.numel for unit in self.trainable), default=0)
        self.owner, self.weak_owner = owner, ref(owner)
        owner.synchronize, owner.agree_found_inf = self.synchronize, self._agree_found_inf
        owner.take_gradient = self._take_gradient
        self._by_name = {
            held.name: (unit, index) for unit in self.trainable for index, held in enumerate(unit.spec.refs)
        }
        self._guards: dict[int, list[ShardGrad]] = {}  # by unit index
        self._agreement = Agreement(self.trainable, mesh=mesh, device=device, choose_prefetch=choose_prefetch)
        self._schedule: Schedule | None = None
        self._fresh_grads = False  # a backward has run since the ranks last agreed
        # New values, and hop 2 where nobody announced it, take units together up to this many bytes.
        self._batch_nbytes = replica_batch_nbytes
        self._edits_show = any(
            unit.master.data_ptr() == unit.param_shard.data_ptr()
            and (mesh.replication.size == 1 or not unit.share.masters_over_replicas)
            for unit in self.trainable
        )
        self._in_use: InUse | None = None  # full gradients that are being laid out
        # What the latest clipping found, until there are new gradients: units, and the norm of each.
        self._clipped: tuple[list[Unit], Tensor] | None = None
        # What an optimizer at work sees in place of guarded gradients; None where it should see nothing.
        self._shown: list[tuple[Unit, int, Tensor | None]] = []
        self._plain: list[nn.Parameter] = []  # parameters that it sees without their guard

    # -- gradients ----------------------------------------------------------------------------------

    def reduce(self, unit: Unit) -> None:
        """Hop 1 of a unit whose backward is over, and hop 2 if this micro-step is the last."""
        self.guard_again()  # an optimizer's step that was broken off
        self._adopt_assigned(unit)
        self._leave_cleared(unit)
        self._let_go()
        in_use = unit.gradients.reduce(self._buffer(unit), self._scale)
        if in_use.read is not DONE:
            self._in_use = in_use
        self._show(unit)
        self._fresh_grads = True
        if self.announced:
            # At once: waiting for company would save latency, and leave the network idle meanwhile.
            reduce_over_replicas([unit.gradients], self._mesh.replication)
        if self.lends_memory and self._share_of_forward() <= QUICK_SHARE:
            self._lend_buffers()

    def tick(self) -> None:
        """A unit is gathered. Full gradients that were reduced some units ago have been read by now."""
        if self._in_use is not None:
            self._in_use.age += 1
            if self._in_use.age > _NUM_UNITS_TO_READ:
                self._let_go()

    def _let_go(self) -> None:
        if self._in_use is not None:
            self._in_use.let_go()
            self._in_use = None

    def synchronize(self) -> None:
        """Hop 2 of every unit that has only had hop 1. Called by whatever needs gradients first."""
        for unit in self.trainable:
            self._adopt_assigned(unit)
        left = [unit for unit in self.trainable if unit.gradients.state is GradState.PARTIAL]
        for batch in batches_of(left, self._batch_nbytes):
            reduce_over_replicas([unit.gradients for unit in batch], self._mesh.replication)
        # Beside hop 2, which is waited for next.
        difference = self.audit.at_boundary() if self._fresh_grads else None
        self._let_go()
        for unit in self.trainable:
            unit.gradients.settle()
        if self._fresh_grads:
            self._fresh_grads = False
            self._clipped = None
            self._agreement.exchange(difference)

    def follow(self, schedule: Schedule) -> None:
        """Check at each boundary that all ranks went through ``schedule`` alike, and start it again after."""
        self._agreement.schedule = self._schedule = schedule
        schedule.edits_show = self._edits_show

    def before_forward(self) -> None:
        """Have the memory of all gradients before training fills the device's memory with other things.

        Or lend it to the forward, whose logits and activations are gone when the first gradients come.
        """
        if self.lends_memory:
            self._lend_memory()
        elif torch.is_grad_enabled():
            for unit in self.trainable:
                unit.gradients.allocate()
            for unit in self.trainable:
                self._buffers_of(unit)

    def _share_of_forward(self) -> float:
        """How long a unit's reduction takes, by the cost model, for each second of its forward."""
        assert self._schedule is not None
        return self._reduction_share(self._schedule.rows)

    def _lend_buffers(self) -> None:
        self._let_go()
        for buffer in self.reduce_buffers():
            buffer.emptied.wait()
        self._buffers.clear()

    def _lend_memory(self) -> None:
        self._lend_buffers()
        with plainly():
            has_gradients = any(shard.grad is not None for unit in self.trainable for shard in unit.shards)
        if has_gradients or self._shown:  # of earlier micro-steps, or an optimizer is at work on them
            return
        guards, self._guards = self._guards, {}
        for unit in self.trainable:
            if unit.gradients.state is GradState.PARTIAL and self._mesh.replication.size > 1:
                for guard in guards.get(unit.spec.index, ()):
                    guard.is_lost = True  # who has put it aside has a sum over the partition group alone
            unit.gradients.release()
        self._gradient_memory.release()

    def any_rank_used(self, unit: Unit, index: int) -> bool:
        """Whether a parameter got a gradient anywhere in the world, once synchronized."""
        self._agreement.settle()
        return self._agreement.used(unit, index)

    def gradient_norm(self, norm_type: float = 2.0) -> Tensor:
        """The norm of all gradients, on the device."""
        self.synchronize()
        return self._total_norm(self._units_with_gradients(), norm_type)

    def clip_to(self, max_norm: float, total: Tensor) -> None:
        """Scale all gradients so that a norm of ``total`` becomes at most ``max_norm``."""
        assert self._clipped is not None, "the norm comes first"
        units, _ = self._clipped
        # As torch's own clipping: no comparison on the host, a factor of at most one on the device.
        factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
        if units:
            torch._foreach_mul_(
                [unit.gradients.step_gradient() for unit in units], factor.to(units[0].spec.grad_dtype)
            )

    def nonfinite_units(self) -> list[str]:
        """Labels of the units whose gradient is not finite on some rank. All ranks must call it."""
        self.synchronize()
        if self._clipped is not None:
            units, norms = self._clipped
        else:
            units = self._units_with_gradients()
            norms = self._norms(units, math.inf)
        position = {unit.spec.index: number for number, unit in enumerate(self.trainable)}
        flags = torch.zeros(len(self.trainable), dtype=torch.float32, device=self._device)
        flags[[position[unit.spec.index] for unit in units]] = (~norms.isfinite()).float()
        self._mesh.world.all_reduce(flags, "which units are not finite (mics.nonfinite_units)", maximum=True)
        return [unit.spec.label for unit, found in zip(self.trainable, flags.tolist(), strict=True) if found]

    def _norms(self, units: Sequence[Unit], norm_type: float) -> Tensor:
        """The norm of this rank's piece of each unit's gradient: [len(units)]."""
        exact = any(unit.spec.grad_dtype is torch.float64 for unit in self.trainable)
        dtype = torch.float64 if exact else torch.float32
        pieces = [unit.gradients.unique_gradient() for unit in units]
        if not pieces:
            return torch.zeros(0, dtype=dtype, device=self._device)
        return torch.stack([norm.to(dtype) for norm in torch._foreach_norm(pieces, norm_type)])

    def _total_norm(self, units: Sequence[Unit], norm_type: float) -> Tensor:
        norms = self._norms(units, norm_type)
        # Clipping by a norm that is not finite spoils all gradients: what they were is known from here alone.
        self._clipped = list(units), norms
        infinite = math.isinf(norm_type)
        local = torch.linalg.vector_norm(norms, norm_type) if units else norms.sum()
        summed: Tensor = local if infinite else local.pow(norm_type)
        self._mesh.world.all_reduce(summed, "the gradient norm (mics.clip_grad_norm_)", maximum=infinite)
        return summed if infinite else summed.pow(1.0 / norm_type)

    def _units_with_gradients(self) -> list[Unit]:
        for unit in self.trainable:
            unit.gradients.drop_cleared()
        return [unit for unit in self.trainable if unit.gradients.state is GradState.REDUCED]

    def _show(self, unit: Unit) -> None:
        """Let ``parameter.grad`` be this unit's guarded gradients."""
        guards = self._guards.get(unit.spec.index)
        if guards is None:
            guards = [
                ShardGrad.of(grad, layout, self.weak_owner)
                for grad, layout in zip(unit.gradients.views, unit.layouts, strict=True)
            ]
            self._guards[unit.spec.index] = guards
        with plainly():
            for index, (shard, guard) in enumerate(zip(unit.shards, guards, strict=True)):
                if shard.grad is None and shard.requires_grad:
                    unit.gradients.check_unhooked(index)
                    shard.grad = guard

    def _leave_cleared(self, unit: Unit) -> None:
        """Before the next gradients come: the user may hold some that were cleared."""
        if unit.spec.index in self._guards and unit.gradients.state is not GradState.EMPTY:
            with plainly():
                cleared = [index for index, shard in enumerate(unit.shards) if shard.grad is None]
            self._leave(unit, cleared)

    def _leave(self, unit: Unit, indices: Sequence[int]) -> None:
        """Leave gradients that are not ``parameter.grad`` any more to whoever holds them."""
        guards = self._guards.get(unit.spec.index, [])
        held = [index for index in indices if guards and sys.getrefcount(guards[index]) > _NOT_HELD]
        for index in held:
            if unit.gradients.state is GradState.PARTIAL and self._mesh.replication.size > 1:
                guards[index].is_lost = True  # a sum over the partition group alone
            else:
                unit.gradients.settle()
                guards[index].keep_for_user()
            guards[index] = ShardGrad.of(unit.gradients.views[index], unit.layouts[index], self.weak_owner)

    def _take_gradient(self, name: str, gradient: Tensor) -> None:
        """A backward has come to this rank's piece of a parameter, outside of any forward (a penalty)."""
        unit, index = self._by_name[name]
        self.guard_again()
        with plainly(), torch.no_grad():
            self._adopt_assigned(unit)
            self._leave_cleared(unit)
            unit.gradients.add_local(index, gradient)
        self._show(unit)
        self._fresh_grads = True

    def _adopt_assigned(self, unit: Unit) -> None:
        """Take gradients that the user put in place of ours (``p.grad = p.grad.clamp(...)``)."""
        guards: Sequence[ShardTensor | None] = self._guards.get(unit.spec.index) or [None] * len(unit.shards)
        with plainly():
            grads = [shard.grad for shard in unit.shards]
        assigned = [
            index
            for index, (grad, guard) in enumerate(zip(grads, guards, strict=True))
            if grad is not None and grad is not guard
        ]
        if self._shown:  # the optimizer is at work on plain gradients, which are not the user's
            return
        if not assigned:
            return
        values = [grads[index] for index in assigned]
        for index, value in zip(assigned, values, strict=True):
            if isinstance(value, ShardTensor):
                value.check_kept()
                self._check_assigned(unit.layouts[index], value)
        unit.gradients.make_reduced()
        self._leave(unit, assigned)
        if not self._fresh_grads:
            # Unless it is news to the ranks that a parameter has a gradient, they have agreed already.
            self._clipped = None
            self._agreement.settle()
            self._fresh_grads = not all(self._agreement.used(unit, index) for index in assigned)
        with plainly():
            for index, value in zip(assigned, values, strict=True):
                assert value is not None
                unit.gradients.views[index].copy_(value)
                unit.gradients.used[index] = True
                unit.shards[index].grad = None
        self._show(unit)

    @staticmethod
    def _check_assigned(layout: Layout, value: ShardTensor) -> None:
        if value.shard_layout != layout:
            raise MicsError(
                f"p.grad of {layout.label}: expected a gradient of the same elements, found a piece of "
                f"{value.shard_layout.label} that holds others; assign p.grad from that parameter's "
                f"own gradient"
            )

    def reduce_buffers(self) -> list[ReduceBuffer]:
        """The buffers hop 1 works in, for each reduce format in use."""
        return [buffer for buffers in self._buffers.values() for buffer in buffers]

    def expected_reduce_nbytes(self) -> int:
        """Their bytes once every unit has been reduced."""
        largest: dict[tuple[torch.dtype, bool], int] = {}
        for unit in self.trainable:
            key, layout = self._kind_of(unit), unit.spec.layout
            nbytes = (layout.numel + layout.chunk_numel) * unit.spec.reduce_dtype.itemsize
            largest[key] = max(largest.get(key, 0), nbytes)
        return self._num_buffers * sum(largest.values())

    def _buffer(self, unit: Unit) -> ReduceBuffer:
        # In turn: while one is being reduced, the next unit's gradients go to the other.
        buffers = self._buffers_of(unit)
        buffers.append(buffers.pop(0))
        return buffers[0]

    def _buffers_of(self, unit: Unit) -> list[ReduceBuffer]:
        key = self._kind_of(unit)
        if key not in self._buffers:
            alike = [other for other in self.trainable if self._kind_of(other) == key]
            self._buffers[key] = [
                ReduceBuffer(
                    numel=max(u.spec.layout.numel for u in alike),
                    shard_numel=max(u.spec.layout.chunk_numel for u in alike),
                    dtype=unit.spec.reduce_dtype,
                    device=self._device,
                )
                for _ in range(self._num_buffers)
            ]
        return self._buffers[key]

    def _kind_of(self, unit: Unit) -> tuple[torch.dtype, bool]:
        """Units of one kind share their reduce buffers."""
        return unit.spec.reduce_dtype, self._is_tiny(unit)

    def _is_tiny(self, unit: Unit) -> bool:
        """A norm between two matrices must not keep the next of them out of the buffer."""
        return unit.spec.layout.numel * TINY_SHARE < self._largest_numel

    def _agree_found_inf(self, found_inf: Tensor) -> None:
        self._mesh.world.all_reduce(found_inf, "the gradient scaler's overflow flag", maximum=True)

    # -- the optimizer's step -----------------------------------------------------------------------

    def before_step(self, members: Sequence[tuple[Unit, int]]) -> None:
        """Show the optimizer plain gradients; none for parameters that no rank used."""
        if self._schedule is not None and self._schedule.suspended:
            raise MicsError(
                "optimizer.step() inside mics.summon_full_params: expected no step there, found one, whose "
                "new values would be overwritten or not be seen; leave the context first"
            )
        self.guard_again()
        self.synchronize()
        for unit in {id(unit): unit for unit, _ in members}.values():
            unit.check_intact()
            unit.gradients.drop_cleared()
        self._agreement.settle()
        for unit, index in members:
            shard = unit.shards[index]
            show_plain(shard)
            self._plain.append(shard)
            if shard.grad is None:
                continue
            if self._agreement.used(unit, index):
                # An empty shard has nothing to update, and not every kernel likes empty tensors.
                plain = unit.gradients.views[index] if shard.numel() else None
                self._shown.append((unit, index, plain))
                shard.grad = plain
            else:
                shard.grad = None

    def guard_again(self) -> None:
        """Put guarded gradients back in place of what an optimizer was shown."""
        for shard in self._plain:
            show_guarded(shard)
        self._plain = []
        if not self._shown:
            return
        with plainly():
            self._guard_gradients()

    def _guard_gradients(self) -> None:
        # A hook that clears gradients clears all of them: what is left tells whether one has.
        seen = [unit.shards[index].grad is plain for unit, index, plain in self._shown if plain is not None]
        for unit, index, plain in self._shown:
            shard = unit.shards[index]
            if shard.grad is plain and (plain is not None or all(seen)):
                shard.grad = self._guards[unit.spec.index][index]
        self._shown = []

    def after_step(self, members: Sequence[tuple[Unit, int]]) -> None:
        """Guard the gradients again and bring the new values to all replicas."""
        self.guard_again()
        self.audit.count_step()
        units = list({id(unit): unit for unit, _ in members}.values())
        if self._schedule is not None:
            self._schedule.settle_homes()
            units = self._schedule.forward_order(units)
        for batch in batches_of(units, self._batch_nbytes):
            refresh_together(batch)
        # Where parameters and masters are one memory, an edit of either through ``.data`` (clamping, say) is
        # seen by a gather that comes after it: so nothing is gathered before the next forward begins.
        if self._schedule is not None and not self._edits_show:
            self._schedule.start_next_forward()


def batches_of(units: Sequence[Unit], nbytes: int) -> Iterator[list[Unit]]:
    """Units that cross the replication group together: ``nbytes`` of shards, but for the first and the last.

    The first goes alone, because somebody waits for it. Towards the end a batch takes no more than half of
    what is left: what comes last is waited for too.
    """
    left = _nbytes_of(units)
    batch: list[Unit] = []
    for number, unit in enumerate(units):
        batch.append(unit)
        found = _nbytes_of(batch)
        if number == 0 or found >= min(nbytes, left / 2):
            yield batch
            batch, left = [], left - found
    if batch:
        yield batch


def _nbytes_of(units: Sequence[Unit]) -> int:
    return sum(unit.spec.layout.chunk_numel * unit.spec.param_dtype.itemsize for unit in units)

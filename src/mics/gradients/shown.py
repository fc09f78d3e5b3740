"""What ``p.grad`` is: guarded pieces for the user, plain ones for an optimizer at work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Final
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor

from mics.errors import MicsError
from mics.gradients.shards import GradState, UnitGradients
from mics.guard import Layout, ShardGrad, ShardOwner, ShardTensor, plainly, show_guarded, show_plain
from mics.sharding.contiguous import Contiguous
from mics.sharding.unit import Unit

_one: Final = [object()]
_NOT_HELD: Final = sys.getrefcount(_one[0])  # of what a list alone refers to


class ShownGradients:
    """The gradients of all units that are trained, as the user and the optimizer see them."""

    def __init__(self, units: Sequence[Unit], *, owner: ShardOwner, memory: Contiguous) -> None:
        self.owner = owner
        errors = Contiguous(owner.device)
        self._gradients = {unit.spec.index: _gradients_of(unit, memory, errors) for unit in units}
        self._guards: dict[int, list[ShardGrad]] = {}  # by unit index
        # What an optimizer at work sees in place of guarded gradients; None where it should see nothing.
        self._plain: list[tuple[Unit, int, Tensor | None]] = []
        self._plain_params: list[nn.Parameter] = []  # that it sees without their guard

    def of(self, unit: Unit) -> UnitGradients:
        """The gradients of ``unit``."""
        return self._gradients[unit.spec.index]

    @property
    def with_errors(self) -> list[UnitGradients]:
        """Those of which ranks keep what rounding in hop 2 loses."""
        return [each for each in self._gradients.values() if each.errors is not None]

    def forget_errors(self) -> None:
        """Start with nothing that rounding has lost."""
        for each in self.with_errors:
            each.forget_errors()

    def keep_unused(self, is_used: Callable[[Unit, int], bool]) -> None:
        """After hop 2: what it brought for parameters without a gradient waits for one."""
        for each in self.with_errors:
            if each.state is GradState.REDUCED and each.unit.groups.replication.size > 1:
                for index in range(len(each.used)):
                    if not is_used(each.unit, index):
                        each.keep_unused(index)

    # -- the user's -----------------------------------------------------------------------------------

    def show(self, unit: Unit) -> None:
        """Let ``parameter.grad`` be this unit's guarded gradients."""
        gradients = self.of(unit)
        guards = self._guards.get(unit.spec.index)
        if guards is None:
            guards = [
                ShardGrad.of(grad, layout, ref(self.owner))
                for grad, layout in zip(gradients.views, unit.layouts, strict=True)
            ]
            self._guards[unit.spec.index] = guards
        with plainly():
            for held, shard, guard in zip(unit.spec.refs, unit.shards, guards, strict=True):
                guard.is_zeroed = False
                if shard.grad is None and shard.requires_grad:
                    _check_unhooked(shard, held.name)
                    shard.grad = guard

    def leave_cleared(self, unit: Unit) -> None:
        """Before the next gradients come: the user may hold some that were cleared."""
        if unit.spec.index in self._guards and self.of(unit).state is not GradState.EMPTY:
            with plainly():
                cleared = [index for index, shard in enumerate(unit.shards) if shard.grad is None]
            self._leave(unit, cleared)

    def adopt_assigned(self, unit: Unit, finish: Callable[[UnitGradients], None]) -> list[int]:
        """Take gradients that the user put in place of ours (``p.grad = p.grad.clamp(...)``): of which.

        ``finish`` brings ours to the state after hop 2 before. The caller notes that they are used.
        """
        if self.is_plain:  # an optimizer is at work on plain gradients, which are not the user's
            return []
        guards: Sequence[ShardTensor | None] = self._guards.get(unit.spec.index) or [None] * len(unit.shards)
        with plainly():
            grads = [shard.grad for shard in unit.shards]
        assigned = {
            index: grad
            for index, (grad, guard) in enumerate(zip(grads, guards, strict=True))
            if grad is not None and grad is not guard
        }
        if not assigned:
            return []
        for index, value in assigned.items():
            if isinstance(value, ShardTensor):
                value.current().check_kept()
                _check_assigned(unit.layouts[index], value)
        gradients = self.of(unit)
        finish(gradients)
        self._leave(unit, list(assigned))
        with plainly():
            for index, value in assigned.items():
                gradients.views[index].copy_(value.current() if isinstance(value, ShardTensor) else value)
                unit.shards[index].grad = None
        self.show(unit)
        for index, value in assigned.items():
            if isinstance(value, ShardTensor):  # who holds it goes on with the gradient
                value.became = self._guards[unit.spec.index][index]
        return list(assigned)

    def forget(self) -> None:
        """The memory of gradients is freed, all of which were cleared."""
        guards, self._guards = self._guards, {}
        for index, gradients in self._gradients.items():
            if gradients.state is GradState.PARTIAL and gradients.unit.groups.replication.size > 1:
                for guard in guards.get(index, ()):
                    guard.is_lost = True  # who has put it aside has a sum over the partition group alone

    def _leave(self, unit: Unit, indices: Sequence[int]) -> None:
        """Leave gradients that are not ``parameter.grad`` any more to whoever holds them."""
        gradients, guards = self.of(unit), self._guards.get(unit.spec.index, [])
        held = [index for index in indices if guards and sys.getrefcount(guards[index]) > _NOT_HELD]
        for index in held:
            if gradients.state is GradState.PARTIAL and unit.groups.replication.size > 1:
                guards[index].is_lost = True  # a sum over the partition group alone
            else:
                gradients.settle()
                guards[index].keep_for_user()
            guards[index] = ShardGrad.of(gradients.views[index], unit.layouts[index], ref(self.owner))

    # -- the optimizer's ------------------------------------------------------------------------------

    @property
    def is_plain(self) -> bool:
        """Whether an optimizer is at work on plain gradients."""
        return bool(self._plain)

    def show_plain(self, unit: Unit, index: int, *, is_used: bool) -> None:
        """Let an optimizer see a plain parameter and gradient; none if no rank used it."""
        shard = unit.shards[index]
        show_plain(shard)
        self._plain_params.append(shard)
        if shard.grad is None:
            return
        if not is_used:
            shard.grad = None
            return
        # An empty shard has nothing to update, and not every kernel likes empty tensors.
        plain = self.of(unit).views[index] if shard.numel() else None
        self._plain.append((unit, index, plain))
        shard.grad = plain

    def hide_plain(self) -> None:
        """The optimizer has used what it was shown, and shall not again."""
        for unit, index, _ in self._plain:
            unit.shards[index].grad = None
        self._plain = [(unit, index, None) for unit, index, _ in self._plain]

    def guard_again(self) -> None:
        """Put guarded gradients back in place of what an optimizer was shown."""
        for shard in self._plain_params:
            show_guarded(shard)
        self._plain_params = []
        if not self._plain:
            return
        with plainly():
            # A hook that clears gradients clears all of them: what is left tells whether one has.
            seen = [unit.shards[i].grad is plain for unit, i, plain in self._plain if plain is not None]
            for unit, index, plain in self._plain:
                shard = unit.shards[index]
                if shard.grad is plain and (plain is not None or all(seen)):
                    shard.grad = self._guards[unit.spec.index][index]
        self._plain = []


def _check_unhooked(shard: nn.Parameter, name: str) -> None:
    """Raise if the user hooked a parameter: autograd never sees shards, so the hook would not run."""
    if shard._post_accumulate_grad_hooks or shard._backward_hooks:
        raise MicsError(
            f"{name}: expected no hooks on parameters of a sharded model, found one, which "
            "would never run; change gradients between backward and optimizer.step() instead"
        )


def _check_assigned(layout: Layout, value: ShardTensor) -> None:
    if value.shard_layout != layout:
        raise MicsError(
            f"p.grad of {layout.label}: expected a gradient of the same elements, found a piece of "
            f"{value.shard_layout.label} that holds others; assign p.grad from that parameter's "
            f"own gradient"
        )


def _gradients_of(unit: Unit, memory: Contiguous, errors: Contiguous) -> UnitGradients:
    spec, numel = unit.spec, unit.spec.layout.chunk_numel
    lost = errors.reserve(torch.bfloat16, numel) if spec.keeps_errors else None
    return UnitGradients(unit, memory.reserve(spec.grad_dtype, numel), lost)

"""When units are gathered, released and reduced: the one place that decides.

Every unit is gathered right before it is needed and released right after. A module's forward is seen by
forward hooks. Its backward begins when a gradient reaches one of the forward's outputs and is over when
the gradient of one of its inputs is complete: autograd works off later nodes first, so whatever the
module had to do is done by then. What never gets that far (the first module, whose inputs are token
numbers) ends with the backward itself. See "Following autograd" in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from mics.arena import Arena
from mics.errors import UNCOPYABLE, UNTRACEABLE, MicsError
from mics.plans import Batch, Plans
from mics.scheduled_site import (
    Call,
    Forward,
    ScheduledSite,
    SharedInputs,
    copy_parameters,
    is_plain_embedding,
)
from mics.step_log import GATHERED, PREFETCHED, REDUCED, StepLog
from mics.tensor_hooks import hook_first, hooks_of
from mics.tensor_trees import cast_floats, num_rows, tensors_in
from mics.unit import Unit, send_for
from mics.user_hooks import UserHooks

_MAX_PUT_OFF = 2  # boundaries


class Schedule:
    """Follows forwards and backwards of one model through hooks on its modules."""

    def __init__(
        self,
        sites: Sequence[ScheduledSite],
        *,
        reduce: Callable[[Unit], None],
        before_root: Callable[[], None],
        on_gather: Callable[[], None],
        plans: Plans,
        has_arena: bool = True,
    ) -> None:
        self.sites = list(sites)
        self.plans = plans
        self.rows = 0  # the most rows that a unit's forward has multiplied its matrices with
        self._num_boundaries = 0
        self._num_put_off = 0  # times that homes were to be given and backwards were still to come
        self.suspended = False  # while parameters are summoned
        self.more_to_come = False  # another micro-step follows with these parameters
        self.units = list({unit.spec.index: unit for site in sites for unit in site.units}.values())
        self.log = StepLog(unit.spec for unit in self.units)
        self.arena = Arena(self.units if has_arena else [])
        self._counts_rows = not has_arena  # with more of them, more memory is lent
        self._by_index = {unit.spec.index: unit for unit in self.units}
        self._reduce_unit = reduce
        self._before_root = before_root
        self._on_gather = on_gather
        self._depth = 0
        self.in_backward = False
        self.edits_show = False  # masters are gathered as they are, whoever wrote to them
        self._has_turned = False  # a backward has come since the forward began
        self._num_backwards = 0
        self._ender: ref[_EndOfBackward] | None = None
        self._sites_of: dict[int, list[ScheduledSite]] = {}  # by unit index
        for site in sites:
            for unit in site.units:
                self._sites_of.setdefault(unit.spec.index, []).append(site)
        self._shared_inputs = SharedInputs()
        self._on_demand: dict[int, Unit] = {}  # units whose parameters are read without calling their module
        for unit in self.units:
            unit.on_access = self._accessed
        self._hooks = [handle for site in self.sites for handle in self._hook(site)]
        self.user_hooks = UserHooks(self._watch_hooked)

    def __reduce__(self) -> Any:
        raise MicsError(UNCOPYABLE)

    # -- forward ------------------------------------------------------------------------------------

    def _hook(self, site: ScheduledSite) -> Iterator[RemovableHandle]:
        # Compiled modules call these as they are: tracing them would find memory that comes and goes.
        before, after = (
            torch.compiler.disable(partial(hook, site), reason=UNTRACEABLE)
            for hook in (self.pre_forward, self.post_forward)
        )
        yield site.module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
        # always_call: a forward that raises (also the early stop of a checkpoint's recomputation) still ends.
        yield site.module.register_forward_hook(after, with_kwargs=True, always_call=True)
        UserHooks.skip(before, after)
        # What these refer to says why it cannot be copied, but pickle would fail over the hooks before that.
        site.module.__dict__["__reduce_ex__"] = self.__reduce_ex__

    def pre_forward(
        self, site: ScheduledSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.suspended:
            if torch.is_grad_enabled():
                raise MicsError(
                    f"forward of {site.label!r} inside mics.summon: expected "
                    "torch.no_grad(), found "
                    "gradients enabled; gradients of summoned parameters would be lost, leave the "
                    "context first"
                )
            return None
        if self._depth == 0:
            self._begin_forward()
        if site.is_removed:
            site.refuse_call()
        self._depth += 1
        site.depth += 1
        site.forwards.append(None)
        self._gather(site.units)
        if site.units and (self._counts_rows or not (self.plans.is_final and self._num_boundaries)):
            self.rows = max(self.rows, num_rows((args, kwargs)))
        if site.cast_to is not None:
            args, kwargs = cast_floats((args, kwargs), site.cast_to)
        if torch.is_grad_enabled():
            site.forwards[-1] = forward = self._watch_inputs(site, (args, kwargs))
            self._shared_inputs.enter(forward)
        return None if site.cast_to is None else (args, kwargs)

    def post_forward(
        self,
        site: ScheduledSite,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if self.suspended or site.depth == 0:
            return None
        forward = site.forwards.pop()
        if forward is not None:
            self._shared_inputs.leave(forward)
        # Results may also be left in the arguments (a list that the forward appends to), and in attributes.
        returned, kept, watched = output, site.kept_tensors(), False
        try:
            leaving = [*site.units, *(self._on_demand.values() if self._depth == 1 else ())]
            output = copy_parameters(site, leaving, output, kept, args, kwargs)
            watched = forward is not None and self._watch_outputs(
                site,
                forward,
                (output, args, kwargs, [tensor for tensor in kept if tensor.grad_fn is not None]),
            )
        finally:
            site.depth -= 1
            self._depth -= 1
            # A forward inside a backward is a recomputation: its own backward follows at once.
            if not (self.in_backward and watched):
                self._release(site.units)
            if self._depth == 0 and not self.in_backward:
                self._release(self._on_demand.values())
        return output if output is not returned else None

    def _begin_forward(self) -> None:
        self._notice_failed_backward()
        if not self.in_backward:
            self._finish_order()
            self._drop_stale()
            self._before_root()

    def _finish_order(self) -> None:
        """What the forward and the backward since the last one needed is known."""
        for unit in self._shared_inputs.take_units():
            # This backward may not have come to it, and the next may: a loss that begins later, of a tower.
            self.arena.stays(unit)
        self.arena.finish(self.plans.begin())

    def _drop_stale(self) -> None:
        """Release units that were sent for and not needed after all (an evaluation has no backward)."""
        # What an evaluation kept may have been edited since, in a way that nobody notices (``.data``) or that
        # only some ranks do. Between micro-steps values stay.
        has_turned, self._has_turned = self._has_turned, False
        first = self.plans.first_units() if has_turned or not self.edits_show else frozenset()
        for unit in self.units:
            if unit.is_arriving and unit.spec.index not in first and not (has_turned and self._stays(unit)):
                unit.release()

    def _accessed(self, unit: Unit) -> None:
        """A module reads a parameter of a released unit."""
        if self.suspended or (self._depth == 0 and not self.in_backward):
            return
        if unit.spec.index not in self._on_demand:
            self._on_demand[unit.spec.index] = unit
            # No call says where it was in the forward: it is always gathered in memory of its own.
            self.arena.leave_out(unit)
        self._gather([unit])

    # -- backward -----------------------------------------------------------------------------------

    def _watch_inputs(self, site: ScheduledSite, inputs: Any) -> Forward:
        watched = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        call = Call(
            values=site.values(),
            num_planned=self.arena.num_planned,
            at_home=tuple(unit.memory.at_home for unit in site.units),
            needs_params=not is_plain_embedding(site.module),
            boundary=self._num_boundaries,
        )
        for tensor in watched.values():
            if tensor.is_leaf:
                self._watch_leaf(site, call, tensor)
            else:
                tensor.register_hook(partial(self._leave, site, call))
                self._release_first(site, call, tensor)
        before = {key: tensor.grad_fn for key, tensor in watched.items()}
        return Forward(site, call, before, self._shared_inputs.read(watched))

    def _release_first(self, site: ScheduledSite, call: Call, tensor: Tensor) -> None:
        """When ``tensor`` has its gradient, release units of ``site`` before its maker's backward begins.

        That one sends for another unit, which has their place then. Not where it needs one of them itself: a
        block that is called again and again.
        """
        hooks = hooks_of(tensor)
        own = [
            hook
            for hook in hooks
            if isinstance(hook, partial) and getattr(hook.func, "__self__", None) is self
        ]
        makers = [hook.args[0] for hook in own if hook.func == self._enter]
        is_shared = any(unit in maker.units for maker in makers for unit in site.units)
        # A hook of the user's may read parameters of either.
        if makers and not is_shared and len(own) == len(hooks):
            hook_first(tensor, partial(self._release_early, site, call))

    def _release_early(self, site: ScheduledSite, call: Call, grad: Tensor) -> None:
        """What ``_leave`` is about to do, but for the gradients: they travel after what is needed sooner."""
        if not self.in_backward or call.live_in != self._num_backwards:
            return
        for unit in site.units:
            if not self._in_use(unit, leaving=site):
                self._let_go(unit)

    def _watch_leaf(self, site: ScheduledSite, call: Call, leaf: Tensor) -> None:
        """Follow an input that is a leaf, as in a reentrant checkpoint's own backward.

        A leaf's gradient has the same rank in autograd's queue as those of parameters, which may still
        be on their way. They are there when this backward, perhaps one inside another, ends.
        """

        def later(grad: Tensor) -> None:
            handle.remove()  # the user may pass the same leaf again and again
            Variable._execution_engine.queue_callback(partial(self._leave, site, call, grad))

        handle = leaf.register_hook(later)

    def _watch_outputs(self, site: ScheduledSite, forward: Forward, output: Any) -> bool:
        """Have autograd call back before it needs this forward's parameters."""
        watched = {id(tensor): tensor for tensor in tensors_in(output) if tensor.requires_grad}
        for tensor in watched.values():
            if not forward.hands_through(tensor):
                tensor.register_hook(partial(self._enter, site, forward.call))
        site.num_waiting += bool(watched)
        if watched and forward.call.needs_params and not self.in_backward:
            self._shared_inputs.expect_backward(site, forward)
        return bool(watched)

    def _watch_hooked(self, values: Any) -> None:
        """Watch what a hook of the user's sees: it may keep it, and make a loss of it alone."""
        seen = {id(t): t for t in tensors_in(values) if t.requires_grad and not t.is_leaf}
        for tensor in seen.values() if not self.suspended else ():
            # Backward may begin inside of all of them, and never see their outputs.
            for forward in self._shared_inputs.under_way:
                if not forward.hands_through(tensor):
                    tensor.register_hook(partial(self._enter, forward.site, forward.call))

    def _enter(self, site: ScheduledSite, call: Call, grad: Tensor) -> None:
        """A gradient has reached an output of ``call``: its backward begins."""
        self._notice_failed_backward()
        if not self.in_backward:
            self._begin_backward()
        if torch.is_grad_enabled():
            raise MicsError(
                "backward with create_graph=True: expected first-order gradients, found a request "
                "for gradients "
                "of gradients, which mics cannot follow; compute that term without the sharded "
                "model's parameters"
            )
        call.check(site, self.arena.num_planned)
        if call.live_in != self._num_backwards:
            call.live_in = self._num_backwards
            site.num_live += 1
        if not call.entered:
            call.entered = True
            site.num_waiting -= call.boundary == self._num_boundaries
        site.reached = True
        if call.needs_params:
            self._return_to_places(site, call)
            self._gather(site.units)

    def _leave(self, site: ScheduledSite, call: Call, grad: Tensor) -> None:
        """The gradient of an input of ``call`` is complete: its backward is over."""
        if not self.in_backward or call.live_in != self._num_backwards:
            return
        call.live_in = 0
        site.num_live -= 1
        self._finish(site.units)

    def _begin_backward(self) -> None:
        self.in_backward = self._has_turned = True
        self._num_backwards += 1
        ender = _EndOfBackward(self)
        self._ender = ref(ender)
        Variable._execution_engine.queue_callback(ender)
        self._gather(self._on_demand.values())

    def end_backward(self) -> None:
        """Reduce and release whatever backward has not been seen to leave."""
        for unit in self.units:
            reached = unit.gathered or any(site.reached for site in self._sites_of[unit.spec.index])
            if unit.gradients.on_full() and not reached:
                raise MicsError(
                    f"unit {unit.spec.name!r} got gradients although none reached an output of its module, "
                    "while its parameters were released. Return every tensor that takes part in the loss "
                    "from the module's forward"
                )
        for site in self.sites:
            site.num_live, site.reached = 0, False
        for site in reversed(self.sites):
            self._finish(site.units, at_the_end=True)
        self.in_backward = False
        if self.more_to_come:
            self.start_next_forward()
            return
        for unit in self.units:
            if unit.is_arriving:
                unit.release()  # the backward did not need it (a lookup), and its values may change now

    def start_next_forward(self) -> None:
        """Send for the units that a forward like the last one needs first."""
        self._send_for(self.plans.first())

    def forward_order(self, units: Sequence[Unit]) -> list[Unit]:
        """``units`` in the order in which the last forward needed them."""
        order = {index: position for position, index in reversed(list(enumerate(self.plans.latest())))}
        return sorted(units, key=lambda unit: order.get(unit.spec.index, len(order)))

    def settle_homes(self) -> None:
        """Give units their homes once an order has settled, and again when another has.

        Called after an optimizer step, and put off while a backward is still to come: tensors that it saved
        are at the old addresses.
        """
        # By counting calls, not by looking at who still holds a graph: all ranks must come to one answer.
        num_waiting = sum(site.num_waiting for site in self.sites)
        for site in self.sites:
            site.num_waiting = 0
        self._num_boundaries += 1
        if self.in_backward or self._depth or not self.plans.is_final or self.plans.prefetch.units == 0:
            return
        self._finish_order()
        if not self.arena.wants_planning():
            return
        # Outputs that no loss is made of never see a backward. One that comes all the same is refused.
        if num_waiting and self._num_put_off < _MAX_PUT_OFF:
            self._num_put_off += 1
            return
        self._num_put_off = 0
        self.arena.give_homes()

    def _notice_failed_backward(self) -> None:
        if self.in_backward and (self._ender is None or self._ender() is None):
            self._abandon_backward()

    def _abandon_backward(self) -> None:
        """The last backward failed half-way: forget what it left."""
        self.in_backward = False
        self.plans.forget_current()
        self.arena.forget_current()
        for site in self.sites:
            site.num_live, site.reached = 0, False
        for unit in self.units:
            unit.gradients.drop_full()
            unit.release()

    # -- units --------------------------------------------------------------------------------------

    def _gather(self, units: Iterator[Unit] | Sequence[Unit] | Any) -> None:
        for unit in units:
            if unit.gathered:
                continue
            self.log.note(unit.spec.index, GATHERED)
            upcoming = self.plans.advance(unit.spec.index, in_backward=self.in_backward)
            if not self.in_backward:
                self._choose_place(unit)
            if unit.memory.at_home and not unit.make_room():
                self.arena.give_up()
                raise MicsError(
                    f"{unit.spec.label} is needed while another unit is in its place: backward uses modules "
                    "together that it never did since places in memory were planned. Places are given up: "
                    "run this step again, from zero_grad() on, and it will go through"
                )
            unit.gather()
            self.arena.note(unit, needed=True)
            # After the unit itself: it is needed now, they are not.
            self._send_for(upcoming)
            if self.more_to_come and self.plans.at_end:
                self.start_next_forward()
            self._on_gather()

    def _choose_place(self, unit: Unit) -> None:
        """At home while an order is followed that homes were planned for, unless somebody is there."""
        if not unit.memory.has_home:
            return
        at_home = self.arena.expects(unit) and unit.make_room()
        # A backward that is still to come finds its tensors where they were.
        if at_home != unit.memory.at_home and not any(
            site.num_waiting for site in self._sites_of[unit.spec.index]
        ):
            unit.live(at_home=at_home)

    def _return_to_places(self, site: ScheduledSite, call: Call) -> None:
        """Have the units of ``call`` where they were in its forward."""
        for unit, at_home in zip(site.units, call.at_home, strict=True):
            if unit.memory.at_home != at_home and unit.gathered:
                raise MicsError(
                    f"backward through {site.label!r}: expected {unit.spec.label} where its "
                    "forward had it, found it elsewhere for another forward; run backward after each forward "
                    "while the order in which modules are used still changes"
                )
            unit.live(at_home=at_home)

    def _send_for(self, batches: Sequence[Batch]) -> None:
        for batch in batches:
            for unit in send_for([self._by_index[index] for index in batch]):
                self.log.note(unit.spec.index, PREFETCHED)

    def _release(self, units: Any) -> None:
        for unit in units:
            if self._in_use(unit) or not unit.gathered:
                continue
            if not self.in_backward and (self.plans.keeps(unit.spec.index) or self._stays(unit)):
                unit.keep()  # the last units of a forward are the first of the backward
            else:
                self._let_go(unit)

    def _finish(self, units: Sequence[Unit], *, at_the_end: bool = False) -> None:
        """Backward is through with these units, unless another of their sites is still in it."""
        for unit in units:
            if self._in_use(unit, at_the_end=at_the_end):
                continue
            if unit.gradients.on_full():
                self.log.note(unit.spec.index, REDUCED)
                self._reduce_unit(unit)
            if at_the_end and unit.gathered:
                self.arena.stays(unit)
            self._let_go(unit)

    def _let_go(self, unit: Unit) -> None:
        if not unit.gathered:
            return
        if self.more_to_come and (self._stays(unit) or self.plans.begins_next(unit.spec.index)):
            unit.keep()  # with the same values
            return
        self.arena.note(unit, needed=False)
        unit.release()

    def _stays(self, unit: Unit) -> bool:
        """Whether ``unit`` has a home of its own, in which it waits for its next use."""
        return unit.memory.at_home and self.plans.stays(unit.spec.index)

    def _in_use(self, unit: Unit, *, leaving: ScheduledSite | None = None, at_the_end: bool = False) -> bool:
        """Whether a call of one of its sites needs it, beside one that is just ``leaving``.

        Or it is read without a call: nobody sees when that is over, before the forward or backward ends.
        """
        if unit.spec.index in self._on_demand and (self.in_backward or self._depth) and not at_the_end:
            return True
        sites = self._sites_of[unit.spec.index]
        return any(site.depth or site.num_live > (site is leaving) for site in sites)


class _EndOfBackward:
    """What autograd calls at the end. It holds the only reference: if this is gone, the backward failed."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule.end_backward()

"""Following autograd: hooks on modules and tensors become events (events.py). Nothing else has such hooks.

A module's forward is seen by forward hooks. Its backward begins when a gradient reaches one of the forward's
outputs and is over when the gradient of one of its inputs is complete: autograd works off later nodes first,
so whatever the module had to do is done by then. What never gets that far (the first module, whose inputs are
token numbers) ends with the backward itself. A unit is in use while any call of any of its modules is under
way, also of one that is called twice (``_in_use``). See "Following autograd" in docs/design.md.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from threading import RLock
from types import FrameType
from typing import Any
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from mics.errors import UNCOPYABLE, UNTRACEABLE, MicsError
from mics.schedule.events import Event, Events, Progress, What
from mics.schedule.sites import (
    Call,
    Forward,
    ScheduledSite,
    copy_parameters,
    is_plain_embedding,
)
from mics.sharding.unit import Unit
from mics.utils.tensor_hooks import hook_first, hooks_of
from mics.utils.tensor_trees import cast_floats, num_rows, tensors_in


class Autograd:
    """Follows forwards and backwards of one model, and tells ``events`` what happens."""

    def __init__(self, sites: Sequence[ScheduledSite], *, events: Events, progress: Progress) -> None:
        self.sites = list(sites)
        self.units = list({unit.spec.index: unit for site in sites for unit in site.units}.values())
        self.progress = progress
        self._events = events
        self._num_backwards = 0
        self._ender: ref[_EndOfBackward] | None = None
        self._noticing = RLock()
        self._sites_of: dict[int, list[ScheduledSite]] = {}  # by unit index
        for site in sites:
            for unit in site.units:
                self._sites_of.setdefault(unit.spec.index, []).append(site)
        self._on_demand: dict[int, Unit] = {}  # units whose parameters are read without calling their module
        for unit in self.units:
            unit.held.read_listeners.append(partial(self._read, unit))
        self._hooks = [handle for site in self.sites for handle in self._hook(site)]
        self.user_hooks = UserHooks(self._watch_hooked)

    def __reduce__(self) -> Any:
        raise MicsError(UNCOPYABLE)

    def _tell(self, what: What, unit: Unit | None = None, place: int | None = None, module: str = "") -> None:
        if listeners := self._events[what]:
            event = Event(what, unit, place=place, module=module)
            for hear in tuple(listeners):
                hear(event)

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
        if self.progress.suspended:
            if torch.is_grad_enabled():
                raise MicsError(
                    f"forward of {site.label!r} inside mics.summon_full_params: expected "
                    "torch.no_grad(), found "
                    "gradients enabled; gradients of summoned parameters would be lost, leave the "
                    "context first"
                )
            return None
        if self.progress.depth == 0 or not site.name:
            self._notice_failure(in_root=not site.name)
        if self.progress.depth == 0 and not self.progress.in_backward:
            self._tell(What.FORWARD_CALLED)
            self._tell(What.FORWARD_BEGINS)
        if site.is_removed:
            site.refuse_call()
        self.progress.depth += 1
        site.depth += 1
        site.forwards.append(None)
        self._tell(What.MODULE_FORWARD_BEGINS, module=site.name)
        self._need(site.units)
        if site.units and self.progress.counts_rows:
            self.progress.rows = max(self.progress.rows, num_rows((args, kwargs)))
        if site.cast_to is not None:
            args, kwargs = cast_floats((args, kwargs), site.cast_to)
        if torch.is_grad_enabled():
            site.forwards[-1] = forward = self._watch_inputs(site, (args, kwargs))
            self.progress.shared_inputs.enter(forward)
        return None if site.cast_to is None else (args, kwargs)

    def post_forward(
        self,
        site: ScheduledSite,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> Any:
        if self.progress.suspended or site.depth == 0:
            return None
        forward = site.forwards.pop()
        if forward is not None:
            self.progress.shared_inputs.leave(forward)
        # Results may also be left in the arguments (a list that the forward appends to), and in attributes.
        returned, kept, watched = output, site.kept_tensors(), False
        try:
            leaving = [*site.units, *(self._on_demand.values() if self.progress.depth == 1 else ())]
            output = copy_parameters(site, leaving, output, kept, args, kwargs)
            watched = forward is not None and self._watch_outputs(
                site,
                forward,
                (output, args, kwargs, [tensor for tensor in kept if tensor.grad_fn is not None]),
            )
        finally:
            self._tell(What.MODULE_FORWARD_ENDS, module=site.name)
            site.depth -= 1
            self.progress.depth -= 1
            # A forward inside a backward is a recomputation: its own backward follows at once.
            if not (self.progress.in_backward and watched):
                self._leave_unused(site.units)
            if self.progress.depth == 0 and not self.progress.in_backward:
                self._leave_unused(self._on_demand.values())
        return output if output is not returned else None

    def _read(self, unit: Unit) -> None:
        """A module reads a parameter of a unit that is not gathered."""
        if self.progress.suspended or (self.progress.depth == 0 and not self.progress.in_backward):
            return
        if unit.spec.index not in self._on_demand:
            self._on_demand[unit.spec.index] = unit
            self._tell(What.READ, unit)
        self._need([unit])

    # -- backward -----------------------------------------------------------------------------------

    def _watch_inputs(self, site: ScheduledSite, inputs: Any) -> Forward:
        watched = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        call = Call(
            values=site.values(),
            places=tuple(unit.whole.place for unit in site.units),
            needs_params=not is_plain_embedding(site.module),
            num_steps=self.progress.num_steps,
        )
        for tensor in watched.values():
            if tensor.is_leaf:
                self._watch_leaf(site, call, tensor)
            else:
                tensor.register_hook(partial(self._leave, site, call))
                self._release_first(site, call, tensor)
        before = {key: tensor.grad_fn for key, tensor in watched.items()}
        return Forward(site, call, before, self.progress.shared_inputs.read(watched))

    def _release_first(self, site: ScheduledSite, call: Call, tensor: Tensor) -> None:
        """When ``tensor`` has its gradient, release units of ``site`` before its maker's backward begins.

        That one prefetches another unit, which has their place then. Not where it needs one of them itself: a
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
        if not self.progress.in_backward or call.live_in != self._num_backwards:
            return
        self._leave_unused(site.units, leaving=site)

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
        if watched:
            self.progress.count_waiting(site.units, 1)
            if forward.call.needs_params and not self.progress.in_backward:
                self.progress.shared_inputs.expect_backward(site, forward)
        return bool(watched)

    def _watch_hooked(self, values: Any) -> None:
        """Watch what a hook of the user's sees: it may keep it, and make a loss of it alone."""
        seen = {id(t): t for t in tensors_in(values) if t.requires_grad and not t.is_leaf}
        for tensor in seen.values() if not self.progress.suspended else ():
            # Backward may begin inside of all of them, and never see their outputs.
            for forward in self.progress.shared_inputs.under_way:
                if not forward.hands_through(tensor):
                    tensor.register_hook(partial(self._enter, forward.site, forward.call))

    def _enter(self, site: ScheduledSite, call: Call, grad: Tensor) -> None:
        """A gradient has reached an output of ``call``: its backward begins."""
        self._notice_failure()
        if not self.progress.in_backward:
            self._begin_backward()
        if torch.is_grad_enabled():
            raise MicsError(
                "backward with create_graph=True: expected first-order gradients, found a request "
                "for gradients "
                "of gradients, which mics cannot follow; compute that term without the sharded "
                "model's parameters"
            )
        call.check(site)
        if call.live_in != self._num_backwards:
            call.live_in = self._num_backwards
            site.num_live += 1
        if not call.entered:
            call.entered = True
            if call.num_steps == self.progress.num_steps:
                self.progress.count_waiting(site.units, -1)
        site.reached = True
        self._tell(What.MODULE_BACKWARD_BEGINS, module=site.name)
        if call.needs_params:
            self._need(site.units, call.places)

    def _leave(self, site: ScheduledSite, call: Call, grad: Tensor) -> None:
        """The gradient of an input of ``call`` is complete: its backward is over."""
        if not self.progress.in_backward or call.live_in != self._num_backwards:
            return
        call.live_in = 0
        site.num_live -= 1
        self._tell(What.MODULE_BACKWARD_ENDS, module=site.name)
        self._finish(site.units)

    def _begin_backward(self) -> None:
        self.progress.in_backward = True
        self._num_backwards += 1
        ender = _EndOfBackward(self)
        # Autograd drops it when this backward is over or has failed, perhaps on a thread of its own.
        self._ender = ref(ender, lambda _: self._notice_failure())
        Variable._execution_engine.queue_callback(ender)
        del ender  # the traceback of a failure would hold it
        self._tell(What.BACKWARD_BEGINS)
        self._need(self._on_demand.values())

    def end_backward(self) -> None:
        """Finish whatever backward has not been seen to leave."""
        for unit in self.units:
            reached = unit.gathered or any(site.reached for site in self._sites_of[unit.spec.index])
            if unit.whole.has_gradients() and not reached:
                raise MicsError(
                    f"unit {unit.spec.name!r} got gradients although none reached an output of its module, "
                    "while its parameters were released. Return every tensor that takes part in the loss "
                    "from the module's forward"
                )
        for site in self.sites:
            site.num_live, site.reached = 0, False
        for site in reversed(self.sites):
            self._finish(site.units, at_the_end=True)
        self.progress.in_backward = False
        self._tell(What.BACKWARD_ENDS)

    def _notice_failure(self, *, in_root: bool = False) -> None:
        """If the last backward failed half-way, or an interrupt ended a forward, forget what it left.

        torch calls no hook of a forward that ends by Ctrl-C: the model is called, and nothing is around it.
        """
        with self._noticing:  # the end of a backward may come on another thread
            failed = self.progress.in_backward and (self._ender is None or self._ender() is None)
            interrupted = in_root and self.progress.depth > 0 and not _is_nested(self.sites)
            if not (failed or interrupted):
                return
            self.progress.in_backward = False
            for site in self.sites:
                site.num_live, site.reached = 0, False
            if interrupted:
                self.progress.depth = 0
                self.progress.shared_inputs.under_way.clear()
                for site in self.sites:
                    site.depth = 0
                    site.forwards.clear()
            for unit in self.units:
                unit.whole.drop_gradients()
            self._tell(What.FAILED)

    # -- units --------------------------------------------------------------------------------------

    def _need(self, units: Iterable[Unit], places: Sequence[int] = ()) -> None:
        """Somebody is about to compute with ``units``: in the backward where its forward had them."""
        for number, unit in enumerate(units):
            place = places[number] if places else None
            if not unit.gathered or (place is not None and place != unit.whole.place):
                self._tell(What.NEEDED, unit, place)

    def _leave_unused(self, units: Iterable[Unit], leaving: ScheduledSite | None = None) -> None:
        for unit in units:
            if unit.gathered and not self._in_use(unit, leaving=leaving):
                self._tell(What.UNUSED, unit)

    def _finish(self, units: Iterable[Unit], *, at_the_end: bool = False) -> None:
        """Backward is through with these units, unless another of their sites is still in it."""
        for unit in units:
            if self._in_use(unit, at_the_end=at_the_end):
                continue
            if unit.whole.has_gradients():
                self._tell(What.GRADIENTS_READY, unit)
            if unit.gathered:
                if at_the_end:
                    self._tell(What.ENDS_UNSEEN, unit)
                self._tell(What.UNUSED, unit)

    def _in_use(self, unit: Unit, *, leaving: ScheduledSite | None = None, at_the_end: bool = False) -> bool:
        """Whether a call of one of its sites needs it, beside one that is just ``leaving``.

        Or it is read without a call: nobody sees when that is over, before the forward or backward ends.
        """
        if (
            unit.spec.index in self._on_demand
            and (self.progress.in_backward or self.progress.depth)
            and not at_the_end
        ):
            return True
        sites = self._sites_of[unit.spec.index]
        return any(site.depth or site.num_live > (site is leaving) for site in sites)


def _is_nested(sites: Iterable[ScheduledSite]) -> bool:
    """Whether the module of one site calls that of another, as this thread's stack says."""
    followed = {id(site.module) for site in sites}
    frame: FrameType | None = sys._getframe()
    num_calls = 0
    while frame is not None:
        is_call = frame.f_code is nn.Module._call_impl.__code__
        num_calls += is_call and id(frame.f_locals["self"]) in followed
        frame = frame.f_back
    return num_calls > 1


class _EndOfBackward:
    """What autograd calls at the end. It holds the only reference: if this is gone, the backward failed."""

    def __init__(self, autograd: Autograd) -> None:
        self._autograd = autograd

    def __call__(self) -> None:
        self._autograd.end_backward()


class UserHooks:
    """Calls back with what modules take and return that have hooks of the user's, and only with theirs.

    What such hooks see may leave the model by a path nobody knows.
    """

    def __init__(self, callback: Callable[[Any], None]) -> None:
        self._callback = callback
        self._followed: set[nn.Module] = set()

    @staticmethod
    def skip(*hooks: Any) -> None:
        """These are no hooks of the user's."""
        for hook in hooks:
            hook.is_of_mics = True

    def follow(self, modules: Iterable[nn.Module]) -> None:
        """Look which of ``modules`` have hooks now."""
        for module in modules:
            hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
            if module not in self._followed and any(not hasattr(hook, "is_of_mics") for hook in hooks):
                self._followed.add(module)
                before, after = torch.compiler.disable(self._before), torch.compiler.disable(self._after)
                self.skip(before, after)
                # First: what the user's hooks put in place of a value comes from it.
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
                module.register_forward_hook(after, prepend=True)

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._callback((args, kwargs))

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._callback(output)

"""When units are gathered, released and reduced: the one place that decides.

Every unit is gathered right before it is needed and released right after. A module's forward is seen by
forward hooks. Its backward begins when a gradient reaches one of the forward's outputs and is over when
the gradient of one of its inputs is complete: autograd works off later nodes first, so whatever the
module had to do is done by then. What never gets that far (the first module, whose inputs are token
numbers) ends with the backward itself. See "Following autograd" in docs/design.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any
from weakref import ref

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from mics.errors import UNCOPYABLE, MicsError
from mics.plans import Plans
from mics.unit import Unit

# Numbers that fit a float32 exactly, so that the digest can travel with other small floats.
_DIGEST_MODULUS = 1 << 24


@dataclass(eq=False)
class _Call:
    """One forward of a site that autograd may come back to.

    Hooks on tensors hold it, and the graph holds the hooks where Python's collector does not look: what this
    refers to is freed with the graph at the earliest, and never if it is part of the graph.
    """

    values: int  # of the parameters' versions in the forward
    live_in: int = 0  # number of the backward that is inside this call; 0: none


@dataclass(frozen=True, eq=False)
class _Forward:
    """A forward under way with gradients."""

    call: _Call
    inputs: dict[int, object]  # id of each input that needs a gradient -> its grad_fn before the forward


@dataclass(eq=False)
class ScheduledSite:
    """A module and the units its forward and backward need."""

    name: str
    module: nn.Module
    units: list[Unit]
    cast_to: torch.dtype | None = None  # format that floating-point inputs are brought to
    depth: int = 0  # forwards under way
    num_live: int = 0  # calls whose backward is under way
    reached: bool = False  # by the current backward
    forwards: list[_Forward | None] = field(default_factory=list)  # one for each of ``depth``
    # Where submodules may keep results outside the return value (auxiliary losses), and how many attributes
    # they had when that was last looked for.
    side_outputs: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    num_attributes: int = -1

    def __post_init__(self) -> None:
        self.attributes = [module.__dict__ for module in self.module.modules()]

    def values(self) -> int:
        """A number that changes whenever a parameter of this site does, on every rank."""
        return sum(unit.num_edits() + unit.num_refreshes for unit in self.units)


class Schedule:
    """Follows forwards and backwards of one model through hooks on its modules."""

    def __init__(
        self,
        sites: Sequence[ScheduledSite],
        *,
        reduce: Callable[[Unit], None],
        before_root: Callable[[], None],
        prefetch: int,
    ) -> None:
        self.sites = list(sites)
        self._plans = Plans(prefetch)
        self.suspended = False  # while parameters are summoned
        self.more_to_come = False  # another micro-step follows with these parameters
        self.digest = 0  # of all gathers and reductions since the last boundary
        self._units = list({unit.spec.index: unit for site in sites for unit in site.units}.values())
        self._by_index = {unit.spec.index: unit for unit in self._units}
        self._reduce_unit = reduce
        self._before_root = before_root
        self._depth = 0
        self._in_backward = False
        self._num_backwards = 0
        self._ender: ref[_EndOfBackward] | None = None
        self._sites_of: dict[int, list[ScheduledSite]] = {}  # by unit index
        for site in sites:
            for unit in site.units:
                self._sites_of.setdefault(unit.spec.index, []).append(site)
        self._on_demand: dict[int, Unit] = {}  # units whose parameters are read without calling their module
        for unit in self._units:
            unit.on_access = self._accessed
        self._hooks = [handle for site in self.sites for handle in self._hook(site)]

    def __reduce__(self) -> Any:
        raise MicsError(UNCOPYABLE)

    # -- forward ------------------------------------------------------------------------------------

    def _hook(self, site: ScheduledSite) -> Iterator[RemovableHandle]:
        # always_call: a forward that raises (also the early stop of a checkpoint's recomputation) still ends.
        yield site.module.register_forward_pre_hook(
            partial(self._pre_forward, site), prepend=True, with_kwargs=True
        )
        yield site.module.register_forward_hook(
            partial(self._post_forward, site), with_kwargs=True, always_call=True
        )

    def _pre_forward(
        self, site: ScheduledSite, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        if self.suspended:
            if torch.is_grad_enabled():
                raise MicsError(
                    f"forward of {site.name or 'the model'!r} inside mics.summon: expected "
                    "torch.no_grad(), found "
                    "gradients enabled; gradients of summoned parameters would be lost, leave the "
                    "context first"
                )
            return None
        if self._depth == 0:
            self._begin_forward()
        self._depth += 1
        site.depth += 1
        site.forwards.append(None)
        self._gather(site.units)
        if site.cast_to is not None:
            args, kwargs = _cast((args, kwargs), site.cast_to)
        if torch.is_grad_enabled():
            site.forwards[-1] = self._watch_inputs(site, (args, kwargs))
        return None if site.cast_to is None else (args, kwargs)

    def _post_forward(
        self,
        site: ScheduledSite,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        output: Any,
    ) -> None:
        if self.suspended or site.depth == 0:
            return
        forward = site.forwards.pop()
        # Results may also be left in the arguments: a list that the forward appends to.
        watched = forward is not None and self._watch_outputs(site, forward, (output, args, kwargs))
        site.depth -= 1
        self._depth -= 1
        # A forward inside a backward is a recomputation: its own backward follows at once.
        if not (self._in_backward and watched):
            self._release(site.units)
        if self._depth == 0 and not self._in_backward:
            self._release(self._on_demand.values())

    def _begin_forward(self) -> None:
        self._notice_failed_backward()
        if not self._in_backward:
            self._plans.begin()
            self._drop_stale()
            self._before_root()

    def _drop_stale(self) -> None:
        """Release units that were sent for and not needed after all (an evaluation has no backward)."""
        first = self._plans.first()
        for unit in self._units:
            if unit.is_arriving and unit.spec.index not in first:
                unit.release()

    def _accessed(self, unit: Unit) -> None:
        """A module reads a parameter of a released unit."""
        if self.suspended or (self._depth == 0 and not self._in_backward):
            return
        self._on_demand[unit.spec.index] = unit
        self._gather([unit])

    # -- backward -----------------------------------------------------------------------------------

    def _watch_inputs(self, site: ScheduledSite, inputs: Any) -> _Forward:
        watched = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        call = _Call(values=site.values())
        for tensor in watched.values():
            if tensor.is_leaf:
                self._watch_leaf(site, call, tensor)
            else:
                tensor.register_hook(partial(self._leave, site, call))
        return _Forward(call, {key: tensor.grad_fn for key, tensor in watched.items()})

    def _watch_leaf(self, site: ScheduledSite, call: _Call, leaf: Tensor) -> None:
        """Follow an input that is a leaf, as in a reentrant checkpoint's own backward.

        A leaf's gradient has the same rank in autograd's queue as those of parameters, which may still
        be on their way. They are there when this backward, perhaps one inside another, ends.
        """

        def later(grad: Tensor) -> None:
            handle.remove()  # the user may pass the same leaf again and again
            Variable._execution_engine.queue_callback(partial(self._leave, site, call, grad))

        handle = leaf.register_hook(later)

    def _watch_outputs(self, site: ScheduledSite, forward: _Forward, output: Any) -> bool:
        """Have autograd call back before it needs this forward's parameters."""
        side = self._side_outputs(site)
        watched = {id(tensor): tensor for tensor in tensors_in((output, side)) if tensor.requires_grad}
        for key, tensor in watched.items():
            # An input handed through belongs to whoever made it (an in-place change makes it ours).
            if key in forward.inputs and forward.inputs[key] is tensor.grad_fn:
                continue
            tensor.register_hook(partial(self._enter, site, forward.call))
        return bool(watched)

    def _side_outputs(self, site: ScheduledSite) -> list[Any]:
        """What submodules keep outside the return value, looked for again when they have new attributes."""
        num_attributes = sum(len(attributes) for attributes in site.attributes)
        if num_attributes != site.num_attributes:
            site.num_attributes = num_attributes
            skip = {"_parameters", "_buffers", "_modules"}
            site.side_outputs = [
                (attributes, name)
                for attributes in site.attributes
                for name, value in attributes.items()
                if name not in skip and _may_hold_tensors(value)
            ]
        values = [attributes.get(name) for attributes, name in site.side_outputs]
        return [tensor for value in values for tensor in _tensors_near(value) if tensor.grad_fn is not None]

    def _enter(self, site: ScheduledSite, call: _Call, grad: Tensor) -> None:
        """A gradient has reached an output of ``call``: its backward begins."""
        self._notice_failed_backward()
        if not self._in_backward:
            self._begin_backward()
        if torch.is_grad_enabled():
            raise MicsError(
                "backward with create_graph=True: expected first-order gradients, found a request "
                "for gradients "
                "of gradients, which mics cannot follow; compute that term without the sharded "
                "model's parameters"
            )
        if call.values != site.values():
            raise MicsError(
                f"backward through {site.name or 'the model'!r}: expected the parameters of its "
                "forward, found them "
                "changed by an optimizer step or an edit since; run backward before the step, or "
                "forward again"
            )
        if call.live_in != self._num_backwards:
            call.live_in = self._num_backwards
            site.num_live += 1
        site.reached = True
        self._gather(site.units)

    def _leave(self, site: ScheduledSite, call: _Call, grad: Tensor) -> None:
        """The gradient of an input of ``call`` is complete: its backward is over."""
        if not self._in_backward or call.live_in != self._num_backwards:
            return
        call.live_in = 0
        site.num_live -= 1
        self._finish(site.units)

    def _begin_backward(self) -> None:
        self._in_backward = True
        self._num_backwards += 1
        ender = _EndOfBackward(self)
        self._ender = ref(ender)
        Variable._execution_engine.queue_callback(ender)
        self._gather(self._on_demand.values())

    def end_backward(self) -> None:
        """Reduce and release whatever backward has not been seen to leave."""
        for site in reversed(self.sites):
            for unit in site.units:
                if unit.has_full_grads() and not (unit.gathered or site.reached):
                    raise MicsError(
                        f"unit {unit.spec.name!r} got gradients although none reached an output of "
                        "its module, "
                        "while its parameters were released. Return every tensor that takes part in the loss "
                        "from the module's forward"
                    )
        for site in self.sites:
            site.num_live, site.reached = 0, False
        for site in reversed(self.sites):
            self._finish(site.units)
        self._in_backward = False
        if self.more_to_come:
            self.start_next_forward()

    def start_next_forward(self) -> None:
        """Send for the units that a forward like the last one needs first."""
        for index in self._plans.first():
            self._by_index[index].start_gather()

    def _notice_failed_backward(self) -> None:
        if self._in_backward and (self._ender is None or self._ender() is None):
            self._abandon_backward()

    def _abandon_backward(self) -> None:
        """The last backward failed half-way: forget what it left."""
        self._in_backward = False
        self._plans.forget_current()
        for site in self.sites:
            site.num_live, site.reached = 0, False
        for unit in self._units:
            unit.drop_full_grads()
            unit.release()

    # -- units --------------------------------------------------------------------------------------

    def _gather(self, units: Iterator[Unit] | Sequence[Unit] | Any) -> None:
        for unit in units:
            if not unit.gathered:
                self._note(unit, 0)
                upcoming = self._plans.advance(unit.spec.index)
                unit.gather()
                # After the unit itself: it is needed now, they are not.
                for index in upcoming:
                    self._by_index[index].start_gather()

    def _release(self, units: Any) -> None:
        for unit in units:
            if not self._in_use(unit):
                unit.release()

    def _finish(self, units: Sequence[Unit]) -> None:
        """Backward is through with these units, unless another of their sites is still in it."""
        for unit in units:
            if self._in_use(unit):
                continue
            if unit.has_full_grads():
                self._note(unit, 1)
                self._reduce_unit(unit)
            unit.release()

    def _in_use(self, unit: Unit) -> bool:
        return any(site.depth or site.num_live for site in self._sites_of[unit.spec.index])

    def _note(self, unit: Unit, kind: int) -> None:
        self.digest = (self.digest * 1_000_003 + 2 * unit.spec.index + kind + 1) % _DIGEST_MODULUS


class _EndOfBackward:
    """What autograd calls at the end. It holds the only reference: if this is gone, the backward failed."""

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule

    def __call__(self) -> None:
        self._schedule.end_backward()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested containers, dataclasses and plain objects."""
    pending, seen = [value], set()
    while pending:
        item = pending.pop()
        if isinstance(item, Tensor):
            yield item
        elif item is None or isinstance(item, str | bytes | int | float | complex | nn.Module | type):
            continue
        elif id(item) not in seen:
            seen.add(id(item))
            if isinstance(item, Mapping):
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset | deque):
                pending.extend(item)
            elif hasattr(item, "__dict__"):
                pending.extend(vars(item).values())
            elif is_dataclass(item):  # with slots
                pending.extend(getattr(item, f.name) for f in fields(item))


def _may_hold_tensors(value: Any) -> bool:
    return value is None or isinstance(value, Tensor | list | tuple | set | dict)


def _tensors_near(value: Any) -> Iterator[Tensor]:
    """Tensors in plain containers: attributes of modules point at half the program."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        yield from (item for item in value if isinstance(item, Tensor))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, Tensor))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in arguments brought to ``dtype``; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_cast(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_cast(item, dtype) for item in value)
    if type(value) is dict:
        return {key: _cast(item, dtype) for key, item in value.items()}
    return value

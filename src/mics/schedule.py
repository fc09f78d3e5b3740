"""When units are gathered, released and reduced: the one place that decides.

Every unit is gathered right before it is needed and released right after. A module's forward is seen by
forward hooks. Its backward begins when a gradient reaches one of the forward's outputs and is over when
the gradient of one of its inputs is complete: autograd works off later nodes first, so whatever the
module had to do is done by then. What never gets that far (the first module, whose inputs are token
numbers) ends with the backward itself. See "Following autograd" in docs/design.md.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.autograd import Variable
from torch.utils.hooks import RemovableHandle

from mics.errors import MicsError
from mics.unit import Unit

# Numbers that fit a float32 exactly, so that the digest can travel with other small floats.
_DIGEST_MODULUS = 1 << 24


@dataclass(eq=False)
class _Call:
    """One forward of a site that autograd may come back to.

    Hooks on tensors hold it, and the graph holds the hooks where Python's collector does not look: what this
    refers to is freed with the graph at the earliest, and never if it is part of the graph.
    """

    entered: bool = False
    left: bool = False


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
    # Where submodules keep results outside the return value (auxiliary losses); None: not looked yet.
    side_outputs: list[tuple[dict[str, Any], str]] | None = None


class Schedule:
    """Follows forwards and backwards of one model through hooks on its modules."""

    def __init__(
        self,
        sites: Sequence[ScheduledSite],
        *,
        reduce: Callable[[Unit], None],
        before_root: Callable[[], None],
    ) -> None:
        self.sites = list(sites)
        self.suspended = False  # while parameters are summoned
        self.digest = 0  # of all gathers and reductions since the last boundary
        self._units = [unit for site in sites for unit in site.units]
        self._reduce_unit = reduce
        self._before_root = before_root
        self._depth = 0
        self._in_backward = False
        self._on_demand: dict[int, Unit] = {}  # units whose parameters are read without calling their module
        for unit in self._units:
            unit.on_access = self._accessed
        self._hooks = [handle for site in self.sites for handle in self._hook(site)]

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
        if site.depth == 0 and site.num_live == 0 and not (self._in_backward and watched):
            self._release(site.units)
        if self._depth == 0 and not self._in_backward:
            self._release(self._on_demand.values())

    def _begin_forward(self) -> None:
        if self._in_backward and torch._C._current_graph_task_id() == -1:
            self._abandon_backward()
        if not self._in_backward:
            self._before_root()

    def _accessed(self, unit: Unit) -> None:
        """A module reads a parameter of a released unit."""
        if self.suspended or (self._depth == 0 and not self._in_backward):
            return
        self._on_demand[unit.spec.index] = unit
        self._gather([unit])

    # -- backward -----------------------------------------------------------------------------------

    def _watch_inputs(self, site: ScheduledSite, inputs: Any) -> _Forward:
        watched = {id(tensor): tensor for tensor in tensors_in(inputs) if tensor.requires_grad}
        call = _Call()
        for tensor in watched.values():
            leave = self._leave_later if tensor.is_leaf else self._leave
            tensor.register_hook(partial(leave, site, call))
        return _Forward(call, {key: tensor.grad_fn for key, tensor in watched.items()})

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
        if site.side_outputs is None:
            places = [(m.__dict__, name) for m in site.module.modules() for name in m.__dict__]
            skip = {"_parameters", "_buffers", "_modules"}
            site.side_outputs = [
                (attributes, name)
                for attributes, name in places
                if name not in skip and any(t.grad_fn is not None for t in _tensors_near(attributes[name]))
            ]
        return [attributes.get(name) for attributes, name in site.side_outputs]

    def _enter(self, site: ScheduledSite, call: _Call, grad: Tensor) -> None:
        """A gradient has reached an output of ``call``: its backward begins."""
        if not self._in_backward:
            self._begin_backward()
        if not call.entered or call.left:
            call.entered, call.left = True, False
            site.num_live += 1
        site.reached = True
        self._gather(site.units)

    def _leave(self, site: ScheduledSite, call: _Call, grad: Tensor) -> None:
        """The gradient of an input of ``call`` is complete: its backward is over."""
        if not call.entered or call.left:
            return
        call.left = True
        site.num_live -= 1
        if site.num_live == 0 and site.depth == 0:
            self._finish(site.units)

    def _leave_later(self, site: ScheduledSite, call: _Call, grad: Tensor) -> None:
        """As :meth:`_leave`, for an input that is a leaf, as in a reentrant checkpoint's own backward.

        A leaf's gradient has the same rank in autograd's queue as those of parameters, which may still
        be on their way. They are there when this backward, perhaps one inside another, ends.
        """
        leave = partial(self._leave, site, call, grad)
        Variable._execution_engine.queue_callback(leave)

    def _begin_backward(self) -> None:
        self._in_backward = True
        Variable._execution_engine.queue_callback(self._end_backward)
        self._gather(self._on_demand.values())

    def _end_backward(self) -> None:
        for site in reversed(self.sites):
            for unit in site.units:
                if unit.has_full_grads() and not (unit.gathered or site.reached):
                    raise MicsError(
                        f"unit {unit.spec.name!r} got gradients although none reached an output of "
                        "its module, "
                        "while its parameters were released. Return every tensor that takes part in the loss "
                        "from the module's forward"
                    )
            site.num_live, site.reached = 0, False
            self._finish(site.units)
        self._in_backward = False

    def _abandon_backward(self) -> None:
        """The last backward failed half-way: forget what it left."""
        self._in_backward = False
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
                unit.gather()

    def _release(self, units: Any) -> None:
        for unit in units:
            unit.release()

    def _finish(self, units: Sequence[Unit]) -> None:
        """Backward is through with these units."""
        for unit in units:
            if unit.has_full_grads():
                self._note(unit, 1)
                self._reduce_unit(unit)
            unit.release()

    def _note(self, unit: Unit, kind: int) -> None:
        self.digest = (self.digest * 1_000_003 + 2 * unit.spec.index + kind + 1) % _DIGEST_MODULUS


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
            elif isinstance(item, Sequence | set | frozenset):
                pending.extend(item)
            elif hasattr(item, "__dict__"):
                pending.extend(vars(item).values())
            elif is_dataclass(item):  # with slots
                pending.extend(getattr(item, f.name) for f in fields(item))


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

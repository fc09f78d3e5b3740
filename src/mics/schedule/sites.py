"""What the schedule keeps about a module that it follows, and about each of its forwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from mics.errors import MicsError
from mics.sharding.float8 import memory_behind
from mics.sharding.unit import Unit
from mics.utils.tensor_trees import (
    is_plain,
    may_hold_tensors,
    replace_in_place,
    replace_tensors,
    tensors_in,
    tensors_near,
)

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))  # parameters, submodules and hooks: no place for an output


@dataclass(eq=False)
class Call:
    """One forward of a site that autograd may come back to.

    Hooks on tensors hold it, and the graph holds the hooks where Python's collector does not look: what this
    refers to is freed with the graph at the earliest, and never if it is part of the graph.
    """

    values: int  # of the parameters' versions in the forward
    places: tuple[int, ...]  # where each unit of the site was
    needs_params: bool  # whether backward reads the parameters
    num_steps: int  # optimizer steps before it
    entered: bool = False  # a backward has come
    live_in: int = 0  # number of the backward that is inside this call; 0: none

    def check(self, site: ScheduledSite) -> None:
        """Raise if backward would not find the parameters of this forward."""
        if self.values != site.values():
            raise MicsError(
                f"backward through {site.label!r}: expected the parameters of its forward, found them "
                "changed by an optimizer step or an edit since; run backward before the step, or forward "
                "again"
            )


@dataclass(eq=False)
class Input:
    """A tensor that forwards of sites take."""

    num_readers: int = 0  # but for those inside one another


@dataclass(frozen=True, eq=False)
class Forward:
    """A forward under way with gradients."""

    site: ScheduledSite
    call: Call
    inputs: Mapping[int, object]  # id of each input that needs a gradient -> its grad_fn before the forward
    readings: Sequence[Input]  # the same inputs

    def hands_through(self, tensor: Tensor) -> bool:
        """Whether it is an input, which belongs to whoever made it (an in-place change makes it ours)."""
        return id(tensor) in self.inputs and self.inputs[id(tensor)] is tensor.grad_fn


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
    forwards: list[Forward | None] = field(default_factory=list)  # one for each of ``depth``
    # Where submodules may keep results outside the return value (auxiliary losses), and how many attributes
    # they had when that was last looked for.
    side_outputs: list[tuple[dict[str, Any], str]] = field(default_factory=list)
    num_attributes: int = -1

    is_removed: bool = False  # from the model

    def __post_init__(self) -> None:
        self.look_again()

    @property
    def label(self) -> str:
        """What errors call it."""
        return self.name or "the model"

    def refuse_call(self) -> None:
        """It is called after it was taken out of the model."""
        raise MicsError(
            f"forward of {self.label!r}: expected a module of the sharded model, found one that was taken "
            "out of it, so that its parameters are no longer the model's; put it back, or take it out before "
            "mics.shard()"
        )

    def look_again(self) -> None:
        """Submodules may have come, or gone."""
        self.attributes = [module.__dict__ for module in self.module.modules()]
        self.num_attributes = -1

    def values(self) -> int:
        """A number that changes whenever a parameter of this site does, on every rank."""
        return sum(unit.num_edits() + unit.num_refreshes for unit in self.units)

    def replace_kept(self, replacements: Mapping[int, Tensor]) -> None:
        """Let submodules keep other tensors, by the ids of those they keep."""
        for attributes, name in self.side_outputs:
            if name in attributes:
                value = attributes[name]
                replace_in_place(value, replacements)
                attributes[name] = replace_tensors(value, replacements) if _is_fixed(value) else value

    def kept_tensors(self) -> list[Tensor]:
        """What submodules keep outside the return value, looked for again when they have new attributes.

        Not parameters: whether those are gathered is our affair.
        """
        num_attributes = sum(map(len, self.attributes))
        if num_attributes != self.num_attributes:
            self.num_attributes = num_attributes
            self.side_outputs = [
                (attributes, name)
                for attributes in self.attributes
                for name, value in attributes.items()
                if name not in _OF_EVERY_MODULE and may_hold_tensors(value)
            ]
        values = [attributes.get(name) for attributes, name in self.side_outputs]
        tensors = (tensor for value in values if value is not None for tensor in tensors_near(value))
        return [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]


class SharedInputs:
    """Finds units whose backward is over only when others' are, because they share all of their inputs."""

    def __init__(self) -> None:
        self.under_way: list[Forward] = []  # with gradients, the innermost last
        self._inputs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # tensor -> Input
        self._readers: list[tuple[ScheduledSite, Sequence[Input]]] = []  # that a backward may come to

    def read(self, tensors: Mapping[int, Tensor]) -> list[Input]:
        """A forward takes ``tensors`` (by id). What the one around it takes too has one reader."""
        found = []
        for key, tensor in tensors.items():
            taken = self._inputs.setdefault(tensor, Input())
            taken.num_readers += not any(key in outer.inputs for outer in self.under_way)
            found.append(taken)
        return found

    def enter(self, forward: Forward) -> None:
        self.under_way.append(forward)

    def leave(self, forward: Forward) -> None:
        self.under_way.remove(forward)

    def expect_backward(self, site: ScheduledSite, forward: Forward) -> None:
        """A backward may come to ``forward``, and need the parameters of ``site``."""
        self._readers.append((site, forward.readings))

    def take_units(self) -> list[Unit]:
        """Units found since the last time; those without inputs that need a gradient are among them."""
        late = [site for site, inputs in self._readers if all(each.num_readers > 1 for each in inputs)]
        self._readers.clear()
        self._inputs.clear()
        return [unit for site in late for unit in site.units]


def copy_parameters(
    site: ScheduledSite,
    leaving: Sequence[Unit],
    output: Any,
    kept: Sequence[Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """The output of a forward, with copies of what are parameters of ``leaving``, or views of them.

    Their memory is about to be somebody else's (a table of positions). In lists that the module was given,
    and among its attributes (``kept``), they are replaced.
    """
    places = [unit for unit in leaving if unit.gathered]
    given = [value for value in (*args, *kwargs.values()) if not isinstance(value, Tensor)]
    # Held until the end: an id may come back when its tensor is gone.
    found = {
        id(tensor): tensor
        for tensor in tensors_in((output, given, kept))
        if is_plain(memory_behind(tensor)) and any(unit.whole.holds(tensor) for unit in places)
    }
    if not found:
        return output
    copies = {key: tensor.clone() for key, tensor in found.items()}
    for value in given:
        replace_in_place(value, copies)
    site.replace_kept(copies)
    output = replace_tensors(output, copies)
    left = next((tensor for tensor in tensors_in(output) if id(tensor) in found), None)
    if left is not None:
        raise MicsError(
            f"forward of {site.label!r}: expected parameters among its results in tuples, "
            f"lists, dicts or dataclasses, found one of shape {list(left.shape)} in another object, "
            "where it cannot be replaced by a copy; return parameter.clone()"
        )
    return output


def _is_fixed(value: Any) -> bool:
    return isinstance(value, Tensor | tuple)


def is_plain_embedding(module: nn.Module) -> bool:
    """Whether backward reads no parameter of ``module``: an embedding's does not, but hooks may save them."""
    hooks = (module._forward_hooks, module._forward_pre_hooks)
    return (
        isinstance(module, nn.Embedding)
        and type(module).forward is nn.Embedding.forward
        and "forward" not in module.__dict__
        and all(len(found) == 1 for found in hooks)  # the schedule's
        and not (module._backward_hooks or module._backward_pre_hooks)
    )

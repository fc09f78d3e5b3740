"""Tensors inside what modules are called with and return: containers, dataclasses, plain objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Final

import torch
import torch.nn as nn
from torch import Tensor


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


def num_rows(inputs: Any) -> int:
    """The rows that a module's matrices are multiplied with: tokens, usually."""
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.dim() > 0]
    return max((t.numel() // max(1, t.shape[-1] if t.is_floating_point() else 1) for t in tensors), default=0)


def may_hold_tensors(value: Any) -> bool:
    """Whether an attribute of a module may come to hold tensors that :func:`tensors_near` finds."""
    return value is None or isinstance(value, Tensor | list | tuple | set | dict)


def tensors_near(value: Any) -> Iterator[Tensor]:
    """Tensors in plain containers: attributes of modules point at half the program."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple | set):
        yield from (item for item in value if isinstance(item, Tensor))
    elif isinstance(value, dict):
        yield from (item for item in value.values() if isinstance(item, Tensor))


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in arguments brought to ``dtype``; everything else as it is."""

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype is not dtype else tensor

    return _changed(value, Tensor, cast, _PLAIN)


def replace_tensors(value: Any, replacements: Mapping[int, Tensor]) -> Any:
    """``value`` with other tensors in place of some, by their ids; what held one is new."""

    def replaced(tensor: Tensor) -> Tensor:
        return replacements.get(id(tensor), tensor)

    return _changed(value, Tensor, replaced, _EVERYTHING)


@dataclass(frozen=True)
class Slot:
    """Where a tensor was."""

    number: int


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """What is left of arguments without the tensors in containers and dataclasses, and the tensors."""
    found: dict[int, tuple[Slot, Tensor]] = {}

    def take(tensor: Tensor) -> Slot:
        return found.setdefault(id(tensor), (Slot(len(found)), tensor))[0]

    rest = _changed(value, Tensor, take, _CONTAINERS)
    return rest, [tensor for _, tensor in found.values()]


def put_together(rest: Any, tensors: Sequence[Tensor]) -> Any:
    """The arguments that were taken apart, as new containers."""
    return _changed(rest, Slot, lambda slot: tensors[slot.number], _CONTAINERS)


# What is looked into for tensors: plain containers; mappings and dataclasses too; any object.
_PLAIN: Final = 0
_CONTAINERS: Final = 1
_EVERYTHING: Final = 2


def _changed(value: Any, kind: type, change: Callable[[Any], Any], depth: int) -> Any:
    """``value`` with everything of one kind changed. Objects are copied only if something in them is."""

    def inside(item: Any) -> Any:
        return _changed(item, kind, change, depth)

    if isinstance(value, kind):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        # Not by its constructor, which may look at what it is given (a PackedSequence does).
        return tuple.__new__(type(value), map(inside, value))
    if isinstance(value, list | tuple):
        return type(value)(map(inside, value))
    if type(value) is dict:
        return {key: inside(item) for key, item in value.items()}
    if depth == _PLAIN or isinstance(value, Tensor | nn.Module | type):
        return value
    if isinstance(value, set | frozenset | deque):
        return type(value)(map(inside, value))
    parts = _parts(value, depth)
    changed = {name: inside(part) for name, part in parts.items()}
    if all(changed[name] is part for name, part in parts.items()):
        return value
    return _copy_with(value, changed)


def _parts(value: Any, depth: int) -> Mapping[Any, Any]:
    """What an object holds, by name."""
    if isinstance(value, MutableMapping):
        return value
    if is_dataclass(value):
        return {field.name: getattr(value, field.name, None) for field in fields(value)}
    return vars(value) if depth == _EVERYTHING and hasattr(value, "__dict__") else {}


def _copy_with(value: Any, parts: Mapping[Any, Any]) -> Any:
    result = copy(value)
    for name, part in parts.items():
        if isinstance(value, MutableMapping):  # a Hugging Face output sets its attributes too
            result[name] = part
        else:
            object.__setattr__(result, name, part)  # also where it is frozen, or has slots
    return result

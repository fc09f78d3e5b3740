"""Tensors inside what modules are called with and return: containers, dataclasses, plain objects."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

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
    tensors = [tensor for tensor in tensors_in(inputs) if tensor.dim() > 0 and not tensor.is_nested]
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


def is_plain(tensor: Tensor) -> bool:
    """Whether it is a view of memory: no subclass, nothing wrapped by a transform."""
    return (
        type(tensor) in (Tensor, nn.Parameter)
        and tensor.layout is torch.strided
        and not tensor.is_nested
        and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
    )


def cast_floats(value: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in arguments brought to ``dtype``; everything else as it is."""
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() and value.dtype is not dtype else value
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast_floats(item, dtype) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(cast_floats(item, dtype) for item in value)
    if type(value) is dict:
        return {key: cast_floats(item, dtype) for key, item in value.items()}
    return value


def replace_tensors(value: Any, replacements: Mapping[int, Tensor]) -> Any:
    """``value`` with other tensors in place of some, by their ids, in containers and dataclasses."""
    return _Rebuild(Tensor, lambda tensor: replacements.get(id(tensor), tensor))(value)


def replace_in_place(value: Any, replacements: Mapping[int, Tensor]) -> None:
    """The same in the lists and dicts themselves."""
    items = value.items() if type(value) is dict else enumerate(value) if type(value) is list else ()
    for key, item in list(items):
        if isinstance(item, Tensor):
            value[key] = replacements.get(id(item), item)
        else:
            replace_in_place(item, replacements)


@dataclass(frozen=True)
class Hole:
    """Where a tensor was."""

    number: int


def take_apart(value: Any) -> tuple[Any, list[Tensor]]:
    """What is left of arguments without the tensors in containers and dataclasses, and the tensors."""
    found: dict[int, tuple[Hole, Tensor]] = {}

    def take(tensor: Tensor) -> Hole:
        return found.setdefault(id(tensor), (Hole(len(found)), tensor))[0]

    rest = _Rebuild(Tensor, take)(value)
    return rest, [tensor for _, tensor in found.values()]


def put_together(rest: Any, tensors: Sequence[Tensor]) -> Any:
    """The arguments that were taken apart, as new containers."""
    return _Rebuild(Hole, lambda slot: tensors[slot.number])(rest)


class _Rebuild:
    """Copies containers and dataclasses with something else in place of everything of one kind.

    Only what is known to be no more than its items: lists, tuples, dicts and their kin, by their exact types,
    named tuples and dataclasses. Anything else is handed on as it is. What was one object stays one.
    """

    def __init__(self, kind: type, change: Callable[[Any], Any]) -> None:
        self._kind = kind
        self._change = change
        self._made: dict[int, Any] = {}  # by id of what it was made from

    def __call__(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return self._change(value)
        if id(value) not in self._made:
            self._made[id(value)] = self._rebuilt(value)
        return self._made[id(value)]

    def _rebuilt(self, value: Any) -> Any:
        kind = type(value)
        if kind is tuple:
            return tuple(self(item) for item in value)
        if isinstance(value, tuple) and hasattr(value, "_fields") and not getattr(value, "__dict__", None):
            # Not by its constructor, which may look at what it is given (a PackedSequence does).
            return tuple.__new__(kind, [self(item) for item in value])
        if kind is list:
            items: list[Any] = []
            self._made[id(value)] = items  # before there are any: one of them may be the list
            items.extend(self(item) for item in value)
            return items
        if kind is deque:
            return deque((self(item) for item in value), value.maxlen)
        if kind in (dict, OrderedDict, defaultdict) or _is_model_output(value):
            mapping = self._made[id(value)] = copy(value)
            for key, item in value.items():
                mapping[key] = self(item)
            return mapping
        if is_dataclass(value) and not isinstance(value, type | Tensor | nn.Module | Mapping | self._kind):
            result = self._made[id(value)] = copy(value)
            for field in fields(value):
                if hasattr(value, field.name):
                    item = getattr(value, field.name)
                    changed = self(item)
                    if changed is not item:
                        object.__setattr__(result, field.name, changed)  # also where it is frozen
            return result
        return value


def _is_model_output(value: Any) -> bool:
    """Hugging Face's outputs: dicts and dataclasses in one, which keep both in step."""
    return is_dataclass(value) and isinstance(value, OrderedDict)

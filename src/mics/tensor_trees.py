"""Tensors inside what modules are called with and return: containers, dataclasses, plain objects."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
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

    return _changed(value, cast)


def replace_tensors(value: Any, replacements: Mapping[int, Tensor]) -> Any:
    """``value`` with other tensors in place of some, by their ids; containers that held one are new."""

    def replaced(tensor: Tensor) -> Tensor:
        return replacements.get(id(tensor), tensor)

    return _changed(value, replaced, everywhere=True)


def _changed(value: Any, change: Callable[[Tensor], Tensor], *, everywhere: bool = False) -> Any:
    """``value`` with its tensors changed: those in plain containers, or in all containers and objects."""
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_changed(item, change, everywhere=everywhere) for item in value))
    if isinstance(value, list | tuple):
        return type(value)(_changed(item, change, everywhere=everywhere) for item in value)
    if type(value) is dict:
        return {key: _changed(item, change, everywhere=everywhere) for key, item in value.items()}
    if everywhere and next(tensors_in(value), None) is not None:
        return _copy_with(value, partial(_changed, change=change, everywhere=True))
    return value


def _copy_with(value: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a container or an object, with ``change`` made to what it holds."""
    if isinstance(value, set | frozenset | deque):
        return type(value)(change(item) for item in value)
    result = copy(value)
    if isinstance(value, MutableMapping):  # a Hugging Face output sets its attributes too
        for key, item in value.items():
            result[key] = change(item)
    elif hasattr(value, "__dict__"):
        vars(result).update({name: change(item) for name, item in vars(value).items()})
    elif is_dataclass(value):  # with slots, and perhaps frozen
        for field in fields(value):
            object.__setattr__(result, field.name, change(getattr(value, field.name)))
    return result

"""Pickles read as data: nothing is imported and nothing is called.

A pickle is a program for a small stack machine, and two of its instructions name a function and call it. Here
these leave a record of what they would have called. The other instructions build plain values.
"""

from __future__ import annotations

import pickletools
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from mics.errors import CheckpointError


@dataclass(frozen=True)
class Name:
    """A class or function that the pickle names; it was not looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@dataclass(eq=False)  # a record is itself, so it can be a key as the object it stands for
class Record:
    """An object that the pickle would have made by calling ``callee``."""

    callee: Any
    args: Any
    state: Any = None
    items: list[tuple[Any, Any]] = field(default_factory=list)

    def is_a(self, module: str, name: str) -> bool:
        return isinstance(self.callee, Name) and self.callee == Name(module, name)


@dataclass(frozen=True)
class Persistent:
    """Something that lies outside the pickle: a tensor's values."""

    key: Any


class _Mark:
    """Where a group of values on the stack begins."""


_MARK: Final = _Mark()


def read_pickle(content: bytes, where: str) -> Any:
    """The value of a pickle, with records in place of objects; ``where`` is its name in errors."""
    machine = _Machine()
    try:
        for opcode, argument, position in pickletools.genops(content):
            name = opcode.name
            if name == "STOP":
                if position is not None and position + 1 != len(content):
                    raise ValueError("something behind its end")
                (value,) = machine.stack
                return value
            _run(machine, name, argument)
    except CheckpointError as error:
        raise CheckpointError(f"{where}: {error}") from None
    except (ValueError, IndexError, KeyError, TypeError, AttributeError, MemoryError, struct.error) as error:
        raise CheckpointError(f"{where}: expected a pickle, found a torn or altered one ({error})") from None
    raise AssertionError("genops ends with STOP")


class _Machine:
    """The stack and the values to come back to."""

    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def to_mark(self) -> list[Any]:
        """Everything above the last mark, taken away with it."""
        at = next((i for i in range(len(self.stack) - 1, -1, -1) if self.stack[i] is _MARK), None)
        if at is None:
            raise ValueError("no mark on the stack")
        found = self.stack[at + 1 :]
        del self.stack[at:]
        return found

    def take(self, count: int) -> list[Any]:
        if count > len(self.stack):
            raise ValueError("the stack is empty")
        found = self.stack[len(self.stack) - count :]
        del self.stack[len(self.stack) - count :]
        return found


def _run(machine: _Machine, name: str, argument: Any) -> None:
    if name in _VALUES:
        machine.stack.append(argument)
    elif name in _CONSTANTS:
        machine.stack.append(_CONSTANTS[name]())
    elif name in _FIXED_TUPLES:
        machine.stack.append(tuple(machine.take(_FIXED_TUPLES[name])))
    elif name in _OTHERS:
        _OTHERS[name](machine, argument)
    elif name not in _NOTHING:
        raise CheckpointError(f"expected a pickle of plain data, found the instruction {name}")


def _global(machine: _Machine, argument: str) -> None:
    module, _, name = argument.partition(" ")
    machine.stack.append(Name(module, name))


def _stack_global(machine: _Machine, argument: Any) -> None:
    module, name = machine.take(2)
    if not isinstance(module, str) or not isinstance(name, str):
        raise TypeError("a name that is no text")  # and never made text of: a list may hold itself
    machine.stack.append(Name(module, name))


def _reduce(machine: _Machine, argument: Any) -> None:
    callee, args = machine.take(2)
    machine.stack.append(Record(callee, args))


def _new_with_keywords(machine: _Machine, argument: Any) -> None:
    callee, args, keywords = machine.take(3)
    machine.stack.append(Record(callee, (args, keywords)))


def _build(machine: _Machine, argument: Any) -> None:
    target, state = machine.take(2)
    if not isinstance(target, Record):
        raise TypeError(f"state for {type(target).__name__}")
    target.state = state
    machine.stack.append(target)


def _put_items(machine: _Machine, flat: list[Any]) -> None:
    target = machine.stack[-1]
    keys = _keys(flat[::2])
    if isinstance(target, Record):
        target.items.extend(zip(keys, flat[1::2], strict=True))
    elif isinstance(target, dict):
        target.update(zip(keys, flat[1::2], strict=True))
    else:
        raise TypeError(f"items for {type(target).__name__}")


def _put_values(machine: _Machine, values: list[Any]) -> None:
    target = machine.stack[-1]
    if isinstance(target, Record):
        target.items.extend(enumerate(values, start=len(target.items)))
    elif isinstance(target, list):
        target.extend(values)
    elif isinstance(target, set):
        target.update(_keys(values))
    else:
        raise TypeError(f"values for {type(target).__name__}")


def _keys(values: list[Any]) -> list[Any]:
    """Values that may be keys. Others are not hashed: a tuple a million deep would end the process, and long
    numbers can be chosen so that all have one hash.
    """
    for value in values:
        if not isinstance(value, str | bytes | int | float | Name | Record | None):
            raise TypeError(f"{type(value).__name__} as a key")
        if isinstance(value, int) and value.bit_length() > 64:
            raise TypeError("a long number as a key")
    return values


def _memoize(machine: _Machine, argument: Any) -> None:
    (number,) = _keys([len(machine.memo) if argument is None else int(argument)])
    machine.memo[number] = machine.stack[-1]


_VALUES: Final = frozenset(
    (
        "INT",
        "BININT",
        "BININT1",
        "BININT2",
        "LONG",
        "LONG1",
        "LONG4",
        "FLOAT",
        "BINFLOAT",
        "STRING",
        "BINSTRING",
        "SHORT_BINSTRING",
        "BINBYTES",
        "SHORT_BINBYTES",
        "BINBYTES8",
        "UNICODE",
        "BINUNICODE",
        "SHORT_BINUNICODE",
        "BINUNICODE8",
    )
)
_CONSTANTS: Final[dict[str, Callable[[], Any]]] = {
    "NONE": lambda: None,
    "NEWTRUE": lambda: True,
    "NEWFALSE": lambda: False,
    "EMPTY_TUPLE": tuple,
    "EMPTY_LIST": list,
    "EMPTY_DICT": dict,
    "EMPTY_SET": set,
    "MARK": lambda: _MARK,
}
_FIXED_TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_NOTHING: Final = frozenset({"PROTO", "FRAME"})
_OTHERS: Final[dict[str, Callable[[_Machine, Any], None]]] = {
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.to_mark())),
    "LIST": lambda machine, _: machine.stack.append(machine.to_mark()),
    "FROZENSET": lambda machine, _: machine.stack.append(frozenset(_keys(machine.to_mark()))),
    "SETITEM": lambda machine, _: _put_items(machine, machine.take(2)),
    "SETITEMS": lambda machine, _: _put_items(machine, machine.to_mark()),
    "APPEND": lambda machine, _: _put_values(machine, machine.take(1)),
    "APPENDS": lambda machine, _: _put_values(machine, machine.to_mark()),
    "ADDITEMS": lambda machine, _: _put_values(machine, machine.to_mark()),
    "GLOBAL": _global,
    "STACK_GLOBAL": _stack_global,
    "REDUCE": _reduce,
    "NEWOBJ": _reduce,
    "NEWOBJ_EX": _new_with_keywords,
    "BUILD": _build,
    "BINPERSID": lambda machine, _: machine.stack.append(Persistent(machine.take(1)[0])),
    "POP": lambda machine, _: machine.take(1).clear(),
    "PUT": _memoize,
    "BINPUT": _memoize,
    "LONG_BINPUT": _memoize,
    "MEMOIZE": _memoize,
    "GET": lambda machine, number: machine.stack.append(machine.memo[int(number)]),
    "BINGET": lambda machine, number: machine.stack.append(machine.memo[number]),
    "LONG_BINGET": lambda machine, number: machine.stack.append(machine.memo[number]),
}

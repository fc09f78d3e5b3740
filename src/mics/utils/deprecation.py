"""Old public names. Each works until mics 0.3, with a FutureWarning that names the new one.

To rename something public, add it to a table here, or put a decorator of this file on what takes it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")

REMOVED_IN: Final = "0.3"

OLD_NAMES: Final = {
    "audit": "audit_replicas",
    "memory": "memory_report",
    "summon": "summon_full_params",
}
"""Names of ``mics``."""

OLD_SETTINGS: Final = {
    "plan": {"wire": "reduce_dtype"},
    "train": {
        "launch.nodes": "launch.simulated_nodes",
        "model.size": "model.name",
        "sharding.precision": "sharding.param_dtype",
        "sharding.reduce": "sharding.reduce_dtype",
        "sharding.replica_reduce": "sharding.replica_reduce_dtype",
    },
}
"""Settings of each command, as flags and in files."""

NewKeyword = str | Callable[[Any], str]
"""A keyword's new name, or what finds it from the value; the same name: this value is not old."""


def warn_of_old(old: str, new: str, *, stacklevel: int = 2) -> None:
    """Warn the caller's caller; each further ``stacklevel`` goes one call up."""
    warnings.warn(
        f"{old} is now {new}; the old name will be removed in mics {REMOVED_IN}",
        FutureWarning,
        stacklevel=stacklevel + 1,
    )


def takes_old_keywords(name: str, **renamed: NewKeyword) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Let the function that users call ``name`` take old keywords too: ``old="new"``."""

    def decorate(function: Callable[P, T]) -> Callable[P, T]:
        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for old in renamed.keys() & kwargs.keys():
                value, new = kwargs[old], renamed[old]
                new = new if isinstance(new, str) else new(value)
                if new == old:
                    continue
                if kwargs.get(new) is not None:
                    raise TypeError(f"{name}: expected {new}, found it and its old name {old}; drop {old}")
                warn_of_old(f"{name}({old}={value!r})", f"{name}({new}={value!r})")
                del kwargs[old]
                kwargs[new] = value
            return function(*args, **kwargs)

        return call

    return decorate


def takes_old_fields(**renamed: NewKeyword) -> Callable[[type[T]], type[T]]:
    """Let a public dataclass take old names of fields as keywords, and have them as attributes."""

    def decorate(cls: type[T]) -> type[T]:
        name = f"mics.{cls.__name__}"
        cls.__init__ = takes_old_keywords(name, **renamed)(cls.__init__)  # type: ignore[method-assign]
        for old, new in renamed.items():
            if isinstance(new, str):  # else the old name is one of today too
                setattr(cls, old, _old_attribute(f"{name}.{old}", f"{name}.{new}", new))
        return cls

    return decorate


def _old_attribute(old: str, new: str, attribute: str) -> property:
    def read(self: object) -> Any:
        warn_of_old(old, new)
        return getattr(self, attribute)

    return property(read)


def new_setting(command: str, key: str) -> str:
    """The name that a setting of a command has now, with a warning if ``key`` is an old one."""
    new = OLD_SETTINGS.get(command, {}).get(key)
    if new is None:
        return key
    warn_of_old(key, new, stacklevel=3)
    return new


def new_flags(command: str, args: Sequence[str]) -> list[str]:
    """The arguments of a command with old flags under their new names, each with a warning."""
    flags = {_flag(old): _flag(new) for old, new in OLD_SETTINGS.get(command, {}).items()}
    found = []
    for arg in args:
        given, equals, value = arg.partition("=")
        new = flags.get(given.replace("_", "-"))
        if new is not None:
            warn_of_old(given, new, stacklevel=3)
        found.append(arg if new is None else new + equals + value)
    return found


def _flag(setting: str) -> str:
    return f"--{setting.replace('_', '-')}"

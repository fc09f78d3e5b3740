"""Notices that somebody changes a sharded model: its modules, its parameters, or hooks on its modules.

The tables in which modules keep these raise one counter at every change. Whoever depends on the structure
compares the counter, one number, and looks at the modules again only when it is another.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.nn as nn

_V = TypeVar("_V")


@dataclass
class Changes:
    """Changes to all sharded models of this process."""

    count: int = 0


CHANGES = Changes()
_CHANGING = ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update")


def _counting(method: Callable[..., Any]) -> Callable[..., Any]:
    def changed(table: Any, *args: Any, **kwargs: Any) -> Any:
        CHANGES.count += 1
        return method(table, *args, **kwargs)

    return changed


class WatchedTable(dict[str, _V]):
    """A module's ``_modules`` or ``_parameters``."""


class WatchedHooks(OrderedDict[int, Any]):
    """A module's hooks. Handles of hooks hold weak references to their table."""


for _table in (WatchedTable, WatchedHooks):
    for _name in _CHANGING:
        setattr(_table, _name, _counting(getattr(_table.__base__, _name)))


def watch_modules(model: nn.Module) -> None:
    """Count changes to what ``model`` and its submodules hold, also those that came since the last call.

    Parameters have tables of their own (``ParameterTable``).
    """
    for module in model.modules():
        if not isinstance(module._modules, WatchedTable):  # deleting from a list makes another table
            module.__dict__["_modules"] = WatchedTable(module._modules)
        for name in ("_forward_hooks", "_forward_pre_hooks"):
            # A table with hooks stays what it is: their handles know that one. Such modules are known.
            table = module.__dict__[name]
            if not (table or isinstance(table, WatchedHooks)):
                module.__dict__[name] = WatchedHooks()

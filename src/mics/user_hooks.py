"""Follows hooks that users put on modules: what those see may leave the model by a path nobody knows."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn as nn


class UserHooks:
    """Calls back with what modules take and return that have hooks of the user's, and only with theirs."""

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

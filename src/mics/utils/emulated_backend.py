"""Lets torch find the emulator by the name of its backend, and loads neither before it is asked for."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

NAME: Final = "emulated"
_AWAITED: Final = "torch.distributed"


def register() -> None:
    """``init_process_group("emulated", ...)`` works from here on, also where torch is imported later.

    Importing torch here would cost ``mics --help`` some seconds.
    """
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Awaiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Awaiting())


class _Awaiting:
    """Registers the backend right after ``torch.distributed`` was loaded, and is gone."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != _AWAITED:
            return None
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((each for each in found if each is not None), None)
        if spec is not None and spec.loader is not None:
            load = spec.loader.exec_module

            def load_and_register(module: ModuleType) -> None:
                load(module)
                if self in sys.meta_path:  # whoever only looks for the module does not load it
                    sys.meta_path.remove(self)
                    _register()

            spec.loader.exec_module = load_and_register  # type: ignore[method-assign]
        return spec


def _register() -> None:
    import torch.distributed as dist

    if not dist.is_available() or hasattr(dist.Backend, NAME.upper()):
        return
    from torch.distributed import distributed_c10d
    from torch.distributed.rendezvous import register_rendezvous_handler

    dist.Backend.register_backend(NAME, _later("create"), extended_api=True, devices=["cpu", "cuda"])
    # From torch 2.15 on a flight recorder is hung on every group whose backend is not listed here as keeping
    # its own record. It can only be hung on torch's own groups, and an emulated one has a log of its own.
    recorders: set[str] = getattr(distributed_c10d, "_FR_SELF_RECORDING_BACKENDS", set())
    recorders.add(NAME)
    register_rendezvous_handler(NAME, _later("rendezvous"))


def _later(name: str) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module("mics.emulator.start"), name)(*args, **kwargs)

    return call

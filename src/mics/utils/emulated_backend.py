"""Lets torch find the emulator by the name of its backend, and loads it when it is asked for."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, Final

import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.rendezvous import register_rendezvous_handler

NAME: Final = "emulated"


def register() -> None:
    """``init_process_group("emulated", ...)`` works from here on."""
    if hasattr(dist.Backend, NAME.upper()):
        return
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

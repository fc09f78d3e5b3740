"""What torch asks of a process group that is written in Python, apart from its collectives."""

from __future__ import annotations

from datetime import timedelta
from types import SimpleNamespace
from typing import Any, Self

import torch
import torch.distributed as dist

_ProcessGroup: Any = dist.ProcessGroup  # its annotations list every form of every call


class PythonGroup(_ProcessGroup):  # type: ignore[misc]
    """A group of one backend, for all of its devices."""

    def __init__(self, backend: str, rank: int, size: int, timeout: timedelta) -> None:
        super().__init__(rank, size)
        self._backend = backend
        self.options = SimpleNamespace(_timeout=timeout)
        self.supports_splitting = False
        self.supports_coalescing = True
        self.bound_device_id = None

    def getBackendName(self) -> str:  # noqa: N802 - torch's name
        return self._backend

    def name(self) -> str:
        return self._backend

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def pg_name(self) -> str:
        return self._name

    def _set_group_name(self, name: str) -> None:
        self._name = name

    def _set_group_desc(self, desc: str) -> None:
        self._desc = desc

    @property
    def group_desc(self) -> str:
        return self._desc

    def _get_backend(self, device: torch.device) -> Self:
        return self

    def shutdown(self) -> None:
        """Nothing is open."""

    def abort(self) -> None:
        """Nothing is open."""

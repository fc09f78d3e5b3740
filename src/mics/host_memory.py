"""Pinned host buffers for copies to and from a GPU, and how much host memory there is to have."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from weakref import finalize

import torch
from torch import Tensor

from mics.errors import MicsError

_MARGIN_NBYTES: Final = 1 << 30  # of the host's memory that is left to others
_CGROUP: Final = Path("/sys/fs/cgroup")
_GIB: Final = 2**30


class HostPool:
    """Host buffers, taken and given back. A steady step allocates none."""

    def __init__(self, *, pin: bool, num_sharing: int) -> None:
        self._pin = pin
        self._num_sharing = num_sharing  # ranks of this node: all of them ask for as much at the same time
        self._free: dict[int, list[Tensor]] = {}  # by size in bytes
        self._pinned: list[Tensor] = []
        # Every buffer is the pool's, and whoever has taken one holds the pool.
        finalize(self, _unpin, self._pinned).atexit = False
        self.nbytes = 0
        self.num_allocations = 0

    def require(self, nbytes: int, what: str) -> None:
        """Raise if ``nbytes`` in all will not be had; ``what`` they are for, in words."""
        available = available_nbytes()
        more = (nbytes - self.nbytes) * self._num_sharing
        if available is None or more <= 0 or more + _MARGIN_NBYTES <= available:
            return
        ranks = f" for each of this node's {self._num_sharing} ranks" if self._num_sharing > 1 else ""
        raise MicsError(
            f"activation offload: expected {nbytes / _GIB:.3g} GiB of host memory for {what}{ranks} (and "
            f"{_MARGIN_NBYTES / _GIB:.0f} GiB left to others), found {available / _GIB:.3g} GiB available "
            f"beside {self.nbytes / _GIB:.3g} GiB that this rank has for it already; offload less "
            "(Activations.offload takes a fraction or bytes) or use a smaller micro-batch"
        )

    def take(self, nbytes: int) -> Tensor:
        """A buffer of exactly ``nbytes``."""
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        self.require(self.nbytes + nbytes, "saved activations")
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        if self._pin:
            _pin(buffer)
            self._pinned.append(buffer)
        self.nbytes += nbytes
        self.num_allocations += 1
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


def _pin(buffer: Tensor) -> None:
    """Pin memory as it is. torch's allocator of pinned memory would round sizes up to powers of two."""
    error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
    if int(error) != 0:
        raise MicsError(
            f"activation offload: expected to pin {buffer.numel() / _GIB:.3g} GiB of host memory, found CUDA "
            f"error {int(error)}; raise the limit of locked memory (ulimit -l) or offload less"
        )


def _unpin(buffers: list[Tensor]) -> None:
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())
    buffers.clear()


def available_nbytes() -> int | None:
    """Host memory that can be had without swapping, here and in this container; None where nobody says."""
    found = [nbytes for nbytes in (_of_the_host(), _of_the_container()) if nbytes is not None]
    return min(found, default=None)


def _of_the_host() -> int | None:
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * found[0] if found else None


def _of_the_container() -> int | None:
    try:
        limit = (_CGROUP / "memory.max").read_text().strip()
        used = int((_CGROUP / "memory.current").read_text())
        statistics = (_CGROUP / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not limit.isdecimal():
        return None
    # Pages of files are given up when somebody needs the memory.
    files = [int(line.split()[1]) for line in statistics if line.startswith("inactive_file ")]
    return int(limit) - used + sum(files)

"""Pinned host buffers for copies to and from a GPU, and how much host memory there is to have."""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final
from weakref import finalize

import torch
from torch import Tensor

from mics.errors import MicsError
from mics.utils.numbers import memory

_MARGIN_NBYTES: Final = 1 << 30  # of the host's memory that is left to others
_CGROUPS: Final = Path("/sys/fs/cgroup")
_OWN_CGROUPS: Final = Path("/proc/self/cgroup")
# Limit, use, and what in memory.stat is pages of files: of the second version of cgroups, and of the first.
_FILES: Final = ("memory.max", "memory.current", "inactive_file ")
_FILES_BEFORE: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file ")


class HostPool:
    """Host buffers, taken and freed. A steady step allocates none.

    There are never more buffers than were in use at once, and none is larger than what was asked for: sizes
    that change from step to step do not pile up.
    """

    def __init__(self, *, pin: bool, num_sharing: int, user: str, remedy: str) -> None:
        self._pin = pin
        self._user = user  # whose buffers they are, and what can be done without them: for errors
        self._remedy = remedy
        self._num_sharing = num_sharing
        self._share: float | None = None  # of the node's memory; None: not looked at since all was freed
        self._free: list[Tensor] = []  # by size, the smallest first
        self.nbytes = 0
        self.used_nbytes = 0  # of buffers that somebody has
        self.num_allocations = 0
        self._pinned: dict[int, Tensor] = {}  # by address
        # Every buffer is the pool's, and whoever has taken one holds the pool.
        finalize(self, _unpin_all, self._pinned).atexit = False

    @property
    def num_free(self) -> int:
        return len(self._free)

    def require(self, nbytes: int, what: str) -> None:
        """Raise if ``nbytes`` in all will not be had; ``what`` they are for, in words."""
        if self._room_for(nbytes):
            return
        while self._free:  # of other sizes than are wanted now
            self._drop(self._free.pop())
        if self._room_for(nbytes):
            return
        available = available_nbytes() or 0
        ranks = (
            f", its share of what there was for the node's {self._num_sharing} being "
            f"{memory(max(0.0, self._share or 0))}"
            if self._num_sharing > 1
            else ""
        )
        raise MicsError(
            f"{self._user}: expected {memory(nbytes)} of host memory for {what} (and "
            f"{memory(_MARGIN_NBYTES)} left to others), found {memory(available)} available "
            f"beside {memory(self.nbytes)} that this rank has for it already{ranks}; {self._remedy}"
        )

    def _room_for(self, nbytes: int) -> bool:
        if nbytes <= self.nbytes:
            return True
        available = available_nbytes()
        if available is None:
            return True
        if self._share is None:
            # The ranks of a node go in step: each has what this one has, and its part of what is left. Not
            # looked at again until all is freed: by then this one may be ahead of the others.
            self._share = self.nbytes + (available - _MARGIN_NBYTES) / self._num_sharing
        return nbytes <= self._share and nbytes - self.nbytes + _MARGIN_NBYTES <= available

    def take(self, nbytes: int, what: str) -> Tensor:
        """A buffer of at least ``nbytes``; ``what`` they are for, in words."""
        if self.used_nbytes == 0:
            self._share = None
        place = next((i for i, buffer in enumerate(self._free) if buffer.numel() >= nbytes), None)
        if place is not None:
            buffer = self._free.pop(place)
            self.used_nbytes += buffer.numel()
            return buffer
        dropped = 0
        while self._free and dropped < nbytes:  # too small for what is wanted now
            dropped += self._free[-1].numel()
            self._drop(self._free.pop())
        self.require(self.nbytes + nbytes, what)
        buffer = torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        if self._pin:
            self._pin_memory(buffer)
            self._pinned[buffer.data_ptr()] = buffer
        self.nbytes += nbytes
        self.used_nbytes += nbytes
        self.num_allocations += 1
        return buffer

    def give_back(self, buffer: Tensor) -> None:
        self.used_nbytes -= buffer.numel()
        insort(self._free, buffer, key=Tensor.numel)

    def _pin_memory(self, buffer: Tensor) -> None:
        """Pin memory as it is. torch's allocator of pinned memory would round sizes up to powers of two."""
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)
        if int(error) != 0:
            raise MicsError(
                f"{self._user}: expected to pin {memory(buffer.numel())} of host memory, found CUDA "
                f"error {int(error)}; raise the limit of locked memory (ulimit -l), or {self._remedy}"
            )

    def _drop(self, buffer: Tensor) -> None:
        self.nbytes -= buffer.numel()
        if self._pinned.pop(buffer.data_ptr(), None) is not None:
            _unpin([buffer])


def _unpin(buffers: Collection[Tensor]) -> None:
    if buffers:
        torch.cuda.synchronize()  # the GPU may be behind, and still copy what was freed here long ago
    for buffer in buffers:
        torch.cuda.cudart().cudaHostUnregister(buffer.data_ptr())


def _unpin_all(buffers: dict[int, Tensor]) -> None:
    _unpin(buffers.values())
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
    """By the limits of this process's control group and of all that it is in."""
    found = [_left_in(folder, *files) for folder, files in _control_groups()]
    return min((nbytes for nbytes in found if nbytes is not None), default=None)


def _control_groups() -> Iterator[tuple[Path, tuple[str, str, str]]]:
    try:
        lines = _OWN_CGROUPS.read_text().splitlines()
    except OSError:
        lines = []
    # A container may see its own as the root, whatever the name that the host has for it.
    paths = {"": "/", "memory": "/", **{line.split(":")[1]: line.split(":", 2)[2] for line in lines}}
    for controller, path in paths.items():
        if "memory" in controller.split(","):
            root, files = _CGROUPS / "memory", _FILES_BEFORE
        elif controller == "":
            root, files = _CGROUPS, _FILES
        else:
            continue
        own = Path(path.removeprefix("/"))
        for inner in (own, *own.parents):
            yield root / inner, files


def _left_in(folder: Path, limit_file: str, used_file: str, files: str) -> int | None:
    try:
        limit = (folder / limit_file).read_text().strip()
        used = int((folder / used_file).read_text())
        statistics = (folder / "memory.stat").read_text().splitlines()
    except (OSError, ValueError):
        return None
    if not limit.isdecimal():
        return None
    # Pages of files are given up when somebody needs the memory.
    return int(limit) - used + sum(int(line.split()[1]) for line in statistics if line.startswith(files))

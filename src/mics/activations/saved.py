"""A tensor that autograd saved, wherever it is: on the device, on the host, or on its way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mics.comm.lanes import DONE, Ticket
from mics.sharding.host_memory import HostPool
from mics.utils.tensor_trees import is_plain


@dataclass
class Held:
    """Bytes of saved activations that are on the device."""

    nbytes: int = 0
    peak: int = 0  # in the forward

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes


@dataclass(frozen=True)
class View:
    """How a tensor looks at memory; ``offset`` in elements."""

    dtype: torch.dtype
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor) -> View:
        return cls(tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    @property
    def extent_nbytes(self) -> int:
        """From its first byte to its last."""
        if self.shape.numel() == 0:
            return 0
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return (1 + last) * self.dtype.itemsize

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


@dataclass(frozen=True)
class Region:
    """Bytes of a piece of memory."""

    start: int
    nbytes: int

    @classmethod
    def behind(cls, view: View, whole_nbytes: int) -> Region:
        """What must be there for a tensor: its own bytes, or all of them where it has gaps or repetitions."""
        if view.nbytes == view.extent_nbytes:
            return cls(view.offset * view.dtype.itemsize, view.nbytes)
        return cls(0, whole_nbytes)


@dataclass(eq=False)
class Saved:
    """Memory behind tensors that autograd saved. It is on the device, on the host, or on its way.

    The parts of one projection have gaps: all of it leaves, together and once.
    """

    memory: StorageWeakRef  # that was saved: whoever else holds it keeps it alive
    root: ref[Tensor]  # what was saved, or what it is a view of: their edits are counted together
    version: int  # when it was saved
    region: Region
    pool: HostPool
    held: Held
    on_device: Tensor | None = None  # a tensor in the memory itself, or a copy of the region
    is_original: bool = True  # the former
    host: Tensor | None = None
    moved: Ticket = DONE  # the copy that is under way, in either direction
    edited: bool = False  # in place, before it had left
    version_here: int = 0  # of ``on_device`` when it came to be

    @property
    def nbytes(self) -> int:
        return self.region.nbytes

    def be_on_device(self, tensor: Tensor, *, is_original: bool) -> None:
        if self.on_device is None:
            self.held.add(self.nbytes)
        self.on_device, self.is_original, self.version_here = tensor, is_original, tensor._version

    def leave_device(self) -> None:
        """Whoever uses this memory next does so after the copy to the host."""
        assert self.on_device is not None
        self.moved.wait()
        self.edited = self.edited or self._was_edited()
        self.on_device = None
        self.held.add(-self.nbytes)

    def _was_edited(self) -> bool:
        return self.on_device is not None and self.on_device._version != self.version_here

    def seen_as(self, view: View) -> Tensor:
        """The tensor that was saved; raises, as torch does, if somebody has changed it meanwhile.

        Edits of what is returned count, too: a backward may make some, and another come to it.
        """
        assert self.on_device is not None
        if self.edited or self._was_edited():
            raise _changed(view.shape, self.version)
        base, offset = self.on_device, view.offset
        if not self.is_original:
            offset -= self.region.start // view.dtype.itemsize
            if self.nbytes % view.dtype.itemsize == 0:
                base = base.view(view.dtype)
        if base.dtype is view.dtype:
            return base.as_strided(view.shape, view.stride, offset)
        return _look(base, view, offset)

    def device_bytes(self) -> Tensor:
        """The region, of the memory itself."""
        assert self.on_device is not None and self.is_original
        flat = View(torch.uint8, torch.Size((self.nbytes,)), (1,), self.region.start)
        return _look(self.on_device, flat, flat.offset)

    def host_bytes(self) -> Tensor:
        assert self.host is not None
        return self.host[: self.nbytes]

    def __del__(self) -> None:
        if self.on_device is not None:
            self.held.add(-self.nbytes)
        if self.host is not None:
            self.moved.wait()  # another tensor's values come next
            self.pool.give_back(self.host)


def _look(tensor: Tensor, view: View, offset: int) -> Tensor:
    """Another view of the memory behind ``tensor``, whose edits are counted for themselves."""
    found = torch.empty(0, dtype=view.dtype, device=tensor.device)
    return found.set_(tensor.untyped_storage(), offset, view.shape, view.stride)


def _changed(shape: torch.Size, version: int) -> RuntimeError:
    return RuntimeError(
        f"a tensor that backward needs, of shape {list(shape)}, was changed in place after it was saved (at "
        f"version {version}); leave it as it is, or change a copy"
    )


class Kept:
    """What autograd holds in place of a tensor that stays. It does not look for edits where there are hooks.

    Detached: an output that its own graph held would never be freed.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()
        self._version = tensor._version

    def check(self) -> Tensor:
        """The tensor, if nobody has changed it."""
        if self._tensor._version != self._version:
            raise _changed(self._tensor.shape, self._version)
        return self._tensor


class SavedInputs:
    """What checkpoints keep on the device where nothing is moved: for the memory report."""

    def __init__(self, num_units: int) -> None:
        self._num_units = num_units
        self._kept = self._last_kept = 0  # since the last backward, and before it
        self._alive: dict[int, tuple[StorageWeakRef, int]] = {}  # by address
        self._latest: StorageWeakRef | None = None
        self._num_added = 0  # since it was last looked which are still there
        self._now = self._peak = self._last_peak = 0

    def add(self, tensors: Sequence[Tensor]) -> None:
        """A unit's inputs are saved."""
        # A backward has come when the latest is gone, which it needs first. Somebody may hold that one.
        self._num_added += 1
        if self._num_added > self._num_units or (self._latest is not None and self._latest.expired()):
            self._drop_freed()
        if not self._alive:
            self._last_peak, self._last_kept = self._peak, self._kept
            self._now = self._peak = self._kept = 0
        for tensor in tensors:
            if is_plain(tensor):
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in self._alive:
                    self._latest = StorageWeakRef(storage)
                    self._alive[storage.data_ptr()] = self._latest, storage.nbytes()
                    self._now += storage.nbytes()
                    self._kept += storage.nbytes()
        self._peak = max(self._peak, self._now)

    def _drop_freed(self) -> None:
        self._num_added = 0
        for address, (memory, nbytes) in list(self._alive.items()):
            if memory.expired():
                del self._alive[address]
                self._now -= nbytes

    def expected_nbytes(self) -> int | None:
        """What units keep between two backwards, if nobody frees any of it; None before one has."""
        return self._kept or self._last_kept or None

    def held_nbytes(self) -> int:
        """The most bytes at once since the last backward."""
        return self._peak or self._last_peak

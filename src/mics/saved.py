"""A tensor that autograd saved, wherever it is: on the device, on the host, or on its way."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from mics.comm.lanes import DONE, Ticket
from mics.host_memory import HostPool


@dataclass
class Held:
    """Bytes of saved activations that are on the device."""

    nbytes: int = 0
    peak: int = 0  # in the forward

    def add(self, nbytes: int) -> None:
        self.nbytes += nbytes


@dataclass(eq=False)
class Saved:
    """One tensor that autograd saved. It is on the device, on the host, or on its way."""

    memory: StorageWeakRef  # of the tensor itself: whoever else holds it keeps it alive
    version: int  # of the tensor when it was saved
    shape: torch.Size
    stride: tuple[int, ...]
    host_stride: tuple[int, ...]  # the same, or without gaps
    dtype: torch.dtype
    pool: HostPool
    held: Held
    device_copy: Tensor | None = None
    is_original: bool = True  # ``device_copy`` is the tensor that was saved
    host: Tensor | None = None
    moved: Ticket = DONE  # the copy that is under way, in either direction
    edited: bool = False  # in place, before it had left

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def be_on_device(self, tensor: Tensor, *, is_original: bool) -> None:
        if self.device_copy is None:
            self.held.add(self.nbytes)
        self.device_copy, self.is_original = tensor, is_original

    def leave_device(self) -> None:
        """Whoever uses this memory next does so after the copy to the host."""
        assert self.device_copy is not None
        self.moved.wait()
        self.edited = self.edited or self._was_edited()
        self.device_copy = None
        self.held.add(-self.nbytes)

    def _was_edited(self) -> bool:
        return self.is_original and self.device_copy is not None and self.device_copy._version != self.version

    def check(self) -> None:
        """Raise, as torch does, if somebody has changed what was saved."""
        if self.edited or self._was_edited():
            raise _changed(self.shape, self.version)

    def __del__(self) -> None:
        if self.device_copy is not None:
            self.held.add(-self.nbytes)
        if self.host is not None:
            self.moved.wait()  # another tensor's values come next
            self.pool.give_back(self.host)

    def host_view(self) -> Tensor:
        assert self.host is not None
        return self.host[: self.nbytes].view(self.dtype).as_strided(self.shape, self.host_stride)


def _changed(shape: torch.Size, version: int) -> RuntimeError:
    return RuntimeError(
        f"a tensor that backward needs, of shape {list(shape)}, was changed in place after it was saved (at "
        f"version {version}); leave it as it is, or change a copy"
    )


@dataclass(frozen=True, eq=False)
class Kept:
    """What it holds in place of one that stays. torch does not look for edits where there are hooks."""

    tensor: Tensor
    version: int

    def check(self) -> Tensor:
        """The tensor, if nobody has changed it."""
        if self.tensor._version != self.version:
            raise _changed(self.tensor.shape, self.version)
        return self.tensor


def extent_nbytes(tensor: Tensor) -> int:
    """From the first to the last byte that a tensor has; less than its size if elements share memory."""
    if tensor.numel() == 0:
        return 0
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return (1 + sum((size - 1) * stride for size, stride in steps)) * tensor.element_size()


def contiguous_stride(shape: torch.Size) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))

"""Saved activations in host memory: away right after the forward, back before the backward needs them.

What autograd saves inside a unit's forward passes through here. Copies run on two lanes of their own (streams
on a GPU), one for each direction; whoever touches the memory waits for its ticket. On a CPU the same code
makes plain copies, so that what is tested there is what runs on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from mics.comm.lanes import DONE, INLINE, Lane, StreamLane, Ticket
from mics.errors import MicsError

_LEAST_NBYTES = 1 << 16  # smaller tensors stay: a copy would cost more than their memory is worth
_MARGIN_NBYTES = 1 << 30  # of the host's memory that is left to others


class HostPool:
    """Pinned host buffers, taken and given back. A steady step allocates none."""

    def __init__(self, *, pin: bool) -> None:
        self._pin = pin
        self._free: dict[int, list[Tensor]] = {}  # by size in bytes
        self.nbytes = 0
        self.num_allocations = 0

    def take(self, nbytes: int) -> Tensor:
        """A buffer of exactly ``nbytes``."""
        free = self._free.setdefault(nbytes, [])
        if free:
            return free.pop()
        available = _available_nbytes()
        if available is not None and nbytes + _MARGIN_NBYTES > available:
            raise MicsError(
                f"activation offload: expected {nbytes / 2**20:.0f} MiB more of host memory for saved "
                f"activations, found {available / 2**20:.0f} MiB available ({self.nbytes / 2**20:.0f} MiB "
                "are in use for it already); offload less (Activations.offload) or use a smaller micro-batch"
            )
        self.nbytes += nbytes
        self.num_allocations += 1
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self._pin)

    def give_back(self, buffer: Tensor) -> None:
        self._free[buffer.numel()].append(buffer)


def _available_nbytes() -> int | None:
    """Host memory that can be had without swapping; None where nobody says."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    found = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return 1024 * found[0] if found else None


@dataclass(eq=False)
class Saved:
    """One tensor that autograd saved. It is on the device, on the host, or on its way."""

    number: int  # in the order of saving
    key: tuple[Any, ...]  # where and what it was when it was saved
    device_copy: Tensor | None
    version: int  # of the tensor when it was saved
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    pool: HostPool
    host: Tensor | None = None
    moved: Ticket = DONE  # the copy that is under way, in either direction
    leaving: bool = False  # the device's memory is given up as soon as the copy is done

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def __del__(self) -> None:
        if self.host is not None:
            self.moved.wait()  # another tensor's values come next
            self.pool.give_back(self.host)

    def host_view(self) -> Tensor:
        assert self.host is not None
        return self.host.view(self.dtype).as_strided(self.shape, self.stride)


@dataclass
class _MicroStep:
    """What was saved between two beginnings of the model's forward."""

    saved: list[int] = field(default_factory=list)  # sizes in bytes

    @property
    def nbytes(self) -> int:
        return sum(self.saved)


class Offloader:
    """Moves what units save, by the order in which it was saved."""

    def __init__(
        self,
        device: torch.device,
        *,
        budget: Callable[[int], float],
        keep_last: int,
        horizon: int,
    ) -> None:
        on_gpu = device.type == "cuda"
        self.pool = HostPool(pin=on_gpu)
        self._away: Lane = StreamLane(device) if on_gpu else INLINE
        self._back: Lane = StreamLane(device) if on_gpu else INLINE
        self._budget = budget  # bytes to offload, of the bytes that a micro-step saves
        self._keep_last = keep_last
        self._horizon = horizon
        self._num_saved = 0
        self._now = _MicroStep()
        self._before: _MicroStep | None = None
        self._offloaded_nbytes = 0  # since the forward began
        self._known: WeakValueDictionary[tuple[Any, ...], Saved] = WeakValueDictionary()
        self._by_number: WeakValueDictionary[int, Saved] = WeakValueDictionary()
        self._leaving: list[ref[Saved]] = []

    def begin(self) -> None:
        """The model's forward begins."""
        if self._now.saved:
            self._before = self._now
        self._now, self._offloaded_nbytes = _MicroStep(), 0

    @contextmanager
    def saving(self, stays: Callable[[Tensor], bool]) -> Iterator[None]:
        """Inside, what autograd saves is offloaded, but for tensors that ``stays`` names (parameters)."""

        def pack(tensor: Tensor) -> Any:
            if tensor.numel() * tensor.element_size() < _LEAST_NBYTES or stays(tensor):
                return tensor
            return self._save(tensor)

        with saved_tensors_hooks(pack, self._unpack):
            yield
        self._let_go()

    def _save(self, tensor: Tensor) -> Saved:
        key = (tensor.data_ptr(), tensor._version, tensor.dtype, tensor.shape, tensor.stride())
        known = self._known.get(key)
        if known is not None and known.device_copy is not None:
            return known  # several units have the same input
        like = torch.empty_like(tensor, device="meta")  # dense, in the order of the original where it can be
        saved = Saved(
            number=self._num_saved,
            key=key,
            device_copy=tensor.detach(),
            version=tensor._version,
            shape=tensor.shape,
            stride=like.stride(),
            dtype=tensor.dtype,
            device=tensor.device,
            pool=self.pool,
        )
        self._num_saved += 1
        self._known[key] = self._by_number[saved.number] = saved
        if self._should_leave(saved):
            self._send_away(saved)
        self._now.saved.append(saved.nbytes)
        return saved

    def _should_leave(self, saved: Saved) -> bool:
        """The last ones stay, because backward needs them at once; so does what is over the budget."""
        total = self._before.nbytes if self._before is not None else None
        if self._before is not None and len(self._now.saved) >= len(self._before.saved) - self._keep_last:
            return False
        limit = self._budget(total if total is not None else self._now.nbytes + saved.nbytes)
        return self._offloaded_nbytes + saved.nbytes <= limit

    def _send_away(self, saved: Saved) -> None:
        saved.host = self.pool.take(saved.nbytes)
        source, target = saved.device_copy, saved.host_view()
        assert source is not None

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        saved.moved = self._away.submit(copy)
        saved.leaving = True
        self._leaving.append(ref(saved))
        self._offloaded_nbytes += saved.nbytes

    def _let_go(self) -> None:
        """Give up the device's memory of what left before the last unit: the copies are done by now."""
        while len(self._leaving) > 1:
            saved = self._leaving.pop(0)()
            if saved is not None and saved.leaving:
                saved.moved.wait()
                saved.device_copy, saved.leaving = None, False
                self._known.pop(saved.key, None)  # another tensor may be there from now on

    def _bring_back(self, saved: Saved) -> None:
        if saved.device_copy is not None:
            saved.leaving = False  # it never left
            return
        here = torch.empty_strided(saved.shape, saved.stride, dtype=saved.dtype, device=saved.device)
        source = saved.host_view()

        def copy() -> None:
            here.copy_(source, non_blocking=True)

        saved.device_copy = here
        saved.moved = self._back.submit(copy)

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Saved):
            found: Tensor = packed
            return found
        self._bring_back(packed)
        for number in range(packed.number - 1, packed.number - 1 - self._horizon, -1):
            before = self._by_number.get(number)
            if before is not None:
                self._bring_back(before)
        tensor = packed.device_copy
        assert tensor is not None
        if packed.host is None:
            if tensor._version != packed.version:
                raise RuntimeError(
                    f"a tensor that backward needs, of shape {list(packed.shape)}, was changed in place "
                    f"after it was saved: expected version {packed.version}, found {tensor._version}"
                )
        else:
            packed.moved.wait()
        return tensor

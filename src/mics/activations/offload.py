"""Saved activations in host memory: away right after they are saved, back before the backward needs them.

What autograd saves in one forward of a unit is a group. Copies run on two lanes of their own (streams on a
GPU), one for each direction; whoever touches the memory waits for its ticket. In which order backwards come
to the groups is recorded as the order of gathers is (`layout/order.py`), and what will be needed next is sent
for ahead of time. On a CPU the same code makes plain copies: what is tested there is what runs on a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mics.activations.groups import CurrentForward, ExpectedBytes, Group, LastForward
from mics.activations.saved import Held, Kept, Region, Saved, View
from mics.activations.transfers import Transfers
from mics.layout.order import Plans, Prefetch
from mics.sharding.host_memory import HostPool
from mics.utils.tensor_trees import is_plain

LEAST_NBYTES: Final = 1 << 16
"""Smaller tensors stay: a copy would cost more than their memory is worth."""
_LEAST_PART: Final = 1 / 8  # of memory with gaps; where less of it is used, it stays


@dataclass(frozen=True, eq=False)
class Packed:
    """What autograd holds in place of a saved tensor that may leave."""

    saved: Saved
    view: View
    group: Group


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How much leaves."""

    fraction: float | None  # of the units; None: all of them,
    limit: float  # up to so many bytes a forward
    keep_last: int | None  # groups that stay; None: as many as are prefetched

    def num_leaving(self, num_groups: int, *, horizon: int) -> float:
        """Groups of a forward that leave, the first ones: they wait longest."""
        keep = horizon if self.keep_last is None else self.keep_last
        share = 1.0 if self.fraction is None else self.fraction
        return min(num_groups - keep, share * num_groups)


class Offloader:
    """Moves what units save."""

    def __init__(self, device: torch.device, budget: Budget, *, num_units: int, num_sharing: int = 1) -> None:
        self.pool = HostPool(
            pin=device.type == "cuda",
            num_sharing=num_sharing,
            user="activation offload",
            remedy="offload less (Activations.offload_fraction, Activations.offload_bytes) or use a smaller "
            "micro-batch",
        )
        self.plans = Plans(Prefetch(units=1), sizes=defaultdict(lambda: 1))  # of places; all count alike
        self._held = Held()
        self._budget = budget
        self.transfers = Transfers(device)
        self._forward = CurrentForward(0)
        self._before = LastForward(num_units, num_groups=num_units)
        self._num_begun = 0  # forwards, also those that go on where one ended
        self._num_open = 0  # units in whose forward what they save is watched
        self._known: WeakValueDictionary[tuple[Any, ...], Saved] = WeakValueDictionary()
        self._groups: WeakValueDictionary[tuple[int, int], Group] = WeakValueDictionary()
        self._leaving: list[list[ref[Saved]]] = []  # by group: on their way, the device's memory still held

    @property
    def horizon(self) -> int:
        """Groups that are prefetched."""
        return self.plans.prefetch.units

    @property
    def offloaded_nbytes(self) -> int:
        """Since the forward began."""
        return self._forward.offloaded_nbytes

    @property
    def saved_nbytes(self) -> int:
        """Likewise, with what stays on the device."""
        return self._forward.saved_nbytes

    def begin(self) -> None:
        """A forward begins. It goes on where the last one ended, unless a backward has come in between.

        So several forwards before a backward are one, also where units are called one by one.
        """
        self._num_begun += 1
        self._before.begin()
        if not self._forward.is_reached:
            self._forward.add_pass()
            return
        self._evict(but=0)
        self._before.see(self._forward.sizes_reached(), self._held.peak)
        self.plans.begin()
        horizon = self.transfers.horizon()
        if horizon is not None:
            self.plans.look_ahead(Prefetch(units=horizon))
        self._forward = CurrentForward(self._forward.number + 1)
        self._held.peak = self._held.nbytes

    def expected_nbytes(self) -> ExpectedBytes | None:
        """By what units save; None before a step has shown it."""
        groups = self._forward.sizes_reached() if self._forward.is_reached else self._before.sizes
        return ExpectedBytes.by(groups) if groups else None

    def held_nbytes(self) -> int:
        """The most bytes of saved activations that were on the device at once in the last forward."""
        return self._held.peak if self.saved_nbytes else self._before.peak

    @contextmanager
    def saving(self, stays: Callable[[Tensor], bool]) -> Iterator[None]:
        """Inside, what autograd saves is one group, but for tensors that ``stays`` names (parameters)."""
        group = self._forward.add_group()
        self._groups[group.forward, group.place] = group
        self._leaving.append([])

        def pack(tensor: Tensor) -> Any:
            if not is_plain(tensor):
                return Kept(tensor)
            if stays(tensor):
                return tensor
            saved = self._save(tensor, group)
            if saved is None:
                return Kept(tensor)
            group.members.append(ref(saved))
            return Packed(saved, View.of(tensor), group)

        self._num_open += 1
        try:
            with saved_tensors_hooks(pack, self._unpack):
                yield
        finally:
            self._num_open -= 1
        self._held.peak = max(self._held.peak, self._held.nbytes)
        self._ask_for_host_memory(group)
        self._evict()

    def pass_over(self) -> None:
        """A unit was called that no backward will come to: it has no group."""
        self._before.pass_over()

    # -- forward ----------------------------------------------------------------------------------------

    def _save(self, tensor: Tensor, group: Group) -> Saved | None:
        """The memory of ``tensor``, which may leave; None: it stays."""
        if tensor.device.type != self.transfers.device.type or tensor.is_conj() or tensor.is_neg():
            return None
        storage, view = tensor.untyped_storage(), View.of(tensor)
        region = Region.behind(view, storage.nbytes())
        used_nbytes = min(view.nbytes, view.extent_nbytes)
        # Views count edits with what they are views of; others may share memory and count for themselves.
        base = tensor._base
        root = tensor if base is None else base
        # By forward: between two of them memory may be filled anew without a trace (by a broadcast, say).
        key = (id(root), storage.data_ptr(), region, tensor._version, self._num_begun)
        # Where a tensor has gaps all of the memory leaves, and the gaps may be filled later in the forward,
        # again without a trace: another unit's tensor in them is saved anew.
        keys = [key] if used_nbytes == region.nbytes else [(*key, view), (*key, group.forward, group.place)]
        found = (self._known.get(each) for each in keys)
        known = next((one for one in found if one is not None), None)
        if known is not None and not known.memory.expired() and known.root() is root:
            # Several units save it, and somebody has held it all the while. What is on the host serves again.
            if known.on_device is None:
                known.be_on_device(tensor.detach(), is_original=True)
                self._leaving[-1].append(ref(known))
                group.sizes.pass_by += known.nbytes
            self._known.update(dict.fromkeys(keys, known))
            return known
        if region.nbytes < LEAST_NBYTES or used_nbytes < _LEAST_PART * region.nbytes:
            return None
        saved = Saved(
            memory=StorageWeakRef(storage),
            root=ref(root),
            version=tensor._version,
            region=region,
            pool=self.pool,
            held=self._held,
        )
        saved.be_on_device(tensor.detach(), is_original=True)
        self._known.update(dict.fromkeys(keys, saved))
        self._forward.saved_nbytes += saved.nbytes
        if self._should_leave(saved, group):
            self._send_away(saved)
            group.sizes.leave += saved.nbytes
            group.sizes.pass_by += saved.nbytes
        else:
            group.sizes.stay += saved.nbytes
        return saved

    def _should_leave(self, saved: Saved, group: Group) -> bool:
        """The last ones stay, because backward needs them at once; so does what is over the budget."""
        if self._num_to_leave(group) <= 0:
            return False
        return self.pool.used_nbytes + saved.nbytes <= self._budget.limit

    def _num_to_leave(self, group: Group) -> float:
        """Groups of this forward that leave, from this one on."""
        num_groups = self._before.num_groups
        place = self._forward.place_of(group, num_groups)
        return self._budget.num_leaving(num_groups, horizon=self.horizon) - place

    def _send_away(self, saved: Saved) -> None:
        saved.host = self.pool.take(saved.nbytes, "saved activations")
        self.transfers.send_away(saved)
        self._leaving[-1].append(ref(saved))
        self._forward.offloaded_nbytes += saved.nbytes

    def _evict(self, but: int = 1) -> None:
        """Give up the device's memory of what left before the last unit: the copies are done by now."""
        while len(self._leaving) > but:
            for member in self._leaving.pop(0):
                saved = member()
                if saved is not None and saved.on_device is not None:
                    saved.leave_device()

    def _ask_for_host_memory(self, group: Group) -> None:
        """Units that are to come will want what the most modest one wanted: better to know now.

        After two of them: the first may be the one that is unlike all others.
        """
        if not group.sizes.leave:
            return
        forward = self._forward
        forward.num_left += 1
        forward.least_nbytes = min(forward.least_nbytes, group.sizes.leave)
        to_come = math.ceil(self._num_to_leave(group) - 1)
        if forward.num_left > 1 and to_come > 0:
            wanted = min(self.pool.used_nbytes + to_come * forward.least_nbytes, self._budget.limit)
            num_groups = self._before.num_groups
            self.pool.require(int(wanted), f"what {num_groups} units save in a forward, at least")

    # -- backward ---------------------------------------------------------------------------------------

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Kept):
            return packed.check()
        if not isinstance(packed, Packed):
            found: Tensor = packed
            return found
        saved, group = packed.saved, packed.group
        # A unit that takes a gradient in its own forward does not begin a backward.
        if not group.is_reached and self._num_open == 0:
            self._reach(group)
        self.transfers.bring_back(saved)
        if not saved.is_original:
            saved.moved.wait()
        return saved.seen_as(packed.view)

    def _reach(self, group: Group) -> None:
        """The backward has come to ``group``: fetch it as a whole, and prefetch what follows."""
        group.is_reached = group.part_of.is_reached = True
        self._leaving = []  # what has not left yet is needed soon
        self.transfers.reach()
        self._forward.is_reached = True
        self._want(group)
        for place in self._places_after(group):
            upcoming = self._groups.get((group.forward, place))
            if upcoming is not None:
                self._want(upcoming)

    def _places_after(self, group: Group) -> Sequence[int]:
        """Where the backward will come to next: as in one that began alike, else the way back."""
        if group.forward == self._forward.number:
            planned = self.plans.advance(group.place)
            if self.plans.follows:
                return [place for batch in planned for place in batch]
        return range(group.place - 1, group.place - 1 - self.horizon, -1)

    def _want(self, group: Group) -> None:
        if not group.is_wanted:
            group.is_wanted = True
            for member in reversed(group.members):
                saved = member()
                if saved is not None:
                    self.transfers.bring_back(saved)

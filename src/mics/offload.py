"""Saved activations in host memory: away right after they are saved, back before the backward needs them.

What autograd saves in one forward of a unit is a group. Copies run on two lanes of their own (streams on a
GPU), one for each direction; whoever touches the memory waits for its ticket. In which order backwards come
to the groups is recorded as the order of gathers is (`plans.py`), and what will be needed next is sent for
ahead of time. On a CPU the same code makes plain copies: what is tested there is what runs on a GPU.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from mics.comm.lanes import INLINE, Lane, StreamLane
from mics.host_memory import HostPool
from mics.plans import Plans, Prefetch
from mics.saved import Held, Kept, Region, Saved, View
from mics.tensor_trees import is_plain
from mics.transfer_clock import TransferClock

LEAST_NBYTES: Final = 1 << 16
"""Smaller tensors stay: a copy would cost more than their memory is worth."""
_LEAST_PART: Final = 1 / 8  # of memory with gaps; where less of it is used, it stays


@dataclass
class GroupBytes:
    """What a group saved."""

    stay: int = 0
    pass_by: int = 0  # on the device until the next unit has ended
    leave: int = 0  # for the host: once, whoever else saves it


@dataclass(frozen=True, kw_only=True)
class ExpectedBytes:
    """Of a forward."""

    on_device: int  # at once, at the most
    stays: int  # of it, for good
    on_host: int


@dataclass(eq=False)
class Pass:
    """One forward of the model. Several that come before a backward count as one."""

    first_place: int
    sizes: list[GroupBytes] = field(default_factory=list)  # of its groups
    groups: list[ref[Group]] = field(default_factory=list)
    is_reached: bool = False  # by a backward

    def is_alive(self) -> bool:
        """Whether a backward can still come."""
        return any(group() is not None for group in self.groups)


@dataclass(eq=False)
class Group:
    """What one forward of a unit saved. It lives as long as anything of it does."""

    forward: int  # number of the passes that count as one
    place: int  # among the groups of them
    part_of: Pass
    sizes: GroupBytes = field(default_factory=GroupBytes)
    members: list[ref[Saved]] = field(default_factory=list)
    is_wanted: bool = False  # the backward has come to it, or it was sent for
    is_reached: bool = False


@dataclass(frozen=True, eq=False)
class Packed:
    """What autograd holds in place of a saved tensor that may leave."""

    saved: Saved
    view: View
    group: Group


class Offloader:
    """Moves what units save."""

    def __init__(
        self,
        device: torch.device,
        *,
        fraction: float | None,
        limit: float,
        keep_last: int | None,
        num_units: int,
        num_sharing: int = 1,
    ) -> None:
        on_gpu = device.type == "cuda"
        self.pool = HostPool(
            pin=on_gpu,
            num_sharing=num_sharing,
            user="activation offload",
            remedy="offload less (Activations.offload takes a fraction or bytes) or use a smaller "
            "micro-batch",
        )
        self.plans = Plans(Prefetch(units=1), sizes=defaultdict(lambda: 1))  # of places; all count alike
        self.offloaded_nbytes = 0  # since the forward began
        self.saved_nbytes = 0  # likewise, with what stays on the device
        self._held = Held()
        self._device = device
        self._away: Lane = StreamLane(device) if on_gpu else INLINE
        self._back: Lane = StreamLane(device) if on_gpu else INLINE
        self._fraction = fraction  # of the units that leave; None: all of them,
        self._limit = limit  # up to so many bytes a forward
        self._keep_last = keep_last  # groups that stay; None: as many as are sent for ahead
        self._num_forwards = 0
        self._num_begun = 0  # forwards, also those that go on where one ended
        self._num_open = 0  # units in whose forward what they save is watched
        self._num_groups = 0  # of this forward
        self._passes = [Pass(0)]  # of this forward
        self._of_groups_before: list[GroupBytes] = []  # in the forward before
        self._num_left = 0  # groups of this forward of which something left
        self._least_nbytes = math.inf  # of what left of one of them
        self._num_units = num_units
        self._expected_groups = num_units  # of a forward
        self._last_peak = 0
        self._known: WeakValueDictionary[tuple[Any, ...], Saved] = WeakValueDictionary()
        self._groups: WeakValueDictionary[tuple[int, int], Group] = WeakValueDictionary()
        self._leaving: list[list[ref[Saved]]] = []  # by group: on their way, the device's memory still held
        self._last: Group | None = None
        self._clock = TransferClock() if on_gpu else None

    @property
    def horizon(self) -> int:
        """Groups that are sent for ahead."""
        return self.plans.prefetch.units

    def begin(self) -> None:
        """A forward begins. It goes on where the last one ended, unless a backward has come in between.

        So several forwards before a backward are one, also where units are called one by one.
        """
        self._num_begun += 1
        if not self._of_groups_before:
            self._expected_groups = self._num_units
        if self._last is None:
            # Through those whose results are gone nobody will go back.
            alive = [each for each in self._passes if each.is_alive()]
            self._passes = [*alive, Pass(self._num_groups)]
            return
        self._let_go(but=0)
        reached = self._of_groups_reached()
        if reached:  # and not only what a forward of long before has saved
            self._of_groups_before, self._last_peak = reached, self._held.peak
            self._expected_groups = len(reached)
        self.plans.begin()
        if self._clock is not None and self._clock.is_read():
            self.plans.look_ahead(Prefetch(units=self._clock.horizon()))
            self._clock = None
        self._num_forwards += 1
        self._num_groups = self.offloaded_nbytes = self.saved_nbytes = 0
        self._passes = [Pass(0)]
        self._num_left, self._least_nbytes = 0, math.inf
        self._held.peak = self._held.nbytes
        self._last = None

    def _of_groups_reached(self) -> list[GroupBytes]:
        """Of forwards that a backward went through: one that was dropped says nothing about a step."""
        return [sizes for each in self._passes if each.is_reached for sizes in each.sizes]

    def expected_nbytes(self) -> ExpectedBytes | None:
        """By what units save; None before a step has shown it.

        What a unit sends away is on the device until the next one has ended.
        """
        groups = self._of_groups_reached() if self._last is not None else self._of_groups_before
        if not groups:
            return None
        most = staying = passing = 0
        for group in groups:
            staying += group.stay
            most = max(most, staying + passing + group.pass_by)
            passing = group.pass_by
        on_host = sum(group.leave for group in groups)
        return ExpectedBytes(on_device=most, stays=staying, on_host=on_host)

    def held_nbytes(self) -> int:
        """The most bytes of saved activations that were on the device at once in the last forward."""
        return self._held.peak if self.saved_nbytes else self._last_peak

    @contextmanager
    def saving(self, stays: Callable[[Tensor], bool]) -> Iterator[None]:
        """Inside, what autograd saves is one group, but for tensors that ``stays`` names (parameters)."""
        group = Group(self._num_forwards, self._num_groups, self._passes[-1])
        self._num_groups += 1
        self._groups[group.forward, group.place] = group
        self._leaving.append([])
        group.part_of.groups.append(ref(group))
        group.part_of.sizes.append(group.sizes)

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
        self._let_go()

    def pass_over(self) -> None:
        """A unit was called that no backward will come to: it has no group."""
        if not self._of_groups_before:
            self._expected_groups = max(1, self._expected_groups - 1)

    # -- forward ----------------------------------------------------------------------------------------

    def _save(self, tensor: Tensor, group: Group) -> Saved | None:
        """The memory of ``tensor``, which may leave; None: it stays."""
        if tensor.device.type != self._device.type or tensor.is_conj() or tensor.is_neg():
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
        self.saved_nbytes += saved.nbytes
        if self._should_leave(saved, group):
            self._send_away(saved)
            group.sizes.leave += saved.nbytes
            group.sizes.pass_by += saved.nbytes
        else:
            group.sizes.stay += saved.nbytes
        return saved

    def _should_leave(self, saved: Saved, group: Group) -> bool:
        """The last ones stay, because backward needs them at once; so does what is over the budget."""
        if self._place_in_forward(group) >= self._num_leaving():
            return False
        return self.pool.used_nbytes + saved.nbytes <= self._limit

    def _place_in_forward(self, group: Group) -> int:
        """There are more groups behind a forward that nobody goes back through, its result still held."""
        return (group.place - self._passes[0].first_place) % self._expected_groups

    def _num_leaving(self) -> float:
        """Groups of a forward that leave, the first ones: they wait longest."""
        keep = self.horizon if self._keep_last is None else self._keep_last
        share = 1.0 if self._fraction is None else self._fraction
        return min(self._expected_groups - keep, share * self._expected_groups)

    def _send_away(self, saved: Saved) -> None:
        saved.host = self.pool.take(saved.nbytes, "saved activations")
        source, target = saved.device_bytes(), saved.host_bytes()

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        saved.moved = self._away.submit(copy)
        self._leaving[-1].append(ref(saved))
        self.offloaded_nbytes += saved.nbytes

    def _let_go(self, but: int = 1) -> None:
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
        self._num_left += 1
        self._least_nbytes = min(self._least_nbytes, group.sizes.leave)
        to_come = math.ceil(self._num_leaving() - self._place_in_forward(group) - 1)
        if self._num_left > 1 and to_come > 0:
            wanted = min(self.pool.used_nbytes + to_come * self._least_nbytes, self._limit)
            self.pool.require(int(wanted), f"what {self._expected_groups} units save in a forward, at least")

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
        self._bring_back(saved)
        if not saved.is_original:
            saved.moved.wait()
        return saved.seen_as(packed.view)

    def _reach(self, group: Group) -> None:
        """The backward has come to ``group``: send for it as a whole, and for what will follow."""
        group.is_reached = group.part_of.is_reached = True
        self._leaving = []  # what has not left yet is needed soon
        if self._clock is not None:
            self._clock.reach(self._device)
        self._last = group
        self._want(group)
        for place in self._places_after(group):
            upcoming = self._groups.get((group.forward, place))
            if upcoming is not None:
                self._want(upcoming)

    def _places_after(self, group: Group) -> Sequence[int]:
        """Where the backward will come to next: as in one that began alike, else the way back."""
        if group.forward == self._num_forwards:
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
                    self._bring_back(saved)

    def _bring_back(self, saved: Saved) -> None:
        if saved.on_device is not None:
            return
        here = torch.empty(saved.nbytes, dtype=torch.uint8, device=self._device)
        source, target = saved.host_bytes(), here.data  # whose version is its own: this is no edit

        def copy() -> None:
            target.copy_(source, non_blocking=True)

        saved.be_on_device(here, is_original=False)
        if self._clock is None:
            saved.moved = self._back.submit(copy)
        else:
            saved.moved = self._back.submit(lambda: self._clock_copy(copy))

    def _clock_copy(self, copy: Callable[[], None]) -> None:
        assert self._clock is not None
        with self._clock.transfer():
            copy()

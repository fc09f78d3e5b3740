"""Optimizer state in host memory: units come to the device one by one, are updated there, and go back.

Masters that are memory of their own come with it. The update is the optimizer's own, on the device, of one
unit at a time: each element gets the bits that it gets where state stays on the device. Two units are on the
device at once. While one is updated and goes back, the next is on its way::

    from host   unit 0 | unit 1 | unit 2 | ...
    device               update | update | ...
    to host                 unit 0 | unit 1 | ...

The first two come beside hop 2. New values go to replicas, and gathers begin, while the rest is under way.
The host waits for nothing: lanes order copies by tickets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor
from torch.optim import Optimizer

from mics.comm.lanes import DONE, Lanes, Ticket, Work
from mics.cost.memory import NUM_STAGED
from mics.errors import SettingsError
from mics.guard import HostTensor, ShardOwner, plainly
from mics.layout.flat import round_up
from mics.sharding.host_memory import HostPool
from mics.sharding.unit import Unit

_ALIGNMENT_NBYTES: Final = 256
_FROM_HOST: Final = Work("from host", "copy", "optimizer state")
_TO_HOST: Final = Work("to host", "copy", "optimizer state")
_MASTER: Final = ""  # among entries of optimizer state, which have names


class HostState:
    """The optimizer state of one sharded model, in host memory."""

    def __init__(
        self, device: torch.device, *, lanes: Lanes, owner: ShardOwner, make_pool: Callable[[], HostPool]
    ) -> None:
        self._device = device
        self._lanes = lanes
        self._owner = owner
        self._make_pool = make_pool
        self.masters = make_pool()  # their memory
        self._last: tuple[Ticket, ...] = (DONE, DONE)  # from the host, and to it
        self._states: WeakKeyDictionary[Optimizer, _State] = WeakKeyDictionary()
        owner.host_needed.append(self.settle)

    @property
    def nbytes(self) -> int:
        """Of optimizer state, without masters."""
        return sum(state.pool.nbytes for state in self._states.values())

    def settle(self) -> None:
        """Wait for the lanes: from here on the host may read and write what is in its memory."""
        pending = [ticket for ticket in self._last if not ticket.is_over()]
        for ticket in pending:
            ticket.wait()
        if pending and self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        self._last = (DONE, DONE)

    def adopt(self, optimizer: Optimizer, unit: Unit, index: int, entries: Mapping[str, Tensor]) -> None:
        """Take values that an optimizer keeps for a parameter into host memory."""
        self.settle()
        state, own = self._state_of(optimizer), optimizer.state[unit.shards[index]]
        for key, value in entries.items():
            piece = state.of(unit).piece(key, index, value)
            with plainly(), torch.no_grad():
                piece.copy_(value)
            own[key] = piece

    @contextmanager
    def streaming(
        self, optimizer: Optimizer, units: Sequence[Unit], members: Sequence[tuple[Unit, int]]
    ) -> Iterator[Stream]:
        """One step of ``optimizer``, which updates ``members`` of ``units``. The first are prefetched."""
        state = self._state_of(optimizer)
        indices: dict[Unit, list[int]] = {}
        for unit, index in members:
            indices.setdefault(unit, []).append(index)
            self._adopt_new(optimizer, unit, index)
        stream = Stream(self, optimizer, [(unit, state.of(unit), indices[unit]) for unit in units])
        try:
            yield stream
        finally:
            stream.close()

    def to_device(self, copy: Callable[[], None], after: Sequence[Ticket]) -> Ticket:
        ticket = self._lanes.lane_for(_FROM_HOST).submit(copy, after)
        self._last = (ticket, self._last[1])
        return ticket

    def to_host(self, copy: Callable[[], None]) -> Ticket:
        ticket = self._lanes.lane_for(_TO_HOST).submit(copy)
        self._last = (self._last[0], ticket)
        return ticket

    def _state_of(self, optimizer: Optimizer) -> _State:
        if optimizer not in self._states:
            self._states[optimizer] = _State(pool=self._make_pool(), owner=ref(self._owner))
        return self._states[optimizer]

    def _adopt_new(self, optimizer: Optimizer, unit: Unit, index: int) -> None:
        """What was made with the optimizer, or put there since."""
        entries = optimizer.state.get(unit.shards[index], {})
        found = self._state_of(optimizer).of(unit)
        new = {
            key: value
            for key, value in sharded_entries(entries, unit.shards[index]).items()
            if value is not found.known(key, index)
        }
        if new:
            self.adopt(optimizer, unit, index, new)


def sharded_entries(entries: Mapping[str, Any], shard: Tensor) -> dict[str, Tensor]:
    """Entries of a parameter's state that have an element for each of ``shard``. Others are numbers."""
    with plainly():
        tensors = {k: v for k, v in entries.items() if isinstance(v, Tensor) and v.dim()}
        strange = next((key for key, value in tensors.items() if value.shape != shard.shape), None)
        if strange is not None:
            raise SettingsError(
                f'optimizer_state="host": expected optimizer state shaped like its parameter, '
                f"{tuple(shard.shape)}, found {strange!r} of shape {tuple(tensors[strange].shape)}; "
                'use optimizer_state="device" with this optimizer'
            )
        return tensors


@dataclass(eq=False, kw_only=True)
class _State:
    """What one optimizer keeps."""

    pool: HostPool
    owner: ref[ShardOwner]
    units: dict[int, _UnitState] = field(default_factory=dict)  # by index

    def of(self, unit: Unit) -> _UnitState:
        if unit.spec.index not in self.units:
            self.units[unit.spec.index] = _UnitState(unit, self.pool, self.owner)
        return self.units[unit.spec.index]


class _UnitState:
    """What one optimizer keeps for one unit: a buffer for each entry, laid out as the masters."""

    def __init__(self, unit: Unit, pool: HostPool, owner: ref[ShardOwner]) -> None:
        self._spec, self._share, self._layouts = unit.spec, unit.share, unit.layouts
        self._pool = pool
        self._owner = owner
        self.flats: dict[str, Tensor] = {}  # [master_numel], by entry
        self._pieces: dict[str, list[Tensor]] = {}  # of each parameter, as the user sees them

    def known(self, key: str, index: int) -> Tensor | None:
        """The piece of a parameter, if there is one."""
        return self._pieces[key][index] if key in self._pieces else None

    def piece(self, key: str, index: int, like: Tensor) -> Tensor:
        """The piece of a parameter, made if there is none."""
        if key not in self.flats:
            numel = self._share.master_numel(self._spec)
            dtype = self._spec.master_dtype if like.is_floating_point() else like.dtype
            taken = self._pool.take(numel * dtype.itemsize, f"optimizer state {key!r}")
            self.flats[key] = flat = taken[: numel * dtype.itemsize].zero_().view(dtype)
            views = self._share.views_of(self._spec, flat)
            self._pieces[key] = [
                HostTensor.guard(view, layout, self._owner)
                for view, layout in zip(views, self._layouts, strict=True)
            ]
        return self._pieces[key][index]


@dataclass(eq=False)
class _Buffer:
    """Device memory for one unit at a time."""

    memory: Tensor
    emptied: Ticket = DONE


@dataclass(eq=False)
class _Staged:
    """A unit's masters and state, on the device or on their way to it."""

    buffer: _Buffer
    pairs: list[tuple[Tensor, Tensor]]  # on the device, on the host
    flats: dict[str, Tensor]  # on the device, by entry
    arrived: Ticket


class Stream:
    """Units that come to the device one after the other, in one optimizer step."""

    def __init__(
        self,
        host: HostState,
        optimizer: Optimizer,
        units: Sequence[tuple[Unit, _UnitState, list[int]]],
    ) -> None:
        self._host = host
        self._optimizer = optimizer
        self._indices = {unit: indices for unit, _, indices in units}
        self._states = {unit: state for unit, state, _ in units}
        self._left = iter([unit for unit, _, _ in units])
        self._staged: dict[Unit, _Staged] = {}
        largest = max((sum(map(_room, _parts(unit, state))) for unit, state, _ in units), default=0)
        device = units[0][0].device if units else None
        self._buffers = [
            _Buffer(torch.empty(largest, dtype=torch.uint8, device=device)) for _ in range(NUM_STAGED)
        ]
        for buffer in self._buffers:
            self._send_for(buffer)

    def update(self, unit: Unit) -> bool:
        """Have the optimizer update a unit; whether its new values are in ``param_shard``."""
        staged = self._staged.pop(unit)
        staged.arrived.wait()
        has_gradients = any(unit.shards[index].grad is not None for index in self._indices[unit])
        if has_gradients:
            with self._shown(unit, staged):
                self._step(unit)
            self._store(unit, staged)
        self._send_for(staged.buffer)
        return has_gradients and unit.spec.masters_on_host

    def close(self) -> None:
        """What follows on the device comes after all copies: it may use the buffers' memory, or read masters.

        A lane copies in order, so the last ones to the host stand for all.
        """
        for staged in self._staged.values():  # somebody raised
            staged.arrived.wait()
        for buffer in self._buffers:
            buffer.emptied.wait()
        self._staged, self._buffers = {}, []

    # -- copies ---------------------------------------------------------------------------------------

    def _send_for(self, buffer: _Buffer) -> None:
        """The next unit, to this buffer."""
        unit = next(self._left, None)
        if unit is None:
            return
        pairs, flats, start = [], {}, 0
        for key, flat in _parts(unit, self._states[unit]):
            here = buffer.memory[start : start + flat.nbytes].view(flat.dtype)
            pairs.append((here, flat.data))  # whose version is its own: this is no edit
            flats[key] = here
            start += _room((key, flat))
        arrived = self._host.to_device(partial(_copy_in, pairs), (buffer.emptied,))
        self._staged[unit] = _Staged(buffer, pairs, flats, arrived)

    def _store(self, unit: Unit, staged: _Staged) -> None:
        if unit.spec.masters_on_host:
            unit.carry(staged.flats[_MASTER])
        staged.buffer.emptied = self._host.to_host(partial(_copy_out, staged.pairs))

    # -- what the optimizer sees ------------------------------------------------------------------------

    @contextmanager
    def _shown(self, unit: Unit, staged: _Staged) -> Iterator[None]:
        """Let the optimizer find parameters and state of ``unit`` on the device."""
        views = {key: unit.views_of(flat) for key, flat in staged.flats.items()}
        members = [(index, unit.shards[index]) for index in self._indices[unit]]
        state, held = self._optimizer.state, self._states[unit]
        for index, shard in members:
            if unit.spec.masters_on_host:
                unit.masters.show_at(index, views[_MASTER][index])
            for key in sharded_entries(state.get(shard, {}), shard):
                state[shard][key] = views[key][index]
        try:
            yield
        finally:
            for index, shard in members:
                new = {}
                for key, value in sharded_entries(state.get(shard, {}), shard).items():
                    if key not in views:
                        new[key] = value
                        continue
                    if value is not views[key][index]:  # made in this step, or anew in each
                        views[key][index].copy_(value)
                    state[shard][key] = held.piece(key, index, value)
                if new:
                    self._host.adopt(self._optimizer, unit, index, new)
                if unit.spec.masters_on_host:
                    unit.masters.show_at(index, None)

    def _step(self, unit: Unit) -> None:
        """The optimizer's own step, without the hooks around it, of this unit's parameters alone."""
        optimizer = self._optimizer
        ours = {id(unit.shards[index]) for index in self._indices[unit]}
        groups = [(group, group["params"]) for group in optimizer.param_groups]
        step: Any = type(optimizer).step
        try:
            for group, params in groups:
                group["params"] = [param for param in params if id(param) in ours]
            step.__wrapped__(optimizer)
        finally:
            for group, params in groups:
                group["params"] = params


def staged_nbytes(unit: Unit) -> int:
    """Of one unit on the device, predicted for AdamW."""
    flat = round_up(unit.master.nbytes, _ALIGNMENT_NBYTES)
    return flat * (3 if unit.spec.masters_on_host else 2)


def _parts(unit: Unit, state: _UnitState) -> list[tuple[str, Tensor]]:
    """What comes to the device with a unit."""
    masters = [(_MASTER, unit.master)] if unit.spec.masters_on_host else []
    return [*masters, *state.flats.items()]


def _room(part: tuple[str, Tensor]) -> int:
    return round_up(part[1].nbytes, _ALIGNMENT_NBYTES)


def _copy_in(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for here, there in pairs:
        here.copy_(there, non_blocking=True)


def _copy_out(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for here, there in pairs:
        there.copy_(here, non_blocking=True)

"""New values of the masters, on their way into every replica's ``param_shard``.

As they are, or as how far each has moved (``comm/moves.py``): every replica has the value of before.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from mics.comm.lanes import DONE, Ticket
from mics.comm.moves import Moves, Room
from mics.comm.world import UnitGroups
from mics.sharding.spec import label_of
from mics.sharding.unit import Unit, note_refresh

_SPARE: Final = 1.3  # room for so many times the moves that there were
_FULL: Final = 0.85  # of the room: time for more
_EMPTY: Final = 0.4  # of the room: time for less
_WORTHWHILE: Final = 0.9  # of the bytes of the values
_ROUND: Final = 16


def refresh_together(units: Sequence[Unit], *, carried: Collection[Unit] = ()) -> None:
    """Carry the masters of several units into their ``param_shard``, by one collective over the replicas.

    This rank's part of those that were ``carried`` is there.
    """
    for unit in units:
        unit.settle_params()
        if unit.own_params is not unit.master and unit not in carried:
            unit.own_params.copy_(unit.masters.here())
    _send_values(units)
    for unit in units:
        note_refresh(unit)


def _send_values(units: Sequence[Unit]) -> None:
    for groups in dict.fromkeys(unit.groups for unit in units if unit.share.masters_over_replicas):
        together = [unit for unit in units if unit.groups is groups]
        # ``.data``: a version counter of its own. What lanes write to it is nobody's edit.
        pairs = [(unit.param_shard.data, unit.own_params) for unit in together]
        ticket = groups.replication.gather_together(pairs, _label(together))
        for unit in together:
            unit.refresh.begin(ticket)


def _label(units: Sequence[Unit]) -> str:
    return f"new values of {label_of([unit.spec for unit in units])}"


@dataclass(eq=False)
class _Sent:
    """One unit's moves on the wire, and how many there is room for."""

    unit: Unit
    moves: Moves
    wire: Tensor  # uint8 [moves.nbytes]: this rank's

    @property
    def is_worthwhile(self) -> bool:
        return self.moves.nbytes < _WORTHWHILE * self.unit.own_params.nbytes

    @property
    def received_nbytes(self) -> int:
        return self.moves.nbytes * self.unit.groups.replication.size


class MovedValues:
    """Refreshes after optimizer steps, by moves where they fit.

    How many bytes moves take is known once they are made, on the GPU. The host does not wait for that: it has
    each unit's moves sent in the room that earlier steps needed, and the need beside them. Before it has the
    first unit gathered it looks (``confirm``): values whose moves did not fit, on any replica, are sent as
    they are. Replicas see the same needs, so they decide alike.
    """

    def __init__(self, units: Sequence[Unit], device: torch.device, *, imagined: bool = False) -> None:
        """``imagined``: the other replicas are, so that their moves are not those of the values here."""
        self._device = device
        self._rows = {unit.spec.index: row for row, unit in enumerate(filter(is_moved, units))}
        self._sent: dict[int, _Sent] = {}
        self._replaced: list[_Sent] = []  # which a lane may still send
        self._needed = torch.zeros(len(self._rows), 2, dtype=torch.int32, device=device)
        self._found = self._host = self._needed
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self._told: Ticket = DONE
        self._pending: list[_Sent] = []
        self._received = torch.empty(0, dtype=torch.uint8, device=device)
        self._last: Ticket = DONE
        # In place of values that would soon be no numbers any more, with which computing is faster.
        largest = max(unit.param_shard.numel() for unit in units)
        self._imagined = torch.zeros(largest, dtype=torch.int16, device=device) if imagined else None

    def __del__(self) -> None:
        """Let the computation wait for what lanes still do with this memory: others get it next."""
        if self._device.type == "cuda":
            for ticket in (self._told, self._last):
                with suppress(Exception):  # the interpreter may be on its way out
                    ticket.wait()

    @property
    def nbytes(self) -> int:
        """Of memory for moves on their way."""
        own = sum(sent.wire.numel() for sent in self._sent.values())
        return own + self._received.numel()

    def begin(self, units: Sequence[Unit]) -> None:
        """Make the moves of ``units``, and tell the replicas what room they need."""
        self.confirm()
        moved = [unit for unit in units if unit.spec.index in self._rows]
        if not moved:
            return
        self._needed.zero_()
        for unit in moved:
            unit.settle_params()
            sent = self._sent.get(unit.spec.index) or self._make(unit, Room(0, 0))
            new = unit.masters.here().to(unit.own_params.dtype)
            sent.moves.encode(sent.wire, unit.own_params, new, self._needed[self._rows[unit.spec.index]])
            unit.own_params.copy_(new)
            self._pending.append(sent)
        self._replaced = [sent for sent in self._replaced if sent.unit not in moved]
        self._tell(moved[0].groups)

    def send(self, units: Sequence[Unit]) -> None:
        """Have the new values of ``units`` come, which are some of those that ``begin`` was told of."""
        moved = [unit for unit in units if self._goes_by_moves(unit)]
        others = [unit for unit in units if unit not in moved]
        if others:
            refresh_together(others, carried=[unit for unit in others if unit.spec.index in self._rows])
        if moved:
            self._send_moves([self._sent[unit.spec.index] for unit in moved])

    def confirm(self) -> None:
        """Send as they are what did not fit, and make room for what the next step may need."""
        pending, self._pending = self._pending, []
        if not pending:
            return
        self._told.wait()
        if self._arrived is not None:
            self._arrived.synchronize()
        needed = self._host.view(-1, *self._needed.shape).amax(0).tolist()
        late = []
        for sent in pending:
            unit, need = sent.unit, Room(*needed[self._rows[sent.unit.spec.index]])
            went_by_moves, unit.refresh.confirm = unit.refresh.confirm is not None, None
            if went_by_moves and not sent.moves.room.holds(need):
                unit.settle_params()
                late.append(unit)
            self._adapt(sent, need)
        if late:
            _send_values(late)

    def _goes_by_moves(self, unit: Unit) -> bool:
        sent = self._sent.get(unit.spec.index)
        return sent is not None and sent.is_worthwhile

    def _tell(self, groups: UnitGroups) -> None:
        """Every replica of the needs of all."""
        numel = groups.replication.size * self._needed.numel()
        if self._found.numel() != numel:
            self._found = torch.zeros(numel, dtype=torch.int32, device=self._device)
            pin = self._device.type == "cuda"
            self._host = torch.zeros(numel, dtype=torch.int32, device="cpu", pin_memory=pin)

        def bring() -> None:
            self._host.copy_(self._found, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()

        label = "how far values have moved"
        self._told = groups.replication.all_gather(self._found, self._needed.view(-1), label, then=bring)

    def _send_moves(self, moved: Sequence[_Sent]) -> None:
        numel = sum(sent.received_nbytes for sent in moved)
        if self._received.numel() < numel:
            self._last.wait()
            self._received = torch.empty(numel, dtype=torch.uint8, device=self._device)
        parts = self._received[:numel].split([sent.received_nbytes for sent in moved])
        pairs = [(part, sent.wire) for part, sent in zip(parts, moved, strict=True)]
        units = [sent.unit for sent in moved]
        ticket = units[0].groups.replication.gather_together(
            pairs, _label(units), then=partial(self._decode, list(moved), parts)
        )
        self._last = ticket
        for unit in units:
            unit.refresh.begin(ticket, confirm=self.confirm)
            note_refresh(unit)

    def _decode(self, moved: Sequence[_Sent], parts: Sequence[Tensor]) -> None:
        """On the lane: move the other replicas' pieces."""
        for sent, part in zip(moved, parts, strict=True):
            unit, size = sent.unit, sent.unit.groups.replication.size
            values = unit.param_shard.data
            if self._imagined is not None:
                values = self._imagined[: values.numel()]
            sent.moves.decode(values.view(size, -1), part.view(size, -1), own=unit.share.piece)

    def _adapt(self, sent: _Sent, needed: Room) -> None:
        index, room = sent.unit.spec.index, sent.moves.room
        wanted = Room(
            _with_spare(room.num_bytes, needed.num_bytes), _with_spare(room.num_words, needed.num_words)
        )
        if index not in self._sent or wanted != room:
            self._replaced.append(sent)
            self._sent[index] = self._make(sent.unit, wanted)

    def _make(self, unit: Unit, room: Room) -> _Sent:
        moves = Moves(unit.own_params.numel(), room)
        return _Sent(unit, moves, torch.zeros(moves.nbytes, dtype=torch.uint8, device=self._device))


def is_moved(unit: Unit) -> bool:
    """Whether values of a unit may go to the replicas as moves: whoever sends them has the ones of before."""
    spec, shared = unit.spec, unit.share.masters_over_replicas and unit.groups.replication.size > 1
    has_both = spec.has_masters and not spec.casts_masters and not spec.masters_on_host
    return shared and has_both and spec.param_dtype.itemsize == 2


def _with_spare(room: int, needed: int) -> int:
    """Room for ``needed`` and some more; as it was while that is about right."""
    if needed <= _FULL * room and needed >= _EMPTY * room:
        return room
    return -(-int(_SPARE * needed + 1) // _ROUND) * _ROUND

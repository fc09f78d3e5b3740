"""New values of the masters, on their way into every replica's ``param_shard``.

As they are, or as how far each has moved (``comm/moves.py``), to ranks that have the value of before. Those
are the other replicas; or, where there are none, the ranks of the partition group that still have whole units
of before the step (``State.OLD``).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

import torch
from torch import Tensor

from mics.comm.lanes import DONE, LanedCollectives, Ticket
from mics.comm.moves import Moves, Room, checksum
from mics.comm.protocol import Action
from mics.comm.world import UnitGroups
from mics.cost.memory import NUM_RECEIVED
from mics.sharding.float8 import as_sent, scale_together
from mics.sharding.spec import label_of
from mics.sharding.unit import State, Unit, note_refresh

_SPARE: Final = 1.3  # room for so many times the moves that there were
_FULL: Final = 0.85  # of the room: time for more
_EMPTY: Final = 0.4  # of the room: time for less
_WORTHWHILE: Final = 0.9  # of the bytes of the values
_ROUND: Final = 16


def refresh_together(units: Sequence[Unit], *, carried: Collection[Unit] = ()) -> None:
    """Carry the masters of several units into their ``param_shard``, by one collective over the replicas.

    This rank's part of those that were ``carried`` is there.
    """
    scale_together(units)
    for unit in units:
        unit.settle_params()
        if unit.own_params is not unit.master and unit not in carried:
            unit.masters.carry_into(unit.own_params)
    _send_values(units)
    for unit in units:
        note_refresh(unit)


def _send_values(units: Sequence[Unit]) -> None:
    for groups in dict.fromkeys(unit.groups for unit in units if unit.share.masters_over_replicas):
        together = [unit for unit in units if unit.groups is groups]
        # ``.data``: a version counter of its own. What lanes write to it is nobody's edit.
        pairs = [(as_sent(unit.param_shard.data), as_sent(unit.own_params)) for unit in together]
        ticket = groups.replication.gather_together(pairs, _label(together))
        for unit in together:
            unit.refresh.begin(ticket)


def _label(units: Sequence[Unit]) -> str:
    return f"new values of {label_of([unit.spec for unit in units])}"


class Route(Protocol):
    """Who has values of before, and where."""

    def in_turn(self, units: Sequence[Unit]) -> bool:
        """Whether moves of ``units`` wait until their unit is needed, but for the first unit's."""
        ...

    def has_old(self, unit: Unit) -> bool:
        """Whether they have them now. The same on all ranks that share a unit."""
        ...

    def group(self, groups: UnitGroups) -> LanedCollectives:
        """Whom moves are sent to."""
        ...

    def copies(self, unit: Unit) -> Tensor:
        """What this rank has of all members' values: [members * numel]."""
        ...

    def position(self, unit: Unit) -> int:
        """Of this rank's own values in there."""
        ...

    def sent(self, unit: Unit, ticket: Ticket, confirm: Action) -> None:
        """Moves are on their way; ``confirm`` is to be called before the values are used."""
        ...

    def send_late(self, units: Sequence[Unit], ticket: Ticket) -> None:
        """Moves did not fit: have values come as they are."""
        ...


@dataclass(frozen=True)
class ToReplicas:
    """All replicas have ``param_shard``."""

    crosses: bool
    """Gathers share the network with moves, and each is needed before the next unit's moves."""

    def in_turn(self, units: Sequence[Unit]) -> bool:
        return self.crosses

    def has_old(self, unit: Unit) -> bool:
        return True

    def group(self, groups: UnitGroups) -> LanedCollectives:
        return groups.replication

    def copies(self, unit: Unit) -> Tensor:
        return unit.param_shard.data  # a version counter of its own: what lanes write is nobody's edit

    def position(self, unit: Unit) -> int:
        return unit.share.piece

    def sent(self, unit: Unit, ticket: Ticket, confirm: Action) -> None:
        unit.refresh.begin(ticket, confirm=confirm)

    def send_late(self, units: Sequence[Unit], ticket: Ticket) -> None:
        for unit in units:
            unit.settle_params()
        _send_values(units)


class MovesUnits(Protocol):
    """Transitions of units whose old values are moved (``schedule/residency.py``)."""

    def update(self, unit: Unit, moved: Ticket) -> None: ...

    def drop(self, unit: Unit, moved: Ticket) -> None: ...


@dataclass(frozen=True, eq=False)
class ToPartitionGroup:
    """Units that stay are whole on all ranks of the partition group, which are all ranks there are."""

    transitions: MovesUnits

    def in_turn(self, units: Sequence[Unit]) -> bool:
        """Not if all of them stay: no gather comes between."""
        return not all(map(self.has_old, units))

    def has_old(self, unit: Unit) -> bool:
        return unit.state is State.OLD

    def group(self, groups: UnitGroups) -> LanedCollectives:
        return groups.gather

    def copies(self, unit: Unit) -> Tensor:
        return unit.whole.flat

    def position(self, unit: Unit) -> int:
        return unit.share.chunk

    def sent(self, unit: Unit, ticket: Ticket, confirm: Action) -> None:
        unit.own_chunk().copy_(unit.own_params)
        unit.refresh.begin(DONE, confirm=confirm)
        self.transitions.update(unit, ticket)

    def send_late(self, units: Sequence[Unit], ticket: Ticket) -> None:
        """They are gathered as any other, when they are needed."""
        for unit in units:
            self.transitions.drop(unit, ticket)


@dataclass(eq=False)
class _Sent:
    """One unit's moves on the wire, and how many there is room for."""

    unit: Unit
    moves: Moves
    wire: Tensor  # uint8 [moves.nbytes]: this rank's
    ticket: Ticket | None = None  # of these moves, once they are sent in place of the values
    fits: bool = True  # whether there was room for all members' moves, once that is known

    @property
    def is_worthwhile(self) -> bool:
        return self.moves.nbytes < _WORTHWHILE * self.unit.own_params.nbytes


@dataclass(eq=False)
class _Received:
    """Memory for what comes from all members."""

    memory: Tensor  # uint8
    read: Ticket = DONE  # by the last that used it


class MovedValues:
    """Refreshes after optimizer steps, by moves where they fit.

    How many bytes moves take is known once they are made, on the GPU. The host does not wait for that: it has
    each unit's moves sent in the room that earlier steps needed, and the need beside them. Before it has the
    first unit gathered it looks (``confirm``): values whose moves did not fit, on any member, are sent as
    they are. Members see the same needs, so they decide alike.

    Moves bring the right values to whom has the right ones of before. Code of a model's that writes to
    ``weight.data`` may leave others, on its rank alone, and so may a bit that flips. So each member tells the
    checksum of all the copies that it has. Where not all are equal, values are sent as well.
    """

    def __init__(
        self, units: Sequence[Unit], device: torch.device, route: Route, *, imagined: bool = False
    ) -> None:
        """``imagined``: the other members are, so that their moves are not those of the values here."""
        self._device = device
        self._route = route
        self._rows = {unit.spec.index: row for row, unit in enumerate(filter(is_moved, units))}
        self._sent: dict[int, _Sent] = {}
        self._replaced: list[_Sent] = []  # which a lane may still send
        # By unit: the bytes and the words that moves need, and the checksum of what they are moves from.
        self._told = torch.zeros(len(self._rows), 4, dtype=torch.int32, device=device)
        self._found = self._host = self._told
        self._arrived = torch.cuda.Event() if device.type == "cuda" else None
        self._telling: Ticket = DONE
        self._pending: list[_Sent] = []
        self._waiting: list[list[_Sent]] = []  # for their turn: what is sent together
        # Two, for a lane that decodes what came while another brings more.
        self._received = [
            _Received(torch.empty(0, dtype=torch.uint8, device=device)) for _ in range(NUM_RECEIVED)
        ]
        # In place of values that would soon be no numbers any more, with which computing is faster.
        largest = max(route.copies(unit).numel() for unit in units)
        self._imagined = torch.zeros(largest, dtype=torch.int16, device=device) if imagined else None

    def __del__(self) -> None:
        """Let the computation wait for what lanes still do with this memory: others get it next."""
        if self._device.type == "cuda":
            for ticket in (self._telling, *(each.read for each in self._received)):
                with suppress(Exception):  # the interpreter may be on its way out
                    ticket.wait()

    @property
    def nbytes(self) -> int:
        """Of memory for moves on their way."""
        own = sum(sent.wire.numel() for sent in (*self._sent.values(), *self._replaced))
        received = sum(each.memory.numel() for each in self._received)
        return own + received + self._told.nbytes + self._found.nbytes

    def send(self, batches: Sequence[Sequence[Unit]]) -> None:
        """Have new values come, of the units of a batch together."""
        units = [unit for batch in batches for unit in batch]
        self._begin(units)
        in_turn = self._route.in_turn(units)
        for number, batch in enumerate(batches):
            self._send_batch(batch, waits=in_turn and number > 0)

    def send_waiting(self, last: Unit | None = None) -> None:
        """Send what waits for its turn, up to the values of ``last``."""
        self.confirm()
        sent: Sequence[_Sent] = ()
        while self._waiting and not any(each.unit is last for each in sent):
            sent = self._waiting.pop(0)
            with torch.inference_mode(False), torch.no_grad():  # an evaluation may be the first to need it
                self._send_or_replace(sent)

    def _begin(self, units: Sequence[Unit]) -> None:
        """Make the moves of ``units``, and tell the other members what they need, and from what they are."""
        self.send_waiting()
        moved = self._moved(units)
        if not moved:
            return
        for unit in moved:  # before one is pending: they may ask for a confirmation, of what came before
            unit.settle_params()
        self._told.zero_()
        for unit in moved:
            sent = self._sent.get(unit.spec.index) or self._make(unit, Room(0, 0))
            sent.ticket = None
            copies, told = self._route.copies(unit), self._told[self._rows[unit.spec.index]]
            checksum(copies, told[2:].view(torch.int64))
            # What all have there if copies are alike, whoever wrote to it.
            old = copies.view(self._route.group(unit.groups).size, -1)[self._route.position(unit)]
            new = unit.masters.here().to(old.dtype)
            sent.moves.encode(sent.wire, old, new, told[:2])
            unit.own_params.copy_(new)
            self._pending.append(sent)
        self._replaced = [old for old in self._replaced if old.unit not in moved]
        self._tell(moved[0].groups)

    def _send_batch(self, units: Sequence[Unit], *, waits: bool) -> None:
        begun = {sent.unit for sent in self._pending}
        moved = [unit for unit in units if unit in begun and self._goes_by_moves(unit)]
        others = [unit for unit in units if unit not in moved]
        if others:
            carried = [unit for unit in others if unit in begun]
            refresh_together(others, carried=carried)
            for unit in carried:
                # Which units go by moves differs in a partition group. When they are gathered next must not.
                unit.refresh.confirm = self.confirm
        for unit in moved:
            note_refresh(unit)
        together = [self._sent[unit.spec.index] for unit in moved]
        if waits and together:
            self._waiting.append(together)
            for unit in moved:
                unit.refresh.confirm = partial(self.send_waiting, unit)
        elif together:
            self._send_moves(together)

    def _send_or_replace(self, batch: Sequence[_Sent]) -> None:
        """Moves where they fit, which is known by now, or values as they are."""
        for sent in batch:
            sent.unit.refresh.confirm = None
        batch = [sent for sent in batch if self._route.has_old(sent.unit)]
        fitting = [sent for sent in batch if sent.fits]
        if fitting:
            self._send_moves(fitting)
        for sent in fitting:
            sent.unit.refresh.confirm = None  # it is known that they fit
        late = [sent.unit for sent in batch if not sent.fits]
        if late:
            self._route.send_late(late, DONE)

    def _moved(self, units: Sequence[Unit]) -> list[Unit]:
        """Those of which values of before can be moved."""
        return [unit for unit in units if unit.spec.index in self._rows and self._route.has_old(unit)]

    def confirm(self) -> None:
        """Send as they are what moves do not bring, and make room for what the next step may need."""
        if not self._pending:
            return
        self._telling.wait()
        if self._arrived is not None:
            self._arrived.synchronize()
        pending, self._pending = self._pending, []  # not before: whoever is interrupted there looks again
        found = self._host.view(-1, *self._told.shape)
        needed, are_alike = found[..., :2].amax(0).tolist(), self._are_alike(found[..., 2:])
        late: dict[Ticket, list[Unit]] = {}
        waiting = {sent.unit for batch in self._waiting for sent in batch}
        for sent in pending:
            unit, row = sent.unit, self._rows[sent.unit.spec.index]
            need = Room(*needed[row])
            if not are_alike[row]:
                need = Room(need.num_bytes, unit.own_params.numel())  # for which the next step sends values
            sent.fits = are_alike[row] and sent.moves.room.holds(need)
            if unit not in waiting:
                unit.refresh.confirm = None
            if sent.ticket is not None and not sent.fits:
                late.setdefault(sent.ticket, []).append(unit)
            self._adapt(sent, need)
        for ticket, together in late.items():
            self._route.send_late(together, ticket)

    def _are_alike(self, checksums: Tensor) -> list[bool]:
        """By unit: whether all members had the same copies. ``checksums``: [members, units, 2]."""
        if self._imagined is not None:
            return [True] * len(self._rows)
        found: list[bool] = (checksums == checksums[0]).all(-1).all(0).tolist()
        return found

    def _goes_by_moves(self, unit: Unit) -> bool:
        sent = self._sent.get(unit.spec.index)
        return sent is not None and sent.is_worthwhile

    def _tell(self, groups: UnitGroups) -> None:
        """Every member what all have to tell."""
        group = self._route.group(groups)
        numel = group.size * self._told.numel()
        if self._found.numel() != numel:
            self._found = torch.zeros(numel, dtype=torch.int32, device=self._device)
            pin = self._device.type == "cuda"
            self._host = torch.zeros(numel, dtype=torch.int32, device="cpu", pin_memory=pin)

        def bring() -> None:
            self._host.copy_(self._found, non_blocking=True)
            if self._arrived is not None:
                self._arrived.record()

        label = "how far values have moved"
        self._telling = group.all_gather(self._found, self._told.view(-1), label, then=bring)

    def _send_moves(self, moved: Sequence[_Sent]) -> None:
        units = [sent.unit for sent in moved]
        group = self._route.group(units[0].groups)
        sizes = [group.size * sent.moves.nbytes for sent in moved]
        received, other = self._received
        self._received = [other, received]
        if received.memory.numel() < sum(sizes):
            received.read.wait()
            received.memory = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
        parts = received.memory[: sum(sizes)].split(sizes)
        pairs = [(part, sent.wire) for part, sent in zip(parts, moved, strict=True)]
        received.read = ticket = group.gather_together(
            pairs, _label(units), after=(received.read,), then=partial(self._decode, list(moved), parts)
        )
        for sent in moved:
            sent.ticket = ticket
            self._route.sent(sent.unit, ticket, self.confirm)

    def _decode(self, moved: Sequence[_Sent], parts: Sequence[Tensor]) -> None:
        """On the lane: move the other members' values."""
        for sent, part in zip(moved, parts, strict=True):
            unit = sent.unit
            size = self._route.group(unit.groups).size
            values = self._route.copies(unit)
            if self._imagined is not None:
                values = self._imagined[: values.numel()]
            sent.moves.decode(values.view(size, -1), part.view(size, -1), own=self._route.position(unit))

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
        with torch.inference_mode(False):  # an evaluation may be the first to look
            return _Sent(unit, moves, torch.zeros(moves.nbytes, dtype=torch.uint8, device=self._device))


def is_moved(unit: Unit) -> bool:
    """Whether new values of a unit may go as moves: whoever makes them has the ones of before."""
    spec = unit.spec
    has_both = spec.has_masters and not spec.casts_masters and not spec.masters_on_host
    # Of values that a gather has rounded, nobody knows how far they moved.
    has_others = unit.groups.gather.size > 1 and not spec.gather.changes(spec.param_dtype)
    if unit.groups.replication.size > 1:
        has_others = unit.share.masters_over_replicas
    return has_others and has_both and spec.param_dtype.itemsize == 2 and unit.own_params.numel() > 0


def _with_spare(room: int, needed: int) -> int:
    """Room for ``needed`` and some more; as it was while that is about right.

    It shrinks by halves: a unit that has no gradient in one step may have one in the next.
    """
    if needed <= _FULL * room and needed >= _EMPTY * room:
        return room
    return max(_rounded(_SPARE * needed + 1), _rounded(room / 2) if needed < _EMPTY * room else 0)


def _rounded(number: float) -> int:
    return -(-int(number) // _ROUND) * _ROUND

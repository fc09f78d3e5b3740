"""Whole parameters out of a sharded model, one after the other.

Parameters travel in buckets of consecutive ones. While the consumer has one bucket, the next is in flight::

    bucket 0   | gather |  consumer's  |
    bucket 1            |    gather    |  consumer's  |
    bucket 2                           |    gather    |  consumer's  |

A parameter lies in some chunks of its unit, so ranks have parts of any size of it, often none. Each part goes
straight to its place in the whole parameter: nothing is padded, and nothing is copied after it has arrived.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm.journal import collective_call
from mics.comm.lanes import Ticket
from mics.comm.world import UnitGroups
from mics.engine import engines_of, units_of
from mics.errors import MicsError, SettingsError
from mics.guard import plainly
from mics.layout.flat import Slot
from mics.sharding.refresh import refresh_together
from mics.sharding.unit import Unit

_BUCKET_NBYTES: Final = 1 << 29
_CALL: Final = "mics.iter_full_params"


@collective_call
def iter_full_params(
    model: nn.Module,
    names: Iterable[str] | None = None,
    *,
    bucket_nbytes: int = _BUCKET_NBYTES,
    dtype: torch.dtype | None = None,
    rank: int | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Whole parameters as ``(name, tensor)``, in the order of ``model.named_parameters()``.

    Values are those of ``mics.full_state_dict(model)``: masters, not what they are computed with. A parameter
    that has several names comes once, under the first; buffers do not come. All ranks must call it with the
    same arguments, between forwards, and iterate to the same place.

    Args:
        names: only these, in the model's order. A tied parameter comes under each name that is asked for.
        bucket_nbytes: parameters that travel together. About two buckets of whole parameters are on the
            device: the one that is consumed, and the next. A larger parameter is a bucket of its own.
        dtype: cast floating-point parameters to it, before they travel where it is narrower.
        rank: only this rank gets them. On the others the call returns an empty iterator when they have sent
            their parts: they need not iterate. If this rank stops early, the rest is sent and dropped.

    Each tensor is memory of its own on the model's device, and stays valid: what is kept, stays allocated.
    To change the model meanwhile (an optimizer step, an edit) raises at the next bucket.
    """
    engine = engines_of(model)[0]
    wanted, error = [], None
    try:
        _refuse_use(model)
        _check(engine.world.size, bucket_nbytes, dtype, rank)
        names = None if names is None else _unique(names)
        wanted = _wanted(model, names, dtype)
    except Exception as caught:
        error = caught  # the others must not wait for this rank
    units = units_of(model)
    edited = [] if error is not None else [number for number, u in enumerate(units) if u.masters_changed()]
    arguments = (
        sorted(names) if error is None and names is not None else None,
        bucket_nbytes,
        str(dtype),
        rank,
    )
    accounts = engine.world.gather_objects((None if error is None else str(error), repr(arguments), edited))
    if error is not None:
        raise error
    _compare(accounts)
    with torch.inference_mode(False), torch.no_grad(), plainly():
        copied = {id(each.unit) for each in wanted if each.source.is_copy}
        stale = {number for *_, edited in accounts for number in edited if id(units[number]) in copied}
        if stale:  # the other replicas' copies
            refresh_together([units[number] for number in sorted(stale)])
        for unit in units:
            unit.refresh.ticket()  # on all ranks, or on none
    stream = _Stream(wanted, bucket_nbytes, own_rank=engine.world.rank, rank=rank)
    if rank in (None, engine.world.rank):
        return stream.values()
    stream.send()
    return iter(())


# -- what is asked for -----------------------------------------------------------------------------------


def _check(world_size: int, bucket_nbytes: Any, dtype: Any, rank: Any) -> None:
    if isinstance(bucket_nbytes, bool) or not isinstance(bucket_nbytes, int) or bucket_nbytes < 1:
        raise SettingsError(f"{_CALL}: bucket_nbytes: expected a number of bytes, found {bucket_nbytes!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise SettingsError(
            f"{_CALL}: dtype: expected a floating-point format such as torch.bfloat16, found {dtype!r}"
        )
    is_number = isinstance(rank, int) and not isinstance(rank, bool)
    if rank is not None and not (is_number and 0 <= rank < world_size):
        raise SettingsError(
            f"{_CALL}: rank: expected None (all ranks) or a rank from 0 to {world_size - 1}, found {rank!r}"
        )


def _unique(names: Iterable[str]) -> frozenset[str]:
    if isinstance(names, str):
        raise SettingsError(f"{_CALL}: names: expected names of parameters, found {names!r}; pass a list")
    found = list(names)
    strange = next((name for name in found if not isinstance(name, str)), None)
    if strange is not None:
        raise SettingsError(f"{_CALL}: names: expected names of parameters, found {strange!r}")
    return frozenset(found)


def _refuse_use(model: nn.Module) -> None:
    for engine in engines_of(model):
        progress = engine.progress
        if progress.suspended:
            raise MicsError(
                f"{_CALL} inside mics.summon_full_params: expected a sharded model, found one whose "
                "parameters are whole already; read them from the model, or leave the context first"
            )
        if progress.depth or progress.in_backward:
            raise MicsError(
                f"{_CALL} inside a {'backward' if progress.in_backward else 'forward'}: expected to be "
                "called between them, where all ranks come together; call it before or after"
            )


def _compare(accounts: Sequence[tuple[str | None, str, list[int]]]) -> None:
    """Raise if some rank cannot go on, or asks for something else."""
    for rank, (error, arguments, _) in enumerate(accounts):
        if error is not None:
            raise SettingsError(
                f"{_CALL}: expected all ranks to go on, found that rank {rank} cannot: {error}"
            )
        if arguments != accounts[0][1]:
            raise SettingsError(
                f"{_CALL}: expected the same arguments on every rank, found (names, bucket_nbytes, dtype, "
                f"rank) = {accounts[0][1]} on rank 0 and {arguments} on rank {rank}"
            )


@dataclass(frozen=True, kw_only=True)
class _Source:
    """Where the values of a unit come from, on every rank alike."""

    values: Tensor
    """This rank's: [len(span)]."""
    span: range
    """Their flat positions in the unit."""
    is_copy: bool
    """Of a chunk whose masters lie on several replicas: exact, as long as it is refreshed."""
    over_replicas: bool
    """Masters, of which each replica has a piece."""

    @classmethod
    def of(cls, unit: Unit, dtype: torch.dtype | None) -> _Source:
        share, spec = unit.share, unit.spec
        if not share.masters_over_replicas or unit.groups.replication.size == 1:
            return cls(values=unit.master, span=share.master_span(spec), is_copy=False, over_replicas=False)
        wanted = unit.master.dtype if dtype is None else dtype
        # Each replica has a copy of all masters in the format of the parameters. It serves where nothing is
        # lost on the way from masters to ``wanted``, and stays inside the partition group.
        if spec.float8 is None and unit.param_shard.dtype in (wanted, unit.master.dtype):
            span = share.chunk_span(spec.layout)
            return cls(values=unit.param_shard, span=span, is_copy=True, over_replicas=False)
        return cls(values=unit.master, span=share.master_span(spec), is_copy=False, over_replicas=True)


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """A parameter that is asked for."""

    name: str
    unit: Unit
    slot: Slot
    source: _Source
    dtype: torch.dtype
    """What the consumer gets."""

    @property
    def wire_dtype(self) -> torch.dtype:
        """What travels: the narrower one."""
        own = self.source.values.dtype
        return own if own.itemsize < self.dtype.itemsize else self.dtype

    @property
    def nbytes(self) -> int:
        return self.slot.numel * self.wire_dtype.itemsize


def _wanted(model: nn.Module, names: frozenset[str] | None, dtype: torch.dtype | None) -> list[_Wanted]:
    places = {
        id(param): (unit, index)
        for unit in units_of(model)
        for params in (unit.shards, unit.whole.params)
        for index, param in enumerate(params)
    }
    params = dict(model.named_parameters(remove_duplicate=names is None))
    unknown = sorted(set(names or ()) - set(params))
    if unknown:
        raise SettingsError(
            f"{_CALL}: names: expected names of model.named_parameters(), found {unknown[0]!r}"
            + (f" and {len(unknown) - 1} more" if unknown[1:] else "")
        )
    found = []
    sources: dict[int, _Source] = {}
    with plainly():
        for name, param in params.items():
            if names is not None and name not in names:
                continue
            unit, index = places[id(param)]
            own = unit.master.dtype
            cast = dtype if own.is_floating_point else None
            if id(unit) not in sources:
                sources[id(unit)] = _Source.of(unit, cast)
            slot, source = unit.spec.layout.slots[index], sources[id(unit)]
            found.append(_Wanted(name=name, unit=unit, slot=slot, source=source, dtype=cast or own))
    return found


# -- on their way ----------------------------------------------------------------------------------------


class _Parcel:
    """One parameter: the part of it that comes to lie on this rank."""

    def __init__(self, wanted: _Wanted, held: range) -> None:
        source, slot = wanted.source, wanted.slot
        self.wanted = wanted
        self._span = slot.overlap(held)
        self._memory = torch.empty(len(self._span), dtype=wanted.wire_dtype, device=wanted.unit.device)
        own = slot.overlap(source.span)
        if own:
            wanted.unit.refresh.ticket().wait()
            first = source.span.start
            self._at(own).copy_(source.values[own.start - first : own.stop - first])

    def of_chunks(self, chunks: range) -> Tensor:
        """What these chunks have of it."""
        layout = self.wanted.unit.spec.layout
        first, last = layout.chunk_span(chunks.start), layout.chunk_span(chunks.stop - 1)
        return self._at(self.wanted.slot.overlap(range(first.start, last.stop)))

    def of_pieces(self, pieces: range) -> Tensor:
        """What these pieces of this rank's chunk have of it."""
        layout, chunk = self.wanted.unit.spec.layout, self.wanted.unit.share.chunk
        first, last = layout.piece_span(chunk, pieces.start), layout.piece_span(chunk, pieces.stop - 1)
        return self._at(self.wanted.slot.overlap(range(first.start, last.stop)))

    def value(self) -> Tensor:
        """The whole parameter, once everything is there."""
        return self._memory.view(self.wanted.slot.shape).to(self.wanted.dtype)

    def _at(self, span: range) -> Tensor:
        if not span:
            return self._memory[:0]
        return self._memory[span.start - self._span.start : span.stop - self._span.start]


@dataclass(frozen=True, kw_only=True)
class _Way:
    """How the parameters of some units come to their rank, or to all."""

    groups: UnitGroups
    over_replicas: bool
    own_rank: int
    rank: int | None

    @property
    def to_chunk(self) -> int | None:
        return None if self.rank is None else self.groups.topology.chunk(self.rank)

    @property
    def to_piece(self) -> int | None:
        """The position, among this rank's replicas, of the one in the partition group of ``rank``."""
        if self.rank is None:
            return None
        topology = self.groups.topology
        own_group = topology.replication_group(self.own_rank)
        receiver = topology.partition_group(self.rank)[topology.chunk(self.own_rank)]
        return own_group.index(receiver)

    @property
    def in_partition_group(self) -> bool:
        """Whether this rank's partition group brings the parameters together."""
        topology = self.groups.topology
        return self.rank is None or topology.replica(self.rank) == topology.replica(self.own_rank)

    @property
    def takes_part(self) -> bool:
        return self.over_replicas or self.in_partition_group

    def held(self, unit: Unit, source: _Source) -> range:
        """The flat positions of a unit that come to lie on this rank."""
        layout = unit.spec.layout
        if not self.in_partition_group:
            if not self.over_replicas:
                return source.span
            pieces, chunk = self.groups.replication.holds(self.to_piece), unit.share.chunk
            first, last = layout.piece_span(chunk, pieces.start), layout.piece_span(chunk, pieces.stop - 1)
            return range(first.start, last.stop)
        chunks = self.groups.gather.holds(self.to_chunk)
        return range(layout.chunk_span(chunks.start).start, layout.chunk_span(chunks.stop - 1).stop)

    def bring(self, parcels: Sequence[_Parcel], label: str) -> Iterator[Ticket]:
        """Have parcels come together, first among the replicas, then inside the partition group."""
        groups, after = self.groups, []
        if self.over_replicas:
            parts = [parcel.of_pieces for parcel in parcels]
            after.append(groups.replication.gather_parts(parts, label, self.to_piece))
            yield from after
        if self.in_partition_group and groups.gather.size > 1:
            yield groups.gather.gather_parts([p.of_chunks for p in parcels], label, self.to_chunk, after)


class _Bucket:
    """Parameters that travel together."""

    def __init__(self, parcels: Sequence[_Parcel], tickets: Sequence[Ticket]) -> None:
        self._parcels = list(reversed(parcels))
        self._tickets = tickets

    def wait(self) -> None:
        for ticket in self._tickets:
            ticket.wait()

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Hand out what has arrived, and keep none of it."""
        while self._parcels:
            yield self._take()

    def _take(self) -> tuple[str, Tensor]:
        parcel = self._parcels.pop()
        return parcel.wanted.name, parcel.value()


class _Stream:
    """All buckets, one after the other, on one rank."""

    def __init__(
        self, wanted: Sequence[_Wanted], bucket_nbytes: int, *, own_rank: int, rank: int | None
    ) -> None:
        self._plan = _plan_buckets(wanted, bucket_nbytes)
        self._units = list({id(each.unit): each.unit for each in wanted}.values())
        self._way = partial(_Way, own_rank=own_rank, rank=rank)
        self._to_one = rank is not None
        self._on_gpu = any(unit.device.type == "cuda" for unit in self._units)
        self._edits = self._count_edits()

    def values(self) -> Iterator[tuple[str, Tensor]]:
        """Of all parameters, on a rank that gets them."""
        plan = iter(self._plan)
        current = following = None
        try:
            for bucket in plan:
                following = self._begin(bucket)
                if current is not None:
                    current.wait()
                    yield from current.values()
                current = following
            if current is not None:
                current.wait()
                yield from current.values()
        except GeneratorExit:
            if self._to_one and not sys.is_finalizing():
                self._drop(plan)  # the others send what they have
            raise
        finally:
            if following is not None and self._on_gpu:
                following.wait()  # memory that is still written to is not to be used again

    def send(self) -> None:
        """On a rank that gets nothing."""
        self._drop(iter(self._plan), check=True)

    def _drop(self, plan: Iterator[Sequence[_Wanted]], *, check: bool = False) -> None:
        before = None
        for bucket in plan:
            current = self._begin(bucket, check=check)
            if before is not None:
                before.wait()
            before = current
        if before is not None:
            before.wait()

    def _begin(self, bucket: Sequence[_Wanted], *, check: bool = True) -> _Bucket:
        """Send for a bucket: its values are those of now."""
        if check and self._count_edits() != self._edits:
            raise MicsError(
                f"{_CALL}: expected the parameters to stay as they were when it was called, found them "
                "changed (by an optimizer step, an edit, a checkpoint that was loaded); change them after "
                "the last one has come"
            )
        by_way: dict[_Way, list[_Parcel]] = {}
        parcels: list[_Parcel] = []
        tickets: list[Ticket] = []
        with torch.inference_mode(False), torch.no_grad(), plainly():
            for each in bucket:
                way = self._way(groups=each.unit.groups, over_replicas=each.source.over_replicas)
                if way.takes_part:
                    parcels.append(_Parcel(each, way.held(each.unit, each.source)))
                    by_way.setdefault(way, []).append(parcels[-1])
            names = bucket[0].name if len(bucket) == 1 else f"{bucket[0].name} to {bucket[-1].name}"
            for way, own in by_way.items():
                tickets += way.bring(own, f"{names} ({_CALL})")
        return _Bucket(parcels, tickets)

    def _count_edits(self) -> int:
        return sum(unit.num_edits() for unit in self._units)


def _plan_buckets(wanted: Iterable[_Wanted], bucket_nbytes: int) -> list[list[_Wanted]]:
    """Consecutive parameters of at most ``bucket_nbytes``, or one."""
    buckets: list[list[_Wanted]] = []
    room = 0
    for each in wanted:
        if not buckets or each.nbytes > room:
            buckets.append([])
            room = bucket_nbytes
        buckets[-1].append(each)
        room -= each.nbytes
    return buckets

"""One flat torch.distributed group: NCCL as it is, gloo with a true and ordered reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mics.comm.emulated.group import EmulatedGroup
from mics.comm.liveness import Liveness
from mics.comm.messages import spread, swap, tag_of
from mics.comm.protocol import Job, Pairs
from mics.comm.traffic import TrafficCounter
from mics.errors import CollectiveError

# Not among torch's public names, unlike the options of the other collectives.
_GatherOptions: Any = distributed_c10d.AllgatherOptions  # type: ignore[attr-defined]

# torch 2.13 renamed the single-tensor forms and warns about the old names, which are all that 2.11 has.
_all_gather = cast(
    Callable[..., Any], getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
)
_reduce_scatter = cast(
    Callable[..., Any], getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


class GroupCollectives:
    """Collectives over one process group whose members are in ownership order.

    gloo's own reduce-scatter sends as much as an all-reduce and adds in an order of its own. Over gloo
    this class exchanges chunks and adds them in the order of the members: half the bytes, and a sum that
    a single process can reproduce to the bit. See "Reduction order" in docs/design.md.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        *,
        axis: str,
        counter: TrafficCounter,
        liveness: Liveness | None,
        purpose: str = "",
        exchange: bool = False,
    ) -> None:
        self._exchange = exchange  # everybody sends to everybody: one hop in place of a ring's many
        self._group = group  # None: a world of one process that never called init_process_group
        self._axis = axis
        self._counter = counter
        self._size = 1 if group is None else dist.get_world_size(group)
        self._position = 0 if group is None else dist.get_rank(group)
        self.is_real = not isinstance(group, EmulatedGroup)  # gloo then, as far as CPU tensors go
        self._staging: dict[str, Tensor] = {}  # uint8 [largest buffer exchanged], by use
        self._liveness = None if group is None else liveness
        self._journal = None
        if self._liveness is not None and group is not None:
            self._journal = self._liveness.journal(purpose, group)

    @property
    def size(self) -> int:
        return self._size

    @property
    def position(self) -> int:
        return self._position

    @property
    def staging_nbytes(self) -> int:
        """Bytes kept for chunks on their way (over gloo, and where the wire's format is narrower)."""
        return sum(staging.numel() for staging in self._staging.values())

    def all_gather(self, out: Tensor, shard: Tensor, label: str) -> None:
        if self._size == 1:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return
        self._count("all_gather", (self._size - 1) * _nbytes(shard))
        if self._is_gloo(out):
            self._swap("all-gather", label, self._rows(out), [shard] * self._size)
        elif self._exchange:
            self._send_to_all(out, shard, label)
        else:
            self._call("all-gather", label, _all_gather, out, shard)

    def reduce_scatter(self, out: Tensor, buffer: Tensor, label: str) -> None:
        if self._size == 1:
            if out.data_ptr() != buffer.data_ptr():
                out.copy_(buffer)
            return
        self._count("reduce_scatter", (self._size - 1) * _nbytes(out))
        if self._is_gloo(buffer):
            self._exchange_and_add(out, buffer, label, buffer.dtype)
        else:
            self._call("reduce-scatter", label, _reduce_scatter, out, buffer)

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        if self._size == 1:
            return
        self._count("all_reduce", 2 * (self._size - 1) * _nbytes(tensor) // self._size)
        if self._is_gloo(tensor):
            self._all_reduce_by_messages(tensor, label, maximum=maximum)
            return
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        self._call("all-reduce", label, dist.all_reduce, tensor, op=op)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        if self._size == 1 or tensor.numel() == 0:
            return
        self._count("broadcast", _nbytes(tensor) if self._position == 0 else 0)
        if self._is_gloo(tensor):
            self._call("broadcast", label, spread, tensor, tag_of("broadcast", label, _nbytes(tensor)))
        else:
            self._call("broadcast", label, dist.broadcast, tensor, group_src=0)

    def gather_stages(self, pairs: Pairs, label: str) -> Sequence[tuple[str, Job]]:
        return (("", partial(self.gather_together, pairs, label)),)

    def reduce_stages(
        self, pairs: Pairs, label: str, wire: torch.dtype | None = None
    ) -> Sequence[tuple[str, Job]]:
        return (("", partial(self.reduce_together, pairs, label, wire)),)

    def all_reduce_stages(
        self, tensors: Sequence[Tensor], label: str, wire: torch.dtype | None = None
    ) -> Sequence[tuple[str, Job]]:
        return (("", partial(self.all_reduce_together, tensors, label, wire)),)

    def gather_together(self, pairs: Pairs, label: str) -> None:
        """``all_gather`` of all pairs (out, shard): one message where the backend can do that."""
        if not self._coalesces(pairs):
            for out, shard in pairs:
                self.all_gather(out, shard, label)
            return
        self._count("all_gather", sum((self._size - 1) * _nbytes(shard) for _, shard in pairs))
        outs, shards = [out for out, _ in pairs], [shard for _, shard in pairs]
        self._call("all-gather", label, _coalesced_gather, outs, shards)

    def reduce_together(self, pairs: Pairs, label: str, wire: torch.dtype | None = None) -> None:
        """``reduce_scatter`` of all pairs (out, buffer) likewise; ``wire``: the format on the way."""
        narrow = wire is not None and wire.itemsize < pairs[0][1].dtype.itemsize
        if self._size > 1 and (narrow or self._exchange):
            for out, buffer in pairs:
                dtype = buffer.dtype if wire is None else wire
                self._count("reduce_scatter", (self._size - 1) * out.numel() * dtype.itemsize)
                self._exchange_and_add(out, buffer, label, dtype)
        elif not self._coalesces(pairs):
            for out, buffer in pairs:
                self.reduce_scatter(out, buffer, label)
        else:
            self._count("reduce_scatter", sum((self._size - 1) * _nbytes(out) for out, _ in pairs))
            outs, buffers = [out for out, _ in pairs], [buffer for _, buffer in pairs]
            self._call("reduce-scatter", label, _coalesced_reduce, outs, buffers)

    def all_reduce_together(
        self, tensors: Sequence[Tensor], label: str, wire: torch.dtype | None = None
    ) -> None:
        """``all_reduce`` of each tensor; the result is rounded to ``wire`` on every member alike."""
        for tensor in tensors:
            if wire is None or wire.itemsize >= tensor.dtype.itemsize or tensor.numel() % self._size:
                self.all_reduce(tensor, label)
            elif self._size > 1:
                own = tensor.view(self._size, -1)[self._position]
                self._count("reduce_scatter", (self._size - 1) * own.numel() * wire.itemsize)
                self._exchange_and_add(own, tensor, label, wire)
                rounded = self._staged("sent", tensor, wire)
                rounded.view(self._size, -1)[self._position].copy_(own)
                self.all_gather(rounded, rounded.view(self._size, -1)[self._position], label)
                tensor.copy_(rounded)

    def _coalesces(self, pairs: Pairs) -> bool:
        same_format = len({shard.dtype for _, shard in pairs}) == 1
        as_it_is = not (self._exchange or self._is_gloo(pairs[0][0]))
        return len(pairs) > 1 and self._size > 1 and same_format and as_it_is

    def _exchange_and_add(self, out: Tensor, buffer: Tensor, label: str, wire: torch.dtype) -> None:
        """Send every member its chunk in ``wire``, and add up what comes in the buffer's own format.

        One hop instead of one for each member. And a backend's own reduce-scatter would add in the format of
        the wire, and round at every member it passes.
        """
        rows: Tensor | Sequence[Tensor]
        received = self._staged("received", buffer, wire)
        sent = buffer
        if wire is not buffer.dtype:
            sent = self._staged("sent", buffer, wire)
            sent.copy_(buffer)
        if self._is_gloo(sent):
            rows = self._rows(received)
            self._swap("reduce-scatter", label, rows, self._rows(sent))
        else:
            self._call("reduce-scatter", label, dist.all_to_all_single, received, sent)
            rows = received.view(self._size, -1)
        _add_up(out, rows)

    def _send_to_all(self, out: Tensor, shard: Tensor, label: str) -> None:
        """Gather in one hop: every member sends its chunk to each of the others."""
        chunks, sent = list(out.view(self._size, -1).unbind()), [shard] * self._size
        if chunks[self._position].data_ptr() == shard.data_ptr():
            chunks[self._position] = sent[self._position] = shard[:0]
        self._call("all-gather", label, dist.all_to_all, chunks, sent)

    def _all_reduce_by_messages(self, tensor: Tensor, label: str, *, maximum: bool) -> None:
        """Over gloo, added in the order of the members. What does not divide among them is small."""
        if not maximum and tensor.numel() % self._size == 0:
            own = tensor.view(self._size, -1)[self._position]
            self._exchange_and_add(own, tensor, label, tensor.dtype)
            self._swap("all-gather", label, self._rows(tensor), [own] * self._size)
            return
        flat = tensor.view(-1)
        received = self._staged("received", flat, times=self._size).view(self._size, -1)
        rows = received.unbind()
        self._swap("all-reduce", label, rows, [flat] * self._size)
        if maximum:
            flat.copy_(received.amax(0))
        else:
            _add_up(flat, rows)

    def _swap(self, kind: str, label: str, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """``sent[r]`` to member r, and ``received[r]`` from there. Over gloo."""
        self._call(kind, label, swap, received, sent, tag_of(kind, label, self._size * _nbytes(received[0])))

    def _rows(self, tensor: Tensor) -> Sequence[Tensor]:
        """A chunk of ``tensor`` for each member."""
        return tensor.view(self._size, -1).unbind()

    def _is_gloo(self, tensor: Tensor) -> bool:
        return self.is_real and tensor.device.type == "cpu"

    def _staged(self, use: str, like: Tensor, dtype: torch.dtype | None = None, *, times: int = 1) -> Tensor:
        """As many elements as ``like``, or so many times as many, kept from call to call."""
        dtype = dtype or like.dtype
        nbytes = times * like.numel() * dtype.itemsize
        if use not in self._staging or self._staging[use].numel() < nbytes:
            self._staging[use] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._staging[use][:nbytes].view(dtype)

    def _count(self, kind: str, nbytes: int) -> None:
        self._counter.add(self._axis, kind, nbytes)

    def _call(self, kind: str, label: str, collective: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        if self._liveness is not None and self._journal is not None:
            self._liveness.enter(self._journal, kind, label)
        try:
            collective(*args, group=self._group, **kwargs)
        except RuntimeError as error:
            culprits = "" if self._liveness is None else self._liveness.explain()
            members = dist.get_process_group_ranks(self._group) if self._group is not None else [0]
            raise CollectiveError(
                f"{kind} of {label} failed in the {self._axis} group of ranks {members}. {culprits}"
                f"The backend said: {error}"
            ) from error


def _coalesced_gather(outs: list[Tensor], shards: list[Tensor], group: Any) -> None:
    options = _GatherOptions()
    options.asyncOp = False
    _coalesced(group, "all_gather_single_coalesced", "allgather_into_tensor_coalesced", outs, shards, options)


def _coalesced_reduce(outs: list[Tensor], buffers: list[Tensor], group: Any) -> None:
    options = dist.ReduceScatterOptions()
    options.asyncOp = False
    _coalesced(
        group, "reduce_scatter_single_coalesced", "reduce_scatter_tensor_coalesced", outs, buffers, options
    )


def _coalesced(group: Any, name: str, old_name: str, *args: Any) -> None:
    """Several tensors as one collective: torch has that as a method of groups, under two names."""
    work = (getattr(group, name, None) or getattr(group, old_name))(*args)
    if work is not None:
        work.wait()


def _add_up(out: Tensor, rows: Tensor | Sequence[Tensor]) -> None:
    """``out`` = the sum of ``rows`` in their order, in the wider of both formats.

    Formats narrower than float32 are added in float32: a sum over many ranks would drown in rounding.
    """
    wide = out.dtype if out.dtype.itemsize >= 4 else torch.float32
    if isinstance(rows, Tensor) and out.device.type != "cpu":
        # One kernel; on the CPU the loop is what a single process can repeat.
        if out.dtype is wide:
            torch.sum(rows, 0, dtype=wide, out=out)
        else:
            out.copy_(torch.sum(rows, 0, dtype=wide))
        return
    first, *others = rows
    total = first if first.dtype is wide else first.to(wide)
    for row in others:
        total += row
    out.copy_(total)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

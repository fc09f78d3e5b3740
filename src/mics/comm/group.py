"""One flat torch.distributed group: NCCL as it is, gloo with a true and ordered reduce-scatter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from mics.comm.calls import GroupCalls
from mics.comm.codec import PLAIN, Codec, add_rows
from mics.comm.counter import TrafficCounter
from mics.comm.liveness import Liveness
from mics.comm.messages import spread, swap, tag_of
from mics.comm.protocol import Action, Pairs
from mics.comm.uneven import GroupUneven

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

    reduces_first = ""  # there is one stage

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
        self._calls = GroupCalls(group, axis=axis, counter=counter, liveness=liveness, purpose=purpose)
        self._size, self._position = self._calls.size, self._calls.position
        self.is_real = self._calls.is_real
        self.uneven = GroupUneven(self._calls)
        self._scratch = _Scratch()

    @property
    def size(self) -> int:
        return self._size

    @property
    def position(self) -> int:
        return self._position

    @property
    def staging_nbytes(self) -> int:
        """Bytes kept for chunks on their way (over gloo, and where the wire's format is narrower)."""
        return self._scratch.nbytes

    def all_gather(self, out: Tensor, shard: Tensor, label: str) -> None:
        if self._size == 1:
            if out.data_ptr() != shard.data_ptr():
                out.copy_(shard)
            return
        self._calls.count("all_gather", (self._size - 1) * shard.nbytes)
        if self._calls.is_gloo(out):
            self._swap("all-gather", label, _rows(out, self._size), [shard] * self._size)
        elif self._exchange:
            self._send_to_all(out, shard, label)
        else:
            self._calls.call("all-gather", label, _all_gather, out, shard)

    def reduce_scatter(self, out: Tensor, buffer: Tensor, label: str) -> None:
        if self._size == 1:
            if out.data_ptr() != buffer.data_ptr():
                out.copy_(buffer)
            return
        self._calls.count("reduce_scatter", (self._size - 1) * out.nbytes)
        if self._calls.is_gloo(buffer):
            self._exchange_and_add(out, buffer, label, PLAIN)
        else:
            self._calls.call("reduce-scatter", label, _reduce_scatter, out, buffer)

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        if self._size == 1:
            return
        self._calls.count("all_reduce", 2 * (self._size - 1) * tensor.nbytes // self._size)
        if self._calls.is_gloo(tensor):
            self._all_reduce_by_messages(tensor, label, maximum=maximum)
            return
        op = dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM
        self._calls.call("all-reduce", label, dist.all_reduce, tensor, op=op)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        if self._size == 1 or tensor.numel() == 0:
            return
        self._calls.count("broadcast", tensor.nbytes if self._position == 0 else 0)
        if self._calls.is_gloo(tensor):
            self._calls.call("broadcast", label, spread, tensor, tag_of("broadcast", label, tensor.nbytes))
        else:
            self._calls.call("broadcast", label, dist.broadcast, tensor, group_src=0)

    def gather_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        return (("", partial(self.gather_together, pairs, label, codec)),)

    def reduce_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        return (("", partial(self.reduce_together, pairs, label, codec)),)

    def all_reduce_stages(
        self, tensors: Sequence[Tensor], label: str, codec: Codec = PLAIN
    ) -> Sequence[tuple[str, Action]]:
        return (("", partial(self.all_reduce_together, tensors, label, codec)),)

    def gather_together(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> None:
        """``all_gather`` of all pairs (out, shard): one message where the backend can do that.

        What a ``codec`` rounds, it rounds on every member alike, its own values included.
        """
        if self._size > 1 and any(codec.changes(shard.dtype) for _, shard in pairs):
            for out, shard in pairs:
                self._gather_encoded(out, shard, label, codec)
            return
        if not self._coalesces(pairs):
            for out, shard in pairs:
                self.all_gather(out, shard, label)
            return
        self._calls.count("all_gather", sum((self._size - 1) * shard.nbytes for _, shard in pairs))
        outs, shards = [out for out, _ in pairs], [shard for _, shard in pairs]
        self._calls.call("all-gather", label, _coalesced_gather, outs, shards)

    def reduce_together(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> None:
        """``reduce_scatter`` of all pairs (out, buffer) likewise, encoded on the way."""
        if self._size > 1 and (codec.changes(pairs[0][1].dtype) or self._exchange):
            for out, buffer in pairs:
                nbytes = codec.wire_nbytes(out.numel(), buffer.dtype)
                self._calls.count("reduce_scatter", (self._size - 1) * nbytes)
                self._exchange_and_add(out, buffer, label, codec)
        elif not self._coalesces(pairs):
            for out, buffer in pairs:
                self.reduce_scatter(out, buffer, label)
        else:
            self._calls.count("reduce_scatter", sum((self._size - 1) * out.nbytes for out, _ in pairs))
            outs, buffers = [out for out, _ in pairs], [buffer for _, buffer in pairs]
            self._calls.call("reduce-scatter", label, _coalesced_reduce, outs, buffers)

    def all_reduce_together(self, tensors: Sequence[Tensor], label: str, codec: Codec = PLAIN) -> None:
        """``all_reduce`` of each tensor; the result is rounded by ``codec`` on every member alike."""
        is_plain = not any(codec.changes(tensor.dtype) for tensor in tensors)
        if is_plain and self._coalesces([(tensor, tensor) for tensor in tensors], exchanges=False):
            nbytes = sum(tensor.nbytes for tensor in tensors)
            self._calls.count("all_reduce", 2 * (self._size - 1) * nbytes // self._size)
            self._calls.call("all-reduce", label, _coalesced_all_reduce, list(tensors))
            return
        for tensor in tensors:
            if not codec.changes(tensor.dtype) or tensor.numel() % self._size:
                self.all_reduce(tensor, label)
            elif self._size > 1:
                own = tensor.view(self._size, -1)[self._position]
                nbytes = codec.wire_nbytes(own.numel(), tensor.dtype)
                self._calls.count("reduce_scatter", (self._size - 1) * nbytes)
                self._exchange_and_add(own, tensor, label, codec)
                self._gather_encoded(tensor, own, label, codec.of_sums)

    def _coalesces(self, pairs: Pairs, *, exchanges: bool | None = None) -> bool:
        same_format = len({shard.dtype for _, shard in pairs}) == 1
        exchanges = self._exchange if exchanges is None else exchanges
        as_it_is = not (exchanges or self._calls.is_gloo(pairs[0][0]))
        return len(pairs) > 1 and self._size > 1 and same_format and as_it_is

    def _exchange_and_add(self, out: Tensor, buffer: Tensor, label: str, codec: Codec) -> None:
        """Send every member its chunk, encoded, and add up what comes in the buffer's own format.

        One hop instead of one for each member. And a backend's own reduce-scatter would add in the format of
        the wire, and round at every member it passes.
        """
        if buffer.numel() == 0:
            return
        if not codec.changes(buffer.dtype):
            received = self._scratch.take("received", buffer.nbytes, buffer).view(buffer.dtype)
            self._send_each(received, buffer, label)
            rows = received.view(self._size, -1)
            add_rows(out, rows.unbind() if self._calls.is_gloo(buffer) else rows)
            return
        nbytes = self._size * codec.wire_nbytes(out.numel(), buffer.dtype)
        sent, received = (self._scratch.take(use, nbytes, buffer) for use in ("sent", "received"))
        codec.encode(sent.view(self._size, -1), buffer.view(self._size, -1))
        self._send_each(received, sent, label)
        codec.add_up(out, received.view(self._size, -1))

    def _send_each(self, received: Tensor, sent: Tensor, label: str) -> None:
        """Every member's chunk of ``sent`` to it."""
        if self._calls.is_gloo(sent):
            self._swap("reduce-scatter", label, _rows(received, self._size), _rows(sent, self._size))
        else:
            self._calls.call("reduce-scatter", label, dist.all_to_all_single, received, sent)

    def _gather_encoded(self, out: Tensor, shard: Tensor, label: str, codec: Codec) -> None:
        if shard.numel() == 0:
            return
        nbytes = codec.wire_nbytes(shard.numel(), shard.dtype)
        wires = self._scratch.take("sent", self._size * nbytes, out).view(self._size, -1)
        own = wires[self._position]
        codec.encode(own.unsqueeze(0), shard.view(1, -1))
        # As int8, which says that these bytes are numbers: imagined members have others.
        self.all_gather(wires.view(-1).view(torch.int8), own.view(torch.int8), label)
        codec.decode(out.view(self._size, -1), wires)

    def _send_to_all(self, out: Tensor, shard: Tensor, label: str) -> None:
        """Gather in one hop: every member sends its chunk to each of the others."""
        chunks, sent = list(out.view(self._size, -1).unbind()), [shard] * self._size
        if chunks[self._position].data_ptr() == shard.data_ptr():
            chunks[self._position] = sent[self._position] = shard[:0]
        self._calls.call("all-gather", label, dist.all_to_all, chunks, sent)

    def _all_reduce_by_messages(self, tensor: Tensor, label: str, *, maximum: bool) -> None:
        """Over gloo, added in the order of the members. What does not divide among them is small."""
        if not maximum and tensor.numel() % self._size == 0:
            own = tensor.view(self._size, -1)[self._position]
            self._exchange_and_add(own, tensor, label, PLAIN)
            self._swap("all-gather", label, _rows(tensor, self._size), [own] * self._size)
            return
        flat = tensor.view(-1)
        received = self._scratch.take("received", self._size * flat.nbytes, flat).view(flat.dtype)
        received = received.view(self._size, -1)
        rows = received.unbind()
        self._swap("all-reduce", label, rows, [flat] * self._size)
        if maximum:
            flat.copy_(received.amax(0))
        else:
            add_rows(flat, rows)

    def _swap(self, kind: str, label: str, received: Sequence[Tensor], sent: Sequence[Tensor]) -> None:
        """``sent[r]`` to member r, and ``received[r]`` from there. Over gloo."""
        self._calls.call(
            kind, label, swap, received, sent, tag_of(kind, label, self._size * received[0].nbytes)
        )


class _Scratch:
    """Memory for chunks on their way, kept from call to call."""

    def __init__(self) -> None:
        self._by_use: dict[str, Tensor] = {}  # uint8 [largest buffer exchanged]

    @property
    def nbytes(self) -> int:
        return sum(memory.numel() for memory in self._by_use.values())

    def take(self, use: str, nbytes: int, like: Tensor) -> Tensor:
        """So many bytes where ``like`` is; whatever was there for this use is gone."""
        if use not in self._by_use or self._by_use[use].numel() < nbytes:
            with torch.inference_mode(False):  # training uses it, too
                self._by_use[use] = torch.empty(nbytes, dtype=torch.uint8, device=like.device)
        return self._by_use[use][:nbytes]


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


def _coalesced_all_reduce(tensors: list[Tensor], group: Any) -> None:
    options = dist.AllreduceCoalescedOptions()
    options.asyncOp = False
    work = group.allreduce_coalesced(tensors, options)
    if work is not None:
        work.wait()


def _coalesced(group: Any, name: str, old_name: str, *args: Any) -> None:
    """Several tensors as one collective: torch has that as a method of groups, under two names."""
    work = (getattr(group, name, None) or getattr(group, old_name))(*args)
    if work is not None:
        work.wait()


def _rows(tensor: Tensor, count: int) -> Sequence[Tensor]:
    """A chunk of ``tensor`` for each of so many members."""
    return tensor.view(count, -1).unbind()

"""Gathers of parts that have any size, to all members or to one. Empty parts do not travel."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mics.comm.calls import GroupCalls
from mics.comm.counter import TrafficCounter
from mics.comm.messages import Message, deliver, tag_of
from mics.comm.protocol import Action, Parts


class GroupUneven:
    """Over one process group: every member sends its parts straight to where they belong."""

    def __init__(self, calls: GroupCalls) -> None:
        self.size = calls.size
        self.position = calls.position
        self._calls = calls
        self._has_met = False

    def holds(self, to: int | None) -> range:
        receives = to is None or to == self.position
        return range(self.size) if receives else range(self.position, self.position + 1)

    def stages(
        self, tensors: Sequence[Parts], label: str, to: int | None = None
    ) -> Sequence[tuple[str, Action]]:
        return (("", partial(self.gather, tensors, label, to)),)

    def gather(self, tensors: Sequence[Parts], label: str, to: int | None = None) -> None:
        """All parts of all tensors, at once where the backend can do that."""
        if self.size == 1:
            return
        own, calls = self.position, self._calls
        others = [member for member in range(self.size) if member != own]
        targets = others if to is None else [member for member in others if member == to]
        sources = others if to in (None, own) else []
        parts = [part(range(own, own + 1)) for part in tensors]
        sent = _messages((target, number, each) for target in targets for number, each in enumerate(parts))
        received = _messages(
            (source, number, part(range(source, source + 1)))
            for source in sources
            for number, part in enumerate(tensors)
        )
        calls.count("all_gather" if to is None else "gather", sum(tensor.nbytes for *_, tensor in sent))
        kind = "all-gather" if to is None else "gather"
        if calls.is_gloo(parts[0]):
            calls.call(kind, label, deliver, received, sent, tag_of(kind, label))
            return
        if calls.is_real and not self._has_met:
            # NCCL makes a communicator when all members call it, and some may have no message.
            calls.call("all-reduce", label, dist.all_reduce, parts[0].new_zeros(1, dtype=torch.float32))
            self._has_met = True
        calls.call(kind, label, _batch if calls.is_real else _imagine, received, sent)


class TwoStageUneven:
    """Over N nodes of k ranks with ownership order ``l*N + n``: between the nodes, then inside each.

    To one member: everything goes to its node first, to the ranks of equal local rank, and from there to it.
    """

    def __init__(self, *, axis: str, intra: GroupUneven, inter: GroupUneven, counter: TrafficCounter) -> None:
        self._axis = axis
        self._intra = intra
        self._inter = inter
        self._counter = counter
        self._size = intra.size * inter.size
        self._position = intra.position * inter.size + inter.position

    def holds(self, to: int | None) -> range:
        num_nodes = self._inter.size
        if to is None or to == self._position:
            return range(self._size)
        if to % num_nodes == self._inter.position:
            first = self._intra.position * num_nodes
            return range(first, first + num_nodes)
        return range(self._position, self._position + 1)

    def stages(
        self, tensors: Sequence[Parts], label: str, to: int | None = None
    ) -> Sequence[tuple[str, Action]]:
        num_nodes = self._inter.size
        own = range(self._position, self._position + 1)
        num_targets = self._size - 1 if to is None else int(to != self._position)
        kind = "all_gather" if to is None else "gather"
        self._counter.add(self._axis, kind, num_targets * sum(part(own).nbytes for part in tensors))
        first = self._intra.position * num_nodes
        inter = [partial(_in_block, part, first) for part in tensors]
        intra = [partial(_of_blocks, part, num_nodes) for part in tensors]
        to_node, to_local = (None, None) if to is None else (to % num_nodes, to // num_nodes)
        stages: list[tuple[str, Action]] = [("inter", partial(self._inter.gather, inter, label, to_node))]
        if to_node in (None, self._inter.position):
            stages.append(("intra", partial(self._intra.gather, intra, label, to_local)))
        return stages


def _in_block(part: Parts, first: int, nodes: range) -> Tensor:
    """What the ranks on these nodes hold together, of the block of chunks that begins at ``first``."""
    return part(range(first + nodes.start, first + nodes.stop))


def _of_blocks(part: Parts, num_nodes: int, blocks: range) -> Tensor:
    """What these blocks hold together."""
    return part(range(blocks.start * num_nodes, blocks.stop * num_nodes))


def _messages(found: Iterable[Message]) -> list[Message]:
    return [message for message in found if message[2].numel()]


def _batch(received: Sequence[Message], sent: Sequence[Message], group: Any) -> None:
    """All messages at once. Those from one member to another keep their order."""
    ops = [dist.P2POp(dist.irecv, each, group=group, group_peer=source) for source, _, each in received]
    ops += [dist.P2POp(dist.isend, each, group=group, group_peer=target) for target, _, each in sent]
    for work in dist.batch_isend_irecv(ops) if ops else ():
        work.wait()


def _imagine(received: Sequence[Message], sent: Sequence[Message], group: Any) -> None:
    """For imagined members, who answer collectives alone: tensor by tensor."""
    members = range(dist.get_world_size(group))
    for number in sorted({number for _, number, _ in (*received, *sent)}):
        places = {member: tensor for member, each, tensor in received if each == number}
        values = {member: tensor for member, each, tensor in sent if each == number}
        nothing = next(iter((places or values).values()))[:0]
        dist.all_to_all(
            [places.get(member, nothing) for member in members],
            [values.get(member, nothing) for member in members],
            group=group,
        )

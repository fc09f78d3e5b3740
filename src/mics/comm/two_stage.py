"""Gather and reduce in two stages, over the network once and inside the node once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from mics.comm.codec import PLAIN, Codec
from mics.comm.counter import TrafficCounter
from mics.comm.group import GroupCollectives
from mics.comm.protocol import Action, Pairs, Parts


class TwoStageCollectives:
    """A partition group over N nodes of k ranks, with ownership order ``l*N + n``.

    Because the chunks of equal local rank ``l`` are neighbours in that order, neither direction copies::

        gather:  inter fills block l of the buffer (N chunks), intra fills the other blocks
        reduce:  intra adds up block l over the node, inter adds up this rank's chunk over the nodes

    Each chunk crosses the network once per node, (p - k)/p of a unit into each, instead of once per rank.
    """

    reduces_first = "intra"

    def __init__(self, *, intra: GroupCollectives, inter: GroupCollectives, counter: TrafficCounter) -> None:
        self._intra = intra
        self._inter = inter
        self._counter = counter

    @property
    def size(self) -> int:
        return self._intra.size * self._inter.size

    @property
    def position(self) -> int:
        return self._intra.position * self._inter.size + self._inter.position

    @property
    def staging_nbytes(self) -> int:
        return self._intra.staging_nbytes + self._inter.staging_nbytes

    def all_gather(self, out: Tensor, shard: Tensor, label: str) -> None:
        for _, action in self.gather_stages([(out, shard)], label):
            action()

    def reduce_scatter(self, out: Tensor, buffer: Tensor, label: str) -> None:
        for _, action in self.reduce_stages([(out, buffer)], label):
            action()

    def gather_stages(self, pairs: Pairs, label: str) -> Sequence[tuple[str, Action]]:
        self._counter.add(
            "partition", "all_gather", sum((self.size - 1) * shard.nbytes for _, shard in pairs)
        )
        blocks = [self._block(out) for out, _ in pairs]
        inter = [(block, shard) for block, (_, shard) in zip(blocks, pairs, strict=True)]
        intra = [(out, block) for block, (out, _) in zip(blocks, pairs, strict=True)]
        return (
            ("inter", partial(self._inter.gather_together, inter, label)),
            ("intra", partial(self._intra.gather_together, intra, label)),
        )

    def holds(self, to: int | None) -> range:
        if to is None or to == self.position:
            return range(self.size)
        if to % self._inter.size == self._inter.position:
            first = self._intra.position * self._inter.size
            return range(first, first + self._inter.size)
        return range(self.position, self.position + 1)

    def exchange_stages(
        self, tensors: Sequence[Parts], label: str, to: int | None = None
    ) -> Sequence[tuple[str, Action]]:
        num_nodes = self._inter.size
        own = range(self.position, self.position + 1)
        num_targets = self.size - 1 if to is None else int(to != self.position)
        kind = "all_gather" if to is None else "gather"
        self._counter.add("partition", kind, num_targets * sum(part(own).nbytes for part in tensors))
        first = self._intra.position * num_nodes
        inter = [partial(_in_block, part, first) for part in tensors]
        intra = [partial(_of_blocks, part, num_nodes) for part in tensors]
        to_node, to_local = (None, None) if to is None else (to % num_nodes, to // num_nodes)
        stages = [("inter", partial(self._inter.exchange, inter, label, to_node))]
        if to_node in (None, self._inter.position):
            stages.append(("intra", partial(self._intra.exchange, intra, label, to_local)))
        return stages

    def reduce_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        self._counter.add(
            "partition", "reduce_scatter", sum((self.size - 1) * _wire_nbytes(out, codec) for out, _ in pairs)
        )
        blocks = [self._block(buffer) for _, buffer in pairs]
        intra = [(block, buffer) for block, (_, buffer) in zip(blocks, pairs, strict=True)]
        inter = [(out, block) for block, (out, _) in zip(blocks, pairs, strict=True)]
        return (
            ("intra", partial(self._intra.reduce_together, intra, label, codec)),
            ("inter", partial(self._inter.reduce_together, inter, label, codec)),
        )

    def all_reduce_stages(
        self, tensors: Sequence[Tensor], label: str, codec: Codec = PLAIN
    ) -> Sequence[tuple[str, Action]]:
        return (
            ("intra", partial(self._intra.all_reduce_together, tensors, label, codec)),
            ("inter", partial(self._inter.all_reduce_together, tensors, label, codec)),
        )

    def _block(self, whole: Tensor) -> Tensor:
        """The chunks that the ranks with this local rank own together."""
        return whole.view(self._intra.size, -1)[self._intra.position]

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        self._counter.add("partition", "all_reduce", 2 * (self.size - 1) * tensor.nbytes // self.size)
        self._intra.all_reduce(tensor, label, maximum=maximum)
        self._inter.all_reduce(tensor, label, maximum=maximum)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        self._inter.broadcast(tensor, label)
        self._intra.broadcast(tensor, label)


def _in_block(part: Parts, first: int, nodes: range) -> Tensor:
    """What the ranks on these nodes hold together, of the block of chunks that begins at ``first``."""
    return part(range(first + nodes.start, first + nodes.stop))


def _of_blocks(part: Parts, num_nodes: int, locals_: range) -> Tensor:
    """What these blocks hold together."""
    return part(range(locals_.start * num_nodes, locals_.stop * num_nodes))


def _wire_nbytes(values: Tensor, codec: Codec) -> int:
    return values.numel() * codec.wire_dtype(values.dtype).itemsize

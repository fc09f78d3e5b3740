"""Gather and reduce in two stages, over the network once and inside the node once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from mics.comm.codec import PLAIN, Codec
from mics.comm.counter import TrafficCounter
from mics.comm.group import GroupCollectives
from mics.comm.protocol import Action, Pairs
from mics.comm.uneven import TwoStageUneven


class TwoStageCollectives:
    """A group over N nodes of k ranks, with ownership order ``l*N + n``.

    Because the chunks of equal local rank ``l`` are neighbours in that order, neither direction copies::

        gather:  inter fills block l of the buffer (N chunks), intra fills the other blocks
        reduce:  intra adds up block l over the node, inter adds up this rank's chunk over the nodes

    Each chunk crosses the network once per node, (p - k)/p of a unit into each, instead of once per rank.
    A codec encodes between nodes alone.
    """

    reduces_first = "intra"

    def __init__(
        self, *, axis: str, intra: GroupCollectives, inter: GroupCollectives, counter: TrafficCounter
    ) -> None:
        self._axis = axis
        self._intra = intra
        self._inter = inter
        self._counter = counter
        self.uneven = TwoStageUneven(axis=axis, intra=intra.uneven, inter=inter.uneven, counter=counter)

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

    def gather_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        self._count("all_gather", [shard for _, shard in pairs], codec)
        blocks = [self._block(out) for out, _ in pairs]
        inter = [(block, shard) for block, (_, shard) in zip(blocks, pairs, strict=True)]
        intra = [(out, block) for block, (out, _) in zip(blocks, pairs, strict=True)]
        return (
            ("inter", partial(self._inter.gather_together, inter, label, codec)),
            ("intra", partial(self._intra.gather_together, intra, label)),
        )

    def reduce_stages(self, pairs: Pairs, label: str, codec: Codec = PLAIN) -> Sequence[tuple[str, Action]]:
        self._count("reduce_scatter", [out for out, _ in pairs], codec)
        blocks = [self._block(buffer) for _, buffer in pairs]
        intra = [(block, buffer) for block, (_, buffer) in zip(blocks, pairs, strict=True)]
        inter = [(out, block) for block, (out, _) in zip(blocks, pairs, strict=True)]
        return (
            ("intra", partial(self._intra.reduce_together, intra, label)),
            ("inter", partial(self._inter.reduce_together, inter, label, self._of_block(codec))),
        )

    def all_reduce_stages(
        self, tensors: Sequence[Tensor], label: str, codec: Codec = PLAIN
    ) -> Sequence[tuple[str, Action]]:
        """Of tensors that all members divide: each adds up its block, and between nodes with its peers."""
        chunks = [tensor.view(self.size, -1)[self.position] for tensor in tensors]
        self._count("reduce_scatter", chunks, codec)
        self._count("all_gather", chunks, codec.of_sums)
        blocks = [self._block(tensor) for tensor in tensors]
        inside = list(zip(blocks, tensors, strict=True))
        whole = list(zip(tensors, blocks, strict=True))
        return (
            ("intra", partial(self._intra.reduce_together, inside, label)),
            ("inter", partial(self._inter.all_reduce_together, blocks, label, self._of_block(codec))),
            ("intra", partial(self._intra.gather_together, whole, label)),
        )

    def _of_block(self, codec: Codec) -> Codec:
        return codec.of_part(self._intra.position, self._intra.size)

    def _count(self, kind: str, chunks: Sequence[Tensor], codec: Codec) -> None:
        """What this rank sends of chunks that have the size of ``chunks``."""
        between = self._inter.size - 1
        inside = self.size - 1 - between
        nbytes = sum(
            inside * chunk.nbytes + between * codec.wire_nbytes(chunk.numel(), chunk.dtype)
            for chunk in chunks
        )
        self._counter.add(self._axis, kind, nbytes)

    def _block(self, whole: Tensor) -> Tensor:
        """The chunks that the ranks with this local rank own together."""
        return whole.view(self._intra.size, -1)[self._intra.position]

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        self._counter.add(self._axis, "all_reduce", 2 * (self.size - 1) * tensor.nbytes // self.size)
        self._intra.all_reduce(tensor, label, maximum=maximum)
        self._inter.all_reduce(tensor, label, maximum=maximum)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        self._inter.broadcast(tensor, label)
        self._intra.broadcast(tensor, label)

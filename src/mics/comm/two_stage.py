"""Gather and reduce in two stages, over the network once and inside the node once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import Tensor

from mics.comm.protocol import Collectives, Job
from mics.comm.traffic import TrafficCounter


class TwoStageCollectives:
    """A partition group over N nodes of k ranks, with ownership order ``l*N + n``.

    Because the chunks of equal local rank ``l`` are neighbours in that order, neither direction copies::

        gather:  inter fills block l of the buffer (N chunks), intra fills the other blocks
        reduce:  intra adds up block l over the node, inter adds up this rank's chunk over the nodes

    Each chunk crosses the network once per node, (p - k)/p of a unit per rank, instead of once per rank.
    """

    def __init__(self, *, intra: Collectives, inter: Collectives, counter: TrafficCounter) -> None:
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
        for _, job in self.gather_stages(out, shard, label):
            job()

    def reduce_scatter(self, out: Tensor, buffer: Tensor, label: str) -> None:
        for _, job in self.reduce_stages(out, buffer, label):
            job()

    def gather_stages(self, out: Tensor, shard: Tensor, label: str) -> Sequence[tuple[str, Job]]:
        self._counter.add("partition", "all_gather", (self.size - 1) * _nbytes(shard))
        block = out.view(self._intra.size, -1)[self._intra.position]
        return (
            ("inter", partial(self._inter.all_gather, block, shard, label)),
            ("intra", partial(self._intra.all_gather, out, block, label)),
        )

    def reduce_stages(self, out: Tensor, buffer: Tensor, label: str) -> Sequence[tuple[str, Job]]:
        self._counter.add("partition", "reduce_scatter", (self.size - 1) * _nbytes(out))
        block = buffer.view(self._intra.size, -1)[self._intra.position]
        return (
            ("intra", partial(self._intra.reduce_scatter, block, buffer, label)),
            ("inter", partial(self._inter.reduce_scatter, out, block, label)),
        )

    def all_reduce(self, tensor: Tensor, label: str, *, maximum: bool = False) -> None:
        self._counter.add("partition", "all_reduce", 2 * (self.size - 1) * _nbytes(tensor) // self.size)
        self._intra.all_reduce(tensor, label, maximum=maximum)
        self._inter.all_reduce(tensor, label, maximum=maximum)

    def broadcast(self, tensor: Tensor, label: str) -> None:
        self._inter.broadcast(tensor, label)
        self._intra.broadcast(tensor, label)


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()

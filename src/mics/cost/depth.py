"""How far ahead units are gathered, which travel together, and how many bytes may stay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from mics.cost.auto import batch_nbytes, latency_nbytes, move_seconds, prefetch_units
from mics.cost.clusters import Cluster
from mics.cost.collectives import Kind, Span
from mics.cost.memory import USABLE
from mics.cost.stages import WHOLE, Shares
from mics.layout.order import Batch, Batching, batches_of

_BUSY_SHARE: Final = 0.9  # of the computation's time: replicas need the network too
_STAYING_SHARE: Final = 1 / 16  # of a device's memory, for units that stay gathered


@dataclass(frozen=True, kw_only=True)
class MicroStep:
    """The order in which units are needed, and what the cost model has to know about them."""

    cluster: Cluster
    span: Span
    """Of the partition group."""
    two_stage: bool
    order: Sequence[int]
    sizes: Mapping[int, int]
    """Bytes of each gathered unit."""
    numels: Mapping[int, int]
    rows: float
    """Of activations, that each unit is multiplied with."""
    shares: Shares = WHOLE

    def depth(self, *, low_memory: bool = False) -> int:
        """Units to look ahead."""
        computes = [
            forward_seconds(self.cluster, sum(self.numels[index] for index in batch), self.rows)
            for batch in self._batches
        ]
        return prefetch_units(self._gathers, computes, low_memory=low_memory)

    def stay_nbytes(
        self, *, wire_nbytes: int, recomputes: bool, memory_nbytes: float, free_nbytes: float
    ) -> int:
        """Bytes of units that stay gathered between their uses: where the network is as busy as the GPU.

        ``wire_nbytes`` are those of a gradient on its way. A small part of the device's memory, and at most
        half of what nobody has used: a batch may be larger one day.
        """
        reductions = sum(
            self._seconds(Kind.REDUCE_SCATTER, numel * wire_nbytes, self.shares.reduce)
            for numel in self.numels.values()
        )
        computes = forward_seconds(self.cluster, sum(self.numels.values()), self.rows)
        # The backward takes twice as long as the forward.
        busy = (4 if recomputes else 3) * computes
        if sum(self._gathers) + reductions <= _BUSY_SHARE * busy:
            return 0
        most = min(memory_nbytes * _STAYING_SHARE, (free_nbytes - memory_nbytes * (1 - USABLE)) / 2)
        return int(max(0.0, min(sum(self.sizes.values()), most)))

    @cached_property
    def _batches(self) -> list[Batch]:
        batching = batching_for(self.cluster, self.span, max(self.sizes.values(), default=0))
        return batches_of(self.order, self.sizes, batching)

    @cached_property
    def _gathers(self) -> list[float]:
        """Seconds of each batch's gather."""
        known: dict[int, float] = {}  # blocks are alike
        found = []
        for batch in self._batches:
            nbytes = sum(self.sizes[index] for index in batch)
            if nbytes not in known:
                known[nbytes] = self._seconds(Kind.ALL_GATHER, nbytes, self.shares.gather)
            found.append(known[nbytes])
        return found

    def _seconds(self, kind: Kind, nbytes: int, share: float) -> float:
        return move_seconds(self.cluster, kind, self.span, nbytes, two_stage=self.two_stage, share=share)


def batching_for(cluster: Cluster, span: Span, largest_nbytes: int) -> Batching:
    """No batch is larger than what the largest unit takes anyway: the memory stays what it would be."""
    return Batching(
        nbytes=min(batch_nbytes(cluster, span), largest_nbytes),
        tiny_nbytes=min(latency_nbytes(cluster, span), largest_nbytes // 16),
    )


def reduction_share(
    cluster: Cluster,
    span: Span,
    *,
    numel: int,
    nbytes: int,
    rows: float,
    two_stage: bool,
    share: float = 1.0,
) -> float:
    """How long the reduction of a unit's gradients takes for each second of the forward of one like it."""
    seconds = move_seconds(cluster, Kind.REDUCE_SCATTER, span, nbytes, two_stage=two_stage, share=share)
    return seconds / max(forward_seconds(cluster, numel, rows), 1e-12)


def forward_seconds(cluster: Cluster, numel: int, rows: float) -> float:
    """Time to multiply ``rows`` rows of activations with parameters."""
    return 2 * numel * rows / (cluster.flops or 1e12)

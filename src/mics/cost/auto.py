"""What mics chooses by itself, from the cost model alone. Arithmetic: every rank comes to the same choice."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final

from mics.cost.clusters import Cluster
from mics.cost.collectives import Kind, Span, cost
from mics.cost.compute import UPDATE_NBYTES
from mics.cost.memory import MASTER_NBYTES
from mics.cost.stages import WHOLE, Shares, hop_2_stages, move_stages, refresh_stages
from mics.layout.compression import UNCOMPRESSED, Compression

_LATENCY_SHARE: Final = 0.05  # of a collective's time that may be latency before it is worth waiting for more
_MAX_PREFETCH: Final = 3
_MAX_HORIZON: Final = 4
_LEAST_MESSAGE_NBYTES: Final = 64 << 10
_WORTH_SHARE: Final = 0.02  # of a step, that whole masters must save: they take memory


def move_seconds(
    cluster: Cluster, kind: Kind, span: Span, nbytes: int, *, two_stage: bool, share: float = 1.0
) -> float:
    """Time to gather or reduce ``nbytes`` over a partition group, in one ring or in two stages.

    ``share``: what rounding leaves of bytes that go from node to node.
    """
    stages = move_stages(cluster, kind, span, nbytes, two_stage=two_stage, share=share)
    return sum(stage.seconds for stage in stages)


def two_stages_pay(
    cluster: Cluster, span: Span, *, gathered: int, reduced: int, shares: Shares = WHOLE
) -> bool:
    """Whether a micro-step takes less in two stages: ``gathered`` bytes come twice, ``reduced`` ones go once.

    Near two nodes because fewer bytes cross the network, beyond because fewer hops do. Where the links inside
    a node are no faster than the network, the second stage may cost more than that. Rounded gradients are
    exchanged: in one stage each of a node's ranks sends to every other node.
    """
    moves = 2 * [(Kind.ALL_GATHER, gathered, shares.gather)] + [(Kind.REDUCE_SCATTER, reduced, shares.reduce)]
    flat, staged = (
        sum(
            move_seconds(cluster, kind, span, nbytes, two_stage=staged, share=share)
            for kind, nbytes, share in moves
        )
        for staged in (False, True)
    )
    return staged < flat


def latency_nbytes(
    cluster: Cluster, span: Span, kind: Kind = Kind.ALL_GATHER, *, two_stage: bool = False
) -> int:
    """The size of a collective whose bytes take as long as its latency."""
    if span.size == 1:
        return 0
    many = 1 << 30
    latency = move_seconds(cluster, kind, span, 0, two_stage=two_stage)
    seconds_per_byte = (move_seconds(cluster, kind, span, many, two_stage=two_stage) - latency) / many
    return int(latency / seconds_per_byte)


def batch_nbytes(cluster: Cluster, span: Span, kind: Kind = Kind.ALL_GATHER) -> int:
    """The size of a collective at which latency is a small part of its time."""
    return int(latency_nbytes(cluster, span, kind) / _LATENCY_SHARE)


def exchange_pays(cluster: Cluster, span: Span, nbytes: int, *, two_stage: bool = False) -> bool:
    """Whether ``nbytes`` are reduced, or gathered, sooner by an exchange of chunks than by a ring.

    Both send the same bytes. An exchange is one hop instead of one for each member; but it needs a connection
    of everybody to everybody, so it must save something, and messages must be large enough for the network to
    carry them at its speed. Of two stages it is the one between nodes.
    """
    if two_stage:
        span, nbytes = span.between, nbytes // span.on_a_node
    if span.size == 1 or nbytes / span.size < _LEAST_MESSAGE_NBYTES:
        return False
    exchange, ring = (cost(cluster, kind, span, nbytes) for kind in (Kind.ALL_TO_ALL, Kind.REDUCE_SCATTER))
    return exchange.seconds < (1 - _LATENCY_SHARE) * ring.seconds


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The last backward of a step and the next forward: where replicas meet. Units are in forward order."""

    cluster: Cluster
    replication: Span
    partition_size: int
    numels: Sequence[int]
    forwards: Sequence[float]
    """Seconds of each unit's forward, for one row where rows are not known."""
    backwards: Sequence[float]
    wire_nbytes: int
    """Of a gradient's element between replicas, where nothing is rounded."""
    compression: Compression = UNCOMPRESSED
    """How hop 2 rounds."""
    two_stage: bool = False
    """Replicas meet on their nodes first."""
    refresh_nbytes: float = 2
    """Of a new parameter on its way to a replica."""
    other_seconds: float = 0.0
    """Of the step's other micro-steps."""

    def whole_masters_pay(self, *, knows_rows: bool = True) -> bool:
        """Whether a step is shorter with masters whole in every partition group.

        Gradients then cross replicas in an all-reduce that hides under the last backward. Otherwise a
        reduce-scatter hides there, and new parameters under the next forward, which is a third of a
        micro-step, or a quarter with recomputation. Where rows are not known, they are taken to be those
        whose backward just hides the all-reduce: with more nothing is exposed either way.
        """
        if self.replication.size == 1:
            return False
        scale = 1.0 if knows_rows else sum(self._across(Kind.ALL_REDUCE)) / max(sum(self.backwards), 1e-12)
        world, whole = self._seconds(scale, whole=False), self._seconds(scale, whole=True)
        return world - whole > _WORTH_SHARE * (world + self.other_seconds)

    def _seconds(self, scale: float, *, whole: bool) -> float:
        """From the beginning of the last backward to the end of the next forward."""
        reductions = self._across(Kind.ALL_REDUCE if whole else Kind.REDUCE_SCATTER)
        computed = sent = 0.0
        for seconds, reduction in zip(reversed(self.backwards), reversed(reductions), strict=True):
            computed += scale * seconds
            sent = max(computed, sent) + reduction
        owners = self.partition_size * (1 if whole else self.replication.size)
        bandwidth = self.cluster.memory_bandwidth or math.inf
        computed = sent = sent + sum(self.numels) * UPDATE_NBYTES / owners / bandwidth
        spread = [0.0] * len(self.numels) if whole else self._across(Kind.ALL_GATHER)
        for seconds, arrival in zip(self.forwards, spread, strict=True):
            sent += arrival
            computed = max(computed, sent) + scale * seconds
        return computed

    def _across(self, kind: Kind) -> list[float]:
        """Seconds of each unit's chunk across replicas, by a ring or an exchange: the largest decides."""
        largest = MASTER_NBYTES * max(self.numels, default=0) // self.partition_size
        exchanges = exchange_pays(self.cluster, self.replication, largest, two_stage=self.two_stage)
        known = {numel: self._chunk_seconds(kind, numel, exchanges) for numel in set(self.numels)}
        return [known[numel] for numel in self.numels]

    def _chunk_seconds(self, kind: Kind, numel: int, exchanges: bool) -> float:
        if kind is Kind.ALL_GATHER:
            nbytes = int(self.refresh_nbytes * numel) // self.partition_size
            stages = refresh_stages(
                self.cluster, self.replication, nbytes, exchanges=exchanges, two_stage=self.two_stage
            )
        else:
            stages = hop_2_stages(
                self.cluster,
                self.replication,
                numel / self.partition_size,
                wire_nbytes=self.wire_nbytes,
                compression=self.compression,
                exchanges=exchanges,
                whole=kind is Kind.ALL_REDUCE,
                two_stage=self.two_stage,
            )
        return sum(stage.seconds for stage in stages)


def prefetch_units(gathers: Sequence[float], computes: Sequence[float], *, low_memory: bool = False) -> int:
    """How far to look ahead, so that every gather fits beside the computation before it.

    Both are seconds, in the order in which they are needed. A gather counts twice: gradients cross the same
    links. Where gathers take longer than the computation altogether no depth hides them. With
    ``low_memory`` the depth is that at which most of them fit, because units that are gathered
    ahead take memory.
    """
    depths = []
    for position in range(1, len(gathers)):
        hidden, depth = 0.0, 0
        while hidden < 2 * gathers[position] and depth < min(position, _MAX_PREFETCH):
            depth += 1
            hidden += computes[position - depth]
        depths.append(depth)
    return max(1, median_low(depths) if low_memory else max(depths)) if depths else 1


def horizon_for(transfer: float, compute: float) -> int:
    """Units whose activations are prefetched, when to bring one unit's back takes ``transfer``.

    ``compute`` is the time of one unit's backward, in the same measure.
    """
    return max(1, min(_MAX_HORIZON, math.ceil(transfer / max(compute, 1e-12))))

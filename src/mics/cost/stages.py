"""Collectives as the engine runs them: in one stage or in two, values as they are or rounded between nodes.

What is rounded (``mics.Compression``) has a kernel before the collective and one after it. Each reads and
writes the device's memory once. Sums are made of decoded values: a reduction is an exchange of chunks then.
So have new values that are sent as moves: these kernels are slower than memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from mics.cost.clusters import Cluster
from mics.cost.collectives import Cost, Kind, Span, cost
from mics.layout.compression import Compression

_SUM_NBYTES: Final = 2  # of a sum that goes to all replicas: bfloat16
_GRADIENT: Final = 4  # bytes, float32
_ERROR: Final = 2  # bytes, of what rounding has lost
# Bytes of 16-bit values a second, of those that memory reads or writes: as measured alone on an H200
# (benchmarks/results/moves_h200_2026-11-19.md).
_MAKING_MOVES: Final = 0.109
_APPLYING_MOVES: Final = 0.132


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One collective, and the kernels that round what leaves and read what came."""

    cost: Cost
    link: str = ""
    """"inter" or "intra" of two stages; empty: there is one."""
    encode_seconds: float = 0.0
    decode_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        return self.encode_seconds + self.cost.seconds + self.decode_seconds


@dataclass(frozen=True, kw_only=True)
class Shares:
    """What rounding leaves of the bytes that a partition group sends from node to node; 1: all of them."""

    gather: float = 1.0
    reduce: float = 1.0

    @classmethod
    def of(cls, compression: Compression, *, param_nbytes: float, wire_nbytes: float) -> Shares:
        """Of elements that take ``param_nbytes``, and their gradients ``wire_nbytes``, where nothing is."""
        return cls(
            gather=compression.inter_gather_nbytes(param_nbytes) / param_nbytes,
            reduce=compression.inter_reduce_nbytes(wire_nbytes) / wire_nbytes,
        )


WHOLE: Final = Shares()


def move_stages(
    cluster: Cluster, kind: Kind, span: Span, nbytes: int, *, two_stage: bool, share: float = 1.0
) -> list[Stage]:
    """Of a gather or a reduction of ``nbytes`` over a partition group, in their order.

    ``share`` is left of what goes from node to node. In one stage over several nodes that is everything.
    """
    if not two_stage:
        return [_between_nodes(cluster, kind, span, nbytes, share)]
    stages = [
        _between_nodes(cluster, kind, span.between, nbytes // span.on_a_node, share, "inter"),
        Stage(cost=cost(cluster, kind, span.inside, nbytes), link="intra"),
    ]
    return stages if kind is Kind.ALL_GATHER else stages[::-1]


def _between_nodes(
    cluster: Cluster, kind: Kind, span: Span, nbytes: int, share: float, link: str = ""
) -> Stage:
    if share == 1.0 or span.num_nodes == 1:
        return Stage(cost=cost(cluster, kind, span, nbytes), link=link)
    wire, chunk = share * nbytes, nbytes / span.size
    if kind is Kind.ALL_GATHER:
        encoded, decoded = chunk + share * chunk, wire + nbytes
    else:
        kind, encoded, decoded = Kind.ALL_TO_ALL, nbytes + wire, wire + chunk
    return Stage(
        cost=cost(cluster, kind, span, int(wire)),
        link=link,
        encode_seconds=_kernel_seconds(cluster, encoded),
        decode_seconds=_kernel_seconds(cluster, decoded),
    )


def hop_2_stages(
    cluster: Cluster,
    span: Span,
    numel: float,
    *,
    wire_nbytes: int,
    compression: Compression,
    exchanges: bool,
    whole: bool,
    two_stage: bool = False,
) -> list[Stage]:
    """Of ``numel`` gradients across replicas.

    ``wire_nbytes``: of one, where nothing is rounded. ``exchanges``: replicas send each to each instead of in
    a ring. ``whole``: every replica needs all sums. ``two_stage``: a node's replicas add theirs up before.
    """
    if two_stage:
        nbytes = int(_GRADIENT * numel)
        between = hop_2_stages(
            cluster,
            span.between,
            numel / span.on_a_node,
            wire_nbytes=wire_nbytes,
            compression=compression,
            exchanges=exchanges or wire_nbytes < _GRADIENT,  # what is narrower is added up as float32
            whole=whole,
        )
        found = [Stage(cost=cost(cluster, Kind.REDUCE_SCATTER, span.inside, nbytes), link="intra")]
        found += [replace(stage, link="inter") for stage in between]
        if whole:
            found.append(Stage(cost=cost(cluster, Kind.ALL_GATHER, span.inside, nbytes), link="intra"))
        return found
    if compression.hop2 is None:
        kind = Kind.ALL_REDUCE if whole else Kind.ALL_TO_ALL if exchanges else Kind.REDUCE_SCATTER
        return [Stage(cost=cost(cluster, kind, span, int(wire_nbytes * numel)))]
    wire, values = compression.hop_2_nbytes(wire_nbytes) * numel, _GRADIENT * numel
    errors = 2 * _ERROR * numel if compression.keeps_errors else 0.0
    found = [
        Stage(
            cost=cost(cluster, Kind.ALL_TO_ALL, span, int(wire)),
            encode_seconds=_kernel_seconds(cluster, values + errors + wire),
            decode_seconds=_kernel_seconds(cluster, wire + values / span.size),
        )
    ]
    if whole:
        sums = _SUM_NBYTES * numel
        kind = Kind.ALL_TO_ALL if exchanges else Kind.ALL_GATHER
        found.append(
            Stage(
                cost=cost(cluster, kind, span, int(sums)),
                encode_seconds=_kernel_seconds(cluster, (values + sums) / span.size),
                decode_seconds=_kernel_seconds(cluster, sums + values),
            )
        )
    return found


def refresh_stages(
    cluster: Cluster, span: Span, nbytes: int, *, exchanges: bool, two_stage: bool = False
) -> list[Stage]:
    """Of ``nbytes`` of new parameters, from each replica to the others."""
    kind = Kind.ALL_TO_ALL if exchanges else Kind.ALL_GATHER
    if not two_stage:
        return [Stage(cost=cost(cluster, kind, span, nbytes))]
    return [
        Stage(cost=cost(cluster, kind, span.between, nbytes // span.on_a_node), link="inter"),
        Stage(cost=cost(cluster, Kind.ALL_GATHER, span.inside, nbytes), link="intra"),
    ]


def replicas_two_stage(span: Span, compression: Compression, wire_nbytes: int) -> bool:
    """Whether replicas meet in two stages: what is not float32 is exchanged, once for a node is enough."""
    encodes = compression.hop2 is not None or wire_nbytes < _GRADIENT
    return encodes and span.num_nodes > 1 and span.on_a_node > 1


def rounding_times(hop_2: Callable[..., Sequence[Stage]], compression: Compression) -> float:
    """How many times the bytes of exact gradients rounded ones send between nodes.

    In one stage they are exchanged: each of a node's replicas sends to every other node. A ring crosses the
    uplink once. ``hop_2``: ``hop_2_stages`` in one stage, of all but ``compression``.
    """
    rounded, exact = (
        sum(stage.cost.inter_nbytes for stage in hop_2(compression=each))
        for each in (compression, replace(compression, hop2=None))
    )
    return rounded / exact if exact else 0.0


def with_moves(cluster: Cluster, stages: Sequence[Stage], *, own_nbytes: float, nbytes: float) -> list[Stage]:
    """``stages`` that send moves: of this rank's ``own_nbytes`` of values, for ``nbytes`` of all members'."""
    first, *others = stages
    found = [replace(first, encode_seconds=_kernel_seconds(cluster, own_nbytes / _MAKING_MOVES)), *others]
    found[-1] = replace(found[-1], decode_seconds=_kernel_seconds(cluster, nbytes / _APPLYING_MOVES))
    return found


def hop_2_nbytes(
    compression: Compression, wire_nbytes: int, span: Span, *, whole: bool, two_stage: bool
) -> float:
    """That a rank sends for each gradient of its shard: to be added up, and where all need sums once more."""
    found = compression.hop_2_nbytes(wire_nbytes)
    if whole:
        found += wire_nbytes if compression.hop2 is None else _SUM_NBYTES
    if not two_stage:
        return found * (span.size - 1) / span.size
    inside = (2 if whole else 1) * _GRADIENT
    return (found * (span.num_nodes - 1) + inside * (span.size - span.num_nodes)) / span.size


def staged_nbytes(
    compression: Compression,
    partition: Span,
    num_replicas: int,
    *,
    param_nbytes: int,
    wire_nbytes: int,
    two_stage: bool,
    whole: bool,
    replicas_staged: int = 1,
) -> float:
    """Of an element of the largest unit: what is rounded waits in memory of its own, sent and received.

    ``replicas_staged``: replicas of a node, where each rounds its share of what they have added up.
    """
    found, staged = 0.0, partition.on_a_node if two_stage else 1
    if partition.num_nodes > 1:
        if compression.inter_gather is not None:
            found += compression.inter_gather_nbytes(param_nbytes) / staged
        if compression.inter_reduce is not None:
            found += 2 * compression.inter_reduce_nbytes(wire_nbytes) / staged
    if num_replicas > 1 and compression.hop2 is not None:
        wire = compression.hop_2_nbytes(wire_nbytes)
        found += (wire + max(wire, _SUM_NBYTES if whole else 0)) / (partition.size * replicas_staged)
    return found


def _kernel_seconds(cluster: Cluster, nbytes: float) -> float:
    """To read or write so many bytes; nothing where the device's speed is not known."""
    return nbytes / (cluster.memory_bandwidth or math.inf)

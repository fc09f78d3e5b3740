"""How long a collective takes on a cluster: arithmetic alone.

The usual latency and bandwidth model. A ring of p ranks passes p - 1 messages of S/p bytes through every
rank one after the other; each costs the latency of the ring's slowest hop and its bytes at the ring's
slowest link::

    all-gather, reduce-scatter   (p-1) (latency + (S/p + ramp) / bandwidth)
    all-reduce, ring             twice that
    all-reduce, tree             2 depth (latency + ramp / bandwidth) + 2 S / bandwidth

A ring that leaves the node crosses the uplink once each way, whatever number of the node's ranks is in it.
Where only some of them are, the others are in rings of their own at the same time (every rank runs the same
program), and all of them share the uplink: a group with ``g`` of a node's ``k`` ranks gets g/k of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum

from mics.cost.clusters import Cluster, Link


class Kind(StrEnum):
    """What a collective does. Sizes are those of the whole buffer: gathered, or before it is scattered."""

    ALL_GATHER = "all_gather"
    REDUCE_SCATTER = "reduce_scatter"
    ALL_REDUCE = "all_reduce"
    BROADCAST = "broadcast"
    REDUCE = "reduce"
    GATHER = "gather"
    SCATTER = "scatter"
    ALL_TO_ALL = "all_to_all"
    SEND = "send"
    RECV = "recv"
    BARRIER = "barrier"


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What one collective takes. A link is busy for its seconds, and the collective for the longest."""

    intra_seconds: float = 0.0
    inter_seconds: float = 0.0
    intra_nbytes: float = 0.0  # sent by this rank inside its node
    inter_nbytes: float = 0.0  # sent by this rank's share of its node's uplink

    @property
    def seconds(self) -> float:
        return max(self.intra_seconds, self.inter_seconds)

    @property
    def link(self) -> str:
        """The slowest link it uses: the uplink, if it leaves the node at all."""
        return "inter" if self.inter_seconds > 0 else "intra"

    def __add__(self, other: Cost) -> Cost:
        return Cost(
            intra_seconds=self.intra_seconds + other.intra_seconds,
            inter_seconds=self.inter_seconds + other.inter_seconds,
            intra_nbytes=self.intra_nbytes + other.intra_nbytes,
            inter_nbytes=self.inter_nbytes + other.inter_nbytes,
        )

    def divided(self, dilation: float) -> Cost:
        """The same bytes in so many times less time."""
        return replace(
            self, intra_seconds=self.intra_seconds / dilation, inter_seconds=self.inter_seconds / dilation
        )


FREE = Cost()


@dataclass(frozen=True, kw_only=True)
class Span:
    """How a group lies on the cluster: all that its costs depend on."""

    size: int
    num_nodes: int
    on_a_node: int  # members on the node that has the fewest

    @classmethod
    def of(cls, cluster: Cluster, ranks: Collection[int]) -> Span:
        return cls.over([cluster.node_of(rank) for rank in ranks])

    @classmethod
    def over(cls, nodes: Collection[int]) -> Span:
        """Of a group whose members are on these nodes."""
        per_node = Counter(nodes)
        return cls(size=len(nodes), num_nodes=len(per_node), on_a_node=min(per_node.values()))

    @property
    def inside(self) -> Span:
        """One node's members."""
        return replace(self, size=self.on_a_node, num_nodes=1)

    @property
    def between(self) -> Span:
        """A member of each node."""
        return replace(self, size=self.num_nodes, on_a_node=1)


def cost(cluster: Cluster, kind: Kind, span: Span, nbytes: int) -> Cost:
    """Seconds and bytes of one collective over a group that lies on the cluster as ``span`` says."""
    if span.size == 1:
        return FREE
    if kind in (Kind.ALL_GATHER, Kind.REDUCE_SCATTER):
        return _ring(cluster, span, nbytes)
    if kind is Kind.ALL_REDUCE:
        ring = _ring(cluster, span, nbytes)
        return min(ring + ring, _tree(cluster, span, nbytes, passes=2), key=lambda found: found.seconds)
    if kind in (Kind.BROADCAST, Kind.REDUCE):
        # A chain would pass pieces on at once; its last rank still waits for p - 1 hops. A tree does not.
        return _tree(cluster, span, nbytes, passes=1)
    if kind is Kind.ALL_TO_ALL:
        return _exchange(cluster, span, nbytes, num_senders=span.on_a_node)
    if kind in (Kind.GATHER, Kind.SCATTER):
        return _exchange(cluster, span, nbytes, num_senders=1)
    if kind in (Kind.SEND, Kind.RECV):
        return _straight(cluster, span, nbytes)
    return _tree(cluster, span, 0, passes=2)


def _ring(cluster: Cluster, span: Span, nbytes: int) -> Cost:
    num_steps, message = span.size - 1, nbytes / span.size
    if span.num_nodes == 1:
        return Cost(intra_seconds=num_steps * _hop(cluster.intra, message), intra_nbytes=num_steps * message)
    uplink = _uplink(cluster, span)
    step = max(_hop(uplink, message), _hop(cluster.intra, message) if span.on_a_node > 1 else 0.0)
    return Cost(
        inter_seconds=num_steps * step,
        # NVLink and its like carry the ring's other hops, at their own pace.
        intra_seconds=num_steps * message / cluster.intra.bandwidth if span.on_a_node > 1 else 0.0,
        inter_nbytes=num_steps * message / span.on_a_node,
        intra_nbytes=num_steps * message * (span.on_a_node - 1) / span.on_a_node,
    )


def _tree(cluster: Cluster, span: Span, nbytes: int, *, passes: int) -> Cost:
    """A binary tree over the nodes with a chain inside each; large messages stream through it in pieces."""
    local = passes * (span.size // span.num_nodes - 1) * _hop(cluster.intra, 0)
    if span.num_nodes == 1:
        depth = math.ceil(math.log2(span.size))
        return Cost(
            intra_seconds=passes * (depth * _hop(cluster.intra, 0) + nbytes / cluster.intra.bandwidth),
            intra_nbytes=passes * nbytes,
        )
    uplink = _uplink(cluster, span)
    depth = math.ceil(math.log2(span.num_nodes))
    return Cost(
        inter_seconds=passes * (depth * _hop(uplink, 0) + nbytes / uplink.bandwidth) + local,
        intra_seconds=passes * nbytes / cluster.intra.bandwidth if span.on_a_node > 1 else 0.0,
        inter_nbytes=passes * nbytes / span.on_a_node,
        intra_nbytes=passes * nbytes * (span.on_a_node - 1) / span.on_a_node,
    )


def _exchange(cluster: Cluster, span: Span, nbytes: int, *, num_senders: int) -> Cost:
    """``num_senders`` members of each node send (or the one root takes) S/p to every other at once."""
    message = nbytes / span.size
    inside = (span.on_a_node - 1) * message
    intra = _hop(cluster.intra, inside) if span.on_a_node > 1 else 0.0
    if span.num_nodes == 1:
        return Cost(intra_seconds=intra, intra_nbytes=inside)
    outside = (span.size - span.on_a_node) * message
    return Cost(
        inter_seconds=max(_hop(_uplink(cluster, span), outside * num_senders), intra),
        intra_seconds=intra,
        inter_nbytes=outside * num_senders / span.on_a_node,
        intra_nbytes=inside,
    )


def _straight(cluster: Cluster, span: Span, nbytes: int) -> Cost:
    if span.num_nodes == 1:
        return Cost(intra_seconds=_hop(cluster.intra, nbytes), intra_nbytes=nbytes)
    return Cost(inter_seconds=_hop(_uplink(cluster, span), nbytes), inter_nbytes=nbytes)


def _uplink(cluster: Cluster, span: Span) -> Link:
    """The part of the node's uplink that this group gets."""
    inter = cluster.inter
    share = min(1.0, span.on_a_node / cluster.ranks_per_node)
    return Link(
        bandwidth=inter.bandwidth * share, latency=inter.latency, ramp_nbytes=inter.ramp_nbytes * share
    )


def _hop(link: Link, nbytes: float) -> float:
    return link.latency + (nbytes + link.ramp_nbytes) / link.bandwidth

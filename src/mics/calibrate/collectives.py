"""All-gathers, reduce-scatters and all-reduces of a step, over the groups of a step, from small to large."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from mics.calibrate.clock import Stopwatch
from mics.calibrate.fit import TINY_NBYTES, CollectiveTime, Division
from mics.comm import Collectives, GroupCollectives, TrafficCounter, TwoStageCollectives, World
from mics.cost.collectives import Kind, Span

KINDS: Final = (Kind.ALL_GATHER, Kind.REDUCE_SCATTER, Kind.ALL_REDUCE)
_LEAST_NBYTES: Final = 64 << 10
_GROWTH: Final = 4
_SETTLED: Final = 0.03  # of the bandwidth: what four times the size may change where it has settled
_FEWEST_SIZES: Final = 4
_RUNS: Final = 4  # of one size at least, with those that are not counted


@dataclass(frozen=True, kw_only=True)
class Groups:
    """The divisions of the world that a step communicates in: in each, all groups work at once."""

    num_nodes: int
    ranks_per_node: int
    collectives: dict[Division, Collectives]
    """This rank's, where a division has groups of several ranks."""

    @classmethod
    def of(cls, world: World, node_of: Sequence[int]) -> Groups:
        """``node_of``: for every rank its node; all nodes have as many ranks. Every rank calls it."""
        nodes = sorted(set(node_of), key=node_of.index)
        members = [[rank for rank, node in enumerate(node_of) if node == each] for each in nodes]
        counter = TrafficCounter()

        def over(axis: str, groups: Sequence[tuple[int, ...]]) -> GroupCollectives:
            # Its own process groups: a size that fails must not harm others.
            group = world.group(groups, f"calibrate {axis}")
            return GroupCollectives(group, axis=axis, counter=counter, liveness=None)

        num_nodes, ranks_per_node = len(nodes), len(members[0])
        found: dict[Division, Collectives] = {}
        intra = over("intra", [tuple(ranks) for ranks in members])
        inter = over("inter", [tuple(ranks) for ranks in zip(*members, strict=True)])
        if ranks_per_node > 1:
            found["intra"] = intra
        if num_nodes > 1:
            found["inter"] = inter
        if ranks_per_node > 1 and num_nodes > 1:
            found["world"] = TwoStageCollectives(axis="world", intra=intra, inter=inter, counter=counter)
        return cls(num_nodes=num_nodes, ranks_per_node=ranks_per_node, collectives=found)

    def span(self, division: Division) -> Span:
        """How its groups lie on the nodes."""
        if division == "intra":
            return Span(size=self.ranks_per_node, num_nodes=1, on_a_node=self.ranks_per_node)
        on_a_node = 1 if division == "inter" else self.ranks_per_node
        return Span(size=self.num_nodes * on_a_node, num_nodes=self.num_nodes, on_a_node=on_a_node)

    def series(self) -> Iterator[tuple[Division, Kind]]:
        """What is measured, one after the other. A world's all-reduce is no part of a step."""
        for division in self.collectives:
            yield from ((division, kind) for kind in KINDS if (division, kind) != ("world", Kind.ALL_REDUCE))

    def action(self, division: Division, kind: Kind, buffer: Tensor) -> Callable[[], None]:
        """One collective whose whole buffer is ``buffer``, as the engine calls it."""
        collectives = self.collectives[division]
        label = f"calibration of {buffer.nbytes} bytes"
        if kind is Kind.ALL_REDUCE:
            return lambda: collectives.all_reduce(buffer, label)
        shard = torch.zeros(buffer.numel() // collectives.size, dtype=buffer.dtype, device=buffer.device)
        if kind is Kind.ALL_GATHER:
            return lambda: collectives.all_gather(buffer, shard, label)
        return lambda: collectives.reduce_scatter(shard, buffer, label)


def sizes(max_nbytes: int) -> list[int]:
    """Bytes of whole buffers, the tiny one first."""
    found = [TINY_NBYTES, _LEAST_NBYTES]
    while found[-1] * _GROWTH <= max_nbytes:
        found.append(found[-1] * _GROWTH)
    return found


def measure_series(
    watch: Stopwatch,
    groups: Groups,
    division: Division,
    kind: Kind,
    *,
    device: torch.device,
    max_nbytes: int,
    max_seconds: float,
) -> list[CollectiveTime]:
    """One collective at growing sizes, until its bandwidth has settled or its time is up."""
    points: list[CollectiveTime] = []
    span = groups.span(division)
    began = watch.left
    for nbytes in sizes(max_nbytes):
        left = max_seconds - (began - watch.left)
        if points and _is_enough(points, nbytes, left=left):
            break
        numel = nbytes // 4 // span.size * span.size
        buffer = torch.zeros(numel, dtype=torch.float32, device=device)
        timing = watch.time(groups.action(division, kind, buffer), max_seconds=left)
        points.append(
            CollectiveTime(
                kind=kind,
                division=division,
                span=span,
                nbytes=buffer.nbytes,
                seconds=timing.seconds,
                spread=timing.spread,
                two_stage=division == "world",
            )
        )
    return points


def _is_enough(points: Sequence[CollectiveTime], nbytes: int, *, left: float) -> bool:
    """Whether a larger size would tell no more, or take too long."""
    last = points[-1]
    expected = _RUNS * last.seconds * nbytes / last.nbytes
    if len(points) >= _FEWEST_SIZES and expected > left:
        return True
    if len(points) <= _FEWEST_SIZES:
        return False
    before = points[-2]
    speeds = last.nbytes / last.seconds, before.nbytes / before.seconds
    return abs(speeds[0] / speeds[1] - 1) < _SETTLED

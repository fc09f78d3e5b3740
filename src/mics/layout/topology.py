"""Ranks, nodes, partition groups and replication groups: arithmetic, and which sizes are refused.

Two nodes of two ranks, partition size 4 (one group over N = 2 nodes, k = 2 ranks on each)::

    node 0:  rank 0 (l=0) owns chunk 0     rank 1 (l=1) owns chunk 2
    node 1:  rank 2 (l=0) owns chunk 1     rank 3 (l=1) owns chunk 3

Rank (node n, local l) owns chunk ``l*N + n``. The inter-node gather among equal ``l`` then lands where it
belongs, ``[0 1]`` and ``[2 3]``, and one intra-node gather of those blocks finishes the unit without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from mics.errors import SettingsError


@dataclass(frozen=True, kw_only=True)
class Stages:
    """The two process groups a rank uses when its group spans whole nodes."""

    intra: tuple[int, ...]  # ranks of this node, by local index l
    inter: tuple[int, ...]  # ranks with the same l, by node index n


@dataclass(frozen=True, kw_only=True)
class Topology:
    """Who holds what. ``partition_groups[g][c]`` is the rank that owns chunk ``c`` in replica ``g``."""

    node_of: tuple[int, ...]  # node of each rank
    partition_groups: tuple[tuple[int, ...], ...]
    two_stage: tuple[bool, ...]  # for each partition group: ordered by l*N + n over N > 1 nodes
    replicas_two_stage: bool = False  # so are all replication groups

    def ranks_beside(self, rank: int) -> int:
        """How many ranks the node of ``rank`` has, itself counted."""
        return self.node_of.count(self.node_of[rank])

    @property
    def world_size(self) -> int:
        return len(self.node_of)

    @property
    def partition_size(self) -> int:
        return len(self.partition_groups[0])

    @property
    def num_replicas(self) -> int:
        return len(self.partition_groups)

    def replica(self, rank: int) -> int:
        """Index of the partition group that ``rank`` is in."""
        return self._places[rank][0]

    @cached_property
    def _places(self) -> dict[int, tuple[int, int]]:
        """(replica, chunk) of each rank."""
        return {rank: (g, c) for g, group in enumerate(self.partition_groups) for c, rank in enumerate(group)}

    def chunk(self, rank: int) -> int:
        """Index of the chunk of every unit that ``rank`` owns."""
        return self._places[rank][1]

    def partition_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold one copy of the model together with ``rank``, in ownership order."""
        return self.partition_groups[self.replica(rank)]

    def piece(self, rank: int) -> int:
        """Index of the piece of its chunk that ``rank`` owns among the replicas."""
        return self.replication_group(rank).index(rank)

    @cached_property
    def replication_groups(self) -> tuple[tuple[int, ...], ...]:
        """For each chunk, the ranks that own it, by piece: in order of rank, as torch has it, or l*N + n."""
        owners = zip(*self.partition_groups, strict=True)
        hierarchical = self.replicas_two_stage
        return tuple(_ownership_order(ranks, self.node_of, hierarchical=hierarchical)[0] for ranks in owners)

    def replication_group(self, rank: int) -> tuple[int, ...]:
        """The ranks that own the same chunk as ``rank``."""
        return self.replication_groups[self.chunk(rank)]

    def stages(self, rank: int) -> Stages | None:
        """The intra and inter groups of ``rank``, or None where one flat collective serves."""
        return self._stages.get(rank)

    def replica_stages(self, rank: int) -> Stages | None:
        """Likewise of its replication group."""
        return self._replica_stages.get(rank)

    @cached_property
    def _stages(self) -> dict[int, Stages]:
        groups = [
            group for group, staged in zip(self.partition_groups, self.two_stage, strict=True) if staged
        ]
        return _stages_of(groups, self.node_of)

    @cached_property
    def _replica_stages(self) -> dict[int, Stages]:
        return _stages_of(self.replication_groups if self.replicas_two_stage else (), self.node_of)


def why_not_two_stage(topology: Topology) -> str | None:
    """What keeps a partition group over several nodes from being gathered in two stages; None: nothing."""
    for group, two_stage in zip(topology.partition_groups, topology.two_stage, strict=True):
        counts = [len(block) for block in _blocks_by_node(group, topology.node_of)]
        if two_stage or len(counts) == 1 or counts == [1] * len(counts):
            continue
        if len(set(counts)) > 1:
            return f"the partition group of ranks {_short(group)} has {counts} ranks on its nodes"
        return f"the ranks {_short(group)} of a partition group are not numbered node by node"
    return None


def _short(ranks: Sequence[int]) -> str:
    listed = sorted(ranks)
    return str(listed) if len(listed) <= 8 else f"[{listed[0]}, ..., {listed[-1]}]"


def plan_topology(
    node_of: Sequence[int],
    *,
    partition_size: int | None = None,
    partition_groups: Sequence[Sequence[int]] | None = None,
    hierarchical: bool = True,
    replicas_in_stages: bool = False,
) -> Topology:
    """Split the world into partition groups of consecutive ranks, or take the groups as given.

    ``replicas_in_stages``: gradients between replicas are encoded, so they are first added up inside nodes,
    where replication groups fill nodes.
    """
    world_size = len(node_of)
    if partition_groups is None:
        if partition_size is None:
            raise SettingsError("plan_topology needs partition_size or partition_groups; found neither")
        check_partition_size(partition_size, world_size)
        partition_groups = [
            range(start, start + partition_size) for start in range(0, world_size, partition_size)
        ]
    check_partition_groups(partition_groups, world_size)
    ordered = [_ownership_order(group, node_of, hierarchical=hierarchical) for group in partition_groups]
    owners = list(zip(*(ranks for ranks, _ in ordered), strict=True))
    replicas = [_ownership_order(each, node_of, hierarchical=replicas_in_stages) for each in owners]
    return Topology(
        node_of=tuple(node_of),
        partition_groups=tuple(ranks for ranks, _ in ordered),
        two_stage=tuple(two_stage for _, two_stage in ordered),
        replicas_two_stage=all(two_stage for _, two_stage in replicas),
    )


def check_partition_size(partition_size: int, world_size: int) -> None:
    """Raise unless ``partition_size`` divides the world."""
    if isinstance(partition_size, bool) or not isinstance(partition_size, int) or partition_size < 1:
        raise SettingsError(f"partition_size: expected a positive integer, found {partition_size!r}")
    if world_size % partition_size:
        fitting = [size for size in range(1, world_size + 1) if world_size % size == 0]
        raise SettingsError(
            f"partition_size: expected a divisor of the world size {world_size}, found {partition_size}; "
            f"choose one of {fitting} or change the number of ranks"
        )


def check_partition_groups(groups: Sequence[Sequence[int]], world_size: int) -> None:
    """Raise unless ``groups`` are equally long and hold every rank of the world once."""
    sizes = sorted({len(group) for group in groups})
    ranks = sorted(rank for group in groups for rank in group)
    if len(sizes) != 1 or ranks != list(range(world_size)):
        raise SettingsError(
            f"partition groups: expected equally long groups that hold each of the {world_size} ranks once, "
            f"found groups of sizes {sizes} over ranks {ranks}; "
            "give a mesh of shape (replicas, partition size) over the whole world"
        )


def _ownership_order(
    group: Sequence[int], node_of: Sequence[int], *, hierarchical: bool
) -> tuple[tuple[int, ...], bool]:
    """The group's ranks by chunk, and whether they span whole nodes as l*N + n."""
    ranks = sorted(group)
    blocks = _blocks_by_node(ranks, node_of)
    num_local = len(blocks[0])
    fills_nodes = len(blocks) > 1 and num_local > 1 and all(len(block) == num_local for block in blocks)
    # Nodes whose ranks interleave would need groups that are not in order of rank, which torch sorts.
    in_order = all(list(peers) == sorted(peers) for peers in zip(*blocks, strict=False))
    if not (hierarchical and fills_nodes and in_order):
        return tuple(ranks), False
    return tuple(block[local] for local in range(num_local) for block in blocks), True


def _stages_of(groups: Sequence[Sequence[int]], node_of: Sequence[int]) -> dict[int, Stages]:
    """By rank."""
    found: dict[int, Stages] = {}
    for group in groups:
        blocks = _blocks_by_node(group, node_of)
        peers = list(zip(*blocks, strict=True))
        for block in map(tuple, blocks):
            found |= {
                rank: Stages(intra=block, inter=inter) for rank, inter in zip(block, peers, strict=True)
            }
    return found


def _blocks_by_node(ranks: Sequence[int], node_of: Sequence[int]) -> list[list[int]]:
    first: dict[int, int] = {}  # nodes in order of their first rank
    for rank in sorted(ranks):
        first.setdefault(node_of[rank], rank)
    by_node = sorted(ranks, key=lambda rank: (first[node_of[rank]], rank))
    return [list(block) for _, block in groupby(by_node, key=lambda rank: node_of[rank])]

"""Groups and ownership order, by property and by the pictures in the docstrings."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics.errors import SettingsError
from mics.layout.topology import Topology, plan_topology


@st.composite
def worlds(draw: st.DrawFn) -> tuple[list[int], int]:
    """Up to 24 ranks on nodes of up to 6, the last perhaps smaller, and a partition size that divides."""
    world_size = draw(st.integers(1, 24))
    ranks_per_node = draw(st.integers(1, 6))
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    return [rank // ranks_per_node for rank in range(world_size)], draw(st.sampled_from(divisors))


def _plan(world: tuple[list[int], int], *, hierarchical: bool = True) -> Topology:
    node_of, partition_size = world
    return plan_topology(node_of, partition_size=partition_size, hierarchical=hierarchical)


@given(worlds())
def test_groups_cover_the_world_once(world: tuple[list[int], int]) -> None:
    """Partition groups split the world, and so do replication groups; each pair meets in one rank."""
    topology = _plan(world)
    everyone = list(range(topology.world_size))
    assert sorted(r for group in topology.partition_groups for r in group) == everyone
    assert sorted(r for group in topology.replication_groups for r in group) == everyone
    for rank in everyone:
        assert topology.partition_group(rank)[topology.chunk(rank)] == rank
        assert topology.replication_group(rank)[topology.replica(rank)] == rank
        shared = set(topology.partition_group(rank)) & set(topology.replication_group(rank))
        assert shared == {rank}


@given(worlds())
def test_two_stage_gather_lands_in_place(world: tuple[list[int], int]) -> None:
    """Gathering among equal l, then within the node, puts every chunk where its number says."""
    topology = _plan(world)
    for rank in range(topology.world_size):
        stages = topology.stages(rank)
        if stages is None:
            continue
        blocks = []
        for member in stages.intra:  # after the inter stage each member holds one block of chunks
            member_stages = topology.stages(member)
            assert member_stages is not None
            blocks.append([topology.chunk(peer) for peer in member_stages.inter])
        assert [chunk for block in blocks for chunk in block] == list(range(topology.partition_size))


@given(worlds())
def test_ownership_is_l_times_nodes_plus_n(world: tuple[list[int], int]) -> None:
    """In a group that fills N nodes, rank (n, l) owns chunk l*N + n; elsewhere chunks follow ranks."""
    topology = _plan(world)
    for group, two_stage in zip(topology.partition_groups, topology.two_stage, strict=True):
        ranks = sorted(group)
        nodes = sorted({topology.node_of[rank] for rank in ranks})
        for rank in ranks:
            mates = [r for r in ranks if topology.node_of[r] == topology.node_of[rank]]
            n, local = nodes.index(topology.node_of[rank]), mates.index(rank)
            expected = local * len(nodes) + n if two_stage else ranks.index(rank)
            assert topology.chunk(rank) == expected


@given(worlds())
def test_flat_order_without_hierarchy(world: tuple[list[int], int]) -> None:
    """hierarchical=False never makes stages."""
    topology = _plan(world, hierarchical=False)
    assert all(topology.stages(rank) is None for rank in range(topology.world_size))
    assert all(list(group) == sorted(group) for group in topology.partition_groups)


def test_the_picture_in_the_docstring() -> None:
    """Two nodes of two: ranks 0, 2, 1, 3 own chunks 0, 1, 2, 3."""
    topology = plan_topology([0, 0, 1, 1], partition_size=4)
    assert topology.partition_groups == ((0, 2, 1, 3),)
    stages = topology.stages(3)
    assert stages is not None
    assert (stages.intra, stages.inter) == ((2, 3), (1, 3))


def test_ragged_groups_fall_back_to_one_stage() -> None:
    """Three ranks here and one there cannot be staged; the order is that of the ranks."""
    topology = plan_topology([0, 0, 0, 1], partition_size=4)
    assert topology.partition_groups == ((0, 1, 2, 3),)
    assert topology.stages(0) is None


@pytest.mark.parametrize("size", [0, -1, 3, True, 2.0])
def test_sizes_that_do_not_divide_are_refused(size: object) -> None:
    """The error says what was expected and what was found."""
    with pytest.raises(SettingsError, match=r"expected .* found"):
        plan_topology([0, 0, 1, 1], partition_size=size)  # type: ignore[arg-type]


@pytest.mark.parametrize("groups", [[[0, 1], [2]], [[0, 1], [1, 2]], [[0, 1]]])
def test_groups_that_do_not_cover_the_world_are_refused(groups: list[list[int]]) -> None:
    """Unequal, overlapping and partial groups."""
    with pytest.raises(SettingsError, match="each of the 4 ranks once"):
        plan_topology([0, 0, 1, 1], partition_groups=groups)

"""Gather and reduce in two stages, in every group of one to four nodes with one to four ranks each.

Real ranks, sixteen at most. Each world plays once: all moves below, through the collectives that `World`
makes for a model and through collectives put together by hand; the tests then look at what its ranks found.
For `N` nodes with `k` ranks each, `p = N * k` and chunks of `c` bytes, one gather or one reduce in two stages
sends from each rank

inter     `(N - 1) * c`, to the ranks with the same local index: `(p - k) / p` of the unit from each node
intra     `(k - 1) * N * c`, blocks of `N` chunks, to the ranks of the same node
together  `(p - 1) * c`, as one flat collective does
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import pytest
import torch
from torch import Tensor

from mics.comm import (
    Collectives,
    GroupCollectives,
    Traffic,
    TrafficCounter,
    TwoStageCollectives,
    World,
    join_world,
)
from mics.comm.lanes import LanedCollectives, Lanes
from mics.comm.protocol import Pairs
from mics.layout.topology import Topology, plan_topology
from tests.ranks import MAX_WORLD_SIZE, RankPool, run_ranks

MAX_RANKS = 16
FORMATS = {torch.float32: torch.int32, torch.bfloat16: torch.int16}
"""What is moved, and the integers of the same width."""
Move = tuple[torch.dtype, int, bool]
"""Format, elements of a chunk, and whether a rank's own chunk lies inside the buffer or apart from it."""
MOVES: list[Move] = [
    (torch.float32, 1, False),
    (torch.float32, 7, True),
    (torch.float32, 1000, False),
    (torch.float32, 1000, True),
    (torch.bfloat16, 7, False),
    (torch.bfloat16, 1000, True),
]
WAYS = {"world": MOVES, "by hand": MOVES[2:5], "flat": MOVES[2:5]}
"""How the collectives are made: by `World` for a model, put together here, by `World` without stages."""
KINDS = ("all_gather", "reduce_scatter")
TIMEOUT_S = 60.0
"""For all moves of one world, which take about a second."""

# By number of ranks: the pool keeps its process group while that stays the same.
SHAPES = sorted(((n, k) for n in range(1, 5) for k in range(1, 5)), key=lambda shape: shape[0] * shape[1])
_FULL = {(1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2), (3, 4), (4, 3), (4, 4)}
"""Left to `make test-all`: each number of nodes and of ranks on one is in others."""


# ---------------------------------------------------------------------------------------------
# What a rank does
# ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one rank found."""

    size: int
    position: int
    two_stage: bool
    wrong: dict[tuple[str, str], list[Move]]  # (way, kind) -> what did not end as it should
    traffic: dict[str, Traffic]


class Mover(Protocol):
    """What collectives and collectives in lanes have in common."""

    def all_gather(self, out: Tensor, shard: Tensor, label: str) -> object: ...

    def reduce_together(self, pairs: Pairs, label: str) -> object: ...


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank's place in its partition group, the data it moves and what should come of them."""

    topology: Topology
    rank: int
    device: torch.device

    def gathers(self, mover: Mover, dtype: torch.dtype, numel: int, inside: bool) -> bool:
        """Whether a gather ends with every chunk in its place, to the bit."""
        size, chunk = self.topology.partition_size, self.topology.chunk(self.rank)
        # No number occurs twice in the world. As bits: bfloat16 has only 256 whole numbers in a row.
        bits = torch.arange(self.topology.world_size * numel, dtype=FORMATS[dtype], device=self.device)
        expected = bits.view(self.topology.num_replicas, -1)[self.topology.replica(self.rank)]
        out = torch.full_like(expected, -1)
        shard = expected.view(size, -1)[chunk].clone()
        if inside:
            shard = out.view(size, -1)[chunk].copy_(shard)
        mover.all_gather(out.view(dtype), shard.view(dtype), "unit")
        return torch.equal(out, expected) and torch.equal(shard, expected.view(size, -1)[chunk])

    def reduces(self, mover: Mover, dtype: torch.dtype, numel: int, inside: bool) -> bool:
        """Whether a reduce ends with the exact sum of this rank's chunk, to the bit."""
        size, chunk = self.topology.partition_size, self.topology.chunk(self.rank)
        addends = _addends(dtype)[:, : size * numel]
        members = list(self.topology.partition_group(self.rank))
        expected = addends.unflatten(1, (size, -1))[members, chunk].double().sum(0).to(self.device, dtype)
        buffer = addends[self.rank].to(self.device, copy=True)
        out = buffer.view(size, -1)[chunk] if inside else torch.full_like(expected, -1)
        mover.reduce_together([(out, buffer)], "unit")
        return torch.equal(out.view(FORMATS[dtype]), expected.view(FORMATS[dtype]))


@cache
def _addends(dtype: torch.dtype) -> Tensor:
    """What each rank adds: [rank, element]. Whole numbers so small that any order of adding is exact."""
    end = round(2 / torch.finfo(dtype).eps) // MAX_RANKS
    shape = MAX_RANKS, MAX_RANKS * max(numel for _, numel, _ in MOVES)
    return torch.randint(end, shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def _play(node_of: Sequence[int], partition_size: int) -> Found:
    """All moves of this rank. None raises if its result is wrong: the others would wait in the next."""
    world = join_world()
    device = world.backend_device(None)
    staged = plan_topology(node_of, partition_size=partition_size)
    flat = plan_topology(node_of, partition_size=partition_size, hierarchical=False)
    wrong: dict[tuple[str, str], list[Move]] = {}
    traffic: dict[str, Traffic] = {}

    def move_all(way: str, topology: Topology, gather: Mover, reduce: Mover, counter: TrafficCounter) -> None:
        member = Member(topology=topology, rank=world.rank, device=device)
        moves = WAYS[way]
        wrong[way, "all_gather"] = [move for move in moves if not member.gathers(gather, *move)]
        wrong[way, "reduce_scatter"] = [move for move in moves if not member.reduces(reduce, *move)]
        traffic[way] = counter.snapshot()

    for way, topology in (("world", staged), ("flat", flat)):
        counter = TrafficCounter()
        mesh = world.collectives(topology, counter, device, overlap=False)
        move_all(way, topology, mesh.groups.gather, mesh.groups.reduce, counter)
    counter = TrafficCounter()
    by_hand = _by_hand(world, staged, counter)
    in_lanes = LanedCollectives(by_hand, Lanes(device, overlap=False), "by hand")
    move_all("by hand", staged, in_lanes, in_lanes, counter)
    return Found(
        size=by_hand.size,
        position=by_hand.position,
        two_stage=staged.two_stage[staged.replica(world.rank)],
        wrong=wrong,
        traffic=traffic,
    )


def _by_hand(world: World, topology: Topology, counter: TrafficCounter) -> Collectives:
    """The collectives of this rank's partition group. Every rank makes every process group."""

    def over(axis: str, groups: Sequence[tuple[int, ...]]) -> GroupCollectives:
        return GroupCollectives(world.group(groups), axis=axis, counter=counter, liveness=None)

    stages = [found for rank in range(world.size) if (found := topology.stages(rank)) is not None]
    intra = over("intra", sorted({found.intra for found in stages}))
    inter = over("inter", sorted({found.inter for found in stages}))
    unstaged = [g for g, two in zip(topology.partition_groups, topology.two_stage, strict=True) if not two]
    flat = over("partition", unstaged)
    if topology.stages(world.rank) is None:
        return flat
    return TwoStageCollectives(axis="partition", intra=intra, inter=inter, counter=counter)


# ---------------------------------------------------------------------------------------------
# What it should find
# ---------------------------------------------------------------------------------------------


def _expected_traffic(num_nodes: int, num_local: int, *, staged: bool) -> dict[str, Traffic]:
    """Of one rank, each way."""
    flat_sent = {"partition": num_nodes * num_local - 1}  # chunks a move
    sent = dict.fromkeys(WAYS, flat_sent)
    if staged:
        links = {"inter": num_nodes - 1, "intra": (num_local - 1) * num_nodes}
        sent |= {"world": flat_sent | links, "by hand": flat_sent | links}
    return {way: _traffic(sent[way], moves) for way, moves in WAYS.items()}


def _traffic(sent: dict[str, int], moves: Sequence[Move]) -> Traffic:
    """One gather and one reduce for each move, along each axis that anything is sent along."""
    keys = [(axis, kind) for axis in sent for kind in KINDS if sent[axis]]
    return Traffic(
        calls={key: len(moves) for key in keys},
        nbytes={key: sent[key[0]] * _chunks_nbytes(moves) for key in keys},
    )


def _chunks_nbytes(moves: Sequence[Move]) -> int:
    return sum(dtype.itemsize * numel for dtype, numel, _ in moves)


def _wrong(ranks: Sequence[Found], kind: str, ways: Sequence[str]) -> list[str]:
    """What went wrong, in words."""
    return [
        f"rank {rank}, {way}: {kind} of chunks of {numel} {dtype}, {'inside' if inside else 'apart'}"
        for rank, found in enumerate(ranks)
        for way in ways
        for dtype, numel, inside in found.wrong[way, kind]
    ]


def _name(shape: tuple[int, int]) -> str:
    return f"{shape[0]}x{shape[1]}"


Ranks = tuple[int, int, list[Found]]
"""N, k and what each rank found."""


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    """Twice as many ranks as other tests use, so not the session's: they end with this file."""
    with RankPool(MAX_RANKS) as pool:
        yield pool


@pytest.fixture(
    scope="module",
    params=[pytest.param(shape, marks=[pytest.mark.full] if shape in _FULL else []) for shape in SHAPES],
    ids=_name,
)
def ranks(request: pytest.FixtureRequest, pool: RankPool) -> Ranks:
    """One world of each shape, for all tests that look at it."""
    num_nodes, num_local = request.param
    size = num_nodes * num_local
    node_of = [rank // num_local for rank in range(size)]
    return num_nodes, num_local, pool.run(size, _play, node_of, size, timeout_s=TIMEOUT_S)


def test_a_gather_puts_every_chunk_in_its_place(ranks: Ranks) -> None:
    """Every rank ends with the whole unit, to the bit, and with its own shard as it was."""
    _, _, found = ranks
    assert _wrong(found, "all_gather", ["world", "by hand"]) == []


def test_a_reduce_adds_up_the_chunk_of_each_rank(ranks: Ranks) -> None:
    """Every rank ends with the exact sum of its chunk, beside the buffer or in it."""
    _, _, found = ranks
    assert _wrong(found, "reduce_scatter", ["world", "by hand"]) == []


def test_one_flat_collective_gives_the_same_bits(ranks: Ranks) -> None:
    """Chunks then follow the ranks; units and sums are held, to the bit, against those of the stages."""
    _, _, found = ranks
    assert [_wrong(found, kind, ["flat"]) for kind in KINDS] == [[], []]


def test_calls_and_bytes_equal_the_formula(ranks: Ranks) -> None:
    """One call on each link for each move, and from a node `(p - k) / p` of the unit to the others."""
    num_nodes, num_local, found = ranks
    staged = num_nodes > 1 and num_local > 1
    expected = _expected_traffic(num_nodes, num_local, staged=staged)
    for rank in found:
        assert rank.traffic == expected
    if staged:
        size = num_nodes * num_local
        units_nbytes = 2 * size * _chunks_nbytes(MOVES)  # gathered and reduced
        for node in range(num_nodes):
            ranks_of_node = found[node * num_local : (node + 1) * num_local]
            sent = sum(rank.traffic["world"].axis_nbytes("inter") for rank in ranks_of_node)
            assert sent * size == (size - num_local) * units_nbytes


def test_chunks_are_owned_by_local_index_then_node(ranks: Ranks) -> None:
    """Rank (n, l) owns chunk l*N + n; within one node, or with one rank a node, there are no stages."""
    num_nodes, num_local, found = ranks
    places = [(node, local) for node in range(num_nodes) for local in range(num_local)]
    for (node, local), rank in zip(places, found, strict=True):
        assert rank.two_stage == (num_nodes > 1 and num_local > 1)
        assert rank.size == num_nodes * num_local
        assert rank.position == local * num_nodes + node  # with N = 1 or k = 1: the order of the ranks


@pytest.mark.parametrize(
    ("node_of", "partition_size", "two_stage"),
    [
        pytest.param("0001", 4, [False], id="three-and-one"),
        pytest.param("001222", 6, [False], id="two-one-three"),
        pytest.param("000111", 2, [False] * 3, id="pairs-in-nodes-of-three"),
        pytest.param("0110", 4, [False], id="interleaved"),
        pytest.param("00112233", 4, [True, True], id="two-replicas"),
        pytest.param("00112223", 4, [True, False], id="one-replica-ragged"),
    ],
)
def test_ragged_nodes_and_replicas(
    pool: RankPool, node_of: str, partition_size: int, two_stage: list[bool]
) -> None:
    """Groups that do not fill their nodes alike move in one stage, also beside a group that has two."""
    nodes = [int(node) for node in node_of]
    found: list[Found] = pool.run(len(nodes), _play, nodes, partition_size, timeout_s=TIMEOUT_S)
    assert [rank.two_stage for rank in found[::partition_size]] == two_stage
    assert [_wrong(found, kind, list(WAYS)) for kind in KINDS] == [[], []]
    for rank in found:  # a group in two stages is one of two nodes
        shape = (2, partition_size // 2) if rank.two_stage else (1, partition_size)
        assert rank.traffic == _expected_traffic(*shape, staged=rank.two_stage)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [s for s in SHAPES if s[0] * s[1] <= MAX_WORLD_SIZE], ids=_name)
def test_nccl_ranks_find_the_same(shape: tuple[int, int]) -> None:
    """The same moves by NCCL: with whole numbers its order of adding makes no difference."""
    num_nodes, num_local = shape
    size = num_nodes * num_local
    node_of = [rank // num_local for rank in range(size)]
    found: list[Found] = run_ranks(size, _play, node_of, size, backend="nccl")
    assert [_wrong(found, kind, list(WAYS)) for kind in KINDS] == [[], []]
    expected = _expected_traffic(num_nodes, num_local, staged=num_nodes > 1 and num_local > 1)
    assert all(rank.traffic == expected for rank in found)

"""The exactness grid: which cases there are, how one is trained, what it must equal.

A case is a world (ranks, partition size, ranks per node) and a way to train in it (accumulation,
optimizer sharding, parameter dtype, announced boundary or not, clipping or not; low memory, units that
stay, or neither; new parameters as moves where they may be). For every world with 1 to 8 ranks,
`quick_cases` takes rows of an orthogonal array over the ways to train, in which every pair of settings
occurs together; `full_cases` takes all combinations. `pair_cases` are those of the quick ones that are
needed for every pair of settings.

No pytest here: `python -m tests.gpu_grid` runs the same cases where there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch

import mics
from tests import pairwise
from tests.reference import (
    EXACT,
    NORM,
    Outcome,
    Recipe,
    Sharding,
    Tolerance,
    differences,
    iterate_divisors,
    merge,
    train_ordered,
    train_plain,
    train_sharded,
)
from tests.toys import language_recipe

MAX_RANKS_PER_NODE = 4
MAX_ACCUMULATION = 4
_STAY_NBYTES = 1 << 20  # all units
TIGHT_NORM = 0.25
"""Below the norm of every step's gradient, so that clipping changes it."""

PLAIN_FP32 = Tolerance(rtol=2e-5, atol=2e-7)
"""Against one pass over the global batch: the same terms summed in another order."""
PLAIN_BF16 = Tolerance(rtol=0.1, atol=1e-3)
"""The same in bf16, where each rank's gradient has 8 bits: a wrong scale or a lost gradient shows, the
last digits do not. The ordered reference is the sharp one."""
GPU_FP32 = Tolerance(rtol=1e-4, atol=1e-6)
GPU_BF16 = Tolerance(rtol=0.1, atol=2e-3)
"""On a GPU against references computed on the CPU: other kernels, and NCCL's own order of summation."""


SETTINGS = (
    *("world_size", "partition_size", "ranks_per_node", "accumulation", "optimizer_sharding"),
    *("bf16", "announced", "clipped", "low_memory", "staying", "moves"),
)
"""What differs between cases, by name."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """One point of the grid."""

    world_size: int
    partition_size: int
    ranks_per_node: int
    accumulation: int
    optimizer_sharding: str
    bf16: bool
    announced: bool
    clipped: bool
    low_memory: bool = False
    staying: bool = False
    moves: bool = False
    shape: tuple[tuple[str, int], ...] = ()
    num_steps: int = 3

    def __str__(self) -> str:
        return (
            f"world {self.world_size} p {self.partition_size} k {self.ranks_per_node} "
            f"accumulation {self.accumulation} optimizer/{self.optimizer_sharding} "
            f"{'bf16' if self.bf16 else 'fp32'} "
            f"{'announced' if self.announced else 'unannounced'}"
            f"{' clipped' if self.clipped else ''}"
            f"{' low_memory' if self.low_memory else ''}"
            f"{' staying' if self.staying else ''}"
            f"{' moves' if self.moves else ''}"
        )

    @property
    def route(self) -> str | None:
        """Who has values of before, so that new ones may come to them as moves."""
        if self.bf16 and self.partition_size < self.world_size and self.optimizer_sharding == "world":
            return "replicas"
        spans_nodes = self.partition_size == self.world_size > self.ranks_per_node
        return "units that stay" if self.bf16 and spans_nodes and self.staying else None

    def with_moves(self) -> Case:
        """With new values as moves, in enough steps for a forward to use some.

        The first step sends values, and its needs make room for the second's moves. Units stay once an order
        has come twice, in the micro-steps of one step or in two.
        """
        assert self.route is not None
        num_steps = 3 if self.route == "replicas" else 5 + (self.accumulation == 1)
        return replace(self, moves=True, num_steps=max(self.num_steps, num_steps))

    def recipe(self) -> Recipe:
        return language_recipe(
            shape=self.shape,
            accumulation=self.accumulation,
            num_steps=self.num_steps,
            max_norm=TIGHT_NORM if self.clipped else None,
            param_dtype=torch.bfloat16 if self.bf16 else None,
        )

    def sharding(self, device: str = "cpu") -> Sharding:
        # Recording gradients needs them, which would make an unannounced boundary that of the
        # recording; left alone, it is that of the clipping or of the optimizer.
        return Sharding(
            partition_size=self.partition_size,
            optimizer_sharding=self.optimizer_sharding,
            announced=self.announced,
            record_gradients=self.announced,
            device=device,
            options={
                "low_memory": self.low_memory,
                "prefetch": mics.Prefetch(units=1, stay_nbytes=_STAY_NBYTES) if self.staying else "auto",
                "compression": mics.Compression() if self.moves else None,
            },
        )


# ---------------------------------------------------------------------------------------------
# Which cases
# ---------------------------------------------------------------------------------------------


def worlds(max_world_size: int = 8) -> Iterator[tuple[int, int, int]]:
    """Every (world size, partition size, ranks per node); more ranks per node than ranks is one node."""
    for world_size in range(1, max_world_size + 1):
        for partition_size in iterate_divisors(world_size):
            for ranks_per_node in range(1, min(MAX_RANKS_PER_NODE, world_size) + 1):
                yield world_size, partition_size, ranks_per_node


def quick_cases(max_world_size: int = 8) -> list[Case]:
    """A part of an orthogonal array in each world, the rest in others: all pairs occur.

    Four rows, two where there are more than two ranks, one where there are more than four: those cases take
    the longest. Two steps each, three in the small worlds.
    """
    cases = []
    for index, world in enumerate(worlds(max_world_size)):
        if world[0] <= 4:
            rows = list(_orthogonal_rows(half=(index // 3) % 2))
            chosen = rows if world[0] <= 2 else rows[index % 2 :: 2]
        else:  # four node sizes in turn: together they have the four rows of a half
            group = (index + 1) // 4
            chosen = [list(_orthogonal_rows(half=group % 2))[(index + group) % 4]]
        num_steps = 3 if world[0] <= 2 else 2
        for number, row in enumerate(chosen):
            turn = (index + 2 * number) % 3
            # Units stay once an order has come twice, and the first step has one of its own.
            steps = 4 if turn == 1 and row[0] == 1 else num_steps
            case = replace(_case(world, row), num_steps=steps, low_memory=turn == 0, staying=turn == 1)
            # In a third of the worlds new values come as they are.
            cases.append(case.with_moves() if case.route is not None and index % 3 else case)
    return cases


def pair_cases() -> list[Case]:
    """Cases of `quick_cases` in which all pairs of settings meet in worlds of up to four ranks.

    Of six ranks there is one case with three replicas, and one with two replicas of three ranks; of eight one
    in nodes with four replicas, one over two nodes with two, and one over all. They take the longest.
    """
    cases = [case for case in quick_cases() if case.world_size <= 4]
    rows = [tuple(getattr(case, name) for name in SETTINGS) for case in cases]
    known = {_world(case): case for case in quick_cases()}
    large = [(6, 2, 4), (6, 3, 4), (8, 2, 4), (8, 4, 2), (8, 8, 2)]
    return [*(cases[index] for index in pairwise.cover(rows)), *(known[world] for world in large)]


def other_worlds() -> list[Case]:
    """Of `quick_cases` one for every world of up to four ranks that `pair_cases` do not have.

    Of larger ones as many as it takes for any two of world size, partition size and node size to meet.
    """
    known = {_world(case) for case in pair_cases()}
    first: dict[tuple[int, int, int], Case] = {}
    for case in quick_cases():
        if _world(case) not in known:
            first.setdefault(_world(case), case)
    large = [world for world in first if world[0] > 4]
    left_out = set(large) - {large[index] for index in pairwise.cover(large)}
    return [case for world, case in first.items() if world not in left_out]


def _world(case: Case) -> tuple[int, int, int]:
    return case.world_size, case.partition_size, case.ranks_per_node


def full_cases(max_world_size: int = 8) -> list[Case]:
    """Every combination; with moves where there can be some."""
    ways = product(range(1, MAX_ACCUMULATION + 1), *[(False, True)] * 4)
    memory = ((False, False), (True, False), (False, True))
    cases = [
        replace(_case(world, row), low_memory=low_memory, staying=staying)
        for world, row, (low_memory, staying) in product(worlds(max_world_size), list(ways), memory)
    ]
    return [*cases, *(case.with_moves() for case in cases if case.route is not None)]


Row = tuple[int, bool, bool, bool, bool]


def _orthogonal_rows(*, half: int) -> Iterator[Row]:
    """Four rows over one setting of four levels and four of two.

    Both halves together are an orthogonal array: each pair of levels occurs equally often.
    """
    for x, y in product((0, 1), repeat=2):
        z = half ^ (x & y)
        yield 1 + 2 * x + y, bool(z), bool(z ^ x), bool(z ^ y), bool(z ^ x ^ y)


def _case(world: tuple[int, int, int], row: Row) -> Case:
    accumulation, classic, bf16, announced, clipped = row
    return Case(
        world_size=world[0],
        partition_size=world[1],
        ranks_per_node=world[2],
        accumulation=accumulation,
        optimizer_sharding="partition" if classic else "world",
        bf16=bf16,
        announced=announced,
        clipped=clipped,
    )


def by_world(cases: Iterable[Case]) -> dict[tuple[int, int], list[Case]]:
    """Cases that can share one call of the rank pool, by (world size, ranks per node)."""
    found: dict[tuple[int, int], list[Case]] = {}
    for case in cases:
        found.setdefault((case.world_size, case.ranks_per_node), []).append(case)
    return found


# ---------------------------------------------------------------------------------------------
# Training and judging
# ---------------------------------------------------------------------------------------------


def train_cases(cases: Sequence[Case], device: str = "cpu") -> list[Outcome]:
    """On one rank: train every case, one after the other."""
    return [train_sharded(case.recipe(), case.sharding(device)) for case in cases]


def merge_ranks(outcomes: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """From the ranks' lists of outcomes to one outcome per case."""
    return [merge(of_case) for of_case in zip(*outcomes, strict=True)]


def judge_gpu(case: Case, found: Outcome) -> list[str]:
    """As `judge`, for a case that was trained on a GPU."""
    tolerance = GPU_BF16 if case.bf16 else GPU_FP32
    return judge(case, found, tolerance, tolerance)


def judge(case: Case, found: Outcome, tolerance: Tolerance = EXACT, norm: Tolerance = NORM) -> list[str]:
    """How `found` differs from plain training: bit by bit in order, within a tolerance in general."""
    recipe = case.recipe()
    ordered = train_ordered(
        recipe,
        world_size=case.world_size,
        partition_size=case.partition_size,
        ranks_per_node=case.ranks_per_node,
        norms=found.norms or None,
    )
    problems = [f"ordered: {line}" for line in differences(found, ordered, tolerance, norm)]
    plain = train_plain(recipe, world_size=case.world_size)
    wide = PLAIN_BF16 if case.bf16 else PLAIN_FP32
    if tolerance is not EXACT:
        wide = tolerance
    problems += [f"plain: {line}" for line in differences(found, plain, wide, wide)]
    if case.moves and not found.num_decoded:
        problems.append("no moves were decoded")
    return problems

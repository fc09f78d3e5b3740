"""Sharded training equals plain training, over the whole grid.

In every case the losses of each rank and micro-step, the gradients, the gradient's norm, the
parameters and the optimizer's state after several steps are compared with two references
(`tests.reference`): bit by bit with the one that sums in the engine's order, fp32 and bf16 alike,
and within a tolerance with ordinary training on the global batch.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mics
from tests import grid, tiers
from tests.grid import Case
from tests.ranks import POOL, run_ranks
from tests.reference import (
    Outcome,
    Recipe,
    Sharding,
    Tolerance,
    differences,
    iterate_divisors,
    merge,
    train_ordered,
    train_sharded,
)
from tests.toys import language_recipe


def _train(cases: list[Case], backend: str = "gloo") -> list[tuple[Case, Outcome]]:
    found = []
    device = "cuda" if backend == "nccl" else "cpu"
    for (world_size, ranks_per_node), group in grid.by_world(cases).items():
        ranks = run_ranks(
            world_size, grid.train_cases, group, device, ranks_per_node=ranks_per_node, backend=backend
        )
        found += list(zip(group, grid.merge_ranks(ranks), strict=True))
    return found


def _report(cases: list[Case], problems: list[list[str]]) -> None:
    wrong = [(case, lines) for case, lines in zip(cases, problems, strict=True) if lines]
    shown = [f"{case}\n    " + "\n    ".join(lines[:6]) for case, lines in wrong[:5]]
    assert not wrong, f"{len(wrong)} of {len(cases)} cases differ:\n" + "\n".join(shown)


@pytest.mark.parametrize(
    ("world_size", "part"),
    [
        *((size, "pairs") for size in (1, 2, 3, 4, 8)),
        pytest.param(6, "pairs", marks=pytest.mark.full),
        *(pytest.param(size, "rest", marks=pytest.mark.full) for size in (1, 2, 3, 4, 8)),
        *(pytest.param(size, "rest", marks=(pytest.mark.full, pytest.mark.long)) for size in (5, 6, 7)),
    ],
)
def test_the_grid_equals_plain_training(
    world_size: int, part: str, request: pytest.FixtureRequest, grid_sizes: dict[str, int]
) -> None:
    """Every partition size and node size, and every pair of ways to train, in worlds of 1 to 8.

    The cases that all pairs of settings need, and the rest, with which any two sizes meet.
    """
    cases = grid.pair_cases()
    if part == "rest":
        full = request.config.getoption("--grid") == "full"
        pairs = set(cases)
        cases = [case for case in (grid.full_cases() if full else grid.other_worlds()) if case not in pairs]
    cases = [case for case in cases if case.world_size == world_size]
    found = _train(cases)
    problems = POOL.map(grid.judge, found)
    size = f"world {world_size}"
    grid_sizes[size] = grid_sizes.get(size, 0) + len(cases)
    _report([case for case, _ in found], problems)


@pytest.mark.parametrize("world_size", tiers.first([4, 2], 0, 1))
def test_two_runs_are_bitwise_equal(world_size: int) -> None:
    """The same cases trained twice give the same bits, norms included."""
    cases = [
        case
        for case in grid.quick_cases()
        if case.world_size == world_size and case.ranks_per_node == 2 and case.partition_size > 1
    ][:4]
    assert len(cases) == 4
    cases = tiers.some(cases, 2)
    pairs = zip(_train(cases), _train(cases), strict=True)
    for (case, first), (_, second) in pairs:
        assert not differences(first, second, norm=grid.EXACT), case


def _flat_outcome(recipe: Recipe) -> Outcome:
    return train_sharded(recipe, Sharding(partition_size=4, options={"hierarchical": False}))


def test_one_stage_where_two_were_possible() -> None:
    """`hierarchical=False` on two nodes of two: equal to the bit to the sum in rank order."""
    recipe = language_recipe(accumulation=2)
    found = merge(run_ranks(4, _flat_outcome, recipe, ranks_per_node=2))
    flat, staged = (train_ordered(recipe, world_size=4, partition_size=4, ranks_per_node=k) for k in (4, 2))
    assert not differences(found, flat)
    assert differences(found, staged)


def _reduced_in_bf16(recipe: Recipe) -> Outcome:
    precision = mics.Precision(param_dtype=torch.float32, reduce_dtype=torch.bfloat16)
    return train_sharded(recipe, Sharding(partition_size=2, options={"precision": precision}))


def test_gradients_that_travel_in_bf16() -> None:
    """`Precision(reduce_dtype=bfloat16)`: right up to bf16's rounding, and not exactly."""
    recipe = language_recipe(accumulation=2)
    found = merge(run_ranks(4, _reduced_in_bf16, recipe, ranks_per_node=2))
    expected = train_ordered(recipe, world_size=4, partition_size=2, ranks_per_node=2)
    assert not differences(found, expected, Tolerance(rtol=2e-2, atol=1e-4))
    assert differences(found, expected, grid.PLAIN_FP32)


@st.composite
def _cases(draw: st.DrawFn) -> Case:
    world_size = draw(st.integers(1, 8))
    case = Case(
        world_size=world_size,
        partition_size=draw(st.sampled_from(list(iterate_divisors(world_size)))),
        ranks_per_node=draw(st.integers(1, min(world_size, grid.MAX_RANKS_PER_NODE))),
        accumulation=draw(st.integers(1, grid.MAX_ACCUMULATION)),
        optimizer_sharding=draw(st.sampled_from(["auto", "world", "partition"])),
        bf16=draw(st.booleans()),
        announced=draw(st.booleans()),
        clipped=draw(st.booleans()),
        low_memory=draw(st.booleans()),
        staying=draw(st.booleans()),
        num_steps=2,
        shape=(
            ("vocab", draw(st.integers(11, 23))),
            ("dim", draw(st.integers(3, 12))),
            ("hidden", draw(st.integers(1, 20))),
            ("num_blocks", draw(st.integers(1, 4))),
        ),
    )
    return case.with_moves() if case.route is not None and draw(st.booleans()) else case


NUM_DRAWN = 9
NUM_DRAWN_QUICK = 4


def test_drawn_cases_equal_plain_training(grid_sizes: dict[str, int]) -> None:
    """Cases and model shapes drawn by hypothesis."""

    @settings(max_examples=NUM_DRAWN_QUICK if tiers.quick else NUM_DRAWN)
    @given(case=_cases())
    def equal(case: Case) -> None:
        ((_, outcome),) = _train([case])
        _report([case], [grid.judge(case, outcome)])
        grid_sizes["drawn"] = grid_sizes.get("drawn", 0) + 1

    equal()


def test_the_quick_grid_covers_every_pair() -> None:
    """Any two settings of the grid meet in some case, also in those of `make test`; every world is in it."""
    cases, pairs, full = grid.quick_cases(), grid.pair_cases(), grid.full_cases()
    assert set(pairs) < set(cases) and len(pairs) < len(cases) / 2
    for first, second in combinations(grid.SETTINGS, 2):
        if "moves" in (first, second) and {first, second} & {"accumulation", "optimizer_sharding"}:
            continue  # in an array of eight rows masters over the world are bf16 with two accumulations
        for some, all_cases in ((cases, full), (pairs, [c for c in full if c.world_size <= 4])):
            wanted = {(getattr(c, first), getattr(c, second)) for c in all_cases}
            assert {(getattr(c, first), getattr(c, second)) for c in some} >= wanted
    worlds = set(grid.worlds())
    some_worlds = {(c.world_size, c.partition_size, c.ranks_per_node) for c in [*pairs, *grid.other_worlds()]}
    assert {(c.world_size, c.partition_size, c.ranks_per_node) for c in cases} == worlds
    assert {world for world in worlds if world[0] <= 4} <= some_worlds
    for a, b in combinations(range(3), 2):
        assert {(world[a], world[b]) for world in some_worlds} == {(world[a], world[b]) for world in worlds}
    assert {(c.world_size, c.partition_size) for c in pairs if c.world_size > 4} == {
        *((6, 2), (6, 3)),
        *((8, 2), (8, 4), (8, 8)),
    }
    assert {c.route for c in pairs if c.moves} == {"replicas", "units that stay"}
    assert len({replace(c, moves=False, num_steps=3) for c in full}) == len(list(grid.worlds())) * 4 * 16 * 3
    assert len(full) == len(set(full))


@pytest.mark.gpu
@pytest.mark.parametrize("world_size", [1, 2, 4, 8])
def test_the_grid_under_nccl(world_size: int, grid_sizes: dict[str, int]) -> None:
    """The same grid on a GPU that several NCCL ranks share, within a tolerance."""
    cases = [case for case in grid.quick_cases() if case.world_size == world_size]
    found = _train(cases, backend="nccl")
    grid_sizes[f"nccl world {world_size}"] = len(cases)
    _report([case for case, _ in found], POOL.map(grid.judge_gpu, found))

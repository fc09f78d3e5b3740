"""Train a recipe sharded and plain, and assert that they agree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from tests import tiers
from tests.ranks import run_ranks
from tests.reference import (
    EXACT,
    Outcome,
    Recipe,
    Sharding,
    Tolerance,
    differences,
    merge,
    train_ordered,
    train_sharded,
)

SHARDINGS = (
    Sharding(partition_size=2, optimizer_sharding="world", record_gradients=True),
    Sharding(partition_size=4, optimizer_sharding="partition", announced=False),
)
"""On two nodes of two ranks: a group in a node with two replicas, and one group over both nodes."""


def train_all(recipe: Recipe, shardings: Sequence[Sharding]) -> list[Outcome]:
    """On one rank: train the recipe once for every sharding."""
    return [train_sharded(recipe, sharding) for sharding in shardings]


def assert_trains_like_plain(
    recipe: Recipe,
    *,
    world_size: int = 4,
    ranks_per_node: int = 2,
    shardings: Sequence[Sharding] = SHARDINGS,
    tolerance: Tolerance = EXACT,
    **changes: Any,
) -> list[Outcome]:
    """Train sharded in each way of `shardings` (with `changes`) and compare with plain training.

    A quick run takes one of the ways.

    The comparison is with the reference that sums in the engine's order, to the bit unless a
    tolerance is given. Returns the sharded outcomes.
    """
    shardings = [replace(sharding, **changes) for sharding in tiers.some(shardings)]
    ranks = run_ranks(world_size, train_all, recipe, shardings, ranks_per_node=ranks_per_node)
    outcomes = [merge(of_sharding) for of_sharding in zip(*ranks, strict=True)]
    for sharding, found in zip(shardings, outcomes, strict=True):
        expected = train_ordered(
            recipe,
            world_size=world_size,
            partition_size=sharding.partition_size,
            ranks_per_node=ranks_per_node,
            norms=found.norms or None,
        )
        problems = differences(found, expected, tolerance)
        if found.extra != expected.extra:
            problems.append(f"between steps: {found.extra} for {expected.extra}")
        assert not problems, f"{sharding}:\n" + "\n".join(problems)
    return outcomes

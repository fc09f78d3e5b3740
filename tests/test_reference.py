"""The references agree with each other and with torch's own DDP, so they may judge the engine."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from mics.layout.topology import plan_topology
from tests.ranks import run_ranks
from tests.reference import (
    SEED,
    Outcome,
    Recipe,
    Tolerance,
    adamw,
    differences,
    elementwise_alike,
    iterate_divisors,
    sgd,
    stages,
    train_ordered,
    train_plain,
)
from tests.toys import language_recipe

FP32 = Tolerance(rtol=2e-4)
"""After a few AdamW steps: an element whose gradient is near zero moves by its sign."""


def _train_ddp(recipe: Recipe) -> Outcome:
    torch.manual_seed(SEED)
    module = recipe.build()
    model = DistributedDataParallel(module, find_unused_parameters=True, gradient_as_bucket_view=False)
    optimizer = recipe.optimizer(module)
    outcome = Outcome()
    for step in range(recipe.num_steps):
        for micro in range(recipe.accumulation):
            batch = recipe.batch(step, micro, dist.get_rank())
            (recipe.loss(model, batch) / recipe.accumulation).backward()
        outcome.gradients.append(
            {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}
        )
        optimizer.step()
        optimizer.zero_grad()
    outcome.parameters = {n: p.detach().clone() for n, p in module.named_parameters()}
    return outcome


def _as_ddp(outcome: Outcome, ddp: Outcome) -> list[str]:
    """How the gradients and parameters differ (a plain DDP run keeps nothing else)."""
    kept = Outcome(gradients=outcome.gradients, parameters=outcome.parameters)
    return differences(Outcome(gradients=ddp.gradients, parameters=ddp.parameters), kept, FP32)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_both_references_equal_ddp(accumulation: int) -> None:
    """World 4: gradients of every step (none where unused) and parameters equal DDP's."""
    recipe = language_recipe(accumulation=accumulation)
    ddp = run_ranks(4, _train_ddp, recipe)[0]
    assert not _as_ddp(train_plain(recipe, world_size=4), ddp)
    for partition_size, ranks_per_node in ((1, 4), (2, 2), (4, 2), (4, 3)):
        ordered = train_ordered(
            recipe, world_size=4, partition_size=partition_size, ranks_per_node=ranks_per_node
        )
        assert not _as_ddp(ordered, ddp)
    assert ddp.gradients[0]["spare.weight"] is None
    assert ddp.gradients[1]["spare.weight"] is not None


def test_the_order_of_summation_shows_in_the_bits() -> None:
    """Different groupings round differently: a bitwise comparison tells them apart."""
    recipe = language_recipe(accumulation=2)
    outcomes = [
        train_ordered(recipe, world_size=8, partition_size=p, ranks_per_node=k)
        for p, k in ((8, 8), (8, 2), (2, 2), (1, 1))
    ]
    for index, one in enumerate(outcomes):
        for other in outcomes[index + 1 :]:
            assert differences(one, other)
            assert not differences(one, other, FP32)


def test_a_clipped_gradient_has_the_norm_it_was_clipped_to() -> None:
    """Clipping in the reference equals torch's `clip_grad_norm_`."""
    recipe = language_recipe(max_norm=0.05, num_steps=1, optimizer=sgd)
    outcome = train_plain(recipe, world_size=2)
    gradients = [g for g in outcome.gradients[0].values() if g is not None]
    parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in gradients]
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = torch.nn.utils.clip_grad_norm_(parameters, 0.05)
    assert outcome.norms[0] == pytest.approx(norm.item(), rel=1e-6)
    assert outcome.norms[0] > 0.05
    clipped = torch.cat([(p.grad).flatten() for p in parameters if p.grad is not None])
    assert clipped.norm().item() == pytest.approx(0.05, rel=1e-4)


@pytest.mark.parametrize(
    ("world_size", "partition_size", "ranks_per_node", "expected"),
    [
        (4, 4, 2, [[[0, 1], [2, 3]]]),
        (4, 4, 4, [[[0, 1, 2, 3]]]),
        (4, 4, 1, [[[0, 1, 2, 3]]]),
        (4, 4, 3, [[[0, 1, 2, 3]]]),
        (8, 4, 2, [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]),
        (8, 4, 3, [[[0, 1, 2, 3]], [[4, 5], [6, 7]]]),
        (6, 3, 2, [[[0, 1, 2]], [[3, 4, 5]]]),
        (6, 6, 3, [[[0, 1, 2], [3, 4, 5]]]),
        (6, 6, 4, [[[0, 1, 2, 3, 4, 5]]]),
    ],
)
def test_stages_of_the_first_hop(
    world_size: int, partition_size: int, ranks_per_node: int, expected: list[list[list[int]]]
) -> None:
    """Two stages exactly where a group has equally many, more than one, ranks on several nodes."""
    assert stages(world_size, partition_size, ranks_per_node) == expected


@pytest.mark.parametrize("world_size", [4, 6, 8, 12])
def test_stages_are_those_of_the_engines_topology(world_size: int) -> None:
    """The order the reference adds in is the order the engine communicates in."""
    for partition_size in iterate_divisors(world_size):
        for ranks_per_node in range(1, world_size + 1):
            node_of = [rank // ranks_per_node for rank in range(world_size)]
            topology = plan_topology(node_of, partition_size=partition_size)
            for nodes in stages(world_size, partition_size, ranks_per_node):
                found = topology.stages(nodes[0][0])
                assert (found is None) == (len(nodes) == 1)
                if found is not None:
                    assert list(found.intra) == nodes[0]
                    assert list(found.inter) == [node[0] for node in nodes]


def test_optimizers_of_the_grid_treat_elements_alike() -> None:
    """The grid may ask for equal bits: these kernels do not care where an element lies."""
    assert elementwise_alike(adamw)
    assert elementwise_alike(sgd)


def test_differences_are_found() -> None:
    """A comparison that cannot fail shows nothing: one changed bit, name or value is reported."""
    recipe = language_recipe()
    options = {"world_size": 2, "partition_size": 1, "ranks_per_node": 2}
    expected = train_ordered(recipe, **options)
    assert not differences(train_ordered(recipe, **options), expected)
    for change in ("parameters", "state_dict"):
        found = train_ordered(recipe, **options)
        tensors = getattr(found, change)
        tensors["norm.weight"][3] = torch.nextafter(tensors["norm.weight"][3], torch.tensor(9.0))
        assert len(differences(found, expected)) == 1
        assert not differences(found, expected, Tolerance(rtol=1e-6))
    found = train_ordered(recipe, **options)
    found.gradients[0]["spare.bias"] = torch.zeros(7)
    del found.optimizer_state["norm.bias"]["exp_avg"]
    found.losses[1][0][1] += 1e-6
    assert len(differences(found, expected)) == 3

"""Which collectives run, how often, and how many bytes this rank sends in them.

The model is nothing but equal blocks, so that counts are small multiples of their number.
For a unit of `n` elements, padded so that every rank's piece starts at 16 bytes:

hop 1     each micro-step, over the partition group: two gathers of the parameters (forward and
          backward; one for the last unit, which is kept in between) and one reduce-scatter of the
          gradient; each sends `(p - 1) / p` of the unit
hop 2     once a boundary, over the replication group: with `optimizer_sharding="world"` one
          reduce-scatter of the gradient shard and one gather of the updated parameters, each
          `(R - 1) / R` of the shard; with "partition" one all-reduce, twice that
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests import pairwise, tiers, toys
from tests.ranks import run_ranks
from tests.reference import adamw

NUM_BLOCKS = 3
FP32, BF16 = 4, 2

_CHAIN = partial(toys.Chain, NUM_BLOCKS)

Calls = dict[tuple[str, str], int]


def _unit_numel(num_ranks: int) -> int:
    """Elements of one padded block: every parameter aligned, the whole divisible among the ranks."""
    align = 8
    end = 0
    for parameter in toys.Block().parameters():
        end = -(-(end + parameter.numel()) // align) * align
    step = align * num_ranks
    return -(-end // step) * step


def _difference(model: nn.Module, before: Any) -> tuple[Calls, int, int]:
    import mics

    now = mics.traffic(model)
    axes = ("partition", "replication", "world")
    calls = {key: number - before.calls.get(key, 0) for key, number in now.calls.items() if key[0] in axes}
    return (
        {key: number for key, number in calls.items() if number},
        now.partition_nbytes - before.partition_nbytes,
        now.replication_nbytes - before.replication_nbytes,
    )


def _phases(
    partition_size: int,
    optimizer_sharding: str,
    accumulation: int,
    announced: bool,
    bf16: bool,
    clip: bool,
    build: Any = _CHAIN,
    prefetch: int | str = 0,
) -> dict[str, tuple[Calls, int, int]]:
    """What travelled in the micro-steps before the last, in the last, in clipping, in the step.

    Of the third optimizer step, when everything lasting has been set up. With prefetch, what travels is
    the same in all, but sooner: phases are told apart without it.
    """
    import mics

    precision = mics.Precision(param_dtype=torch.bfloat16 if bf16 else torch.float32)
    model = mics.shard(
        build(),
        partition_size=partition_size,
        optimizer_sharding=optimizer_sharding,
        precision=precision,
        prefetch=prefetch,
        compression=None,  # bytes of moves depend on the values: `test_lossless_refresh.py`
    )
    optimizer = adamw(model)
    phases = {}
    for step in range(3):
        batches = [toys.floats(step, micro, dist.get_rank()) for micro in range(accumulation)]
        before = mics.traffic(model)
        for micro, batch in enumerate(mics.microsteps(model, batches) if announced else batches):
            if micro == accumulation - 1:
                phases["micro-steps"] = _difference(model, before)
                before = mics.traffic(model)
            model(*batch).backward()
        phases["last"] = _difference(model, before)
        before = mics.traffic(model)
        if clip:
            mics.clip_grad_norm_(model, 1.0)
        phases["clip"] = _difference(model, before)
        before = mics.traffic(model)
        optimizer.step()
        phases["step"] = _difference(model, before)
        before = mics.traffic(model)
        optimizer.zero_grad()
        phases["zero"] = _difference(model, before)
    return phases


def _total(*phases: tuple[Calls, int, int]) -> tuple[Calls, int, int]:
    calls: Calls = {}
    for phase in phases:
        for key, number in phase[0].items():
            calls[key] = calls.get(key, 0) + number
    return calls, sum(phase[1] for phase in phases), sum(phase[2] for phase in phases)


def _along(axis: str, calls: Calls) -> dict[str, int]:
    return {kind: number for (along, kind), number in calls.items() if along == axis}


def _hop_1(num_micro: int, partition_size: int, num_ranks: int, itemsize: int) -> tuple[dict[str, int], int]:
    """Calls and bytes along the partition axis of some micro-steps."""
    if partition_size == 1 or num_micro == 0:
        return {}, 0
    chunk = _unit_numel(num_ranks) // partition_size
    num_gathers = (2 * NUM_BLOCKS - 1) * num_micro
    num_reductions = NUM_BLOCKS * num_micro
    nbytes = (partition_size - 1) * chunk * (num_gathers * itemsize + num_reductions * FP32)
    return {"all_gather": num_gathers, "reduce_scatter": num_reductions}, nbytes


def _hop_2(
    optimizer_sharding: str, partition_size: int, num_replicas: int, itemsize: int
) -> tuple[dict[str, int], int]:
    """Calls and bytes along the replication axis of one boundary, refresh included."""
    if num_replicas == 1:
        return {}, 0
    piece = _unit_numel(partition_size * num_replicas) // partition_size // num_replicas
    if optimizer_sharding == "world":
        calls = {"reduce_scatter": NUM_BLOCKS, "all_gather": NUM_BLOCKS}
        return calls, NUM_BLOCKS * (num_replicas - 1) * piece * (FP32 + itemsize)
    return {"all_reduce": NUM_BLOCKS}, NUM_BLOCKS * 2 * (num_replicas - 1) * piece * FP32


@pairwise.parametrize(
    full_strength=3,
    partition_size=[1, 2, 4],
    optimizer_sharding=["world", "partition"],
    announced=[True, False],
    bf16=[False, True],
)
def test_calls_and_bytes_equal_the_formula(
    partition_size: int, optimizer_sharding: str, announced: bool, bf16: bool
) -> None:
    """Every call and byte of an optimizer step, in each phase, on every rank."""
    accumulation, world_size = 3, 4
    itemsize = BF16 if bf16 else FP32
    num_replicas = world_size // partition_size
    ranks = run_ranks(
        world_size,
        _phases,
        *(partition_size, optimizer_sharding, accumulation, announced, bf16, True),
        ranks_per_node=2,
    )
    for phases in ranks:
        for phase, num_micro in (("micro-steps", accumulation - 1), ("last", 1)):
            calls, partition_nbytes, _ = phases[phase]
            expected = _hop_1(num_micro, partition_size, world_size, itemsize)
            assert (_along("partition", calls), partition_nbytes) == expected
        assert not _along("replication", phases["micro-steps"][0])
        assert phases["zero"] == ({}, 0, 0)
        everything = _total(*phases.values())
        expected = _hop_2(optimizer_sharding, partition_size, num_replicas, itemsize)
        assert (_along("replication", everything[0]), everything[2]) == expected
        # Hop 2 runs within the announced backward, or else when clipping needs the gradients.
        where = _along("replication", phases["last" if announced else "clip"][0])
        hop_2 = "reduce_scatter" if optimizer_sharding == "world" else "all_reduce"
        assert where.get(hop_2, 0) == (NUM_BLOCKS if num_replicas > 1 else 0)


@pytest.mark.parametrize(
    ("partition_size", "announced"),
    tiers.first([(2, True), (1, False), (4, True), (1, True), (2, False), (4, False)], 1, 3),
)
def test_prefetch_moves_nothing_more(partition_size: int, announced: bool) -> None:
    """A whole optimizer step makes the same calls and sends the same bytes with prefetch as without.

    But for units that are kept: one more at the turn of each micro-step, and where it is announced that
    another one follows the two that its forward begins with.
    """
    bf16, accumulation = partition_size == 2, 3
    args = (partition_size, "world", accumulation, announced, bf16, True)
    ahead = run_ranks(4, _phases, *args, ranks_per_node=2, kwargs={"prefetch": 1})
    plain = run_ranks(4, _phases, *args, ranks_per_node=2)
    num_kept = accumulation + (2 * (accumulation - 1) if announced else 0)
    num_kept = num_kept if partition_size > 1 else 0
    itemsize = BF16 if bf16 else FP32
    chunk_nbytes = _unit_numel(4) // partition_size * itemsize
    for found, without in zip(ahead, plain, strict=True):
        calls, partition_nbytes, replication_nbytes = _total(*without.values())
        if num_kept:
            calls["partition", "all_gather"] -= num_kept
        expected = (calls, partition_nbytes - num_kept * (partition_size - 1) * chunk_nbytes)
        assert _total(*found.values()) == (*expected, replication_nbytes)


def test_hop_two_is_independent_of_accumulation() -> None:
    """One micro-step or three: the replication axis sees the same calls and bytes."""
    for announced in tiers.some([True, False]):
        seen = []
        for accumulation in (1, 3):
            phases = run_ranks(4, _phases, 2, "world", accumulation, announced, False, False)[0]
            calls, _, nbytes = _total(*phases.values())
            seen.append((_along("replication", calls), nbytes))
        assert seen[0] == seen[1] == _hop_2("world", 2, 2, FP32)


@pytest.mark.parametrize("announced", tiers.first([True, False]))
def test_clipping_is_one_all_reduce(announced: bool) -> None:
    """Clipping adds one all-reduce over the world to the same step without clipping."""
    with_clip = run_ranks(4, _phases, 2, "world", 2, announced, False, True)
    without = run_ranks(4, _phases, 2, "world", 2, announced, False, False)
    for clipped, plain in zip(with_clip, without, strict=True):
        more, _, _ = _total(*clipped.values())
        less, _, _ = _total(*plain.values())
        extra = {key: more[key] - less.get(key, 0) for key in more if more[key] != less.get(key, 0)}
        assert extra == {("world", "all_reduce"): 1}


@pairwise.parametrize(
    strength=1, build=[toys.CheckpointAround, toys.CheckpointInside], reentrant=[False, True]
)
def test_checkpointing_reduces_each_unit_once(build: Any, reentrant: bool) -> None:
    """A recomputed block is gathered twice (the last unit once) and reduced once, like any other."""
    phases = run_ranks(
        4, _phases, 4, "world", 2, True, False, False, kwargs={"build": partial(build, reentrant=reentrant)}
    )[0]
    num_units = 4  # three blocks and the stem
    calls = _along("partition", phases["micro-steps"][0])
    assert calls == {"all_gather": 2 * num_units - 1, "reduce_scatter": num_units}


def _repeated() -> Calls:
    """One micro-step of a model that calls its only block three times in a row."""
    import mics

    model = toys.Chain(1)
    model.blocks = nn.ModuleList(list(model.blocks) * 3)
    mics.shard(model, partition_size=2, units=[toys.Block])
    before = mics.traffic(model)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    return _difference(model, before)[0]


def test_a_block_that_is_called_again_and_again_is_reduced_once() -> None:
    """In the backward it is gathered once, and let go when the first of its calls is over."""
    for calls in run_ranks(2, _repeated):
        assert calls == {("partition", "all_gather"): 4, ("partition", "reduce_scatter"): 1}


class _Hooked(toys.Chain):
    """What comes between two blocks has a hook that reads a weight of either."""

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for before, block in itertools.pairwise(self.blocks):
            x.register_hook(
                lambda grad, b=before, c=block: (b.up.weight.sum() + c.up.weight.sum()) * 0 + grad
            )
            x = block(x)
        return toys.mse(x, target)


def _of_a_steady_step(build: Any) -> tuple[Calls, int]:
    """Collectives, and how many units have a home."""
    import mics
    from mics.engine import engine_of

    model = mics.shard(build(NUM_BLOCKS), partition_size=2, prefetch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        before = mics.traffic(model)
        model(*toys.floats(step, 0, dist.get_rank())).backward()
        optimizer.step()
        optimizer.zero_grad()
    num_homes = sum(unit.whole.at_home for unit in engine_of(model).units)
    return _difference(model, before)[0], num_homes


def test_hooks_between_blocks_may_read_their_weights() -> None:
    """Such a hook finds both gathered: it costs no gather, and nobody its home."""
    assert run_ranks(2, _of_a_steady_step, _Hooked) == run_ranks(2, _of_a_steady_step, toys.Chain)


def _evaluate(no_grad: bool) -> Calls:
    import mics

    model = mics.shard(toys.Chain(NUM_BLOCKS), partition_size=2)
    before = mics.traffic(model)
    with torch.no_grad() if no_grad else torch.enable_grad():
        model(*toys.floats(0, 0, dist.get_rank()))
    return _difference(model, before)[0]


@pytest.mark.parametrize("no_grad", [True, False])
def test_a_forward_gathers_each_unit_once(no_grad: bool) -> None:
    """Evaluation costs one gather per unit and nothing else."""
    for calls in run_ranks(4, _evaluate, no_grad):
        assert calls == {("partition", "all_gather"): NUM_BLOCKS}


def test_two_nodes_send_each_chunk_over_the_network_once() -> None:
    """A group over two nodes of two: one logical gather, `(p - k) / p` of a unit between nodes."""
    by_axis = run_ranks(4, _links, ranks_per_node=2)
    unit = _unit_numel(4) * FP32
    for intra, inter, partition in by_axis:
        assert partition == NUM_BLOCKS * 3 * (unit * 3 // 4)
        assert inter == NUM_BLOCKS * 3 * (unit // 4)
        assert intra == NUM_BLOCKS * 3 * (unit // 2)


def _links() -> tuple[int, int, int]:
    import mics

    model = mics.shard(toys.Chain(NUM_BLOCKS), partition_size=4)
    before = mics.traffic(model)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    now = mics.traffic(model)
    intra, inter = (now.axis_nbytes(axis) - before.axis_nbytes(axis) for axis in ("intra", "inter"))
    return intra, inter, now.partition_nbytes - before.partition_nbytes

"""The replica audit: every flipped bit is found and named, and an audit changes and costs nothing else."""

from __future__ import annotations

import time
from functools import partial
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.comm import GroupCollectives
from mics.engine import engine_of
from mics.utils.digests import SLICE_NUMEL, _weights, digests
from tests import pairwise, toys
from tests.ranks import run_expecting_error, run_ranks
from tests.reference import adamw

audit = import_module("mics.diagnostics.audit")  # the public name of the module is a function

CPU = torch.device("cpu")
CHAIN = partial(toys.Chain, 3)
SECOND = "unit 'blocks.1'"


# -- digests ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("nbytes", [1, 4, 32, 83, 96, 102])
def test_every_bit_counts(nbytes: int) -> None:
    """Each single bit flipped, in whole words and in the tail, within one slice and in several."""
    data = torch.randint(256, (nbytes,), dtype=torch.uint8)
    digest = digests([data], slice_numel=8).item()
    flipped = [data.clone() for _ in range(8 * nbytes)]
    for number, each in enumerate(flipped):
        each[number // 8] ^= 1 << number % 8
    found = digests(flipped, slice_numel=8).tolist()
    assert digest not in found
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.float16])
def test_order_and_pairs_of_bits_count(dtype: torch.dtype) -> None:
    """Words that change places, and the highest bit of two words, which a sum of 64-bit words would miss."""
    data = torch.randn(64).to(dtype)
    swapped, signs = data.clone(), data.clone()
    swapped[3], swapped[40] = data[40], data[3]
    signs[::8] *= -1
    found = digests([data, swapped, signs, data.clone(), torch.zeros(64, dtype=dtype)]).tolist()
    assert found[3] == found[0] and found[4] == 0
    assert len(set(found)) == 4


def test_a_digest_is_that_of_its_formula() -> None:
    """Over several slices of real size, against Python's own integers."""
    data = torch.arange(2 * SLICE_NUMEL + 5, dtype=torch.int32) * 65_537
    place, slices = _weights(0, SLICE_NUMEL, CPU), _weights(SLICE_NUMEL, 3, CPU)
    weights = (place[None] * slices[:, None]).view(-1)[: data.numel()]
    assert bool((weights % 2 == 1).all())
    assert len(weights.unique()) == weights.numel()
    expected = (
        sum(word * weight for word, weight in zip(data.tolist(), weights.tolist(), strict=True)) % 2**64
    )
    assert digests([data]).item() % 2**64 == expected


def test_who_stands_out() -> None:
    """Whoever is not with the majority; everybody where there is none."""
    assert audit.odd_ones([5, 5, 5], [0, 2, 4]) == ()
    assert audit.odd_ones([5, 6, 5], [0, 2, 4]) == (2,)
    assert audit.odd_ones([5, 6, 5, 7, 5], range(5)) == (1, 3)
    assert audit.odd_ones([5, 6], [1, 3]) == (1, 3)
    assert audit.odd_ones([5, 5, 6, 6], range(4)) == (0, 1, 2, 3)


# -- ranks ------------------------------------------------------------------------------------------


def _flip(model: nn.Module, label: str, *, bit: int = 9) -> None:
    """One bit of this rank's shard, as a broken memory cell would: no version counter sees it."""
    engine = engine_of(model)
    engine.mesh.lanes.drain()
    unit = next(unit for unit in engine.units if unit.spec.label == label)
    unit.param_shard.data.view(torch.int32)[1] ^= 1 << bit


def _train(
    num_steps: int,
    *,
    build: Any = CHAIN,
    flips: tuple[int, ...] = (),
    flip_at: int = 0,
    label: str = SECOND,
    bf16: bool = False,
    accumulation: int = 1,
    **settings: Any,
) -> tuple[list[float], dict[str, Tensor], mics.Traffic]:
    """Losses, whole parameters, traffic. The ranks ``flips`` flip a bit after ``flip_at`` optimizer steps."""
    torch.manual_seed(0)
    precision = mics.Precision(param_dtype=torch.bfloat16 if bf16 else torch.float32)
    model = mics.shard(build(), precision=precision, **settings)
    optimizer = adamw(model)
    losses = []
    for step in range(num_steps):
        if step == flip_at and dist.get_rank() in flips:
            _flip(model, label)
        batches = [toys.floats(step, micro, dist.get_rank()) for micro in range(accumulation)]
        for batch in mics.microsteps(model, batches):
            loss = model(*batch)
            loss.backward()
            losses.append(loss.item())
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    traffic = mics.traffic(model)
    return losses, mics.full_state_dict(model), traffic


_CASES = [
    pytest.param(4, 4, {"partition_size": 1}, id="plain replicas", marks=pytest.mark.full),
    pytest.param(4, 4, {"partition_size": 2, "accumulation": 2}, id="two of two"),
    pytest.param(4, 4, {"partition_size": 2, "bf16": True}, id="bf16", marks=pytest.mark.full),
    pytest.param(
        4, 4, {"partition_size": 1, "optimizer_sharding": "partition"}, id="partition", marks=pytest.mark.full
    ),
    pytest.param(4, 4, {"partition_size": 2, "prefetch": 0}, id="inline", marks=pytest.mark.full),
    pytest.param(4, 4, {"partition_size": 4}, id="no replicas", marks=pytest.mark.full),
    pytest.param(4, 4, {"partition_size": 2, "build": toys.LoRA}, id="frozen", marks=pytest.mark.full),
    pytest.param(8, 2, {"partition_size": 4, "hierarchical": True}, id="two stages"),
]


@pytest.mark.parametrize(("world_size", "ranks_per_node", "settings"), _CASES)
def test_equal_replicas_pass_and_nothing_else_changes(
    world_size: int, ranks_per_node: int, settings: dict[str, Any]
) -> None:
    """An audit every step: the same losses and parameters to the bit, and no more traffic than its own."""
    without, beside = (
        run_ranks(
            world_size,
            _train,
            5,
            ranks_per_node=ranks_per_node,
            kwargs={**settings, "audit_interval": interval},
        )
        for interval in (0, 1)
    )
    num_replicas = world_size // settings["partition_size"]
    for (losses, state, traffic), (losses_beside, state_beside, traffic_beside) in zip(
        without, beside, strict=True
    ):
        assert losses == losses_beside
        assert state.keys() == state_beside.keys()
        assert all(torch.equal(value, state_beside[name]) for name, value in state.items())
        assert traffic_beside.partition_nbytes == traffic.partition_nbytes
        key = ("replication", "all_gather")
        num_audits = traffic_beside.calls.get(key, 0) - traffic.calls.get(key, 0)
        assert num_audits == (
            4 if num_replicas > 1 else 0
        )  # of five boundaries, the first has no step before
        num_units = 7 if settings.get("build") is toys.LoRA else 3
        audit_nbytes = (num_replicas - 1) * num_units * 2 * 8
        nbytes = traffic_beside.replication_nbytes - traffic.replication_nbytes
        assert nbytes == num_audits * audit_nbytes


@pairwise.parametrize(
    strength=1, world_size=[3, 4], bf16=[False, True], optimizer_sharding=["world", "partition"]
)
def test_the_rank_and_the_unit_are_named(world_size: int, bf16: bool, optimizer_sharding: str) -> None:
    """Three or four replicas, one bit: all ranks say which rank, which unit, which step."""
    errors = run_expecting_error(
        world_size,
        _train,
        5,
        kwargs={
            "partition_size": 1,
            "audit_interval": 2,
            "flips": (1,),
            "flip_at": 2,
            "bf16": bf16,
            "optimizer_sharding": optimizer_sharding,
        },
    )
    for error in errors:
        assert error.type_name == "ReplicaError" and error.is_a("MicsError")
        assert "after optimizer step 2" in error.message
        assert f"{SECOND} different on rank 1." in error.message
        assert "blocks.0" not in error.message and "blocks.2" not in error.message


@pytest.mark.parametrize(
    ("world_size", "ranks_per_node", "partition_size"),
    [pytest.param(2, 2, 1, marks=pytest.mark.full), (4, 4, 2), (8, 2, 4)],
)
def test_of_two_replicas_both_are_named(world_size: int, ranks_per_node: int, partition_size: int) -> None:
    """Nobody can say which of two is right. Groups over several nodes too."""
    second = tuple(range(partition_size, world_size))
    errors = run_expecting_error(
        world_size,
        _train,
        4,
        ranks_per_node=ranks_per_node,
        kwargs={"partition_size": partition_size, "audit_interval": 1, "flips": second, "flip_at": 1},
    )
    for rank, error in enumerate(errors):
        first = rank % partition_size
        found = f"{SECOND} different among ranks {first} and {first + partition_size}, with no majority"
        assert error.type_name == "ReplicaError"
        assert found in error.message


def test_ranks_whose_own_replicas_are_equal_fail_too() -> None:
    """Two replicas of two ranks, one bit: the other group would wait for ranks that never come."""
    kwargs = {"partition_size": 2, "audit_interval": 1, "flips": (3,), "flip_at": 1}
    errors = run_expecting_error(4, _train, 4, kwargs=kwargs)
    assert all(error.type_name == "ReplicaError" for error in errors)
    assert all(f"{SECOND} different among ranks 1 and 3" in errors[rank].message for rank in (1, 3))
    assert all("found those of rank 3's group to differ" in errors[rank].message for rank in (0, 2))


def test_frozen_units_are_compared() -> None:
    """Nothing would ever overwrite a flipped bit there."""
    frozen = "unit 'blocks.1[frozen float32]'"
    errors = run_expecting_error(
        3,
        _train,
        4,
        kwargs={
            "partition_size": 1,
            "audit_interval": 2,
            "build": toys.LoRA,
            "flips": (2,),
            "flip_at": 0,
            "label": frozen,
        },
    )
    assert all(f"{frozen} different on rank 2." in error.message for error in errors)


@pytest.mark.parametrize("audit_interval", [0, 2, "auto"])
def test_nobody_looks_before_the_interval_is_over(audit_interval: int | str) -> None:
    """A bit of a frozen unit is wrong from the start. Two steps pass; audits of two and of 0 differ after."""
    kwargs = {
        "partition_size": 1,
        "audit_interval": audit_interval,
        "build": toys.LoRA,
        "flips": (0,),
        "label": "unit 'stem'",
    }
    without = run_ranks(2, _train, 2, kwargs={**kwargs, "audit_interval": 0})
    found = run_ranks(2, _train, 2, kwargs=kwargs)
    assert [traffic for _, _, traffic in found] == [traffic for _, _, traffic in without]
    if audit_interval == 2:
        run_ranks(2, _train, 3, kwargs=kwargs)  # taken at the third boundary, looked at in the fourth
        errors = run_expecting_error(2, _train, 4, kwargs=kwargs)
        assert all("after optimizer step 2," in error.message for error in errors)
    else:
        run_ranks(2, _train, 6, kwargs=kwargs)


def _explicit(partition_size: int, flipped: int | None, bf16: bool) -> tuple[Any, Any]:
    """The report of equal replicas, and what is found after a flip: an error's fields, or a report."""
    precision = mics.Precision(param_dtype=torch.bfloat16 if bf16 else torch.float32)
    model = mics.shard(CHAIN(), partition_size=partition_size, audit_interval=0, precision=precision)
    optimizer = adamw(model)
    model(*toys.floats(0, 0, dist.get_rank())).backward()
    optimizer.step()
    with torch.no_grad():  # an edit that no gather has carried to the others yet
        for param in model.parameters():
            param.mul_(0.5)
    report = mics.audit_replicas(model)
    if dist.get_rank() == flipped:
        _flip(model, SECOND, bit=31)
    try:
        return report, mics.audit_replicas(model)
    except mics.ReplicaError as error:
        return report, (error.ranks, error.units, error.step)


@pytest.mark.parametrize("bf16", [False, True])
def test_on_request(bf16: bool) -> None:
    """Edits are carried over first; a difference in one replication group raises in both."""
    found = run_ranks(4, _explicit, 2, 3, bf16)
    for rank, (report, after) in enumerate(found):
        ranks = (rank % 2, rank % 2 + 2)
        assert (report.step, report.ranks, report.num_units) == (1, ranks, 3)
        assert report.nbytes > 0
        assert after == (((), (), 0) if rank % 2 == 0 else (ranks, (SECOND,), 1))


def test_on_request_without_replicas() -> None:
    """One copy has nobody to compare with."""
    for report, after in run_ranks(2, _explicit, 2, None, False):
        assert report == after
        assert len(report.ranks) == 1


def _edited(interval: int) -> int:
    """Edits before every step stand in this rank's part alone until the next gather: no difference."""
    model = mics.shard(CHAIN(), partition_size=1, audit_interval=interval)
    optimizer = adamw(model)
    for step in range(4):
        model(*toys.floats(step, 0, dist.get_rank())).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(0.99)
        optimizer.step()
        optimizer.zero_grad()
    return mics.audit_replicas(model).step


def test_edits_are_no_difference() -> None:
    assert run_ranks(2, _edited, 1) == [4, 4]


class _Shrinking(toys.Chain):
    """Only the first block is used after the first forward."""

    used = 3

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        for block in self.blocks[: self.used]:
            x = block(x)
        self.used = 1
        return toys.mse(x, target)


def _late() -> int:
    """New values arrive late, also those of units that no forward waits for."""
    on_time = GroupCollectives.all_gather

    def late(self: GroupCollectives, *args: Any) -> None:
        if self._calls.axis == "replication":
            time.sleep(0.05 + 0.05 * dist.get_rank())
        on_time(self, *args)

    with patch.object(GroupCollectives, "all_gather", late):
        model = mics.shard(_Shrinking(), partition_size=1, audit_interval=1)
        optimizer = adamw(model)
        for step in range(4):
            model(*toys.floats(step, 0, dist.get_rank())).backward()
            optimizer.step()  # momentum moves what has no gradient any more
            optimizer.zero_grad(set_to_none=False)
        return mics.audit_replicas(model).step


def test_values_on_their_way_are_waited_for() -> None:
    assert run_ranks(2, _late) == [4, 4]


def _bad_interval(interval: Any) -> None:
    mics.shard(CHAIN(), partition_size=1, audit_interval=interval)


@pytest.mark.parametrize("interval", [-1, True, 2.5, "often", None])
def test_bad_intervals_are_refused(interval: Any) -> None:
    errors = run_expecting_error(1, _bad_interval, interval)
    assert 'audit_interval: expected "auto" or a number' in errors[0].message


def _own_interval() -> None:
    _bad_interval(10 + dist.get_rank())


def test_intervals_that_disagree_are_refused() -> None:
    """Ranks would issue different collectives."""
    errors = run_expecting_error(2, _own_interval)
    assert all("expected the same audit_interval on all ranks" in error.message for error in errors)


_CLUSTER = mics.Cluster(
    num_nodes=2,
    ranks_per_node=2,
    intra=mics.Link(bandwidth=1e11, latency=1e-6),
    inter=mics.Link(bandwidth=1e10, latency=1e-6),
)


def test_an_emulated_cluster_has_equal_replicas() -> None:
    """Imagined replicas hold what this one holds."""
    with mics.emulate(_CLUSTER):
        _train(4, partition_size=2, audit_interval=1)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("partition_size", [1, 2])
def test_nobody_waits_on_a_gpu(partition_size: int) -> None:
    """Audits every step under torch's own check for synchronisation of the host."""
    with mics.emulate(_CLUSTER):
        model = mics.shard(CHAIN().cuda(), partition_size=partition_size, audit_interval=1)
        optimizer = adamw(model)
        batches = [[x.cuda() for x in toys.floats(step, 0, 0)] for step in range(12)]
        try:
            for step, batch in enumerate(batches):
                torch.cuda.set_sync_debug_mode("error" if step >= 4 else "default")
                model(*batch).backward()
                mics.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert mics.audit_replicas(model).step == 12


@pytest.mark.gpu
def test_a_gpu_makes_the_digests_of_the_cpu() -> None:
    """Integer arithmetic: the same numbers everywhere."""
    tensors = [torch.randn(3 * SLICE_NUMEL + 7), torch.randn(9).bfloat16(), torch.zeros(4)]
    assert digests([tensor.cuda() for tensor in tensors]).tolist() == digests(tensors).tolist()

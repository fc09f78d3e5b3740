"""The emulated backend: data of the right shape, the time of the cost model, and unmodified systems on it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from datetime import timedelta
from itertools import pairwise
from typing import Literal

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mics
from mics.comm import GroupCollectives, TrafficCounter
from mics.comm.quantized import Quantized
from mics.cost.clusters import Cluster, Link
from mics.cost.collectives import Cost, Kind, Span, cost
from mics.emulator import emulated_cluster
from mics.emulator.host_links import HostLinks
from mics.models.gpt import GPT, GPTConfig

CLUSTER = Cluster(
    num_nodes=4,
    ranks_per_node=2,
    intra=Link(bandwidth=10e9, latency=1e-6),
    inter=Link(bandwidth=100e6, latency=100e-6),
)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # 2.13 renamed what 2.11 has


@pytest.fixture
def emulation() -> Iterator[mics.Emulation]:
    with mics.emulate(CLUSTER) as running:
        yield running
    assert not dist.is_initialized()


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.mark.usefixtures("emulation")
def test_every_collective_writes_what_it_should(device: torch.device) -> None:
    """Own data at its place, other ranks' data like it, sums as of equal ranks; nothing left unwritten."""
    own = torch.arange(1.0, 4.0, device=device)
    whole = torch.full((24,), torch.nan, device=device)
    dist.all_gather_into_tensor(whole, own)
    assert torch.equal(whole[:3], own) and whole.isfinite().all()
    assert torch.allclose(whole.view(8, 3).abs() / own, torch.ones((), device=device), atol=0.25)
    in_place = torch.arange(1.0, 25.0, device=device)
    dist.all_gather_into_tensor(in_place, in_place[:3])
    assert torch.equal(in_place[:3], own) and not torch.equal(in_place[3:6], own)
    parts = [torch.full((3,), torch.nan, device=device) for _ in range(8)]
    dist.all_gather(parts, own)
    assert all(torch.equal(part, own) for part in parts)

    out = torch.full((3,), torch.nan, device=device)
    dist.reduce_scatter_tensor(out, torch.arange(24.0, device=device))
    assert out.tolist() == [0.0, 8.0, 16.0]
    dist.reduce_scatter(out, [own.clone() for _ in range(8)], op=dist.ReduceOp.AVG)
    assert torch.equal(out, own)
    for op, expected in [("SUM", 16.0), ("AVG", 2.0), ("MAX", 2.0), ("PRODUCT", 256.0)]:
        reduced = torch.full((2,), 2.0, device=device)
        dist.all_reduce(reduced, op=getattr(dist.ReduceOp, op))
        assert reduced.tolist() == [expected] * 2, op
    reduced = torch.ones(2, device=device)
    dist.reduce(reduced, dst=0)
    assert reduced.tolist() == [8.0, 8.0]
    dist.reduce(reduced, dst=1)
    assert reduced.tolist() == [8.0, 8.0]

    for src in (0, 5):
        sent = own.clone()
        dist.broadcast(sent, src=src)
        assert torch.equal(sent, own)
    exchanged = torch.full((16,), torch.nan, device=device)
    dist.all_to_all_single(exchanged, torch.arange(16.0, device=device))
    assert exchanged.tolist() == [0.0, 1.0] * 8
    uneven = torch.full((9,), torch.nan, device=device)
    dist.all_to_all_single(uneven, torch.arange(8.0, device=device), [2] + [1] * 7, [1] * 8)
    assert uneven.isfinite().all()
    lists = [torch.full((2,), torch.nan, device=device) for _ in range(8)]
    dist.all_to_all(lists, [torch.full((2,), float(rank), device=device) for rank in range(8)])
    assert all(part.tolist() == [0.0, 0.0] for part in lists)
    whole = torch.full((8, 3), torch.nan, device=device)
    whole[0] = own
    group = GroupCollectives(
        dist.group.WORLD, axis="world", counter=TrafficCounter(), liveness=None, exchange=True
    )
    group.all_gather(whole.view(-1), whole[0], "by exchange")
    assert torch.equal(whole[0], own)
    assert whole.isfinite().all()
    gathered = [torch.full((3,), torch.nan, device=device) for _ in range(8)]
    dist.gather(own, gathered, dst=0)
    assert all(torch.equal(part, own) for part in gathered)
    dist.scatter(out, [torch.full((3,), float(rank), device=device) for rank in range(8)], src=0)
    assert out.tolist() == [0.0] * 3
    received = torch.full((3,), torch.nan, device=device)
    dist.send(own, dst=3)
    dist.recv(received, src=3)
    assert received.isfinite().all()
    dist.barrier()


@pytest.mark.usefixtures("emulation")
def test_objects() -> None:
    """The collectives of pickled objects: every rank says what this one says."""
    everyone: list[object] = [None] * 8
    dist.all_gather_object(everyone, {"rank": dist.get_rank()})
    assert everyone == [{"rank": 0}] * 8
    sent = ["settings", 3]
    dist.broadcast_object_list(sent, src=0)
    assert sent == ["settings", 3]
    dist.gather_object("here", everyone, dst=0)
    assert everyone == ["here"] * 8
    own: list[object] = [None]
    dist.scatter_object_list(own, list(range(8)), src=0)
    assert own == [0]
    dist.send_object_list([{"a": 1}], dst=1)
    received: list[object] = [None]
    dist.recv_object_list(received, src=1)
    assert received == [{"a": 1}]


@pytest.mark.usefixtures("emulation")
def test_what_other_ranks_send_is_harmless() -> None:
    """Objects from a rank that is not there are None, and tensors keep what they had."""
    sent: list[object] = ["mine", 3]
    dist.broadcast_object_list(sent, src=5)
    assert sent == [None, None]
    own: list[object] = ["mine"]
    dist.scatter_object_list(own, [None] * 8, src=5)
    dist.recv_object_list(own, src=3)
    assert own == [None]


@pytest.mark.usefixtures("emulation")
def test_parameters_and_inference_tensors() -> None:
    """Asynchronous collectives write in a thread: gradients stay off there, and inference mode on."""
    parameter = nn.Parameter(torch.ones(4))
    dist.all_reduce(parameter, async_op=True).wait()
    whole = torch.zeros(32)
    dist.all_gather_into_tensor(whole, parameter, async_op=True).wait()
    assert parameter.tolist() == [8.0] * 4 and not whole.requires_grad
    with torch.inference_mode():
        tensor = torch.ones(2)
        dist.all_reduce(tensor, async_op=True).wait()
    assert tensor.tolist() == [8.0, 8.0]


@pytest.mark.usefixtures("emulation")
def test_buffers_that_do_not_fit_are_refused() -> None:
    """As real backends do: an engine's mistake must not pass here."""
    with pytest.raises(ValueError, match="expected a whole of 8 x 3"):
        dist.all_gather_into_tensor(torch.zeros(16), torch.ones(3))
    with pytest.raises(ValueError, match="expected a whole of 8 x 4"):
        dist.reduce_scatter_tensor(torch.zeros(4), torch.ones(24))
    with pytest.raises(ValueError, match="bfloat16"):
        dist.all_gather_into_tensor(torch.zeros(8).bfloat16(), torch.ones(1))


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.float8_e4m3fn, torch.complex64])
@pytest.mark.usefixtures("emulation")
def test_every_format(dtype: torch.dtype) -> None:
    tensor = torch.ones(8).to(dtype)
    whole = torch.zeros(64).to(dtype)
    dist.all_gather_into_tensor(whole, tensor)
    dist.reduce_scatter_tensor(tensor, whole)
    dist.all_reduce(tensor)
    dist.all_to_all_single(tensor.clone(), tensor)


def test_a_send_uses_the_link_to_its_peer(emulation: mics.Emulation) -> None:
    """Rank 1 is on this node, rank 2 is not."""
    emulation.clear()
    for peer in (1, 2):
        dist.send(torch.ones(8), dst=peer)
    assert [found.cost.link for found in emulation.collectives()] == ["intra", "inter"]


def test_coalesced_calls_are_one_collective(emulation: mics.Emulation) -> None:
    """torch's coalescing manager and batched sends pay one latency."""
    wholes, parts = [torch.zeros(16) for _ in range(3)], [torch.ones(2) for _ in range(3)]
    emulation.clear()
    with dist._coalescing_manager():
        for whole, part in zip(wholes, parts, strict=True):
            dist.all_gather_into_tensor(whole, part)
    assert all(whole[:2].tolist() == [1.0, 1.0] and whole.abs().min() > 0 for whole in wholes)
    (found,) = emulation.collectives()
    assert (found.kind, found.nbytes) == (Kind.ALL_GATHER, 3 * 64)
    emulation.clear()
    works = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, torch.ones(4), 1), dist.P2POp(dist.irecv, torch.zeros(4), 7)]
    )
    for work in works:
        work.wait()
    assert sum(found.nbytes for found in emulation.collectives()) <= 32


def test_time_is_that_of_the_cost_model(emulation: mics.Emulation) -> None:
    """The log has the model's seconds, and the caller really waited that long."""
    tensor = torch.ones(250_000)
    expected = cost(CLUSTER, Kind.ALL_REDUCE, Span.of(CLUSTER, range(8)), 10**6)
    emulation.clear()
    began = time.perf_counter()
    dist.all_reduce(tensor)
    took = time.perf_counter() - began
    (found,) = emulation.collectives()
    assert found.cost == expected
    assert found.times.end - found.times.start == pytest.approx(expected.seconds)
    assert took >= expected.seconds
    ((since, until),) = emulation.blocked()
    assert until - since <= took


def test_an_asynchronous_collective_lets_the_host_go_on(emulation: mics.Emulation) -> None:
    tensor = torch.ones(2_500_000)
    began = time.perf_counter()
    work = dist.all_reduce(tensor, async_op=True)
    issued = time.perf_counter() - began
    assert not work.is_completed()
    work.wait()
    took = time.perf_counter() - began
    (found,) = emulation.collectives()
    assert issued < found.cost.seconds <= took
    assert work.is_completed() and tensor[0] == 8


def test_collectives_on_one_link_take_turns() -> None:
    """Exact, on a clock that stands still: queues by link, not by group or kind."""
    links = HostLinks(clock=lambda: 100.0)
    first = links.reserve(Cost(inter_seconds=2.0, intra_seconds=0.5))
    second = links.reserve(Cost(inter_seconds=1.0))
    inside = links.reserve(Cost(intra_seconds=3.0))
    assert (first.start, first.end) == (100.0, 102.0)
    assert (second.start, second.end) == (102.0, 103.0)
    assert (inside.start, inside.end) == (100.5, 103.5)
    assert links.reserve(Cost()).end == 100.0
    both = links.reserve(Cost(inter_seconds=1.0, intra_seconds=2.0))
    assert (both.start, both.end) == (103.0, 105.5)


def test_groups_share_the_uplink(emulation: mics.Emulation) -> None:
    """Two groups at once: the second waits for the first. A group inside the node waits for nobody."""
    world, inside = dist.new_group(list(range(8))), dist.new_group([0, 1])
    emulation.clear()
    works = [dist.all_reduce(torch.ones(2_500_000), group=group, async_op=True) for group in (None, world)]
    works.append(dist.all_reduce(torch.ones(25_000), group=inside, async_op=True))
    for work in works:
        work.wait()
    first, second, third = emulation.collectives()
    assert second.times.start == pytest.approx(first.times.end)
    assert third.times.end < second.times.start


def _tiny() -> tuple[GPT, torch.Tensor]:
    torch.manual_seed(0)
    config = GPTConfig(num_layers=2, num_heads=2, hidden_size=32, vocab_size=64, seq_len=16)
    return GPT(config), torch.randint(0, 64, (2, 16))


def _train(model: nn.Module, batch: torch.Tensor, steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters())
    losses = []
    for _ in range(steps):
        loss = model(batch, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("system", ["mics", "mics over nodes", "fsdp2", "hsdp", "ddp"])
def test_unmodified_systems_train(system: str, emulation: mics.Emulation) -> None:
    """Ours and torch's, as they come: finite losses, and the collectives each is known for."""
    model: nn.Module
    model, batch = _tiny()
    if system.startswith("mics"):
        mics.shard(model, partition_size=4 if "nodes" in system else 2)
    elif system == "ddp":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        shape, names = ((8,), ("shard",)) if system == "fsdp2" else ((4, 2), ("replicate", "shard"))
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for block in [*model.blocks, model]:
            fully_shard(block, mesh=mesh)
    losses = _train(model, batch)
    assert all(loss < 20 for loss in losses)
    kinds = {found.kind for found in emulation.collectives()}
    assert Kind.ALL_REDUCE in kinds if system in ("ddp", "hsdp") else Kind.ALL_GATHER in kinds


def test_mics_sees_the_emulated_nodes(emulation: mics.Emulation) -> None:
    """Partition groups over two nodes gather in two stages, with bytes by link as the formula has them."""
    model, batch = _tiny()
    mics.shard(model, partition_size=4)
    emulation.clear()
    with torch.no_grad():
        model(batch)
    found = emulation.collectives()
    assert {one.group_size for one in found} == {2}
    assert {one.cost.link for one in found} == {"intra", "inter"}


@pytest.mark.parametrize("imagined", ["different", "copies", "zeros"])
def test_what_imagined_ranks_hold(imagined: Literal["different", "copies", "zeros"]) -> None:
    with mics.emulate(CLUSTER, imagined=imagined):
        others = dist.get_world_size() - 1
        whole = torch.full((3 * (others + 1),), 7.0)
        dist.all_gather_into_tensor(whole, torch.ones(3))
        assert torch.equal(whole[:3], torch.ones(3))
        assert whole.eq(1).sum() == (3 * others + 3 if imagined == "copies" else 3)
        assert whole.eq(0).sum() == (3 * others if imagined == "zeros" else 0)


def test_imagined_ranks_hold_other_encoded_numbers() -> None:
    """A gather in int8 has other values in the rows of others, of the size of this rank's own."""
    own = torch.randn(256)
    codec = Quantized(8)
    with mics.emulate(CLUSTER):
        size = dist.get_world_size()
        wires = torch.zeros(size, codec.wire_nbytes(256, own.dtype), dtype=torch.uint8)
        codec.encode(wires[:1], own.view(1, -1))
        dist.all_gather_into_tensor(wires.view(-1).view(torch.int8), wires[0].view(torch.int8))
        whole = torch.zeros(size, 256)
        codec.decode(whole, wires)
    torch.testing.assert_close(whole[0], own, rtol=0, atol=0.02)
    assert whole.abs().max() < 4 * own.abs().max()
    for row in (1, 2, 4):
        assert whole[row].ne(whole[0]).float().mean() > 0.4


def test_thousands_of_ranks() -> None:
    """A world of 4096 is set up in seconds."""
    with mics.emulate("p4d.24xlarge:512") as emulation:
        model, batch = _tiny()
        mics.shard(model, partition_size=8)
        assert _train(model, batch, steps=1)[0] < 20
        assert emulation.cluster.world_size == dist.get_world_size() == 4096


def test_plain_torch_can_start_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """By an address that names the cluster, or with a store of one's own and MICS_CLUSTER."""
    dist.init_process_group("emulated", init_method="emulated://p4d.24xlarge:16")
    assert (dist.get_rank(), dist.get_world_size(), dist.get_backend()) == (0, 128, "emulated")
    dist.destroy_process_group()
    monkeypatch.setenv("MICS_CLUSTER", "p5.48xlarge")
    dist.init_process_group(
        "emulated", store=HashStore(), rank=0, world_size=24, timeout=timedelta(seconds=30)
    )
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == 24
    dist.destroy_process_group()


def test_worlds_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each world has the cluster that it was given, and an old emulation does not end a new one."""
    old = mics.emulate("p3dn.24xlarge:2")
    dist.destroy_process_group()
    monkeypatch.setenv("MICS_CLUSTER", "p5.48xlarge")
    dist.init_process_group("emulated", store=HashStore(), rank=0, world_size=16)
    cluster = emulated_cluster()
    assert cluster is not None and cluster.name == "p5.48xlarge"
    old.close()
    assert dist.is_initialized()
    dist.destroy_process_group()
    with pytest.raises(mics.SettingsError, match="whole nodes of 8 ranks"):
        dist.init_process_group("emulated", store=HashStore(), rank=0, world_size=12)
    with pytest.raises(mics.SettingsError, match="found rank 5 of 64"):
        dist.init_process_group("emulated", init_method="emulated://p5.48xlarge:2", rank=5, world_size=64)
    assert not dist.is_initialized()


def test_a_second_world_is_refused() -> None:
    with (
        mics.emulate(CLUSTER),
        pytest.raises(mics.SettingsError, match="expected no process group, found an initialised one"),
    ):
        mics.emulate(CLUSTER)


@pytest.mark.gpu
def test_the_device_waits_and_the_host_does_not() -> None:
    """20 ms of transfers are issued in much less, and take 5% or 5 us around what they should."""
    with mics.emulate(CLUSTER) as emulation:
        tensor = torch.ones(25_000, device="cuda")
        dist.all_reduce(tensor)
        torch.cuda.synchronize()
        emulation.clear()
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(5_000_000)
        began = time.perf_counter()
        before.record()
        for _ in range(10):
            dist.all_reduce(tensor)
        after.record()
        issued = time.perf_counter() - began
        torch.cuda.synchronize()
        expected = sum(found.cost.seconds for found in emulation.collectives())
        assert issued < expected / 2
        assert before.elapsed_time(after) * 1e-3 == pytest.approx(expected, rel=0.05, abs=50e-6)
        times = [found.times for found in emulation.collectives()]
        assert all(late.start >= early.end for early, late in pairwise(times))

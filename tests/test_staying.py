"""Units that stay gathered between their uses: fewer gathers, the same bits, memory that was asked for."""

from __future__ import annotations

from collections.abc import Sequence
from unittest import mock

import pytest
import torch

import mics
from mics.cost.clusters import find_cluster
from mics.engine import engine_of
from mics.layout.order import Prefetch, make_plan, staying_units
from mics.models.gpt import GPT, GPTConfig
from mics.sharding.unit import State
from tests import tiers
from tests.ranks import run_ranks

_SHAPE = GPTConfig(num_layers=4, num_heads=2, hidden_size=32, vocab_size=64, seq_len=8)
_ALL = 1 << 30


def test_those_in_the_middle_stay_first() -> None:
    """At the ends units are kept around the turns anyway. One that is too large leaves room to others."""
    sizes = {0: 300, 1: 100, 2: 100, 3: 100, 4: 100, 5: 50}
    order = (0, 1, 2, 3, 4, 5, 5, 4, 3, 2, 1)
    assert staying_units(order, sizes, 0) == frozenset()
    assert staying_units(order, sizes, 250) == {2, 3, 5}
    assert staying_units(order, sizes, 10_000) == set(range(6))
    plan = make_plan(order, sizes=sizes, prefetch=Prefetch(units=1, stay_nbytes=200))
    assert plan.staying == {2, 3}
    assert staying_units((0, 1, 2, 3, 3), sizes, 100) == {3}, "before those that are needed once"
    assert staying_units(order, sizes, 250, chosen=[1]) == {1, 2, 5}
    assert not make_plan(order, sizes=sizes, prefetch=Prefetch(units=0, stay_nbytes=200)).staying
    assert not make_plan(order, sizes=sizes, prefetch=Prefetch(units=1, stay_nbytes=200), turn=6).staying


def _train(
    prefetch: Prefetch, partition_size: int, accumulation: int, announced: bool
) -> tuple[list[float], float]:
    """Losses of some steps, an evaluation and an edit between them, and how often one gathered the model."""
    torch.manual_seed(0)
    model = mics.shard(GPT(_SHAPE), partition_size=partition_size, prefetch=prefetch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    losses, gathered = [], []
    for step in range(7):
        batches = [torch.randint(0, 64, (2, 9), generator=generator) for _ in range(accumulation)]
        gathered.append(_gathered_nbytes(model))
        for tokens in mics.microsteps(model, batches) if announced else batches:
            loss = model(tokens[:, :-1], tokens[:, 1:])
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if step == 3:
            with torch.no_grad():
                losses.append(model(tokens[:, :-1], tokens[:, 1:]).item())
                for parameter in model.parameters():
                    parameter.mul_(0.9)
                losses.append(model(tokens[:, :-1], tokens[:, 1:]).item())
    whole = sum(unit.whole.nbytes for unit in engine_of(model).units)
    return losses, (gathered[6] - gathered[5]) / (whole * (partition_size - 1) / partition_size)


def _gathered_nbytes(model: torch.nn.Module) -> int:
    return mics.traffic(model).nbytes.get(("partition", "all_gather"), 0)


@pytest.mark.parametrize(
    ("partition_size", "accumulation", "announced"),
    tiers.first([(2, 2, True), (4, 3, False), (4, 1, True)], 1, 2),
)
def test_fewer_gathers_and_the_same_bits(partition_size: int, accumulation: int, announced: bool) -> None:
    found = [
        run_ranks(4, _train, Prefetch(units=1, stay_nbytes=nbytes), partition_size, accumulation, announced)
        for nbytes in (0, 60_000, _ALL)
    ]
    losses = [[rank[0] for rank in ranks] for ranks in found]
    assert losses[0] == losses[1] == losses[2]
    none, some, every = ([rank[1] for rank in ranks] for ranks in found)
    assert max(every) < min(some) < min(none)
    if announced or accumulation == 1:
        assert set(every) == {1.0}, "each unit once a step"


class _Branching(torch.nn.Module):
    """Runs the blocks that it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.lookup = torch.nn.Embedding(16, 8)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(8))

    def forward(self, tokens: torch.Tensor, which: Sequence[int]) -> torch.Tensor:
        x = self.lookup(tokens)
        for index in which:
            x = x + torch.tanh(self.blocks[index](x))
        return x.square().mean()


def _several_orders(stay_nbytes: int) -> tuple[list[float], int]:
    """Losses where orders leave their plans and masters are edited by hand; bytes of the arena."""
    torch.manual_seed(0)
    model = mics.shard(_Branching(), partition_size=2, prefetch=Prefetch(units=1, stay_nbytes=stay_nbytes))
    orders = [range(8), range(4), range(4, 8), (0, 2, 4, 6), (1, 3, 5, 7), (0, 7)]
    losses = []
    for step in range(28):  # four times all orders
        loss = model(torch.arange(16), orders[step % 7 % 6])
        loss.backward()
        losses.append(loss.item())
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.data.sub_(parameter.grad, alpha=0.5)
        model.zero_grad()
        torch.optim.SGD(model.parameters(), lr=0.1).step()  # a boundary, and nothing to do
    return losses, mics.memory_report(model, show=False)["gathered units"].measured or 0


@pytest.mark.full
def test_several_orders_share_what_stays() -> None:
    """The arena grows by no more than was asked for, and nobody waits with old values."""
    unit_nbytes, home_nbytes = 300, 512  # at most, of a block
    none, some, every = (run_ranks(2, _several_orders, nbytes) for nbytes in (0, 3 * unit_nbytes, _ALL))
    assert none[0][0] == some[0][0] == every[0][0]
    assert none[0][1] < some[0][1] <= none[0][1] + 3 * home_nbytes


def _report(stay_nbytes: int) -> tuple[int | None, int | None, str]:
    model = mics.shard(GPT(_SHAPE), partition_size=2, prefetch=Prefetch(units=1, stay_nbytes=stay_nbytes))
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(4):
        for batch in mics.microsteps(model, [tokens, tokens]):
            model(batch, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    term = mics.memory_report(model, show=False)["gathered units"]
    return term.predicted, term.measured, term.about


def test_the_memory_report_knows_them() -> None:
    none, some, every = (run_ranks(2, _report, nbytes)[0] for nbytes in (0, 60_000, _ALL))
    for predicted, measured, _ in (none, some, every):
        assert measured and predicted == pytest.approx(measured, rel=0.03)
    assert none[1] < some[1] < every[1]
    assert "stay" in some[2] and "stay" not in none[2]


def _edited(edit: str, *, sharded: bool) -> list[float]:
    """Losses around an edit of the masters between two evaluations."""
    torch.manual_seed(0)
    model: torch.nn.Module = GPT(_SHAPE)
    if sharded:
        mics.shard(model, partition_size=2, prefetch=Prefetch(units=1, stay_nbytes=_ALL))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(16).view(2, 8)
    losses = []
    for step in range(6):
        loss = model(tokens, tokens)
        if step != 4:  # dropped: its units stay, and no backward comes
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        with torch.no_grad():
            for parameter in model.parameters():
                (parameter.data if edit == "data" else parameter).mul_(0.95)
            losses.append(model(tokens, tokens).item())
    return losses


@pytest.mark.parametrize("edit", tiers.first(["data", "no_grad"]))
def test_edits_are_seen(edit: str) -> None:
    """One partition group, where ``.data`` counts too."""
    plain = run_ranks(1, _edited, edit, kwargs={"sharded": False})
    assert run_ranks(2, _edited, edit, kwargs={"sharded": True}) == plain * 2


class _Writing(torch.nn.Module):
    """Changes its weight in the forward, if it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.writes = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.writes:
            with torch.no_grad():
                self.layer.weight.mul_(3.0)
        return torch.tanh(self.layer(x))


def _written() -> tuple[float, float]:
    """A loss before and after a forward that wrote to its parameters and was refused."""
    torch.manual_seed(0)
    blocks = [_Writing() for _ in range(6)]
    model = mics.shard(
        torch.nn.Sequential(*blocks),
        partition_size=2,
        units=[_Writing],
        prefetch=Prefetch(units=1, stay_nbytes=_ALL),
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    x = torch.ones(2, 8)
    for _ in range(5):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        before = model(x).sum().item()
        blocks[3].writes = True
        with pytest.raises(mics.MicsError, match="wrote to it in place"):
            model(x)
        blocks[3].writes = False
        return before, model(x).sum().item()


def test_what_a_forward_wrote_does_not_stay() -> None:
    for before, after in run_ranks(4, _written):
        assert before == after


def _broken_off() -> tuple[list[float], list[float]]:
    """Losses after a step whose second micro-step raised, sharded and plain."""

    def train(model: torch.nn.Module, micro: object) -> list[float]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.arange(16).view(2, 8)
        losses = []
        for step in range(7):
            try:
                for number, batch in enumerate(micro([tokens, tokens + 1, tokens + 2])):
                    loss = model(batch, batch)
                    if step == 4 and number == 1:
                        raise RuntimeError("a bad batch")
                    loss.backward()
                    losses.append(loss.item())
            except RuntimeError:
                pass
            optimizer.step()
            optimizer.zero_grad()
        return losses

    models = []
    for _ in range(2):
        torch.manual_seed(0)
        models.append(GPT(_SHAPE))
    sharded = mics.shard(models[0], partition_size=2, prefetch=Prefetch(units=1, stay_nbytes=_ALL))
    return train(sharded, lambda batches: mics.microsteps(sharded, batches)), train(models[1], iter)


def test_a_step_that_is_broken_off_leaves_nothing_old() -> None:
    """Units that wait for the next micro-step, which does not come: the optimizer changes them first."""
    for sharded, plain in run_ranks(2, _broken_off):
        assert sharded == pytest.approx(plain, abs=1e-5)


_WIDE = GPTConfig(num_layers=4, num_heads=2, hidden_size=256, vocab_size=32, seq_len=8)


def _chosen(memory_nbytes: list[float], flops: float) -> int:
    """Bytes that stay after three steps, where a rank has so much memory."""
    rank = torch.distributed.get_rank()
    memory = memory_nbytes[rank]
    cluster = mics.Cluster(
        name="slow",
        num_nodes=1,
        ranks_per_node=2,
        intra=mics.Link(bandwidth=1e9, latency=1e-5),
        inter=mics.Link(bandwidth=1e9, latency=1e-5),
        flops=flops,
    )
    with (
        mock.patch("mics.config.assumed_cluster", return_value=cluster),
        mock.patch("mics.choices._device_memory", return_value=(memory, memory)),
    ):
        model = mics.shard(GPT(_SHAPE), partition_size=2)
    optimizer = torch.optim.SGD(model.parameters())
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(4):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return engine_of(model).residency.plans.prefetch.stay_nbytes


def test_auto_lets_units_stay_where_the_network_is_busier_and_memory_is_left() -> None:
    gib = float(1 << 30)
    assert run_ranks(2, _chosen, [8 * gib] * 2, 1e15) == [1 << 20] * 2, "the whole model, in MiB"
    assert run_ranks(2, _chosen, [8 * gib] * 2, 1e6) == [0, 0], "computing takes longer"
    assert run_ranks(2, _chosen, [0.0] * 2, 1e15) == [0, 0], "nobody says how much memory there is"
    assert run_ranks(2, _chosen, [8 * gib, 0.0], 1e15) == [0, 0], "as much as every rank has"


def _ahead(memory_nbytes: list[float], low_memory: bool) -> tuple[int, int | None]:
    """Units and bytes that are prefetched after four steps, where a rank has so much memory left."""
    free = memory_nbytes[torch.distributed.get_rank()]
    total = 100e6
    with (
        mock.patch("mics.choices._device_memory", return_value=(free + 0.08 * total, total)),
        mock.patch("mics.cost.depth.prefetch_units", return_value=3),
    ):
        model = mics.shard(GPT(_WIDE), partition_size=2, low_memory=low_memory)
        optimizer = torch.optim.SGD(model.parameters())
        tokens = torch.zeros(2, 8, dtype=torch.long)
        for _ in range(4):
            model(tokens, tokens).backward()
            optimizer.step()
            optimizer.zero_grad()
    prefetch = engine_of(model).residency.plans.prefetch
    return prefetch.units, prefetch.nbytes


@pytest.mark.full
@pytest.mark.parametrize("low_memory", [False, True])
def test_auto_looks_no_further_ahead_than_memory_is_left(low_memory: bool) -> None:
    """Beside one unit, which has been there, and the optimizer's state, which is to come. For all ranks."""
    block = 12 * 256 * 256 * 4 + 4096  # bytes, with norms
    state = 4e6  # two moments of half of 4 blocks, and more
    [plenty] = set(run_ranks(2, _ahead, [80e6, 80e6], low_memory))
    assert plenty == (3, None)
    [tight] = set(run_ranks(2, _ahead, [80e6, 1.2 * block + 3.1 * state], low_memory))
    assert tight[0] == 3 and tight[1] is not None and block < tight[1] < 4 * block
    [none] = set(run_ranks(2, _ahead, [0.0, 80e6], low_memory))
    assert none[1] is not None and block <= none[1] < 1.5 * block, "one unit, as from the beginning"


def _after_a_step(stay_nbytes: int) -> tuple[set[int], set[int]]:
    """Units that stay, and those whose old values wait to be moved, but for the last norm: it is tiny."""
    torch.manual_seed(0)
    model = mics.shard(
        GPT(_SHAPE),
        partition_size=4,
        prefetch=Prefetch(units=1, stay_nbytes=stay_nbytes),
        precision=mics.Precision(param_dtype=torch.bfloat16),
        audit_interval=0,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    tokens = torch.zeros(2, 8, dtype=torch.long)
    for _ in range(6):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    sizes = {unit.spec.index: unit.whole.nbytes for unit in engine_of(model).units}
    stay = staying_units(engine_of(model).residency.plans.latest(), sizes, stay_nbytes)
    large = {index for index, nbytes in sizes.items() if nbytes > 1000}
    return large & stay, {u.spec.index for u in engine_of(model).units if u.state is State.OLD} & large


def test_moves_wait_for_gathers_that_come_first() -> None:
    """Where some units stay over a step, in the middle of the order. If all do, no gather comes between."""
    for stay, old in run_ranks(4, _after_a_step, 60_000, ranks_per_node=2):
        assert old == stay != set()
    for stay, old in run_ranks(4, _after_a_step, _ALL, ranks_per_node=2):
        assert not old and len(stay) == 6


@pytest.mark.gpu
@pytest.mark.parametrize("partition_size", [2, 8])
def test_the_same_bits_on_a_gpu(partition_size: int) -> None:
    """As rank 0 of two emulated nodes, with streams."""
    found = []
    for nbytes in (0, 60_000, _ALL):
        with mics.emulate(find_cluster("dgx-h100:2")):
            torch.manual_seed(0)
            model = GPT(_SHAPE).cuda()
            mics.shard(model, partition_size=partition_size, prefetch=Prefetch(units=1, stay_nbytes=nbytes))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            losses = []
            for step in range(30):
                tokens = torch.full((2, 8), step, device="cuda")
                for batch in mics.microsteps(model, [tokens, tokens + 1]):
                    loss = model(batch, batch)
                    loss.backward()
                    losses.append(loss.detach())
                optimizer.step()
                optimizer.zero_grad()
            found.append(torch.stack(losses).tolist())
    assert found[0] == found[1] == found[2]

"""Units that are recomputed, and activations that go to host memory: the same bits as without."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import product
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.comm.lanes import Ticket
from mics.engine import engine_of
from mics.sharding import host_memory
from tests import pairwise, tiers
from tests.ranks import run_ranks

_WIDTH = 64
_ROWS = 300  # a saved input has 75 KiB: large enough to be moved


class Block(nn.Module):
    """With dropout, so that recomputation must repeat random numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(_WIDTH, 2 * _WIDTH)
        self.down = nn.Linear(2 * _WIDTH, _WIDTH)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        hidden = torch.dropout(torch.tanh(self.up(x.t().t())), 0.1, self.training)
        out = x + self.down(hidden)
        return out if skip is None else out + skip


class Stack(nn.Module):
    """Blocks in a chain; the first block's output is read again by later ones, as a view."""

    def __init__(self, num_blocks: int = 5) -> None:
        super().__init__()
        self.stem = nn.Linear(_WIDTH, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        skip = None
        for number, block in enumerate(self.blocks):
            x = block(x, skip=skip if number % 2 else None)
            skip = x.view(-1, _WIDTH) if skip is None else skip
        return x.square().mean()


def _losses(
    activations: mics.Activations | None, partition_size: int, scenario: str, **settings: Any
) -> list[float]:
    torch.manual_seed(0)
    model = Stack()
    if scenario == "frozen in front":
        for module in (model.stem, *model.blocks[:2]):
            module.requires_grad_(False)
    mics.shard(model, partition_size=partition_size, activations=activations, **settings)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    found = []
    for step in range(4):
        batches = list(torch.rand(2, _ROWS, _WIDTH, generator=generator))
        torch.manual_seed(step)
        if scenario == "several forwards":
            losses = [model(batch) for batch in batches]
            (losses[0] + losses[1]).backward()
        elif scenario == "evaluation and failures":
            with torch.no_grad():
                found.append(model(batches[0]).item())
            model(batches[0])  # never used: everything it saved is let go
            with pytest.raises(RuntimeError, match="on purpose"):
                _fail_in_forward(model, batches[0])
            losses = [model(batches[1])]
            losses[0].backward(retain_graph=True)
            losses[0].backward()
        else:
            losses = []
            for batch in mics.microsteps(model, batches):
                losses.append(model(batch))
                losses[-1].backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item() for loss in losses]
    return found


def _fail_in_forward(model: nn.Module, batch: Tensor) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("on purpose")

    handle = model.blocks[3].down.register_forward_pre_hook(fail)  # type: ignore[union-attr,index]
    try:
        model(batch)
    finally:
        handle.remove()


@cache
def _plain(world_size: int, partition_size: int, scenario: str) -> list[list[float]]:
    """Losses of all ranks without a policy."""
    return run_ranks(world_size, _losses, None, partition_size, scenario, ranks_per_node=min(world_size, 2))


_POLICIES = {
    "checkpoint": mics.Activations(),
    "offload": mics.Activations(offload=True),
    "every other": mics.Activations(every=2, offload=True, keep_last=2),
    "half": mics.Activations(offload_fraction=0.5),
    "bytes": mics.Activations(offload_bytes=200_000, keep_last=0),
    "no checkpoint": mics.Activations(checkpoint="none", offload=True),
}


@pytest.mark.parametrize(
    ("partition_size", "scenario"),
    [
        (2, "micro-steps"),
        # All scenarios are in the tests below, too.
        pytest.param(2, "evaluation and failures", marks=pytest.mark.full),
        pytest.param(1, "micro-steps", marks=pytest.mark.full),
        pytest.param(2, "several forwards", marks=pytest.mark.full),
    ],
)
def test_losses_are_equal_to_the_bit(partition_size: int, scenario: str) -> None:
    """Dropout, skip connections, views, accumulation, forwards that fail or lead nowhere."""
    plain = _plain(2, partition_size, scenario)
    num = 1 if tiers.quick or partition_size == 1 or scenario != "micro-steps" else len(_POLICIES)
    for name, policy in tiers.some(list(_POLICIES.items()), num):
        assert run_ranks(2, _losses, policy, partition_size, scenario) == plain, name


_SCENARIOS = ["micro-steps", "evaluation and failures", "several forwards", "frozen in front"]
_GRID = list(product(["auto", 1], _SCENARIOS, [False, True], [False, True]))
_FIRST = [("auto", "micro-steps", False, False), (1, "evaluation and failures", True, True)]


@pytest.mark.parametrize(
    ("prefetch", "scenario", "offload", "low_memory"),
    tiers.first([*_FIRST, *(row for i in pairwise.cover(_GRID) if (row := _GRID[i]) not in _FIRST)], 1),
)
def test_units_inside_what_is_recomputed(
    prefetch: int | str, scenario: str, offload: bool, low_memory: bool
) -> None:
    """A block that is no unit is recomputed as a whole; its matrices are gathered one by one.

    With micro-steps in two stages, on two nodes of two ranks.
    """
    world_size = 4 if scenario == "micro-steps" else 2
    plain = _plain(world_size, 2, scenario)
    policy = mics.Activations(checkpoint=Block, offload=offload)
    settings = {"units": [nn.Linear], "low_memory": low_memory, "prefetch": prefetch}
    found, same = (
        run_ranks(world_size, partial(_losses, **settings), which, world_size, scenario, ranks_per_node=2)
        for which in (policy, None)
    )
    for ours, theirs in zip(found, plain, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5), "sums over four ranks in another order"
    assert found == same


def test_losses_with_frozen_units_in_front_are_equal_to_the_bit() -> None:
    """With replicas on two nodes and accumulation."""
    plain = _plain(4, 2, "frozen in front")
    for name, policy in tiers.some(list(_POLICIES.items())):
        found = run_ranks(4, _losses, policy, 2, "frozen in front", ranks_per_node=2)
        assert found == plain, name


class LateLane:
    """Does a job when somebody waits for it or for a later one: as late as a stream may."""

    def __init__(self) -> None:
        self._jobs: list[Callable[[], None]] = []
        self._num_done = 0
        self.num_submitted = 0

    def submit(self, job: Callable[[], None], after: Sequence[Ticket] = ()) -> Ticket:
        self._jobs.append(job)
        self.num_submitted += 1
        return LateTicket(self, self.num_submitted)

    def catch_up(self, number: int) -> None:
        while self._num_done < number:
            self._num_done += 1
            self._jobs.pop(0)()


@dataclass
class LateTicket:
    lane: LateLane
    number: int

    def wait(self) -> None:
        self.lane.catch_up(self.number)

    def is_over(self) -> bool:
        return False


def _late_losses(policy: mics.Activations, scenario: str) -> tuple[list[float], int]:
    away, back = LateLane(), LateLane()

    def shard(*args: Any, **kwargs: Any) -> nn.Module:
        model = original(*args, **kwargs)
        offloader = engine_of(model).offloader
        assert offloader is not None
        offloader.transfers.away, offloader.transfers.back = away, back
        return model

    original = mics.shard
    torch.use_deterministic_algorithms(True)  # new memory is full of NaNs
    try:
        with patch.object(mics, "shard", shard):
            losses = _losses(policy, 2, scenario)
    finally:
        torch.use_deterministic_algorithms(False)
    return losses, min(away.num_submitted, back.num_submitted)


@pytest.mark.parametrize(
    "scenario",
    ["micro-steps", pytest.param("several forwards", marks=pytest.mark.full), "evaluation and failures"],
)
def test_copies_may_come_as_late_as_they_are_waited_for(scenario: str) -> None:
    """Copies that run at once show no missing wait; on a GPU they run beside the computation."""
    plain = _plain(2, 2, scenario)
    for name in tiers.some(["offload", "bytes", "no checkpoint"]):
        found = run_ranks(2, _late_losses, _POLICIES[name], scenario)
        assert [losses for losses, _ in found] == plain, name
        assert all(num_copies > 0 for _, num_copies in found)


def _traffic(policy: mics.Activations) -> dict[str, Any]:
    model = mics.shard(Stack(), partition_size=1, activations=policy)
    optimizer = torch.optim.AdamW(model.parameters())
    offloader = engine_of(model).offloader
    assert offloader is not None
    allocations, offloaded = [], []
    for _ in range(4):
        loss = model(torch.rand(_ROWS, _WIDTH))
        offloaded.append(offloader.offloaded_nbytes)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        allocations.append(offloader.pool.num_allocations)
    del loss
    return {
        "allocations": allocations,
        "offloaded": offloaded,
        "free": offloader.pool.num_free,
    }


def test_a_steady_step_reuses_its_buffers() -> None:
    """What the first step took serves all others, and everything is freed."""
    found = _traffic(mics.Activations(offload=True))
    assert len(set(found["allocations"])) == 1
    assert found["free"] == found["allocations"][-1] > 0


def test_the_last_ones_and_what_is_over_the_budget_stay() -> None:
    unit = _ROWS * _WIDTH * 4
    assert _traffic(mics.Activations(offload=True, keep_last=2))["offloaded"][-1] == 3 * unit
    assert _traffic(mics.Activations(offload_bytes=2 * unit))["offloaded"] == [2 * unit] * 4
    # Five inputs are saved; the first one is read again, and counts once.
    assert _traffic(mics.Activations(offload_fraction=0.4, keep_last=0))["offloaded"][-1] == 2 * unit


def test_a_full_host_is_an_error_that_says_how_much() -> None:
    model = mics.shard(Stack(), partition_size=1, activations=mics.Activations(offload=True))
    with (
        patch("mics.sharding.host_memory.available_nbytes", return_value=1 << 20),
        pytest.raises(mics.MicsError, match=r"host memory for .* found 1\.00 MiB"),
    ):
        model(torch.rand(_ROWS, _WIDTH))


def test_an_edit_of_what_stays_is_noticed() -> None:
    """As torch notices it without offload; what has left keeps the values it had."""

    class EditsLate(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            out = self.blocks[1](self.blocks[0](x))
            x.mul_(2)
            return out.sum()

    policy = mics.Activations(offload_fraction=1.0, keep_last=2)
    edits = mics.shard(EditsLate(2), partition_size=1, activations=policy)
    loss = edits(torch.rand(_ROWS, _WIDTH))
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize(
    "wrong",
    [
        {"every": 0},
        {"checkpoint": "some"},
        {"offload": "all"},
        {"offload_fraction": 1.5},
        {"offload_fraction": float("nan")},
        {"offload_fraction": True},
        {"offload_bytes": -1},
        {"offload_bytes": 1},
        {"offload_bytes": 0.5},
        {"offload_bytes": False},
        {"offload_fraction": 0.5, "offload_bytes": 1 << 30},
        {"keep_last": -1},
    ],
)
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(
        mics.SettingsError, match=f"{next(iter(wrong))}.*expected|expected {next(iter(wrong))}"
    ):
        mics.Activations(**wrong)


def test_how_much_to_offload_implies_offload() -> None:
    assert mics.Activations(offload_fraction=0.5) == mics.Activations(offload=True, offload_fraction=0.5)
    assert mics.Activations(offload_bytes=1 << 30).offload
    assert not mics.Activations(offload_fraction=0.0).offload
    assert not mics.Activations(offload_bytes=0).offload
    assert not mics.Activations().offload


def test_a_callable_chooses() -> None:
    """Whose forward is recomputed: twice as many calls of its submodules."""
    torch.manual_seed(0)
    stack = Stack(3)
    chosen = stack.blocks[1]
    calls: dict[nn.Module, int] = {}

    def count(module: nn.Module, *_: Any) -> None:
        calls[module] = calls.get(module, 0) + 1

    for block in stack.blocks:
        block.up.register_forward_hook(count)  # type: ignore[union-attr]
    pick: Callable[[nn.Module], bool] = lambda module: module is chosen  # noqa: E731
    mics.shard(stack, partition_size=1, activations=mics.Activations(checkpoint=pick))
    stack(torch.rand(_ROWS, _WIDTH)).backward()
    assert [calls[block.up] for block in stack.blocks] == [1, 2, 1]  # type: ignore[index,union-attr]


class Edits(Stack):
    """Changes the input of a block while it is on its way to the host."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        out = self.blocks[0](x)
        x.mul_(2)
        return self.blocks[1](out).sum()


def test_an_edit_of_what_is_leaving_is_noticed() -> None:
    """The copy to the host may have read either value."""
    model = mics.shard(Edits(2), partition_size=1, activations=mics.Activations(offload=True, keep_last=0))
    loss = model(torch.rand(_ROWS, _WIDTH))
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


class Masked(nn.Module):
    """Every block gets the same large tensors: one that is held all the while, and an expanded one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.register_buffer("mask", torch.linspace(0, 1, _ROWS * _WIDTH).view(_ROWS, _WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        expanded = x.mean(0, keepdim=True).expand(_ROWS, _WIDTH)
        for number, block in enumerate(self.blocks):
            x = block(x, self.mask if number % 2 else expanded)
        return x.square().mean()


def test_what_is_held_anyway_is_copied_once_and_what_is_expanded_never() -> None:
    torch.manual_seed(0)
    model = mics.shard(Masked(), partition_size=1, activations=mics.Activations(offload=True, keep_last=0))
    offloader = engine_of(model).offloader
    assert offloader is not None
    model(torch.rand(_ROWS, _WIDTH)).backward()
    # The model's input needs no gradient but is saved all the same: four inputs and the mask.
    assert offloader.saved_nbytes == 5 * _ROWS * _WIDTH * 4


class Branches(nn.Module):
    """The backward does not come in the reverse order of the forward: the blocks are independent."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [block(x * (number + 1)) for number, block in enumerate(self.blocks)]


def test_a_backward_that_began_alike_decides_what_comes_back_next() -> None:
    """Also when several orders take turns. Without one, what was saved last comes back first."""
    model = mics.shard(Branches(), partition_size=1, activations=mics.Activations(offload=True, keep_last=0))
    offloader = engine_of(model).offloader
    assert offloader is not None
    orders = [2, 0, 3, 1], [1, 3, 0, 2]
    way_back = [[1], [], [], []], [[0], [2], [], []]
    for step in range(6):
        order = orders[step % 2]
        outputs = model(torch.rand(_ROWS, _WIDTH))
        groups = [offloader._groups[offloader._forward.number, place] for place in range(4)]
        came = []
        for number in order:
            before = [group.is_wanted for group in groups]
            outputs[number].sum().backward()
            after = [group.is_wanted for group in groups]
            came.append([p for p in range(4) if after[p] and not before[p] and p != number])
        if step < 2:
            assert came == way_back[step], came
        else:
            assert came == [[order[1]], [order[2]], [order[3]], []], came


def test_behind_a_forward_without_a_backward_activations_leave_as_ever() -> None:
    """As where a loss is not finite and its backward is left out, the loss still held meanwhile."""
    unit = _ROWS * _WIDTH * 4
    ways: list[tuple[dict[str, Any], int]] = [
        ({"offload": True}, 4),
        ({"offload_fraction": 0.4}, 2),
        ({"offload_bytes": 3 * unit}, 3),
    ]
    for way, leave in ways:
        model = mics.shard(Stack(), partition_size=1, activations=mics.Activations(**way))
        offloader = engine_of(model).offloader
        assert offloader is not None
        for step in range(6):
            before = offloader.offloaded_nbytes
            loss = model(torch.rand(_ROWS, _WIDTH))
            left = offloader.offloaded_nbytes - (before if step == 4 else 0)
            if step in (2, 3):
                assert left == leave * unit, (way, step)
            if step == 4:  # behind the one of step 3, whose loss this one has just replaced
                assert left == (0 if "offload_bytes" in way else leave * unit), way
            if step != 3:
                loss.backward()


def test_a_forward_that_leads_nowhere_gives_everything_back() -> None:
    model = mics.shard(Stack(), partition_size=1, activations=mics.Activations(offload=True))
    offloader = engine_of(model).offloader
    assert offloader is not None
    for _ in range(3):
        loss = model(torch.rand(_ROWS, _WIDTH))
        del loss
        with pytest.raises(RuntimeError, match="on purpose"):
            _fail_in_forward(model, torch.rand(_ROWS, _WIDTH))
    assert offloader._held.nbytes == 0
    assert offloader.pool.num_free == offloader.pool.num_allocations


def test_memory_names_every_term(capsys: pytest.CaptureFixture[str]) -> None:
    model = mics.shard(Stack(), partition_size=1, activations=mics.Activations(offload=True))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.rand(_ROWS, _WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = mics.memory_report(model)
    assert str(report) in capsys.readouterr().out
    unit = _ROWS * _WIDTH * 4
    assert report["parameters"].predicted == report["parameters"].measured
    assert report["optimizer state"].predicted == report["optimizer state"].measured
    # One at work, the one before that is leaving, and the one that is read again.
    assert report["saved activations"].predicted == report["saved activations"].measured == 3 * unit
    assert report["offloaded activations"].predicted == report["offloaded activations"].measured == 4 * unit
    assert report.total("host") == 4 * unit
    with pytest.raises(KeyError, match="expected one of parameters, gradients"):
        report["nothing"]


class Chain(nn.Module):
    """Blocks of one matrix, whose input comes as ``cut`` leaves it."""

    def __init__(self, cut: Callable[[Tensor], Tensor] = lambda x: x, num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(num_blocks))
        self.cut = cut

    def encode(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x))
        return x

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = torch.tanh(block(self.cut(x)))
        return x.square().mean()


def _trained(model: nn.Module, policy: mics.Activations | None, batches: list[Tensor]) -> list[Tensor]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    mics.shard(model, partition_size=1, activations=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


_CUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: torch.cat([x, x], dim=1)[:, 1 : 1 + x.shape[1]],
    "steps": lambda x: torch.cat([x, x], dim=1)[:, ::2],
    "transposed": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "expanded": lambda x: x[:, :1].expand_as(x),
}


@pytest.mark.parametrize("name", list(_CUTS))
def test_inputs_keep_their_layout(name: str) -> None:
    """Kernels are chosen by it: other strides would round differently, or fail the checkpoint's check."""
    batches = [torch.rand(3, _ROWS, _WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    plain = _trained(Chain(_CUTS[name]), None, batches)
    for policy in (_POLICIES["offload"], _POLICIES["no checkpoint"]):
        found = _trained(Chain(_CUTS[name]), policy, batches)
        assert all(map(torch.equal, found, plain))


@pytest.mark.parametrize("rows", [4, _ROWS])
def test_an_edit_of_a_small_tensor_is_noticed_too(rows: int) -> None:
    """Tensors that are too small to move go through hooks as well, where torch no longer looks."""

    class Small(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.blocks[0](x)
            out = self.blocks[1](x)
            x.mul_(2)
            return self.blocks[2](out).sum()

    model = mics.shard(Small(num_blocks=3), partition_size=1, activations=_POLICIES["offload"])
    with pytest.raises(RuntimeError, match="changed in place"):
        model(torch.rand(rows, _WIDTH)).backward()


def test_sizes_that_change_do_not_pile_up() -> None:
    model = mics.shard(Chain(), partition_size=1, activations=mics.Activations(offload=True))
    offloader = engine_of(model).offloader
    assert offloader is not None
    for rows in (*range(300, 600, 10), *range(600, 300, -10)):
        model(torch.rand(rows, _WIDTH)).backward()
    assert offloader.pool.num_free <= 4
    assert offloader.pool.nbytes <= 4 * 600 * _WIDTH * 4


def test_a_fraction_is_one_of_the_units() -> None:
    """Not of the bytes of another batch."""
    model = mics.shard(Chain(), partition_size=1, activations=mics.Activations(offload_fraction=0.5))
    offloader = engine_of(model).offloader
    assert offloader is not None
    for rows in (1000, 300, 1000):
        loss = model(torch.rand(rows, _WIDTH))
        assert offloader.offloaded_nbytes == 2 * rows * _WIDTH * 4
        loss.backward()


def test_frozen_units_before_the_first_that_is_trained_keep_nothing() -> None:
    """They are not copied for nothing, and neither a fraction nor the host memory asked for counts them."""
    plain = Chain()
    frozen = len(plain.blocks) - 2
    for block in plain.blocks[:frozen]:
        block.requires_grad_(False)
    one, x = _ROWS * _WIDTH * 4, torch.rand(_ROWS, _WIDTH)
    room = one * 5 // 2 + host_memory._MARGIN_NBYTES  # for two units
    expected = {"offload": 2 * one, "fraction": one, "checkpoint": 2 * one}
    for name, policy in (
        ("offload", mics.Activations(offload=True, keep_last=0)),
        ("fraction", mics.Activations(offload_fraction=0.5, keep_last=0)),
        ("checkpoint", mics.Activations()),
    ):
        model = mics.shard(copy.deepcopy(plain), partition_size=1, activations=policy)
        offloader = engine_of(model).offloader
        for _ in range(3):
            taken = 0 if offloader is None else offloader.pool.nbytes
            with patch.object(host_memory, "available_nbytes", return_value=room - taken):
                loss = model(x)
            if offloader is not None:
                assert offloader.offloaded_nbytes == offloader.pool.used_nbytes == expected[name], name
            loss.backward()
        report = mics.memory_report(model, show=False)
        term = report["saved activations" if offloader is None else "offloaded activations"]
        assert term.predicted == term.measured == expected[name], name
        for _ in range(3):
            plain(x).backward()
        found = mics.full_gradients(model)
        for key, param in plain.named_parameters():
            assert param.grad is None or torch.equal(found[key], param.grad), key
        plain.zero_grad()


def test_units_that_are_called_one_by_one_are_one_forward() -> None:
    model = mics.shard(Chain(), partition_size=1, activations=mics.Activations(offload=True))
    offloader = engine_of(model).offloader
    assert offloader is not None
    for _ in range(3):
        out = model.encode(torch.rand(_ROWS, _WIDTH))  # type: ignore[operator]
        assert offloader.offloaded_nbytes == 3 * _ROWS * _WIDTH * 4
        out.sum().backward()


class _Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(_WIDTH, _WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return x


def test_a_checkpoint_drops_what_units_inside_it_save() -> None:
    policy = mics.Activations(
        checkpoint=lambda module: isinstance(module, _Nested), offload=True, keep_last=0
    )
    model = nn.Sequential(*(_Nested() for _ in range(3)))
    mics.shard(model, partition_size=1, units=[_Nested, nn.Linear], activations=policy)
    offloader = engine_of(model).offloader
    assert offloader is not None
    loss = model(torch.rand(_ROWS, _WIDTH)).sum()
    assert offloader.saved_nbytes == 3 * _ROWS * _WIDTH * 4
    loss.backward()
    assert offloader.saved_nbytes == 3 * _ROWS * _WIDTH * 4


@pytest.mark.parametrize("offload", [False, True])
def test_the_report_counts_what_units_inside_units_keep_once(offload: bool) -> None:
    model = nn.Sequential(*(_Nested() for _ in range(3)))
    policy = mics.Activations(offload=offload)
    mics.shard(model, partition_size=1, units=[_Nested, nn.Linear], activations=policy)
    for _ in range(2):
        model(torch.rand(_ROWS, _WIDTH)).sum().backward()
        report = mics.memory_report(model, show=False)
        term = report["offloaded activations" if offload else "saved activations"]
        assert term.predicted == term.measured == (2 if offload else 3) * _ROWS * _WIDTH * 4


def test_names_of_arguments_are_the_units_own() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(_WIDTH, _WIDTH)

        def forward(self, x: Tensor, *, debug: bool, function: Tensor) -> Tensor:
            return self.linear(x) + (function if debug else 0)

    class Caller(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Named() for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x, debug=True, function=x + 1)
            return x.square().mean()

    batches = [torch.ones(_ROWS, _WIDTH)]
    plain = _trained(Caller(), None, batches)
    for policy in (_POLICIES["checkpoint"], _POLICIES["offload"]):
        assert all(map(torch.equal, _trained(Caller(), policy, batches), plain))


def test_a_callable_that_raises_leaves_the_model_as_it_was() -> None:
    def choose(module: nn.Module) -> bool:
        raise ValueError("on purpose")

    model = Chain()
    with pytest.raises(ValueError, match="on purpose"):
        mics.shard(model, partition_size=1, activations=mics.Activations(checkpoint=choose))
    assert model(torch.rand(2, _WIDTH)).dim() == 0
    mics.shard(model, partition_size=1)


def _cuda_losses(policy: mics.Activations | None) -> list[float]:
    torch.manual_seed(0)
    model = mics.shard(Stack().cuda(), partition_size=1, activations=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(6):
        torch.manual_seed(step)
        batches = list(torch.rand(2, _ROWS, _WIDTH, device="cuda"))
        if step == 5:  # nothing waits, nothing is allocated on the host
            torch.cuda.synchronize()
            offloader = engine_of(model).offloader
            before = offloader.pool.num_allocations if offloader is not None else 0
            torch.cuda.set_sync_debug_mode("error")
        losses = []
        try:
            for batch in mics.microsteps(model, batches):
                loss = model(batch)
                loss.backward()
                losses.append(loss.detach())
            optimizer.step()
            optimizer.zero_grad()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [loss.item() for loss in losses]
    assert offloader is None or offloader.pool.num_allocations == before
    return found


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", list(_POLICIES))
def test_cuda_losses_are_equal_to_the_bit(name: str) -> None:
    """On streams of their own, with no waiting on the host in a steady step."""
    assert _cuda_losses(_POLICIES[name]) == _cuda_losses(None)

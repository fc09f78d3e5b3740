"""Whatever a unit saves: views, slices and odd layouts leave and come back, and nothing is held for good."""

from __future__ import annotations

import gc
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils.rnn import PackedSequence

import mics
from mics.activations.offload import Offloader
from mics.activations.transfers import TransferClock
from mics.engine import engine_of
from mics.errors import MicsError, SettingsError
from mics.sharding import host_memory
from mics.sharding.host_memory import HostPool
from tests import pairwise, tiers
from tests.ranks import run_ranks

_WIDTH = 64
_ROWS = 600  # in bfloat16, too, more than what is too small to leave
_INPUT = _ROWS * _WIDTH * 4

_ALL = mics.Activations(offload=True, keep_last=0)
_NONE = mics.Activations(checkpoint="none", offload=True, keep_last=0)
_EVERY_OTHER = mics.Activations(every=2, offload=True, offload_uncheckpointed=True)


class Stack(nn.Module):
    """Blocks of one kind in a chain."""

    def __init__(self, block: Callable[[], nn.Module], num_blocks: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(num_blocks))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Gated(nn.Module):
    """With a gate so small that it stays: autograd saves it as the output of its own sigmoid."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_WIDTH, _WIDTH)
        self.gate = nn.Linear(_WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(x)) * torch.sigmoid(self.gate(x))


class Fused(nn.Module):
    """Attention with one projection for everything: ``groups`` heads of queries, one of keys and values."""

    def __init__(self, groups: int) -> None:
        super().__init__()
        self.groups, self.size = groups, _WIDTH // groups
        self.project = nn.Linear(_WIDTH, (groups + 2) * self.size)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.project(x).view(-1, 20, self.groups + 2, self.size).transpose(1, 2)
        queries, keys, values = parts.split([self.groups, 1, 1], dim=1)
        shape = queries.shape
        found = F.scaled_dot_product_attention(queries, keys.expand(shape), values.expand(shape))
        return x + found.transpose(1, 2).reshape(x.shape)


class TakesGradient(nn.Module):
    """Looks at a gradient of its own in the middle of its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x if x.requires_grad else x.clone().requires_grad_()
        y = torch.tanh(self.line(x))
        (slope,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return torch.tanh(self.line(y + slope))


class Cells(nn.Module):
    """A recurrent cell: its gates are parts of one memory, edited in place and each counted for itself."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        hidden, kept = self.cell(x)
        return hidden + kept


class Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_WIDTH, _WIDTH)
        adjacency = (torch.rand(_ROWS, _ROWS, generator=torch.Generator().manual_seed(1)) < 0.05).float()
        self.adjacency = adjacency.to_sparse()

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.line(torch.sparse.mm(self.adjacency, x)))


def _sharded(model: nn.Module, policy: mics.Activations | None) -> tuple[nn.Module, Offloader | None]:
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    mics.shard(model, partition_size=1, activations=policy)
    return model, engine_of(model).offloader


def _train(model: nn.Module, batches: list[Any]) -> list[Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        model(batch).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [parameter.detach().clone() for parameter in model.parameters()]


def _batches() -> list[Tensor]:
    return [torch.rand(_ROWS, _WIDTH, generator=torch.Generator().manual_seed(i)) for i in range(3)]


@pytest.mark.parametrize(
    "build", tiers.first([Cells, lambda: Fused(4), TakesGradient, Sparse, Gated, lambda: Fused(1)], 4)
)
def test_what_units_save_comes_back_to_the_bit(build: Callable[[], nn.Module]) -> None:
    plain = _train(_sharded(Stack(build), None)[0], _batches())
    for policy in (_ALL, _NONE, _EVERY_OTHER):
        model, offloader = _sharded(Stack(build), policy)
        found = _train(model, _batches())
        assert all(map(torch.equal, found, plain))
        assert offloader is not None and offloader.offloaded_nbytes > 0


def _on_two_nodes(build: Callable[[], nn.Module], policies: list[mics.Activations | None]) -> list[Any]:
    found = []
    for policy in policies:
        torch.manual_seed(0)
        model = mics.shard(Stack(build), partition_size=2, activations=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(4):
            batches = [batch + step + dist.get_rank() for batch in _batches()[:2]]
            for batch in mics.microsteps(model, batches):
                model(batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([parameter.to_local().clone() for parameter in model.parameters()])
    return found


@pytest.mark.parametrize("build", [partial(Fused, 4), pytest.param(Cells, marks=pytest.mark.full)])
def test_what_units_save_comes_back_with_replicas_and_accumulation(build: Callable[[], nn.Module]) -> None:
    """On two nodes of two ranks, `low_memory` where it is offloaded, and parameters among what is saved."""
    policies = [None, _ALL, _NONE, _EVERY_OTHER]
    for plain, *others in run_ranks(4, _on_two_nodes, build, policies, ranks_per_node=2):
        assert any(parameter.numel() for parameter in plain)
        for found in others:
            assert all(map(torch.equal, found, plain))


@pytest.mark.gpu
@pytest.mark.parametrize("build", [Gated, lambda: Fused(1), lambda: Fused(4), TakesGradient, Cells])
def test_what_units_save_comes_back_to_the_bit_on_a_gpu(build: Callable[[], nn.Module]) -> None:
    batches = [batch.cuda() for batch in _batches()]
    with sdpa_kernel(SDPBackend.MATH):  # others add up in no fixed order
        plain = _train(_sharded(Stack(build).cuda(), None)[0], batches)
        for policy in (_ALL, _NONE, _EVERY_OTHER):
            model, offloader = _sharded(Stack(build).cuda(), policy)
            assert all(map(torch.equal, _train(model, batches), plain))
            assert offloader is not None and offloader.offloaded_nbytes > 0
            assert offloader.pool.used_nbytes == 0


@pairwise.parametrize(strength=1, fails=[False, True], policy=[_ALL, _NONE, _EVERY_OTHER])
def test_a_forward_without_a_backward_leaves_nothing_behind(policy: mics.Activations, fails: bool) -> None:
    """A dropped loss, or an exception in the last block: no tensor and no host buffer is held."""
    model, offloader = _sharded(Stack(Gated), policy)
    assert offloader is not None
    last = model.blocks[-1].gate  # type: ignore[union-attr,index]
    seen = []
    for _ in range(3):
        batch = torch.rand(_ROWS, _WIDTH)
        seen.append(weakref.ref(batch))
        if fails:
            with patch.object(last, "forward", side_effect=ValueError), pytest.raises(ValueError):
                model(batch)
        else:
            model(batch)
        del batch
        gc.collect()
        assert offloader.pool.used_nbytes == 0
    assert not any(ref() is not None for ref in seen[:-1])


@pytest.mark.parametrize(
    "write", [lambda x, y: np.copyto(x.numpy(), y.numpy()), lambda x, y: x.data.copy_(y)]
)
def test_memory_that_is_filled_anew_is_saved_anew(write: Callable[[Tensor, Tensor], Any]) -> None:
    """Without a trace in its version, while the graph of an earlier forward from it is still held."""

    def trained(policy: mics.Activations | None) -> list[Tensor]:
        model, _ = _sharded(Stack(Gated), policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        buffer, held = torch.empty(_ROWS, _WIDTH), []
        for step, batch in enumerate(_batches()):
            write(buffer, batch)
            loss = model(buffer)
            if step == 1:
                held.append(loss)  # a skipped batch
                continue
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    plain = trained(None)
    for policy in (_ALL, _NONE):
        assert all(map(torch.equal, trained(policy), plain))


def test_parts_of_one_projection_leave_together_and_once() -> None:
    """Queries, keys and values are slices of it; what else is saved are inputs and the attention's own."""
    model, offloader = _sharded(Stack(lambda: Fused(4), num_blocks=2), _NONE)
    assert offloader is not None
    with patch("mics.activations.offload._LEAST_PART", 0.9):  # of a slice nothing is freed
        model(torch.rand(_ROWS, _WIDTH)).backward()
    without = offloader.offloaded_nbytes
    model(torch.rand(_ROWS, _WIDTH)).backward()
    assert offloader.offloaded_nbytes - without == 2 * _INPUT * 6 // 4


def test_micro_batches_that_are_slices_leave_by_themselves() -> None:
    model, offloader = _sharded(Stack(Gated), _ALL)
    assert offloader is not None
    for batch in torch.rand(4 * _ROWS, _WIDTH).split(_ROWS):
        model(batch).backward()
        assert offloader.offloaded_nbytes == 4 * _INPUT


class EditsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        return grad * x.mul_(2)


class Edits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = EditsInBackward.apply(torch.tanh(self.line(x)))
        return result


@pytest.mark.parametrize("keep_last", [0, 4])
def test_an_edit_of_what_came_back_is_noticed(keep_last: int) -> None:
    """Two nodes saved it. What the first one's backward does to it the second must not compute with."""
    policy = mics.Activations(checkpoint="none", offload=True, keep_last=keep_last)
    model, _ = _sharded(Stack(Edits), policy)
    with pytest.raises(RuntimeError, match="changed in place"):
        model(torch.rand(_ROWS, _WIDTH)).backward()


def test_transforms_of_functions_see_through_units() -> None:
    model, _ = _sharded(Stack(Gated), None)
    with torch.no_grad():
        batches = torch.stack(_batches())
        found = torch.func.vmap(model.blocks[0])(batches)  # type: ignore[index,arg-type]
        torch.testing.assert_close(found[1], model.blocks[0](batches[1]))  # type: ignore[index,operator]


@dataclass
class State:
    value: Tensor
    others: list[Tensor]


def _unpacked(given: Any) -> Tensor:
    if isinstance(given, PackedSequence):
        return given.data
    if isinstance(given, State):
        return given.value + given.others[0]
    if isinstance(given, dict):
        return given["value"] + given["more"][0]
    return given[0] + given[1][0] if isinstance(given, tuple) else given


_WAYS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x,
    "tuple": lambda x: (x, [x]),
    "dict": lambda x: {"value": x, "more": (x,)},
    "dataclass": lambda x: State(x, [x]),
    "packed": lambda x: PackedSequence(x, torch.full((1,), x.shape[0])),
}


class Takes(nn.Module):
    """Is given its input in a container, and leaves a result in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, given: Any, *, results: list[Tensor]) -> Any:
        y = torch.tanh(self.line(_unpacked(given)))
        results.append(y)
        return y


class Gives(nn.Module):
    def __init__(self, way: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.way = way
        self.blocks = nn.ModuleList(Takes() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        results: list[Tensor] = []
        for block in self.blocks:
            block(self.way(x), results=results)
            x = results[-1]
        assert len(results) == 4
        return x.square().mean()


@pytest.mark.parametrize("name", list(_WAYS))
def test_inputs_in_containers_leave_too(name: str) -> None:
    plain = _train(_sharded(Gives(_WAYS[name]), None)[0], _batches())
    model, offloader = _sharded(Gives(_WAYS[name]), _ALL)
    assert offloader is not None
    assert all(map(torch.equal, _train(model, _batches()), plain))
    assert offloader.offloaded_nbytes == 4 * _INPUT


class Tagged(list[Tensor]):
    scale = 0.5


class Ring(nn.Module):
    """Is given containers that are more than their items, or the same one twice."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_WIDTH, _WIDTH)

    def forward(
        self, tagged: Tagged, one: list[Tensor], *, other: list[Tensor], last: deque[Tensor]
    ) -> Tensor:
        one.append(one[0] * tagged.scale)  # which is seen in the other
        last.append(tagged[0])  # and one leaves at the other end
        return torch.tanh(self.line(tagged[0] * getattr(tagged, "more", 1.0) + other[-1] + last[0]))


class GivesOddities(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Ring() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            tagged, one = Tagged([x]), [x]
            tagged.more = 3.0  # type: ignore[attr-defined]
            last = deque([x * 2, x * 3], maxlen=2)
            x = block(tagged, one, other=one, last=last)
            assert len(one) == 2
        return x.square().mean()


def test_what_is_computed_again_finds_the_containers_it_was_given() -> None:
    plain = _train(_sharded(GivesOddities(), None)[0], _batches())
    for policy in (mics.Activations(), _ALL):
        assert all(map(torch.equal, _train(_sharded(GivesOddities(), policy)[0], _batches()), plain))


def test_what_units_save_that_are_not_computed_again_stays_unless_told() -> None:
    saved = {}
    for others in (False, True, "auto"):
        policy = mics.Activations(every=2, offload=True, keep_last=0, offload_uncheckpointed=others)  # type: ignore[arg-type]
        model, offloader = _sharded(Stack(Gated), policy)
        assert offloader is not None
        model(torch.rand(_ROWS, _WIDTH)).backward()
        saved[others] = offloader.offloaded_nbytes
    assert saved["auto"] == saved[False] == 2 * _INPUT < saved[True]


def test_a_class_of_modules_is_computed_again() -> None:
    with pytest.raises(SettingsError, match="units are: Gated"):
        mics.shard(Stack(Gated), partition_size=1, activations=mics.Activations(checkpoint=nn.Conv2d))
    model = nn.Sequential(*(build() for build in (Gated, TakesGradient, Gated)))
    mics.shard(
        model, partition_size=1, units=[Gated, TakesGradient], activations=mics.Activations(checkpoint=Gated)
    )
    model(torch.rand(_ROWS, _WIDTH)).sum().backward()
    term = mics.memory_report(model, show=False)["saved activations"]
    assert term.predicted == term.measured == 2 * _INPUT


# ---------------------------------------------------------------------------------------------
# Host memory
# ---------------------------------------------------------------------------------------------


class Wide(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(_WIDTH, width), nn.Linear(width, _WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


class Uneven(nn.Module):
    """One unit saves much more than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Wide(1024 if number == 0 else _WIDTH) for number in range(12))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def _host_of(nbytes: float, *pools: HostPool) -> AbstractContextManager[Any]:
    """A host with so much memory for ``pools``, beside what is left to others."""

    def available() -> int:
        return int(nbytes) - sum(pool.nbytes for pool in pools) + host_memory._MARGIN_NBYTES

    return patch.object(host_memory, "available_nbytes", available)


def test_no_more_host_memory_is_asked_for_than_is_needed() -> None:
    model, offloader = _sharded(Uneven(), _NONE)
    assert offloader is not None
    model(torch.rand(_ROWS, _WIDTH)).backward()
    needed = offloader.pool.nbytes
    for room, fits in ((1.1, True), (0.9, False)):
        model, offloader = _sharded(Uneven(), _NONE)
        assert offloader is not None
        with _host_of(needed * room, offloader.pool):
            if fits:
                model(torch.rand(_ROWS, _WIDTH)).backward()
            else:
                with pytest.raises(MicsError, match="MiB of host memory for"):
                    model(torch.rand(_ROWS, _WIDTH))


def test_a_forward_that_is_dropped_says_nothing_about_the_next() -> None:
    """Evaluations with gradients, and batches that are skipped: neither host memory nor fractions change."""
    for fraction, leaving in ((None, 4), (0.5, 2)):
        policy = mics.Activations(offload=True, offload_fraction=fraction, keep_last=0)
        model, offloader = _sharded(Stack(Gated), policy)
        assert offloader is not None
        for step in range(6):
            if step in (2, 3):
                for _ in range(3):
                    loss = model(torch.rand(_ROWS, _WIDTH))
                del loss
            before = offloader.offloaded_nbytes if step in (2, 3) else 0
            model(torch.rand(_ROWS, _WIDTH)).backward()
            assert offloader.offloaded_nbytes - before == leaving * _INPUT, (fraction, step)
        expected = offloader.expected_nbytes()
        assert expected is not None and expected.on_host == leaving * _INPUT
        # Two of them are alive at once where a variable gets the next one's loss.
        assert offloader.pool.nbytes <= 2 * leaving * _INPUT


def test_a_backward_of_long_before() -> None:
    """Of a forward from before the latest one, whose own backward has not come and never will."""

    def trained(policy: mics.Activations | None) -> list[Tensor]:
        model, _ = _sharded(Stack(Gated), policy)
        batches = torch.rand(6, _ROWS, _WIDTH, generator=torch.Generator().manual_seed(0)).unbind()
        for _ in range(2):
            first, second = model(batches[0]), model(batches[1])
            second.backward()
            third = model(batches[2])
            first.backward()
            fourth = model(batches[3])
            fourth.backward()
            del third
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    plain = trained(None)
    for policy in (_ALL, _NONE, _EVERY_OTHER):
        assert all(map(torch.equal, trained(policy), plain))


def test_memory_that_has_become_free_is_had() -> None:
    """After a refusal, and after steps that were small because there was little."""
    model, offloader = _sharded(Stack(Gated), _NONE)
    assert offloader is not None
    model(torch.rand(_ROWS, _WIDTH)).backward()
    needed = offloader.pool.nbytes
    model, offloader = _sharded(Stack(Gated), _NONE)
    assert offloader is not None
    with _host_of(needed, offloader.pool):
        model(torch.rand(_ROWS, _WIDTH)).backward()
        with pytest.raises(MicsError, match="MiB of host memory for"):
            model(torch.rand(4 * _ROWS, _WIDTH))
    for _ in range(2):
        model(torch.rand(4 * _ROWS, _WIDTH)).backward()
    assert offloader.pool.nbytes > 2 * needed


def test_each_rank_of_a_node_has_its_share() -> None:
    """One that is ahead takes no more than that, memory that is freed is shared, and what is gone is gone."""
    pools = [HostPool(pin=False, num_sharing=4, user="test", remedy="") for _ in range(4)]
    mib = 1 << 20
    held = []

    def take(pool: HostPool) -> None:
        held.append((pool, pool.take(mib, "pieces")))

    with _host_of(16 * mib, *pools):
        for _ in range(4):
            take(pools[0])
        with pytest.raises(MicsError, match="its share of what there was for the node's 4 being"):
            take(pools[0])
        for pool in pools[1:] * 2:
            take(pool)
    for pool, buffer in held:
        pool.give_back(buffer)
    with _host_of(40 * mib, *pools):
        held = [(pool, pool.take(mib, "pieces")) for _ in range(6) for pool in pools]
    for pool, buffer in held:
        pool.give_back(buffer)
    with _host_of(26 * mib, *pools):
        for pool in pools:
            pool.take(mib, "a piece that is there")
            with pytest.raises(MicsError, match="MiB of host memory"):
                pool.require(12 * mib, "what was there before")


def test_host_memory_is_looked_at_when_it_is_needed() -> None:
    """Not while the model is sharded, when a loaded checkpoint may still be in the way."""
    with patch.object(host_memory, "available_nbytes", lambda: 0):
        model, _ = _sharded(Stack(Gated), _ALL)
        with pytest.raises(MicsError, match="found 0 MiB available"):
            model(torch.rand(_ROWS, _WIDTH))
    model(torch.rand(_ROWS, _WIDTH)).backward()


class Columns(nn.Module):
    """Each block gets a column of one buffer, which is filled just before and without a trace."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Scaled() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        buffer = torch.zeros(_ROWS, 4, _WIDTH)
        for number, block in enumerate(self.blocks):
            buffer.data[:, number] = torch.sin(x.detach() + number)
            x = block(x, buffer[:, number])
        return x.square().mean()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: Tensor, scale: Tensor) -> Tensor:
        return torch.tanh(self.line(x) * scale)


def test_memory_between_the_parts_of_a_tensor_may_be_filled_later() -> None:
    plain = _train(_sharded(Columns(), None)[0], _batches())
    for policy in (_ALL, _NONE, _EVERY_OTHER):
        assert all(map(torch.equal, _train(_sharded(Columns(), policy)[0], _batches()), plain))


def test_a_transfer_before_any_backward_is_not_timed() -> None:
    """A unit takes a gradient through units before it, in its forward."""
    clock = TransferClock()
    with patch.object(torch.cuda, "Event", side_effect=AssertionError("no GPU here")), clock.transfer():
        pass
    assert not clock.is_read()


@pytest.mark.parametrize(
    ("model", "settings", "found"),
    [
        (nn.Linear(4, 4), {}, "with units, found none"),
        (nn.Linear(4, 4), {"checkpoint": "none", "offload": True}, "with units, found none"),
        (Stack(Gated), {"checkpoint": lambda module: False, "offload": True}, "takes none of 4"),
    ],
)
def test_settings_that_would_change_nothing(model: nn.Module, settings: dict[str, Any], found: str) -> None:
    with pytest.raises(SettingsError, match=found):
        mics.shard(model, partition_size=1, activations=mics.Activations(**settings))
    mics.shard(model, partition_size=1, activations=mics.Activations(checkpoint="none"))


def test_a_limit_in_bytes_holds_when_sizes_change() -> None:
    model, offloader = _sharded(Stack(Gated), mics.Activations(offload_bytes=1_000_000, keep_last=0))
    assert offloader is not None
    for rows in (300, 3900, 300, 3900):
        model(torch.rand(rows, _WIDTH)).backward()
        assert 0 < offloader.pool.nbytes <= 1_000_000


@pytest.mark.parametrize("own", ["/", "/job/step"])
@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_container(tmp_path: Path, version: int, own: str) -> None:
    """Its own, or one of a control group inside it, as batch systems make them."""
    folder = tmp_path / ("memory" if version == 1 else "") / own.removeprefix("/").removesuffix("/step")
    folder.mkdir(parents=True, exist_ok=True)
    ours = tmp_path / "cgroup"
    ours.write_text(f"7:cpu,cpuacct:/x\n5:memory:{own}\n" if version == 1 else f"0::{own}\n")
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    (folder / names[0]).write_text("1000000\n")
    (folder / names[1]).write_text("600000\n")
    statistics = "inactive_file 100000\ntotal_inactive_file 100000\n"
    (folder / "memory.stat").write_text(statistics)
    with patch.multiple(host_memory, _CGROUPS=tmp_path, _OWN_CGROUPS=ours):
        assert host_memory._of_the_container() == 500_000
        (folder / names[0]).write_text("max\n")
        assert host_memory._of_the_container() is None

"""Units that are computed again, and activations that go to host memory: the same bits as without."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.engine import engine_of
from tests.ranks import run_ranks

_WIDTH = 64
_ROWS = 300  # a saved input has 75 KiB: large enough to be moved


class Block(nn.Module):
    """With dropout, so that recomputation must repeat random numbers; and a list that may carry results."""

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


def _losses(activations: mics.Activations | None, partition_size: int, scenario: str) -> list[float]:
    torch.manual_seed(0)
    model = mics.shard(Stack(), partition_size=partition_size, activations=activations)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
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


_POLICIES = {
    "checkpoint": mics.Activations(),
    "offload": mics.Activations(offload=True),
    "half": mics.Activations(offload=0.5),
    "bytes": mics.Activations(offload=200_000, keep_last=0),
    "every other": mics.Activations(every=2, offload=True, keep_last=2),
    "no checkpoint": mics.Activations(checkpoint="none", offload=True),
}


@pytest.mark.parametrize(
    ("partition_size", "scenario"),
    [(1, "micro-steps"), (2, "micro-steps"), (2, "several forwards"), (2, "evaluation and failures")],
)
def test_losses_are_equal_to_the_bit(partition_size: int, scenario: str) -> None:
    """Dropout, skip connections, views, accumulation, forwards that fail or lead nowhere."""
    plain = run_ranks(2, _losses, None, partition_size, scenario)
    for name, policy in _POLICIES.items():
        assert run_ranks(2, _losses, policy, partition_size, scenario) == plain, name


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
        "free": sum(map(len, offloader.pool._free.values())),
    }


def test_a_steady_step_reuses_its_buffers() -> None:
    """What the first step took serves all others, and everything is given back."""
    found = _traffic(mics.Activations(offload=True))
    assert len(set(found["allocations"])) == 1
    assert found["free"] == found["allocations"][-1] > 0


def test_the_last_ones_and_what_is_over_the_budget_stay() -> None:
    unit = _ROWS * _WIDTH * 4
    assert _traffic(mics.Activations(offload=True, keep_last=2))["offloaded"][-1] == 3 * unit
    assert _traffic(mics.Activations(offload=2 * unit))["offloaded"] == [2 * unit] * 4
    # Five inputs are saved; the first one is read again, and counts once.
    assert _traffic(mics.Activations(offload=0.4, keep_last=0))["offloaded"][-1] == 2 * unit


def test_a_full_host_is_an_error_that_says_how_much() -> None:
    model = mics.shard(Stack(), partition_size=1, activations=mics.Activations(offload=True))
    with (
        patch("mics.host_memory.available_nbytes", return_value=1 << 20),
        pytest.raises(mics.MicsError, match=r"host memory for .* found 0\.000977 GiB"),
    ):
        model(torch.rand(_ROWS, _WIDTH))


def test_an_edit_of_what_stays_is_noticed() -> None:
    """As torch notices it without offload; what has left keeps the values it had."""
    model = mics.shard(nn.ModuleList([nn.Tanh()]), partition_size=1)
    del model

    class Edits(Stack):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            out = self.blocks[1](self.blocks[0](x))
            x.mul_(2)
            return out.sum()

    edits = mics.shard(Edits(2), partition_size=1, activations=mics.Activations(offload=1.0, keep_last=2))
    edits(torch.rand(_ROWS, _WIDTH)).backward()
    loss = edits(torch.rand(_ROWS, _WIDTH))
    with pytest.raises(RuntimeError, match="changed in place"):
        loss.backward()


@pytest.mark.parametrize(
    "wrong",
    [{"every": 0}, {"checkpoint": "some"}, {"offload": 1.5}, {"offload": -1}, {"keep_last": -1}],
)
def test_bad_settings(wrong: dict[str, Any]) -> None:
    with pytest.raises(mics.SettingsError, match=next(iter(wrong))):
        mics.Activations(**wrong)


def test_a_callable_chooses() -> None:
    """Whose forward is computed again: twice as many calls of its submodules."""
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


def test_the_order_of_the_last_backward_decides_what_comes_back_next() -> None:
    model = mics.shard(Branches(), partition_size=1, activations=mics.Activations(offload=True, keep_last=0))
    offloader = engine_of(model).offloader
    assert offloader is not None
    order = [2, 0, 3, 1]
    for _ in range(2):
        outputs = model(torch.rand(_ROWS, _WIDTH))
        for number in order:
            outputs[number].sum().backward()
    assert [offloader._follows[place] for place in order[:-1]] == order[1:]


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
    assert sum(map(len, offloader.pool._free.values())) == offloader.pool.num_allocations


def test_memory_names_every_term(capsys: pytest.CaptureFixture[str]) -> None:
    model = mics.shard(Stack(), partition_size=1, activations=mics.Activations(offload=True))
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.rand(_ROWS, _WIDTH)).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = mics.memory(model)
    assert str(report) in capsys.readouterr().out
    unit = _ROWS * _WIDTH * 4
    assert report["parameters"].predicted == report["parameters"].measured
    assert report["optimizer state"].predicted == report["optimizer state"].measured
    assert report["saved activations"].predicted == unit  # the last block's input
    assert report["saved activations"].measured == 2 * unit  # beside the one that is leaving
    assert report["offloaded activations"].predicted == 4 * unit
    # In the first forward it was not known which one would be the last.
    assert report["offloaded activations"].measured == 5 * unit
    assert report.total("host") == 5 * unit


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
@pytest.mark.parametrize("name", list(_POLICIES))
def test_cuda_losses_are_equal_to_the_bit(name: str) -> None:
    """On streams of their own, with no waiting on the host in a steady step."""
    assert _cuda_losses(_POLICIES[name]) == _cuda_losses(None)

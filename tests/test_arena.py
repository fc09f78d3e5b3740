"""Gathered units at their homes: addresses that stay, orders that change, and memory in few pieces."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import mics
from mics.engine import engine_of
from mics.models.gpt import GPT, GPTConfig
from tests import pairwise, tiers
from tests.ranks import run_expecting_error, run_ranks

_SHAPE = GPTConfig(num_layers=6, num_heads=2, hidden_size=16, vocab_size=32, seq_len=8, tie_weights=False)


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, tokens: Tensor) -> float:
    loss = model(tokens, tokens)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.item())


def _addresses() -> tuple[bool, bool, bool]:
    """Whether units stay where they are, whether they share places, whether all places are in one buffer."""
    model = mics.shard(GPT(_SHAPE), partition_size=2, prefetch=1)
    optimizer = torch.optim.AdamW(model.parameters())
    units = engine_of(model).units
    tokens = torch.arange(8).view(1, 8)
    seen = []
    for step in range(7):
        if step == 4:
            with torch.no_grad():
                model(tokens)
        _step(model, optimizer, tokens)
        seen.append([unit.whole.flat.data_ptr() for unit in units])
    stay = all(addresses == seen[2] for addresses in seen[3:])
    storages = {unit.whole.flat.untyped_storage().data_ptr() for unit in units}
    return stay, len(set(seen[-1])) < len(units), len(storages) == 1


def test_homes_are_fixed_and_shared() -> None:
    """From the third step on every unit has one address in one buffer, also through an evaluation."""
    assert run_ranks(2, _addresses) == [(True, True, True)] * 2


def _pieces() -> dict[str, int]:
    """How many pieces of memory hold all shards, masters, gradients and each entry of optimizer state."""
    model = mics.shard(GPT(_SHAPE), partition_size=2, precision=mics.Precision(param_dtype=torch.bfloat16))
    optimizer = torch.optim.AdamW(model.parameters())
    units = engine_of(model).units
    tokens = torch.arange(8).view(1, 8)

    def count(tensors: list[Tensor]) -> int:
        return len({tensor.untyped_storage().data_ptr() for tensor in tensors if tensor.numel()})

    def of_state(key: str) -> int:
        return count([state[key] for state in optimizer.state.values()])

    for _ in range(2):
        _step(model, optimizer, tokens)
    found = {key: of_state(key) for key in ("exp_avg", "exp_avg_sq")}
    state = optimizer.state_dict()
    # As read from a file, tensor by tensor.
    cloned = {n: {key: value.clone() for key, value in s.items()} for n, s in state["state"].items()}
    optimizer.load_state_dict(state | {"state": cloned})
    loaded = of_state("exp_avg")
    _step(model, optimizer, tokens)
    return found | {
        "params": count([unit.param_shard for unit in units]),
        "masters": count([unit.master for unit in units]),
        "gradients": count([engine_of(model).shown.of(unit).allocate() for unit in units]),
        "loaded": int(loaded > 1),
        "loaded and stepped": of_state("exp_avg"),
    }


def test_what_lasts_is_contiguous() -> None:
    """Shards, masters, gradients and optimizer state are one piece each, again after state was loaded."""
    for pieces in run_ranks(4, _pieces, ranks_per_node=2):
        assert set(pieces.values()) == {1}, pieces


class _Branches(nn.Module):
    """Two chains of blocks whose outputs are added, or only the first of them used."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.right = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: Tensor, both: bool) -> Tensor:
        left = right = x
        for block in self.left:
            left = torch.tanh(block(left))
        for block in self.right:
            right = torch.tanh(block(right))
        return (left + right if both else left).sum()


def _against_plain(losses: Callable[[nn.Module, torch.optim.Optimizer], list[float]]) -> float:
    """The largest difference that sharding makes to what ``losses`` returns."""
    models = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model: nn.Module = _Branches()
        models.append(mics.shard(model, partition_size=2, prefetch=1) if sharded else model)
    found = [losses(model, torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    return max(abs(a - b) for a, b in zip(*found, strict=True))


def _branch_losses(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    found = []
    for step in range(10):
        # Graphs that are kept, cleared gradients between forward and backward, evaluations in between.
        loss = model(torch.ones(2, 6), True)
        model.zero_grad()
        loss.backward(retain_graph=step % 2 == 0)
        if step % 2 == 0:
            loss.backward()
        optimizer.step()
        with torch.no_grad():
            found.append(model(torch.ones(2, 6), False).item())
    return found


def test_branches_and_habits() -> None:
    assert max(run_ranks(2, _against_plain, _branch_losses)) < 1e-5


class _Towers(nn.Module):
    """Two towers on one embedding, the second perhaps on something made of it."""

    def __init__(self, first: nn.Module, *, derives: bool) -> None:
        super().__init__()
        self.first = first
        self.left = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.right = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.derives = derives

    def forward(self, x: Tensor, both: bool) -> Tensor:
        x = self.first(x)
        right = x * 2 if self.derives else x
        for block in self.right:
            right = torch.tanh(block(right))
        left = x
        for block in self.left:
            left = torch.tanh(block(left))
        return (left + right if both else left).sum()


def _late_loss(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    """A second loss that begins when places in memory have long been given."""
    found = []
    for step in range(9):
        loss = model(torch.linspace(-1, 1, 12).view(2, 6), both=3 <= step < 6 or step == 8)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def _late_loss_of(embeds: bool, prefetch: int) -> float:
    found = []
    for sharded in (False, True):
        torch.manual_seed(0)
        model = _Towers(nn.Linear(6, 6) if embeds else nn.Identity(), derives=False)
        if sharded:
            mics.shard(model, partition_size=2, prefetch=prefetch)
        found.append(_late_loss(model, torch.optim.SGD(model.parameters(), lr=0.1)))
    return max(abs(a - b) for a, b in zip(*found, strict=True))


@pairwise.parametrize(strength=1, embeds=[False, True], prefetch=[1, 2])
def test_a_loss_may_begin_later(embeds: bool, prefetch: int) -> None:
    """Of a tower that shares its input with the first: how long its backward takes was never seen."""
    assert max(run_ranks(2, _late_loss_of, embeds, prefetch)) < 1e-5


def _conflict() -> list[str]:
    """Backwards in which units are in use together that never were before, tried again where they fail."""
    model = mics.shard(_Towers(nn.Linear(6, 6), derives=True), partition_size=2, prefetch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for both in (False, False, False, True, True, True, True):
        try:
            model(torch.ones(2, 6), both).backward()
            found.append("fine")
            optimizer.step()
        except mics.MicsError as error:
            found.append(str(error))
        optimizer.zero_grad()
    return found


def test_a_place_that_is_taken_is_an_error_once_and_never_a_wrong_number() -> None:
    """The same forward with another backward: values that autograd saved would be somebody else's."""
    first, second = run_ranks(2, _conflict)
    assert first == second
    failed = [message for message in first if message != "fine"]
    assert len(failed) == 1
    assert all("run this step again" in message for message in failed)
    assert first[-1] == "fine"


class _Doubled(nn.Module):
    """A weight that is used without calling its module, an embedding with a hook, and layers left out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 6)
        self.embed.register_forward_hook(lambda module, args, out: out * module.weight[3])
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(5))
        self.extra = nn.Linear(6, 6)

    def forward(self, tokens: Tensor, skip: int | None = None) -> Tensor:
        x = self.embed(tokens)
        for number, block in enumerate(self.blocks):
            if number != skip:
                x = torch.tanh(block(x))
        return (torch.tanh(x @ self.extra.weight.t()) @ self.embed.weight.t()).square().mean()


def _doubled_losses(sharded: bool, keep: bool) -> list[float]:
    """Evaluations in every step, outputs that one rank keeps, now and then two forwards for a backward."""
    torch.manual_seed(0)
    model: nn.Module = _Doubled()
    if sharded:
        mics.shard(model, partition_size=2, prefetch=1)
    optimizer = torch.optim.AdamW([{"params": []}, {"params": list(model.parameters())}], lr=1e-2)
    tokens = torch.arange(8).view(2, 4)
    kept, found = [], []
    for step in range(12):
        with torch.no_grad():
            found.append(model(tokens).item())
        unused = model(tokens, skip=step % 3)
        if keep and torch.distributed.get_rank() == 0:
            kept.append(unused)
        loss = model(tokens, skip=step % 5 if step > 6 else None)
        if step in (5, 9):
            loss = loss + model(tokens + 1)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.parametrize("keep", tiers.first([True, False]))
def test_ranks_decide_alike_whatever_they_hold(keep: bool) -> None:
    """One rank keeps graphs alive, orders change, weights are used by others: losses of plain training."""
    plain = run_ranks(2, _doubled_losses, False, keep)
    for sharded, expected in zip(run_ranks(2, _doubled_losses, True, keep), plain, strict=True):
        assert sharded == pytest.approx(expected, abs=1e-5)


def _num_planned(evaluate: bool) -> int:
    model = mics.shard(GPT(_SHAPE), partition_size=2, prefetch=1)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(8).view(1, 8)
    for _ in range(10):
        if evaluate:
            with torch.no_grad():
                model(tokens)
        _step(model, optimizer, tokens)
    return engine_of(model).residency.arena.num_planned


@pytest.mark.full
def test_evaluations_move_nobody() -> None:
    """Homes are given once, and at most once more when the evaluation has settled."""
    assert run_ranks(2, _num_planned, False) == [1, 1]
    assert max(run_ranks(2, _num_planned, True)) <= 2


def _old_graph() -> None:
    """A backward through a forward of before the units moved in."""
    model = mics.shard(_Branches(), partition_size=2, prefetch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    kept = model(torch.ones(2, 6), True)
    kept.backward(retain_graph=True)
    for _ in range(3):
        optimizer.step()
        model(torch.ones(2, 6), True).backward()
    kept.backward()


def test_a_graph_from_before_is_refused() -> None:
    errors = run_expecting_error(2, _old_graph)
    assert all("run forward again" in str(error) or "run backward before" in str(error) for error in errors)


def _offloaded(low_memory: bool) -> tuple[list[float], int]:
    """Losses of six steps with activations in host memory, and how many units have a home."""
    torch.manual_seed(0)
    policy = mics.Activations(checkpoint="unit", offload=True)
    model = mics.shard(GPT(_SHAPE), partition_size=2, low_memory=low_memory, activations=policy, prefetch=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    tokens = torch.arange(16).view(2, 8)
    losses = [_step(model, optimizer, tokens) for _ in range(6)]
    engine = engine_of(model)
    assert engine.offloader is not None
    return losses, sum(unit.whole.at_home for unit in engine.units)


@pytest.mark.full
def test_homes_and_offload_go_together() -> None:
    """The same bits in low memory, where the loss may have the arena's memory."""
    found = [run_ranks(4, _offloaded, low_memory, ranks_per_node=2) for low_memory in (False, True)]
    for kept, freed in zip(*found, strict=True):
        assert kept[0] == freed[0]
        assert kept[1] > 0 and freed[1] > 0

"""Gathered units at their homes: addresses that stay, orders that change, and memory in few pieces."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

import mics
from mics.engine import engine_of
from mics.models.gpt import GPT, GPTConfig
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
        seen.append([unit.flat.data_ptr() for unit in units])
    stay = all(addresses == seen[2] for addresses in seen[3:])
    storages = {unit.flat.untyped_storage().data_ptr() for unit in units}
    return stay, len(set(seen[-1])) < len(units), len(storages) == 1


def test_homes_are_fixed_and_shared() -> None:
    """From the third step on every unit has one address in one buffer, also through an evaluation."""
    assert run_ranks(2, _addresses) == [(True, True, True)] * 2


def _pieces() -> dict[str, int]:
    """How many pieces of memory hold all shards, masters, gradients and each entry of optimizer state."""
    model = mics.shard(GPT(_SHAPE), partition_size=2, precision=mics.Precision(param=torch.bfloat16))
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
        "gradients": count([unit.gradients.allocate() for unit in units]),
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


def _conflict() -> None:
    """A backward in which units are in use together that never were before."""
    model = mics.shard(_Branches(), partition_size=2, prefetch=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for both in (False, False, False, True):
        model(torch.ones(2, 6), both).backward()
        optimizer.step()
        optimizer.zero_grad()


def test_a_place_that_is_taken_is_an_error_not_a_wrong_number() -> None:
    """The same forward with another backward: values that autograd saved would be somebody else's."""
    results = run_ranks(2, _tries, _conflict)
    assert all(result == "fine" or "in its place" in result for result in results)
    assert len(set(results)) == 1


def _tries(call: Callable[[], None]) -> str:
    try:
        call()
    except mics.MicsError as error:
        return str(error)
    return "fine"


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

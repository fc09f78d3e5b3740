"""Models that are changed after `mics.shard`: new parts are refused until they are sharded, old ones go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.errors import MicsError
from mics.utils.structure import CHANGES
from tests import toys
from tests.ranks import run_ranks
from tests.reference import adamw
from tests.test_user_habits import Run, _assert_same


class Tower(nn.Module):
    """Blocks and a head, with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((toys.DIM,), 0.9))
        self.blocks = nn.ModuleList(toys.Block() for _ in range(3))
        self.head = nn.Sequential(nn.LayerNorm(toys.DIM), nn.Linear(toys.DIM, toys.DIM))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        x = x * self.scale
        for block in self.blocks:
            x = block(x)
        return toys.mse(self.head(x), target)


def _new_head() -> nn.Module:
    torch.manual_seed(5)
    norm = nn.BatchNorm1d(5)  # with buffers
    return nn.Sequential(nn.Linear(toys.DIM, 5), norm, nn.Linear(5, toys.DIM))


# ---------------------------------------------------------------------------------------------
# New parts, once they are sharded
# ---------------------------------------------------------------------------------------------


def _changed(run: Run) -> list[Any]:
    """A new head, a block more and one less, then ten steps with all that spans the model."""
    model = run.shard(Tower())
    run.backward(lambda rank: model(*toys.floats(0, 0, rank)))
    model.head = run.shard(_new_head().eval())
    model.blocks.append(toys.Block())
    run.shard(model.blocks[3])
    del model.blocks[1]
    model.zero_grad()
    optimizer = adamw(model)
    found: list[Any] = []
    for step in range(10):
        for micro in range(2):
            run.backward(lambda rank, at=(step, micro): model(*toys.floats(*at, rank)))
        found += [run.gradients(model)] if step == 8 else []
        found.append(run.clip(model, 0.5))
        optimizer.step()
        optimizer.zero_grad()
    return [*found, *run.state(model)]


def test_new_parts_that_are_sharded_are_part_of_the_model() -> None:
    """Losses, gradients, the norm over all of it and the parameters are those of plain training."""
    _assert_same(_changed, rtol=1e-5, atol=1e-6)


def _round_trips(folder: Path) -> None:
    """Everything that reads or writes the whole model, over its first part and a later one."""
    torch.manual_seed(0)
    model = mics.shard(Tower(), partition_size=2)
    model.head = mics.shard(_new_head().eval(), partition_size=4)
    optimizer = adamw(model)
    for batch in mics.microsteps(model, [0, 1]):
        model(*toys.floats(0, batch, dist.get_rank())).backward()
    assert mics.nonfinite_units(model) == []
    optimizer.step()
    optimizer.zero_grad()
    saved = mics.full_state_dict(model, rank0_only=False)
    state = mics.full_optimizer_state_dict(model, optimizer, rank0_only=False)
    assert saved["head.2.weight"].shape == state["head.2.weight"]["exp_avg"].shape == (toys.DIM, 5)
    assert mics.audit_replicas(model).num_units > mics.audit_replicas(model.head).num_units > 0
    mics.save(folder, model, optimizer)
    with mics.summon_full_params(model, write=True):
        assert model.head[2].weight.shape == (toys.DIM, 5)
        with torch.no_grad():
            model.head[2].weight.zero_()
            model.scale.zero_()
    assert not any(mics.full_state_dict(model, rank0_only=False)[n].any() for n in ("scale", "head.2.weight"))
    mics.load(folder, model, optimizer)
    _assert_state(model, saved)
    mics.load_full_state_dict(model, {name: value + 1 for name, value in saved.items()})
    _assert_state(model, {name: value + 1 for name, value in saved.items()})
    mics.load_full_state_dict(model, saved if dist.get_rank() == 0 else None)
    _assert_state(model, saved)
    torch.testing.assert_close(mics.full_optimizer_state_dict(model, optimizer, rank0_only=False), state)


def _assert_state(model: nn.Module, expected: dict[str, Tensor]) -> None:
    found = mics.full_state_dict(model, rank0_only=False)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_states_and_checkpoints_of_a_model_with_a_later_part(tmp_path: Path) -> None:
    """Sharded in other groups than the first: one state, one checkpoint, by the names that it has now."""
    run_ranks(4, _round_trips, tmp_path / "checkpoint")


# ---------------------------------------------------------------------------------------------
# New parts that are not
# ---------------------------------------------------------------------------------------------


def _insert(model: Tower) -> None:
    model.blocks.insert(1, toys.Block())


def _deep(model: Tower) -> None:
    model.blocks[1].up = nn.Sequential(model.blocks[1].up, nn.Linear(toys.HIDDEN, toys.HIDDEN))


def _adapter(model: Tower) -> None:
    """What a library for adapters does: a new module around the old one."""

    class Adapted(nn.Module):
        def __init__(self, base: nn.Module) -> None:
            super().__init__()
            self.base_layer, self.lora = base, nn.ModuleDict({"a": nn.Linear(toys.DIM, toys.HIDDEN)})

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.lora["a"](x)

    for block in model.blocks:
        block.up = Adapted(block.up)


CHANGES_TO_MODELS: dict[str, Callable[[Tower], Any]] = {
    "head.weight": lambda model: setattr(model, "head", nn.Linear(toys.DIM, toys.DIM)),
    "more.weight": lambda model: model.add_module("more", nn.Linear(2, 2)),
    "blocks.3.gain": lambda model: model.blocks.append(toys.Block()),
    "blocks.1.gain": _insert,
    "head.2.weight": lambda model: model.head.append(nn.Linear(2, 2)),
    "blocks.1.up.1.weight": _deep,
    "blocks.0.up.lora.a.weight": _adapter,
    "bias": lambda model: model.register_parameter("bias", nn.Parameter(torch.zeros(1))),
    "blocks.0.norm.gain": lambda model: setattr(model.blocks[0].norm, "gain", nn.Parameter(torch.ones(1))),
    "scale": lambda model: setattr(model, "scale", nn.Parameter(torch.ones(toys.DIM))),
    "other": lambda model: setattr(model, "other", model.scale),
    "head.0.bias": lambda model: delattr(model.head[0], "bias"),
    "blocks.2.up.bias": lambda model: setattr(model.blocks[2].up, "bias", None),
}


@pytest.mark.parametrize("name", CHANGES_TO_MODELS)
def test_new_parameters_are_refused(name: str) -> None:
    """However they came: by the next forward, by name, and with what to do. So are deleted ones."""
    model = mics.shard(Tower(), partition_size=1)
    batch = toys.floats(0, 0, 0)
    model(*batch).backward()
    CHANGES_TO_MODELS[name](model)
    for call in (lambda: model(*batch), lambda: mics.full_state_dict(model)):
        with pytest.raises(MicsError, match=rf"{name}.*expected the parameters.*before mics\.shard"):
            call()


def test_parametrizations_are_refused() -> None:
    """torch makes a parameter of a piece for them, which it refuses; the model goes on as it was."""
    model = mics.shard(Tower(), partition_size=1)
    batch = toys.floats(0, 0, 0)
    before = model(*batch).item()
    with pytest.raises(RuntimeError, match="ShardParameter"):
        nn.utils.parametrizations.weight_norm(model.blocks[0].down)
    assert model(*batch).item() == before


def test_modules_without_parameters_may_come_and_go() -> None:
    """An activation put in or taken out, a list cut short, modules in another order: all go on."""
    model = mics.shard(Tower(), partition_size=1)
    batch = toys.floats(0, 0, 0)
    model.head.append(nn.Tanh())
    assert model(*batch).item() != (model.head.pop(2), model(*batch).item())[1]
    full = model(*batch).item()
    first, second, third = model.blocks
    model.blocks = model.blocks[:2]
    shorter = model(*batch)
    assert shorter.item() != full
    shorter.backward()
    assert third.gain.grad is None and {"scale", "blocks.1.gain"} <= mics.full_gradients(model).keys()
    assert "blocks.2.gain" not in mics.full_gradients(model).keys() | mics.full_state_dict(model).keys()
    with pytest.raises(MicsError, match=r"blocks\.2.*taken out.*put it back"):
        third(batch[0])
    model.blocks = nn.ModuleList([first, second, third])
    assert model(*batch).item() == full


def test_a_layer_that_is_gone_has_no_gradient() -> None:
    """One of before does not count in the norm."""
    model = mics.shard(Tower(), partition_size=1)
    model(*toys.floats(0, 0, 0)).backward()
    model.head = nn.Identity()
    expected = [grad for grad in mics.full_gradients(model).values() if grad is not None]
    norm = torch.stack([grad.norm() for grad in expected]).norm()
    torch.testing.assert_close(mics.clip_grad_norm_(model, 1e9), norm)


def test_a_steady_step_looks_at_no_module() -> None:
    """Nothing in training counts as a change: forwards, steps, evaluation, summoning, state dicts."""
    model = mics.shard(Tower(), partition_size=1)
    optimizer = adamw(model)
    before = CHANGES.count
    for step in range(3):
        model(*toys.floats(step, 0, 0)).backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad(), mics.summon_full_params(model, write=True):
            model.eval()(*toys.floats(step, 0, 0))
        model.train().load_state_dict(mics.full_state_dict(model))
    assert CHANGES.count == before


def _unfrozen(run: Run) -> list[Any]:
    """Gradual unfreezing: everything is trainable when it is sharded, and frozen until its turn."""
    model = run.shard(Tower())
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-2)
    for step in range(10):
        if step in (3, 5, 7):
            model.blocks[(7 - step) // 2].requires_grad_(True)
        run.backward(lambda rank, step=step: model(*toys.floats(step, 0, rank)))
        optimizer.step()
        optimizer.zero_grad()
    return run.state(model)


def test_gradual_unfreezing() -> None:
    """What was frozen after `mics.shard` can be trained again."""
    _assert_same(_unfrozen, rtol=1e-5, atol=1e-6)

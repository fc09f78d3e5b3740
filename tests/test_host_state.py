"""Optimizer state in host memory: the same bits as on the device, whatever is done with it."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import mics
from mics.engine import units_of
from mics.gradients import host_state
from mics.guard import plainly
from mics.train.config import ShardingSettings
from mics.train.sharding import shard_model
from tests import tiers, toys
from tests.ranks import run_expecting_error, run_ranks
from tests.test_optimizers import OPTIMIZERS

_NARROW = mics.Precision(param_dtype=torch.bfloat16)
_WIDE = mics.Precision()


def _adamw(model: nn.Module, **options: Any) -> torch.optim.Optimizer:
    trained = [param for param in model.parameters() if param.requires_grad]
    groups = [
        {"params": [param for param in trained if param.ndim > 1], "weight_decay": 0.1},
        {"params": [param for param in trained if param.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.01, **options)


def _built(where: str, **settings: Any) -> nn.Module:
    torch.manual_seed(3)
    model = toys.Language()
    return mics.shard(model.to(settings.pop("device", "cpu")), optimizer_state=where, **settings)


def _batch(model: nn.Module, step: int, micro: int = 0) -> list[Any]:
    device = next(model.parameters()).device
    found = toys.language_batch(step, micro, dist.get_rank())
    return [each.to(device) if isinstance(each, Tensor) else each for each in found]


def _train(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    first: int = 0,
    steps: int = 3,
    accumulation: int = 2,
) -> list[Tensor]:
    """Losses and norms. The spare layer is used from the second step on."""
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    found = []
    for step in range(first, first + steps):
        for micro in mics.microsteps(model, range(accumulation)):
            loss = model(*_batch(model, step, micro)) / accumulation
            loss.backward()
            found.append(loss.detach())
        found.append(mics.clip_grad_norm_(model, 0.5))
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return found


def _outcome(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Any, Any]:
    return (
        mics.full_state_dict(model, rank0_only=False),
        mics.full_optimizer_state_dict(model, optimizer, rank0_only=False),
    )


def _trained(
    where: str,
    make: Any = _adamw,
    *,
    accumulation: int = 2,
    first: int = 0,
    steps: int = 3,
    **settings: Any,
) -> Any:
    model = _built(where, **settings)
    optimizer = make(model)
    losses = _train(model, optimizer, accumulation=accumulation, first=first, steps=steps)
    return losses, *_outcome(model, optimizer)


def _assert_same_bits(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


def _compare(*cases: dict[str, Any]) -> None:
    for case in cases:
        _assert_same_bits(_trained("host", **case), _trained("device", **case))


def _sleeping(copy_pairs: Any) -> Any:
    def run(pairs: Any) -> None:
        time.sleep(0.02)
        copy_pairs(pairs)

    return run


def _compare_late(case: dict[str, Any]) -> None:
    """With copies that take long: whoever does not wait for them is found out."""
    late = {name: _sleeping(getattr(host_state, name)) for name in ("_copy_in", "_copy_out")}
    with patch.multiple(host_state, **late):
        found = _trained("host", **case)
    _assert_same_bits(found, _trained("device", **case))


def test_trains_to_the_bits_of_state_on_the_device() -> None:
    """In bfloat16 masters leave the device with the state; in float32 parameters are their own masters.

    Copies are late: whoever does not wait for them is found out.
    """
    run_ranks(2, _compare_late, {"partition_size": 2, "precision": _NARROW, "accumulation": 1})
    run_ranks(2, _compare, {"partition_size": 1, "precision": _WIDE, "steps": 2})


@pytest.mark.parametrize("size", tiers.first([4, 1, 2], 0, 2))
def test_layouts_train_to_the_same_bits(size: int) -> None:
    cases: list[dict[str, Any]] = [
        {"precision": _NARROW, "accumulation": 3},
        {"precision": _WIDE, "accumulation": 1, "optimizer_sharding": "partition"},
        {"precision": _NARROW, "optimizer_sharding": "partition", "low_memory": True},
        {"precision": _NARROW, "optimizer_sharding": "auto", "prefetch": 0},
    ]
    run_ranks(4, _compare, *({"partition_size": size, **case} for case in cases), ranks_per_node=2)


def _compare_optimizer(name: str, options: dict[str, Any]) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        kind: Any = getattr(torch.optim, name)
        return kind([param for param in model.parameters() if param.requires_grad], **options)

    # torch's fused SGD takes no parameter whose first gradient is a later one.
    _compare({"make": make, "partition_size": 2, "precision": _NARROW, "first": 1})


@pytest.mark.full
@pytest.mark.parametrize(("name", "options"), OPTIMIZERS, ids=lambda each: str(each)[:40])
def test_optimizers_step_to_the_same_bits(name: str, options: dict[str, Any]) -> None:
    run_ranks(2, _compare_optimizer, name, options)


def _checkpoints(folder: Path, narrow: bool) -> None:
    """From the device to the host and back, and on: three steps, wherever state was in each."""
    settings: dict[str, Any] = {"partition_size": 2, "precision": _NARROW if narrow else _WIDE}
    for number, places in enumerate([("device", "host", "device"), ("host", "device", "host")]):
        for step, where in enumerate(places):
            model = _built(where, **settings)
            optimizer = _adamw(model)
            if step:
                mics.load(folder / str(number), model, optimizer)
            _train(model, optimizer, first=step, steps=1)
            mics.save(folder / str(number), model, optimizer, step=step, wait=step == 1)
            for group in optimizer.param_groups:
                group["lr"] = 0.01  # the schedule begins anew
    found = []
    for number in range(2):
        model = _built("host", partition_size=1, precision=settings["precision"])
        optimizer = _adamw(model)
        mics.load(folder / str(number), model, optimizer)
        found.append(_outcome(model, optimizer))
        mics.load(folder / str(number), model, optimizer)  # to the memory that it has
        _assert_same_bits(_outcome(model, optimizer), found[-1])
    _assert_same_bits(*found)


@pytest.mark.parametrize("narrow", [True, pytest.param(False, marks=pytest.mark.full)])
def test_a_checkpoint_does_not_know_where_state_was(tmp_path: Path, narrow: bool) -> None:
    run_ranks(2, _checkpoints, tmp_path, narrow)


def _habits(where: str) -> Any:
    """What users do with parameters and state, and what comes of it."""
    model = _built(where, partition_size=2, precision=_NARROW)
    optimizer = _adamw(model)
    found: list[Any] = _train(model, optimizer, steps=2)
    params = [param for param in model.parameters() if param.requires_grad]
    weight = model.get_submodule("blocks.0").up.weight  # type: ignore[union-attr]
    with torch.no_grad():
        for param in params:
            param.mul_(1.25)
        weight.data = weight.data.clamp(-0.1, 0.1)
        weight.to_local().add_(0.01)
        for state in optimizer.state.values():  # of parameters of which this rank has a part
            state["exp_avg"].mul_(0.5)
    found += [
        weight.full_tensor(),
        weight.norm(),
        list(weight.shape),
        weight.element_size(),
        weight.is_contiguous(),
    ]
    averages = [param.detach().clone() for param in params]
    found += _train(model, optimizer, first=2, steps=1)
    torch._foreach_lerp_(averages, params, 0.5)
    found += [each.square().sum() for each in averages]
    kept = copy.deepcopy(optimizer.state_dict())
    found += _train(model, optimizer, first=3, steps=1)
    optimizer.load_state_dict(kept)
    penalty = mics.norms(params).square().sum() * 0.01
    (model(*_batch(model, 4)) + penalty).backward()
    found += [param.grad.abs().sum() for param in params if param.grad is not None]
    optimizer.step(lambda: model(*_batch(model, 5)).detach())
    optimizer.zero_grad()
    with mics.summon_full_params(model, write=True), torch.no_grad():
        model.get_submodule("spare").weight.fill_(0.5)  # type: ignore[operator, union-attr]
    model.load_state_dict(mics.full_state_dict(model, rank0_only=False))
    found += _train(model, optimizer, first=6, steps=1)
    found += [value.clone() for _, value in mics.iter_full_params(model)]
    return found, *_outcome(model, optimizer)


def _compare_habits() -> None:
    _assert_same_bits(_habits("host"), _habits("device"))


def test_parameters_and_state_can_be_read_and_edited() -> None:
    run_ranks(2, _compare_habits)


def _memory() -> None:
    """With the settings of ``mics train``."""
    asked = ShardingSettings(partition_size=2, param_dtype="bf16", optimizer_state="host")
    model = shard_model(toys.Language(), asked)
    optimizer = _adamw(model)
    _train(model, optimizer, steps=2)
    report = mics.memory_report(model, show=False)
    numel = sum(unit.master.numel() for unit in units_of(model) if unit.spec.trainable)
    for name, nbytes in (("masters", 4 * numel), ("optimizer state", 8 * numel)):
        term = report[name]
        assert (term.where, term.predicted, term.measured) == ("host", nbytes, nbytes), term
    held = [shard for unit in units_of(model) if unit.spec.trainable for shard in unit.shards]
    with plainly():  # on the device: one number, for all elements
        assert all(shard.untyped_storage().nbytes() == 4 for shard in held)
    assert all(shard.to_local().untyped_storage().nbytes() == 4 * numel for shard in held)


def test_the_report_finds_masters_and_state_on_the_host() -> None:
    run_ranks(2, _memory)


class Halving(torch.optim.Optimizer):
    """Somebody's own."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                param.data.mul_(0.5)


def _somebodys_own() -> None:
    model = _built("host", partition_size=2)
    _train(model, mics.allow_optimizer(Halving)(model.parameters()), steps=1)


def _elsewhere() -> None:
    _built("disk", partition_size=2)


def test_what_cannot_be_on_the_host_is_refused() -> None:
    (error, *_) = run_expecting_error(2, _somebodys_own)
    assert 'Halving: expected one of torch\'s own optimizers with optimizer_state="host"' in error.message
    (error, *_) = run_expecting_error(2, _elsewhere)
    assert 'optimizer_state: expected "device" or "host", found \'disk\'' in error.message


def _compare_scaled() -> None:
    """An overflow leaves everything as it is, with a fused optimizer and with one that is not."""

    def scaled(where: str, **options: Any) -> Any:
        model = _built(where, partition_size=2, precision=_NARROW)
        optimizer = _adamw(model, **options)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        for step in range(3):
            loss = model(*_batch(model, step))
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return _outcome(model, optimizer)

    for options in ({}, {"fused": True}):
        _assert_same_bits(scaled("host", **options), scaled("device", **options))


@pytest.mark.full
def test_gradient_scalers_work() -> None:
    run_ranks(2, _compare_scaled)


def _compare_two_optimizers() -> None:
    """Of which each has some parameters of every unit."""

    def trained(where: str) -> Any:
        model = _built(where, partition_size=2, precision=_NARROW)
        params = [param for param in model.parameters() if param.requires_grad]
        pair = [
            torch.optim.SGD([param for param in params if param.ndim < 2], lr=0.1, momentum=0.9),
            torch.optim.AdamW([param for param in params if param.ndim > 1], lr=0.01),
        ]
        for step in range(3):
            model(*_batch(model, step)).backward()
            for optimizer in pair:
                optimizer.step()
                optimizer.zero_grad()
        return [_outcome(model, optimizer) for optimizer in pair]

    _assert_same_bits(trained("host"), trained("device"))


@pytest.mark.full
def test_two_optimizers_share_units() -> None:
    run_ranks(2, _compare_two_optimizers)


def _compare_on_gpu() -> None:
    for options in ({}, {"fused": True}):
        case = {
            "make": lambda model, options=options: _adamw(model, **options),
            "partition_size": 2,
            "device": "cuda",
            "steps": 6,
        }
        _compare(case)
    model = _built("host", partition_size=2, device="cuda")
    optimizer = _adamw(model)
    param = next(param for param in model.parameters() if param.requires_grad)
    _train(model, optimizer, steps=2)
    assert param.device.type == "cuda" and param.to_local().is_pinned()
    model(*_batch(model, 2)).backward()
    assert param.grad is not None
    with torch.no_grad():
        expected = (param.full_tensor().cpu() - 0.5 * param.grad.full_tensor().cpu()).abs().sum()
        param.sub_(param.grad, alpha=0.5)  # which is on the device
        torch.testing.assert_close(param.abs().sum().cpu(), expected)
        assert (param * param.grad).device.type == "cuda"
        before = param.cpu()
        param.mul_(2)
        assert not torch.equal(before.full_tensor(), param.full_tensor())


@pytest.mark.gpu
def test_trains_to_the_same_bits_under_nccl() -> None:
    run_ranks(2, _compare_on_gpu, backend="nccl")

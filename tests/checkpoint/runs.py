"""Short trainings that save and load, run as ranks by the tests of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests import toys

STEPS = 2


def build(
    partition_size: int, *, seed: int = 0, model: str = "Language", **options: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    import mics

    torch.manual_seed(seed)
    sharded = mics.shard(getattr(toys, model)(), partition_size=partition_size, **options)
    groups = [
        {"params": [p for p in sharded.parameters() if p.dim() >= 2], "weight_decay": 0.1},
        {"params": [p for p in sharded.parameters() if p.dim() < 2], "weight_decay": 0.0, "lr": 2e-3},
    ]
    return sharded, torch.optim.AdamW(groups, lr=1e-3)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    """Steps on batches that are the same on every rank, so that the world may change in size."""
    import mics

    losses = []
    for step in range(first, last):
        batches = [toys.language_batch(step, micro, 0) for micro in range(2)]
        for batch in mics.microsteps(model, batches):
            loss = model(*batch) / 2
            loss.backward()
        losses.append(loss.item())
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All parameters, buffers and optimizer state, whole."""
    import mics

    return {
        "model": mics.full_state_dict(model, rank0_only=False),
        "optimizer": mics.full_optimizer_state_dict(model, optimizer, rank0_only=False),
        "lr": [group["lr"] for group in optimizer.param_groups],
    }


def trained_and_saved(path: str, partition_size: int, **options: Any) -> dict[str, Any]:
    import mics

    wait = options.pop("wait", True)
    model, optimizer = build(partition_size, **options)
    losses = train(model, optimizer, 0, STEPS)
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    before = everything(model, optimizer)
    mics.save(path, model, optimizer, {"step": STEPS}, wait=wait).wait()
    return {**before, "losses": losses, "after": train(model, optimizer, STEPS, 2 * STEPS)}


def loaded(
    paths: list[str], partition_size: int, go_on: tuple[int, ...] = (), **options: Any
) -> list[dict[str, Any]]:
    """Load one checkpoint after the other into the same model, which trains on from those in ``go_on``."""
    import mics

    model, optimizer = build(partition_size, seed=1, **options)
    found = []
    for number, path in enumerate(paths):
        extra = mics.load(path, model, optimizer)
        values = everything(model, optimizer)
        after = train(model, optimizer, STEPS, 2 * STEPS) if number in go_on else None
        found.append({**values, "extra": extra, "after": after})
    return found


def loads(paths: list[str], expected: list[dict[str, Any]], partition_size: int) -> list[bool]:
    """Load one checkpoint after the other into the same model: whether this rank has its part of each."""
    import mics

    model, optimizer = build(partition_size, seed=1)
    found = []
    for path, whole in zip(paths, expected, strict=True):
        extra = mics.load(path, model, optimizer)
        lr = [group["lr"] for group in optimizer.param_groups]
        found.append(extra == {"step": STEPS} and lr == whole["lr"] and has_part_of(whole, model, optimizer))
    return found


def has_part_of(whole: dict[str, Any], model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
    """Whether every shard, and its optimizer state, is this rank's part of the whole tensors."""
    from mics.checkpoint.contents import contents_of
    from mics.engine import engine_of

    contents = contents_of(model, engine_of(model))
    equal = [torch.equal(buffer, whole["model"][name]) for name, buffer in contents.buffers.items()]
    for held in contents.params:
        span = held.span(once=False)
        part = slice(span.start, span.stop)
        equal.append(torch.equal(held.shard.to_local().view(-1), whole["model"][held.name].view(-1)[part]))
        state = optimizer.state.get(held.shard, {}) if span else {}
        for key, value in (whole["optimizer"].get(held.name, {}) if span else {}).items():
            cut = value.view(-1)[part] if value.dim() else value.view(-1)
            own = state[key].to_local() if value.dim() else state[key]
            equal.append(torch.equal(own.view(-1), cut))
    has_some = any(
        held.span(once=False) for held in contents.params
    )  # the last of many ranks may have padding
    return all(equal) and (len(equal) > len(contents.params) or not has_some)


def same(a: Any, b: Any) -> bool:
    """Whether nested dicts of tensors and numbers are equal to the bit."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def files_of(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in folder.iterdir()}

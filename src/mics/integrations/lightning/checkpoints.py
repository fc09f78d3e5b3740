"""Checkpoints of both strategies: one file with whole tensors, or a folder that all ranks write."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any, Final

import torch
from lightning.fabric.utilities.cloud_io import get_filesystem
from torch import nn
from torch.optim import Optimizer

from mics.checkpoint import load, save
from mics.engine import engine_of
from mics.state_dict import full_optimizer_state_dict

_REST: Final = "lightning"
"""What the strategy keeps beside tensors of model and optimizers, as the extra state of ``mics.save``."""


def whole_optimizer_state(models: Sequence[nn.Module], optimizer: Optimizer) -> dict[str, Any]:
    """``optimizer.state_dict()`` with whole tensors, on rank 0; empty on the others. All ranks call it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = {id(param): number for number, param in enumerate(params)}
    state: dict[int, dict[str, Any]] = {}
    is_first = True
    for model in models:
        found = full_optimizer_state_dict(model, optimizer)
        is_first = engine_of(model).world.rank == 0
        state |= {
            numbers[id(param)]: found[name]
            for name, param in model.named_parameters()
            if name in found and id(param) in numbers
        }
    if not is_first:
        return {}
    return {"state": state, "param_groups": optimizer.state_dict()["param_groups"]}


def is_folder(path: str) -> bool:
    """Whether a checkpoint is a folder, here or in an object store."""
    return bool(get_filesystem(path).isdir(path))


def save_folder(
    path: str, model: nn.Module, optimizers: Sequence[Optimizer] | None, rest: dict[str, Any]
) -> None:
    """Every rank writes its part; ``rest`` of rank 0 is kept. A file of this name is replaced."""
    own: dict[str, Any] = {}
    if engine_of(model).world.rank == 0:
        filesystem = get_filesystem(path)
        if filesystem.isfile(path):
            filesystem.rm(path)
        buffer = io.BytesIO()
        torch.save(rest, buffer)
        own[_REST] = torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)
    save(path, model, list(optimizers) if optimizers else None, own)


def load_folder(
    path: str,
    model: nn.Module,
    optimizers: Sequence[Optimizer] | None,
    *,
    strict: bool,
    weights_only: bool | None,
) -> dict[str, Any]:
    """Read model and optimizers; the rest, as rank 0 saved it. Any number of ranks may have written it."""
    found = load(path, model, list(optimizers) if optimizers else None, strict=strict)
    everyone = engine_of(model).world.gather_objects(found.get(_REST))
    if everyone[0] is None:  # mics.save wrote it, in a script of the user's
        return {}
    rest = torch.load(io.BytesIO(everyone[0].numpy().tobytes()), weights_only=weights_only)
    assert isinstance(rest, dict)
    return rest

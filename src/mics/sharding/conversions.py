"""What would take a sharded model's parameters from under it: other formats and devices, exports, scripts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from mics.errors import UNTRACEABLE, MicsError
from mics.sharding.held import ParameterTable


def refuse_conversions(model: nn.Module) -> None:
    """Have ``model`` and its submodules say what cannot be done to them, before anything is changed."""
    for module in model.modules():
        if any(ParameterTable.holds_units(inner) for inner in module.modules()):
            module.__dict__["_apply"] = partial(_apply, module)
            module.__dict__["__prepare_scriptable__"] = partial(_refuse_export, "torch.jit.script")


def refuse_tracing() -> None:
    """Raise in a forward that is only recorded: what it records are not the parameters."""
    if torch.jit.is_tracing():  # type: ignore[attr-defined, no-untyped-call]
        _refuse_export("torch.jit.trace")
    if torch.compiler.is_exporting():
        _refuse_export("torch.export")


def _apply(module: nn.Module, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """In place of ``nn.Module._apply``, by which models are converted and moved: only buffers may change."""
    _refuse_change(module, fn)
    if recurse:
        for child in module.children():
            child._apply(fn)
    for name, buffer in module._buffers.items():
        if buffer is not None:
            module._buffers[name] = fn(buffer)
    return module


def _refuse_change(module: nn.Module, fn: Callable[[Tensor], Tensor]) -> None:
    shards = {(param.dtype, param.device): name for name, param in module.named_parameters()}
    for (dtype, device), name in shards.items():
        probe = torch.empty(1, dtype=dtype, device=device)
        found = fn(probe)
        if found is not probe:
            raise MicsError(
                f"{name}: expected parameters to stay as they are ({dtype} on {device}), found them replaced "
                f"by {found.dtype} on {found.device}, while the ranks hold parts of them in memory that "
                "collectives use; convert or move the model before mics.shard(), choose formats by "
                "mics.shard(model, precision=mics.Precision(...)), or load mics.full_state_dict(model) into "
                "a plain model and convert that one"
            )


def _refuse_export(what: str) -> Any:
    raise MicsError(f"{what}: expected a plain model, found a sharded one; {UNTRACEABLE}")

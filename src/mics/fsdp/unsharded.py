"""Whole parameters that a program asks for with ``unshard()``, to read them.

Outside of forward and backward modules hold copies in the format that they compute in. These go with
``reshard()``, a use of the unit by a forward or backward, an optimizer step, or a state dict. They are for
reading: writes to them and gradients of them would be lost, so both raise. Inside of a forward or backward
parameters that are read are whole already.
"""

from __future__ import annotations

from typing import NoReturn

import torch
import torch.nn as nn
from torch import Tensor

from mics.comm.journal import calling
from mics.engine import engine_of, units_of
from mics.errors import MicsError
from mics.fsdp.records import root_of, units_of_record
from mics.gradients.optimizer import refuse_copies
from mics.schedule.events import Event, What
from mics.sharding.unit import Unit
from mics.state_dict import split_whole


def unshard(module: nn.Module) -> None:
    """Let ``module`` hold whole parameters, but not the modules inside that ``fully_shard`` was called on."""
    root = root_of(module)
    if root is None:
        return  # not sharded yet
    engine = engine_of(root)
    if engine.progress.depth or engine.progress.in_backward or engine.progress.suspended:
        return
    units_of(root)  # raises if the model is not what it was
    listeners = engine.events[What.STEP_BEGINS]
    if _drop_copies not in listeners:
        listeners.append(_drop_copies)
    with calling("unshard"):
        for unit in units_of_record(engine, module):
            if not (unit.gathered or unit.held.copies):
                unit.held.show_copies(_copies(unit))


def reshard(module: nn.Module, *, recurse: bool = False) -> None:
    """Let ``module`` hold shards again; with ``recurse`` all of the model does."""
    root = root_of(module)
    if root is None:
        return
    for unit in units_of(root) if recurse else units_of_record(engine_of(root), module):
        unit.held.drop_copies(unit.shards)


def _drop_copies(event: Event) -> None:
    """New values are on their way: nobody may read the old ones."""
    for unit in event.units:
        unit.held.drop_copies(unit.shards)


def _copies(unit: Unit) -> list[nn.Parameter]:
    flat = unit.full_of_masters(unit.master).to(unit.spec.param_dtype)
    copies = []
    with torch.inference_mode(False):
        for shard, value in zip(unit.shards, split_whole(unit, flat), strict=True):
            copy = nn.Parameter(value.data, requires_grad=shard.requires_grad)  # counts its own writes
            if copy.requires_grad:
                copy.register_hook(_refuse_gradient)
            copies.append(copy)
    refuse_copies(unit, copies)
    return copies


def _refuse_gradient(grad: Tensor) -> NoReturn:
    raise MicsError(
        "gradient of an unsharded parameter: expected none, found a backward through what was read; "
        "use the parameter inside the forward of its model, or read it under torch.no_grad()"
    )

"""The functions of ``torch.distributed.checkpoint.state_dict`` for models that mics has sharded.

Torch's own work too, on the DTensors of ``dtensors.py``. These take and return the same and need less memory:
one unit at a time is whole, where torch's have each tensor twice, or all of them. Other models are left to
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict as of_torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from mics.comm.journal import calling
from mics.engine import Engine, engine_of, is_sharded
from mics.errors import SettingsError
from mics.fsdp.dtensors import divide, hand_out, mesh_of
from mics.fsdp.records import find_record
from mics.fsdp.waiting import is_waiting, settle
from mics.gradients.eight_bit import eight_bit_of
from mics.guard import ShardParameter, ShardTensor
from mics.state_dict import (
    full_state_dict,
    load_full_state_dict,
    own_copy,
    take_optimizer_state,
    take_parameters,
)

Optimizers = Optimizer | Iterable[Optimizer]


def get_model_state_dict(
    model: nn.Module, *, submodules: Any = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """The state dict of ``model``, in master precision. All ranks must call it.

    With ``full_state_dict`` whole tensors: on all ranks, and with ``cpu_offload`` on rank 0 alone. Without it
    DTensors over the mesh, as of FSDP2.
    """
    if not _is_ours(model):
        return of_torch.get_model_state_dict(model, submodules=submodules, options=options)
    asked = _check_options("get_model_state_dict", options, submodules)
    if asked.full_state_dict:
        state = full_state_dict(model, rank0_only=asked.cpu_offload, cpu=asked.cpu_offload)
    else:
        state = _divided_state_dict(model, asked)
    if asked.ignore_frozen_params:
        frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
        state = {name: value for name, value in state.items() if name not in frozen}
    return state


def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Any = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """The state of ``optimizers`` by parameter name, in the same two forms. All ranks must call it.

    An optimizer that has not stepped makes its state by a step with a learning rate of zero.
    """
    if not _is_ours(model):
        return of_torch.get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)
    asked = _check_options("get_optimizer_state_dict", options, submodules)
    engine, found = engine_of(model), _listed(optimizers)
    _refuse_eight_bit("get_optimizer_state_dict", found)
    keep = not (asked.full_state_dict and asked.cpu_offload) or engine.world.rank == 0
    names = {id(param): name for name, param in model.named_parameters()}
    state: dict[str, Any] = {}
    groups: list[dict[str, Any]] = []
    for optimizer in found:
        _make_state(engine, optimizer)
        state |= _optimizer_state(model, optimizer, _taking(model, asked) if keep else None)
        for group in optimizer.param_groups:
            groups.append({**group, "params": [names[id(param)] for param in group["params"]]})
    return {"state": state, "param_groups": groups} if keep else {}


def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: Any = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Both of the above."""
    found = _listed(optimizers)
    return (
        get_model_state_dict(model, submodules=submodules, options=options),
        get_optimizer_state_dict(model, found, submodules=submodules, options=options),
    )


def set_model_state_dict(
    model: nn.Module, model_state_dict: dict[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load whole tensors or DTensors. With ``broadcast_from_rank0`` rank 0 sends its whole tensors."""
    if not _is_ours(model):
        return of_torch.set_model_state_dict(model, model_state_dict, options=options)
    asked = _check_options("set_model_state_dict", options, None)
    if asked.broadcast_from_rank0:
        own = model_state_dict if engine_of(model).world.rank == 0 else None
        return load_full_state_dict(model, own, strict=asked.strict)
    return model.load_state_dict(dict(model_state_dict), strict=asked.strict)


def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load what ``get_optimizer_state_dict`` returned, on any mesh, into optimizers of the same groups."""
    if not _is_ours(model):
        of_torch.set_optimizer_state_dict(model, optimizers, dict(optim_state_dict), options=options)
        return
    asked = _check_options("set_optimizer_state_dict", options, None)
    found = _listed(optimizers)
    _refuse_eight_bit("set_optimizer_state_dict", found)
    sender = engine_of(model) if asked.broadcast_from_rank0 else None
    saved = _Saved(optim_state_dict, sender)
    names = {id(param): name for name, param in model.named_parameters()}
    for optimizer in found:
        saved.load(optimizer, names)


def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: dict[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Both of the above."""
    found = _listed(optimizers)
    keys = set_model_state_dict(model, model_state_dict, options=options)
    set_optimizer_state_dict(model, found, optim_state_dict, options=options)
    return keys


# -- inside -----------------------------------------------------------------------------------------


def _is_ours(model: nn.Module) -> bool:
    """Whether mics has sharded ``model``, which it has from here on if it was recorded."""
    if is_waiting(model):
        settle(model)
    if find_record(model) is not None and not is_sharded(model):
        raise SettingsError(
            f"state dict of {type(model).__name__}: expected the whole model, found a module inside it; "
            "pass the module that fully_shard was called on last"
        )
    return is_sharded(model)


def _check_options(call: str, options: StateDictOptions | None, submodules: Any) -> StateDictOptions:
    asked = options or StateDictOptions()
    if submodules:
        raise SettingsError(f"{call}: submodules: expected None, found {len(submodules)}; filter the result")
    if asked.flatten_optimizer_state_dict:
        raise SettingsError(f"{call}: flatten_optimizer_state_dict: expected False, found True")
    if asked.broadcast_from_rank0 and not asked.full_state_dict:
        raise SettingsError(
            f"{call}: broadcast_from_rank0: expected full_state_dict=True with it, found False"
        )
    return asked


def _listed(optimizers: Optimizers) -> list[Optimizer]:
    return [optimizers] if isinstance(optimizers, Optimizer) else list(optimizers)


def _refuse_eight_bit(call: str, optimizers: Sequence[Optimizer]) -> None:
    """Scales are no tensors of the parameter's shape, so no DTensor has them."""
    for optimizer in optimizers:
        if eight_bit_of(optimizer) is not None:
            raise SettingsError(
                f"{call}: optimizers: expected state in the parameters' shape, found the 8-bit state of "
                f"{type(optimizer).__name__}; use mics.save and mics.load"
            )


def _divided_state_dict(model: nn.Module, asked: StateDictOptions) -> dict[str, Any]:
    with calling("get_model_state_dict"):
        taken = take_parameters(model, _taking(model, asked))
    state: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        if isinstance(value, Tensor):
            rest = value.detach()
            state[name] = (
                taken[id(value)] if id(value) in taken else rest.cpu() if asked.cpu_offload else rest
            )
        else:
            state[name] = value  # what a module's get_extra_state returned
    if not asked.cpu_offload:
        hand_out(model, state)
    return state


def _optimizer_state(
    model: nn.Module, optimizer: Optimizer, take: Callable[[Tensor], Tensor] | None
) -> dict[str, dict[str, Any]]:
    with calling("get_optimizer_state_dict"):
        return take_optimizer_state(model, optimizer, take)


def _taking(model: nn.Module, asked: StateDictOptions) -> Callable[[Tensor], Tensor]:
    """What to keep of a whole tensor."""
    if asked.full_state_dict:
        return partial(own_copy, cpu=asked.cpu_offload)
    return partial(divide, mesh_of(model), cpu=asked.cpu_offload)


def _make_state(engine: Engine, optimizer: Optimizer) -> None:
    """Have an optimizer make its state, as torch does: by a step with zero gradients that changes nothing."""
    params = [param for group in optimizer.param_groups for param in group["params"] if param.requires_grad]
    busy = bool(optimizer.state) or any(param.grad is not None for param in params)
    if any(engine.world.gather_objects(busy)):
        return
    rates = [group["lr"] for group in optimizer.param_groups if "lr" in group]
    for param in params:
        param.grad = torch.zeros_like(param)
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
    optimizer.step()
    for group in optimizer.param_groups:
        if "lr" in group:
            group["lr"] = rates.pop(0)
    optimizer.zero_grad(set_to_none=True)


class _Saved:
    """Optimizer state by parameter name, on its way into optimizers: from here, or from rank 0."""

    def __init__(self, state_dict: Mapping[str, Any], sender: Engine | None) -> None:
        self._sender = sender
        self._is_source = sender is None or sender.world.rank == 0
        described: dict[str, Any] = {}
        if self._is_source:
            if not {"state", "param_groups"} <= state_dict.keys():
                raise SettingsError(
                    "set_optimizer_state_dict: expected 'state' and 'param_groups', as "
                    f"get_optimizer_state_dict returns them, found {sorted(map(str, state_dict))[:4]}"
                )
            described = {"state": state_dict["state"], "param_groups": state_dict["param_groups"]}
        self._state: Mapping[str, Any] = described.get("state", {})
        if sender is not None:
            outline = {
                name: {key: _outline(value) for key, value in entries.items()}
                for name, entries in self._state.items()
            }
            described = sender.world.gather_objects({**described, "state": outline})[0]
        self._outline: Mapping[str, Any] = described["state"]
        self._groups: Sequence[Mapping[str, Any]] = described["param_groups"]

    def load(self, optimizer: Optimizer, names: Mapping[int, str]) -> None:
        """Give ``optimizer`` its state, by the way that optimizers provide for it."""
        groups, state, number = [], {}, 0
        for group in optimizer.param_groups:
            own = [names[id(param)] for param in group["params"]]
            groups.append({**self._settings(own), "params": list(range(number, number + len(own)))})
            for name, param in zip(own, group["params"], strict=True):
                entries = {key: self._fetch(param, name, key) for key in sorted(self._outline.get(name, {}))}
                if entries and not (isinstance(param, ShardParameter) and not param.shard_layout.local_numel):
                    state[number] = entries
                number += 1
        optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _settings(self, own: Sequence[str]) -> dict[str, Any]:
        for group in self._groups:
            if set(group["params"]) == set(own):
                return dict(group)
        raise SettingsError(
            f"set_optimizer_state_dict: expected a group of the parameters {', '.join(own[:3])}..., "
            "found groups of others; build the optimizer with the groups that were saved"
        )

    def _fetch(self, param: Any, name: str, key: str) -> Any:
        """One entry: of tensors as large as the parameter this rank's piece. All ranks call it in turn."""
        value = self._state[name][key] if self._is_source else None
        outline = self._outline[name][key]
        if self._sender is not None and isinstance(outline, _Outline):
            device = self._sender.device
            whole = torch.empty(outline.shape, dtype=outline.dtype, device=device)
            if value is not None:
                whole.copy_(value.full_tensor() if isinstance(value, DTensor) else value)
            self._sender.mesh.world.broadcast(whole, f"optimizer state {key!r} of {name!r}")
            value = whole if outline.shape else whole.cpu()
        elif self._sender is not None:
            value = outline
        elif isinstance(value, DTensor):
            value = value.full_tensor()
        if not (isinstance(param, ShardParameter) and isinstance(value, Tensor) and value.dim()):
            return value
        layout = param.shard_layout
        if isinstance(value, ShardTensor) or not layout.is_whole(value):
            return value  # the optimizer checks it
        return ShardTensor.guard(layout.own_part_of(value).clone(), layout, param.shard_owner)


class _Outline:
    """What tells the other ranks how to receive a tensor."""

    def __init__(self, value: Tensor) -> None:
        self.shape, self.dtype = tuple(value.shape), value.dtype


def _outline(value: Any) -> Any:
    return _Outline(value) if isinstance(value, Tensor) else value

"""Whole tensors out of and into a sharded model: state dicts, gradients, summoned parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final
from weakref import ref
from zlib import crc32

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from mics.comm.journal import calling, collective_call, in_call, name_ranks
from mics.engine import Engine, engines_of, settle_host, units_of
from mics.errors import SettingsError
from mics.gradients.eight_bit import EightBit, eight_bit_of
from mics.gradients.shards import GradState, UnitGradients
from mics.guard import Layout, ShardTensor, run_plainly
from mics.sharding.held import ParameterTable
from mics.sharding.unit import Unit
from mics.utils.deprecation import takes_old_keywords
from mics.utils.dtensors import is_dtensor

_NUM_SAMPLED: Final = 1024  # elements of a tensor that tell it from another


@collective_call
def full_state_dict(model: nn.Module, *, rank0_only: bool = True, cpu: bool = True) -> dict[str, Tensor]:
    """The model's state dict with whole tensors, parameters in master precision.

    All ranks must call it. With ``rank0_only`` the other ranks get an empty dict; no rank holds more than
    one gathered unit besides its result.
    """
    keep = engines_of(model)[0].world.rank == 0 or not rank0_only
    whole = take_parameters(model, partial(own_copy, cpu=cpu) if keep else None)
    if not keep:
        return {}
    state = {}
    for name, value in _state_of(model, lambda unit: [whole[id(shard)] for shard in unit.shards]).items():
        if isinstance(value, Tensor):
            found = whole.get(id(value))
            state[name] = found if found is not None else _copied(value, cpu=cpu)
        else:
            state[name] = value  # what a module's get_extra_state returned
    return state


def state_names(model: nn.Module) -> dict[str, Any]:
    """``model.state_dict(keep_vars=True)`` for names, buffers and extra state: parameters may be empty."""
    return _state_of(model, _without_memory)


def _state_of(model: nn.Module, whole: Callable[[Unit], list[Tensor]]) -> dict[str, Any]:
    """``model.state_dict(keep_vars=True)``, of shards.

    Hooks of the model may split or reshape parameters, which pieces refuse. They then see ``whole`` ones.
    """
    try:
        return model.state_dict(keep_vars=True)
    except RuntimeError:  # MicsError is one
        units = units_of(model)
        try:
            for unit in units:
                unit.held.show([nn.Parameter(value, requires_grad=False) for value in whole(unit)])
            return model.state_dict(keep_vars=True)
        finally:
            for unit in units:
                unit.held.show(unit.shards)


def _without_memory(unit: Unit) -> list[Tensor]:
    dtype = unit.spec.seen_dtype
    return [torch.empty(slot.shape, dtype=dtype, device="meta") for slot in unit.spec.layout.slots]


def take_parameters(model: nn.Module, take: Callable[[Tensor], Tensor] | None) -> dict[int, Tensor]:
    """What ``take`` makes of each whole parameter, by id of its shard; None: nothing, on this rank.

    All ranks must call it. One unit at a time is whole.
    """
    taken: dict[int, Tensor] = {}
    for unit in units_of(model):
        flat = unit.full_of_masters(unit.master)
        if take is not None:
            for shard, value in zip(unit.shards, split_whole(unit, flat), strict=True):
                taken[id(shard)] = take(value)
    return taken


@collective_call
def load_full_state_dict(
    model: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True
) -> Any:
    """Load whole tensors into a sharded model. Ranks other than 0 may pass None: rank 0 then sends its own.

    ``model.load_state_dict(full)`` does the same where every rank has the whole dict.
    """
    engine = engines_of(model)[0]
    given = engine.world.gather_objects(state_dict is not None)
    if not given[0]:
        raise SettingsError("load_full_state_dict: expected rank 0 to pass a state dict, found None")
    if all(given):
        assert state_dict is not None
        return model.load_state_dict(dict(state_dict), strict=strict)
    return model.load_state_dict(_receive(model, engine, state_dict), strict=strict)


@collective_call
def full_gradients(
    model: nn.Module, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, Tensor | None]:
    """Whole gradients by parameter name, averaged over all ranks; None where there is none."""
    names = _names(model)
    grads: dict[str, Tensor | None] = {}
    for engine in engines_of(model):
        engine.step.synchronize()
        keep = engine.world.rank == 0 or not rank0_only
        for shard, value in _full_gradients(engine):
            if keep and id(shard) in names:
                grads[names[id(shard)]] = None if value is None else _copied(value, cpu=cpu)
    return grads


def _full_gradients(engine: Engine) -> Iterator[tuple[nn.Parameter, Tensor | None]]:
    units = engine.hops.units
    for unit in units:
        engine.shown.of(unit).drop_cleared()
    # A rank without a part of a unit shows its optimizer no gradients, and has none after the step.
    found = engine.world.gather_objects([engine.shown.of(unit).state is GradState.REDUCED for unit in units])
    for unit, *present in zip(units, *found, strict=True):
        flat = unit.full_of_masters(_step_gradient(engine.shown.of(unit))) if any(present) else None
        values = [None] * len(unit.shards) if flat is None else split_whole(unit, flat)
        for index, (shard, value) in enumerate(zip(unit.shards, values, strict=True)):
            hidden = value is None or not engine.step.any_rank_used(unit, index)
            yield shard, None if hidden else value


def _step_gradient(gradients: UnitGradients) -> Tensor:
    if gradients.state is GradState.REDUCED:
        return gradients.step_gradient()
    unit = gradients.unit
    return torch.zeros_like(unit.master, dtype=unit.spec.grad_dtype, device=unit.device)


@collective_call
def full_optimizer_state_dict(
    model: nn.Module, optimizer: Optimizer, *, rank0_only: bool = True, cpu: bool = True
) -> dict[str, dict[str, Any]]:
    """Whole optimizer state by parameter name: tensors shaped like the parameter, scalars as they are."""
    keep = engines_of(model)[0].world.rank == 0 or not rank0_only
    return take_optimizer_state(model, optimizer, partial(own_copy, cpu=cpu) if keep else None)


@run_plainly
def take_optimizer_state(
    model: nn.Module, optimizer: Optimizer, take: Callable[[Tensor], Tensor] | None
) -> dict[str, dict[str, Any]]:
    """Optimizer state by parameter name, with what ``take`` makes of tensors shaped like the parameter.

    None: nothing, on this rank. All ranks must call it. One entry of one unit at a time is whole.
    """
    settle_host(model)
    names = _names(model)
    world = engines_of(model)[0].world
    result: dict[str, dict[str, Any]] = {}
    units = [unit for unit in units_of(model) if unit.spec.trainable]
    eight_bit = eight_bit_of(optimizer)
    states = [
        [_state_of_shard(optimizer, eight_bit, unit, i) for i in range(len(unit.shards))] for unit in units
    ]
    # Only ranks with a part of a parameter have state for it: all must know what there is to gather.
    described = [
        [_describe(state, shard, eight_bit) for state, shard in zip(own, unit.shards, strict=True)]
        for unit, own in zip(units, states, strict=True)
    ]
    everywhere = world.gather_objects(described)
    for number, (unit, own) in enumerate(zip(units, states, strict=True)):
        found = [_merged(entries) for entries in zip(*(ranks[number] for ranks in everywhere), strict=True)]
        kinds = {(key, kind) for entry in found for key, kind in entry.items() if isinstance(kind, _Sharded)}
        for key, kind in sorted(kinds, key=str):
            has = [isinstance(entry.get(key), _Sharded) and entry[key] == kind for entry in found]
            values = [state.get(key) if each else None for state, each in zip(own, has, strict=True)]
            whole = _whole_state(unit, kind, values)
            for entry, value, each in zip(found, whole, has, strict=True):
                if take is not None and each:
                    entry[key] = take(value)
        for shard, entry in zip(unit.shards, found, strict=True):
            if take is not None and entry and id(shard) in names:
                state = entry if eight_bit is None else eight_bit.put_together(entry, shard.dtype)
                result[names[id(shard)]] = state
    return result


def _whole_state(unit: Unit, kind: _Sharded, values: Sequence[Tensor | None]) -> list[Tensor]:
    """One entry of the optimizer's state of a unit, from this rank's part of it for each parameter."""
    layout, numel = unit.spec.layout, kind.block_numel
    span = unit.share.master_span(unit.spec)
    local = unit.master.new_zeros(len(span) // numel, dtype=kind.dtype)
    for slot, value in zip(layout.slots, values, strict=True):
        if value is not None and value.numel():
            start = (slot.overlap(span).start - span.start) // numel
            local[start : start + value.numel()].copy_(value.reshape(-1))
    flat = unit.full_of_masters(local)
    if numel == 1:
        return split_whole(unit, flat)
    return [flat[slot.start // numel : -(-slot.stop // numel)] for slot in layout.slots]


def _state_of_shard(
    optimizer: Optimizer, eight_bit: EightBit | None, unit: Unit, index: int
) -> Mapping[str, Any]:
    """This rank's part of a parameter's optimizer state; 8-bit state taken apart."""
    shard = unit.shards[index]
    if eight_bit is not None:
        return eight_bit.pieces(shard, unit.layouts[index])
    return optimizer.state.get(shard, {})  # type: ignore[no-any-return]


@takes_old_keywords("mics.summon_full_params", writeback="write")
@contextmanager
def summon_full_params(model: nn.Module, *, write: bool = False) -> Iterator[nn.Module]:
    """Inside this context modules hold whole parameters, in master precision, on every rank.

    With ``write`` the changes made inside are kept: those of rank 0 (initialisers draw from each rank's own
    random numbers). Forwards inside need ``torch.no_grad()``. All ranks must enter it.
    """
    units, parts = units_of(model), [engine.progress for engine in engines_of(model)]
    if any(progress.suspended for progress in parts):
        raise SettingsError(
            "mics.summon_full_params: expected a sharded model, found one whose parameters are "
            "whole already; "
            "do not nest it"
        )
    with calling("mics.summon_full_params"):
        flats = [unit.full_of_masters(unit.master) for unit in units]
    for progress in parts:
        progress.suspended = True
    try:
        for unit, flat in zip(units, flats, strict=True):
            unit.held.show([nn.Parameter(value, requires_grad=False) for value in split_whole(unit, flat)])
        yield model
    finally:
        for progress in parts:
            progress.suspended = False
        for unit in units:
            unit.held.show(unit.shards)
    if write:
        world = engines_of(model)[0].mesh.world
        for unit, flat in zip(units, flats, strict=True):
            world.broadcast(flat, f"written {unit.spec.label}")
            unit.load(flat)


def num_parameters(model: nn.Module, *, only_trainable: bool = False) -> int:
    """The number of elements of the whole model's parameters, tied ones once. Nothing is communicated."""
    return sum(param.numel() for param in model.parameters() if param.requires_grad or not only_trainable)


def shard_of_full(module: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a module loads its state: whole tensors become this rank's part of them."""
    table = module._parameters
    for attribute, unit in table.units.items() if isinstance(table, ParameterTable) else ():
        value = state_dict.get(prefix + attribute)
        if not isinstance(value, Tensor):
            continue
        index = next(i for i, held in enumerate(unit.spec.refs) if (module, attribute) in held.places)
        slot, shard = unit.spec.layout.slots[index], unit.shards[index]
        if isinstance(value, ShardTensor):
            _check_piece(prefix + attribute, value, unit.layouts[index])
        elif tuple(value.shape) == slot.shape:
            layout = unit.layouts[index]
            if is_dtensor(value):  # of FSDP2, say: all ranks load the same names in turn
                own = layout.own_part_of(value.full_tensor()).clone()  # frees the whole one
            else:
                own = layout.own_part_of(value)
            state_dict[prefix + attribute] = ShardTensor.guard(own, layout, shard.shard_owner)
        else:
            raise SettingsError(
                f"{prefix + attribute}: expected the whole tensor of shape {slot.shape}, found "
                f"{tuple(value.shape)}; is this the state of another model, or one rank's piece of it? "
                "mics.full_state_dict(model) has whole tensors, and mics.load(path, model) reads "
                "what mics.save wrote"
            )


def agree_on_full(model: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Before a sharded model loads its state: raise unless all ranks load the same whole tensors."""
    world = engines_of(model)[0].world
    found = {
        key.removeprefix(prefix): _sample(value)
        for key, value in state_dict.items()
        if key.startswith(prefix)
        and isinstance(value, Tensor)
        and not isinstance(value, ShardTensor)
        and not is_dtensor(value)
    }
    with calling("load_state_dict"):
        if len(set(world.gather_objects(crc32(repr(sorted(found.items())).encode())))) == 1:
            return
        by_rank = world.gather_objects(found)
    name = next(name for name in sorted(set().union(*by_rank)) if len({f.get(name) for f in by_rank}) > 1)
    without = [rank for rank, values in enumerate(by_rank) if name not in values]
    raise SettingsError(
        "load_state_dict of a sharded model: expected the same whole tensors on every rank, found "
        + (f"{name!r} missing on {name_ranks(without)}" if without else f"another {name!r} on some ranks")
        + "; load the same file on all ranks, take mics.full_state_dict(model, rank0_only=False), or call "
        "mics.load_full_state_dict(model, state), which sends what rank 0 has to the others"
    )


def _sample(value: Tensor) -> tuple[Any, ...]:
    """What tells one tensor from another: its shape, its format and some of its elements."""
    flat = value.detach().reshape(-1)
    some = flat[:: max(1, flat.numel() // _NUM_SAMPLED)].contiguous().cpu()
    return tuple(value.shape), str(value.dtype), crc32(some.view(torch.uint8).numpy().tobytes())


def _check_piece(name: str, value: ShardTensor, layout: Layout) -> None:
    if value.shard_layout != layout:
        raise SettingsError(
            f"{name}: expected the whole tensor or the piece of it that this rank has, found a "
            f"piece with other "
            "elements; pass mics.full_state_dict(model), or shard both models with the same settings"
        )


@run_plainly
def _receive(model: nn.Module, engine: Engine, state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Rank 0's state dict on every rank, already cut to shards: one unit at a time is whole."""
    names = engine.world.gather_objects(None if state_dict is None else list(state_dict))[0]
    received: dict[str, Any] = {}
    tied: dict[int, str] = {}
    by_shard = {id(shard): (unit, i) for unit in units_of(model) for i, shard in enumerate(unit.shards)}
    current = model.state_dict(keep_vars=True)
    for name in names:
        target = current.get(name)
        if not isinstance(target, Tensor):
            everyone = engine.world.gather_objects(state_dict[name] if state_dict is not None else None)
            received[name] = everyone[0]
            continue
        if id(target) in tied:
            received[name] = received[tied[id(target)]]
            continue
        tied[id(target)] = name
        unit, index = by_shard.get(id(target), (None, -1))
        slot = None if unit is None else unit.spec.layout.slots[index]
        whole = torch.empty(
            tuple(target.shape) if slot is None else slot.shape, dtype=target.dtype, device=target.device
        )
        if state_dict is not None:
            _check_shape(name, state_dict[name], whole)
            whole.copy_(state_dict[name])
        engine.mesh.world.broadcast(whole, in_call(f"state {name!r}"))
        if unit is not None and slot is not None:
            layout = unit.layouts[index]
            whole = ShardTensor.guard(layout.own_part_of(whole).clone(), layout, ref(engine.step.owner))
        received[name] = whole
    return received


def _names(model: nn.Module) -> dict[int, str]:
    """What the model calls each of its parameters now, by id: it may have been changed since."""
    return {id(param): name for name, param in model.named_parameters()}


def _check_shape(name: str, value: Tensor, whole: Tensor) -> None:
    if value.shape != whole.shape:
        raise SettingsError(
            f"{name}: expected a tensor of shape {tuple(whole.shape)}, found {tuple(value.shape)}; "
            "is this the state of another model?"
        )


@dataclass(frozen=True)
class _Sharded:
    """Stands for a tensor of which each rank has a part: with a value for each block of elements."""

    dtype: torch.dtype
    block_numel: int = 1


def _describe(state: Mapping[str, Any], shard: Tensor, eight_bit: EightBit | None) -> dict[str, Any]:
    """Each entry of a parameter's optimizer state, by its value where all ranks have the same."""
    found: dict[str, Any] = {}
    for key, value in state.items() if shard.numel() > 0 else ():  # some make it for every parameter
        if eight_bit is not None and eight_bit.is_per_block(key):
            found[key] = _Sharded(value.dtype, eight_bit.block_numel)
        elif isinstance(value, Tensor) and value.shape == shard.shape and value.dim() > 0:
            found[key] = _Sharded(shard.dtype if eight_bit is None else value.dtype)
        else:
            found[key] = _host(value)
    return found


def _merged(descriptions: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """What any rank has of one parameter's state."""
    return {key: value for one in descriptions for key, value in one.items()}


def _host(value: Any) -> Any:
    return value.detach().cpu() if isinstance(value, Tensor) else value


def own_copy(value: Tensor, *, cpu: bool) -> Tensor:
    """A copy, on the CPU too: who saves tensors that share their memory takes them for tied ones."""
    return value.to("cpu", copy=True) if cpu else value.clone()


def _copied(value: Tensor, *, cpu: bool) -> Tensor:
    return value.detach().cpu().clone() if cpu else value.detach().clone()


def split_whole(unit: Unit, flat: Tensor) -> list[Tensor]:
    """The parameters of a unit in its whole memory."""
    return [flat[slot.start : slot.stop].view(slot.shape) for slot in unit.spec.layout.slots]

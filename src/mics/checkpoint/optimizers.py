"""What an optimizer is given from a checkpoint: state by parameter, settings by group."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeGuard

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from mics.checkpoint.contents import Contents, HeldParam
from mics.checkpoint.names import state_entries
from mics.checkpoint.records import StoredTensor
from mics.checkpoint.wanted import Wanted, converts
from mics.gradients.eight_bit import EightBit, eight_bit_of
from mics.gradients.trial_step import IMPLEMENTATION, state_after_a_step
from mics.guard import ShardParameter, ShardTensor
from mics.sharding.contiguous import Contiguous

_Entries = dict[int, dict[str, Tensor]]  # by id of the shard: the entries of its state
# What torch's schedulers leave among an optimizer's settings.
_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum"}
)
_MAX_WHOLE: Final = 16  # times the size of its parameter, or this many million elements


@dataclass(frozen=True, kw_only=True)
class Fill:
    """The state and settings that an optimizer will be given."""

    optimizer: Optimizer
    entries: _Entries
    groups: list[dict[str, Any]]
    strict: bool

    def run(self) -> None:
        """By the way that optimizers provide for it."""
        eight_bit = eight_bit_of(self.optimizer)
        if eight_bit is not None:
            self._run_in_place(eight_bit)
            return
        groups, state, number = [], {}, 0
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            numbers = []
            for param in group["params"]:
                if id(param) in self.entries:
                    state[number] = _guarded(param, self.entries[id(param)])
                elif not self.strict and self.optimizer.state.get(param):
                    state[number] = dict(self.optimizer.state[param])
                numbers.append(number)
                number += 1
            groups.append({**settings, "params": numbers})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})

    def _run_in_place(self, eight_bit: EightBit) -> None:
        """Put 8-bit state where the optimizer keeps it: libraries would cast it, or take it for whole."""
        kept = {} if self.strict else dict(self.optimizer.state)
        self.optimizer.state.clear()
        self.optimizer.state.update(kept)
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(settings)
            for param in (each for each in group["params"] if id(each) in self.entries):
                entries = self.entries[id(param)]
                guarded = _guarded(param, eight_bit.elementwise(entries))
                self.optimizer.state[param] = eight_bit.put_together({**entries, **guarded}, param.dtype)


def _guarded(param: nn.Parameter, entries: dict[str, Tensor]) -> dict[str, Tensor]:
    """State as the optimizer shows it: pieces that know which elements they hold."""
    if not isinstance(param, ShardParameter):
        return entries
    layout, owner = param.shard_layout, param.shard_owner
    return {
        key: ShardTensor.guard(value, layout, owner)
        if value.dim() and value.shape == param.shape and type(value) is Tensor
        else value
        for key, value in entries.items()
    }


def plan_fill(wanted: Wanted, contents: Contents, optimizer: Optimizer, saved: Any, *, strict: bool) -> Fill:
    """Have the state of an optimizer read, and find its settings among the ``saved`` groups."""
    groups = _settings(wanted, contents, optimizer, saved, strict=strict)
    eight_bit = eight_bit_of(optimizer)
    if eight_bit is not None:
        found = _want_eight_bit(wanted, contents, eight_bit)
        return Fill(optimizer=optimizer, entries=found, groups=groups, strict=strict)
    entries = _want_state(wanted, contents, optimizer, strict=strict)
    if strict:
        _check_state(wanted, contents, optimizer, groups, entries)
    return Fill(optimizer=optimizer, entries=entries, groups=groups, strict=strict)


# -- groups and settings --------------------------------------------------------------------------------


def check_groups(wanted: Wanted, contents: Contents, optimizers: Sequence[Optimizer], saved: Any) -> None:
    """That the optimizers are those of the checkpoint: by class, and by which parameters are in which group.

    By names, so the order of groups and of the parameters in them may differ.
    """
    if not optimizers or not _are_groups(saved):
        return
    known = {name: id(held.shard) for held in contents.params for name in held.names}
    theirs = [frozenset(known[name] for name in group["params"] if name in known) for group in saved]
    ours = [frozenset(map(id, group["params"])) for each in optimizers for group in each.param_groups]
    if sorted(map(sorted, theirs)) != sorted(map(sorted, ours)):
        wanted.problems.append(
            f"optimizer: expected the parameter groups that were saved, {_sizes(theirs)}; found "
            f"{_sizes(ours)}, or other parameters in them; group them as they were, and give all optimizers"
        )
    classes = wanted.index.about.get("optimizers")
    found = [type(each).__qualname__ for each in optimizers]
    if isinstance(classes, list) and sorted(map(str, classes)) != sorted(found):
        wanted.problems.append(
            f"optimizer: expected the state of {', '.join(found)}; found that of "
            f"{', '.join(map(str, classes)) or 'none'}"
        )


def _are_groups(saved: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(saved, list) and all(
        isinstance(group, dict)
        and isinstance(group.get("params"), list)
        and all(isinstance(name, str) for name in group["params"])
        for group in saved
    )


def _sizes(groups: Sequence[frozenset[int]]) -> str:
    return f"{len(groups)} of {', '.join(str(len(group)) for group in groups)} parameters"


def _settings(
    wanted: Wanted, contents: Contents, optimizer: Optimizer, saved: Any, *, strict: bool
) -> list[dict[str, Any]]:
    """Those of the checkpoint for each group of the optimizer, where it has any."""
    if saved is not None and not _are_groups(saved):
        wanted.problems.append("optimizer: expected parameter groups, found something else")
        saved = None
    options = _options_by_param(saved or ())
    names = {id(held.shard): held.names for held in contents.params}
    found = []
    for group in optimizer.param_groups:
        own = [options[n] for param in group["params"] for n in names.get(id(param), ()) if n in options]
        if any(each is not own[0] and not _equal(each, own[0]) for each in own):
            wanted.problems.append(
                "optimizer: expected the parameters of a group to have had the same settings, found "
                "different ones; group them as they were when the checkpoint was saved"
            )
        present = {key: value for key, value in group.items() if key != "params"}
        taken = own[0] if own else {}
        wanted.problems += [
            f"optimizer: expected {key} to be like {present[key]!r:.60}, found {value!r:.60}"
            for key, value in taken.items()
            if key in present and not _is_like(value, present[key])
        ]
        found.append({**present, **taken})
        if own and strict:
            _refuse_other_class(wanted, optimizer, taken)
    return found


def _equal(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, Tensor) and isinstance(b[k], Tensor) else bool(v == b[k])
        for k, v in a.items()
    )


def _is_like(value: Any, present: Any) -> bool:
    """Whether a setting from a file can stand where another one stands."""
    if value is None or present is None:
        return True
    if isinstance(present, tuple | list):
        return (
            isinstance(value, tuple | list)
            and len(value) == len(present)
            and all(map(_is_like, value, present))
        )
    if isinstance(present, bool) or isinstance(value, bool):
        return isinstance(value, bool) and isinstance(present, bool)
    if isinstance(present, int | float | Tensor):
        return isinstance(value, int | float) or (isinstance(value, Tensor) and value.numel() == 1)
    return type(value) is type(present)


def _refuse_other_class(wanted: Wanted, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Each class has settings of its own: its state would not be found wrong before the next step."""
    own = optimizer.defaults.keys() - IMPLEMENTATION
    missing, strange = sorted(own - saved.keys()), sorted(saved.keys() - own - _OF_SCHEDULERS)
    if missing and strange:  # one of both alone: another version of the same class
        wanted.problems.append(
            f"optimizer: expected the state of {type(optimizer).__name__}, with settings as "
            f"{', '.join(missing)}; found that of an optimizer with {', '.join(strange)}"
        )


def _options_by_param(groups: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {k: v for k, v in group.items() if k not in ("params", "param_names", *IMPLEMENTATION)}
        for group in groups
        for name in group["params"]
    }


# -- state ----------------------------------------------------------------------------------------------


def _want_state(wanted: Wanted, contents: Contents, optimizer: Optimizer, *, strict: bool) -> _Entries:
    """Memory for the state of every parameter that the checkpoint has state of, wanted from there."""
    entries = state_entries(wanted.index, [name for held in contents.params for name in held.names])
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    filled: _Entries = {}
    sharded: dict[
        tuple[str, torch.dtype], list[tuple[HeldParam, str, StoredTensor]]
    ] = {}  # what has no memory
    for held in contents.params:
        own = next((entries[name] for name in held.names if name in entries), {})
        if id(held.shard) not in trained or held.shard.numel() == 0:
            continue
        for entry, name in own.items():
            if name in wanted.index.numbers:
                number = torch.tensor(wanted.index.numbers[name], dtype=torch.float32, device="cpu")
                filled.setdefault(id(held.shard), {})[entry] = number
                continue
            stored = wanted.stored(name)
            if stored.whole or stored.shape != held.shape or (entry == "step" and not stored.shape):
                if math.prod(stored.shape) > _MAX_WHOLE * max(1 << 20, math.prod(held.shape)):
                    wanted.problems.append(f"{name}: expected at most a few values, found {stored.shape}")
                    continue
                value = torch.empty(stored.shape, dtype=stored.dtype, device="cpu")
                filled.setdefault(id(held.shard), {})[entry] = value
                wanted.add_whole(value, name, stored)
                continue
            value = optimizer.state.get(held.shard, {}).get(entry)
            if _fits(value, held, stored):
                filled.setdefault(id(held.shard), {})[entry] = value
                wanted.add(held.part(name, value, once=False), name, stored)
            else:
                sharded.setdefault((entry, stored.dtype), []).append((held, name, stored))
    for (entry, dtype), found in sharded.items():
        # One buffer for each entry, as training leaves it.
        store = Contiguous(found[0][0].unit.masters.state_device)
        places = [(each, store.reserve(dtype, each[0].shard.numel())) for each in found]
        for (held, name, stored), place in places:
            value = place.tensor().view(held.shard.shape)
            filled.setdefault(id(held.shard), {})[entry] = value
            wanted.add(held.part(name, value, once=False), name, stored)
    if strict and not entries and wanted.index.param_groups is None:
        wanted.problems.append(
            "optimizer: expected the state of an optimizer, found none; load the model alone"
        )
    return filled


def _want_eight_bit(wanted: Wanted, contents: Contents, eight_bit: EightBit) -> _Entries:
    """The same of an optimizer with 8-bit state, whose codes and scales mean nothing to another one."""
    found = state_entries(wanted.index, [name for held in contents.params for name in held.names])
    optimizer = eight_bit.optimizer
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    filled: _Entries = {}
    for held in contents.params:
        own = next((found[name] for name in held.names if name in found), {})
        if not own or id(held.shard) not in trained or held.shard.numel() == 0:
            continue
        has = optimizer.state.get(held.shard) or eight_bit.make(held.shard, math.prod(held.shape))
        entries = filled[id(held.shard)] = eight_bit.take_apart(has)
        if own.keys() != entries.keys():
            wanted.problems.append(
                f"{held.name}: expected the state of {type(optimizer).__name__} ({', '.join(entries)}), "
                f"found {', '.join(own)}; build the optimizer that was saved, with its settings"
            )
            continue
        for entry, name in own.items():
            stored, value = wanted.stored(name), entries[entry]
            if eight_bit.is_per_block(entry):
                part = held.part(name, value, once=False, block_numel=eight_bit.block_numel)
                wanted.add(part, name, stored)
            elif isinstance(value, Tensor) and value.dim():
                wanted.add(held.part(name, value, once=False), name, stored)
            else:
                entries[entry] = torch.empty((), dtype=stored.dtype, device="cpu")
                wanted.add_whole(entries[entry], name, stored)
    return filled


def _fits(value: Any, held: HeldParam, stored: StoredTensor) -> TypeGuard[Tensor]:
    """Whether an optimizer that has stepped before has the very memory that is needed."""
    return (
        isinstance(value, Tensor)
        and (value.shape, value.dtype) == (held.shard.shape, stored.dtype)
        and value.device == held.unit.masters.state_device
        and value.is_contiguous()
    )


def _check_state(
    wanted: Wanted,
    contents: Contents,
    optimizer: Optimizer,
    groups: Sequence[Mapping[str, Any]],
    entries: _Entries,
) -> None:
    """That what was found is what this optimizer keeps: else it would not be missed before the next step."""
    names = {id(held.shard): held.name for held in contents.params}
    for group, settings in zip(optimizer.param_groups, groups, strict=True):
        found = [(param, entries[id(param)]) for param in group["params"] if id(param) in entries]
        expected = state_after_a_step(optimizer, settings) if found else None
        if expected is None:
            continue
        for param, own in found:
            wrong = sorted(
                key
                for key in expected
                if key not in own or not _stands_for(own[key], expected[key], param.dim())
            )
            if wrong or not expected:
                wanted.problems.append(
                    f"{names[id(param)]}: expected the state of {type(optimizer).__name__} "
                    f"({', '.join(expected) or 'none'}), found {', '.join(own)}"
                    + (f" with another {wrong[0]}" if wrong and wrong[0] in own else "")
                )


def _stands_for(value: Tensor, expected: Any, dims: int) -> bool:
    """Whether a value from a file can be the entry that a step made."""
    if isinstance(expected, Tensor) and expected.dim():
        return value.dim() == dims and converts(value.dtype, expected.dtype)
    return value.dim() == 0 and value.dtype != torch.bool and not value.dtype.is_complex

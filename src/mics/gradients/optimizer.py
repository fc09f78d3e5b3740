"""Hooks around every ``torch.optim`` step: what makes plain optimizers work on sharded models."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from inspect import unwrap
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
import torch.nn as nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook
from torch.utils.weak import WeakIdKeyDictionary

from mics.errors import SettingsError
from mics.gradients.eight_bit import EightBit, eight_bit_of, is_packed, plain_tensors
from mics.gradients.host_state import sharded_entries
from mics.gradients.optimizer_state import make_contiguous
from mics.gradients.step import Step
from mics.gradients.trial_step import is_per_element
from mics.guard import ShardTensor, guard_initialisers, plainly, run_plainly
from mics.sharding.unit import Unit
from mics.utils.dtensors import is_dtensor

# Optimizers whose update of an element uses that element's values alone are exact on shards.
_ELEMENTWISE: set[type[Optimizer]] = {
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.ASGD,
}
_TORCH = frozenset(_ELEMENTWISE)
_REFUSED = {
    "Adafactor": "it factors whole matrices and scales by their norms",
    "Muon": "it orthogonalises whole matrices",
    "LBFGS": "it needs inner products over all parameters",
    "SparseAdam": "it needs sparse gradients, and shards are dense",
}
# Endings of names, in lower case: of torchao's, and of what all of bitsandbytes' come from.
# For those that work, see eight_bit.py.
_QUANTIZED = ("8bit", "4bit", "fp8")


@dataclass(frozen=True, eq=False)
class _Place:
    """Where a sharded parameter belongs. Weak: the table must not keep models alive."""

    step: ref[Step]
    unit: ref[Unit]
    index: int


_places: WeakIdKeyDictionary = WeakIdKeyDictionary()  # sharded parameter -> _Place
# Parameter that no longer is the model's, or a copy of one -> its name.
_replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
_in_place: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()  # whether its state is contiguous
load_listeners: list[Callable[[Optimizer], None]] = []  # told of optimizers over sharded parameters
_Members = list[tuple[ref[Step], list[tuple[ref[Unit], int]]]]
# Weak: an optimizer that its model holds would keep both alive for ever.
_members: WeakKeyDictionary[Optimizer, tuple[tuple[int, ...], _Members]] = WeakKeyDictionary()


def allow_optimizer(optimizer_class: type[Optimizer]) -> type[Optimizer]:
    """Declare that an optimizer from elsewhere updates each element from that element alone.

    mics refuses optimizers it does not know, because one that needs whole matrices or norms would be
    silently wrong on shards. Usable as a class decorator.
    """
    if not (isinstance(optimizer_class, type) and issubclass(optimizer_class, Optimizer)):
        raise SettingsError(
            f"allow_optimizer: expected a torch.optim.Optimizer class, found {optimizer_class!r}"
        )
    _ELEMENTWISE.add(optimizer_class)
    return optimizer_class


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise now what its first step would raise, of the sharded parameters that it has by now."""
    _look_up(optimizer)


def register_params(step: Step) -> None:
    """Let optimizers over this model's parameters find ``step``, and refuse the replaced parameters."""
    _install_hooks()
    for optimizer, (_, weak) in list(_members.items()):
        _members[optimizer] = ((), weak)  # looked up again: its parameters may be among the replaced
    for unit in step.units:
        for index, (old, shard) in enumerate(zip(unit.spec.refs, unit.shards, strict=True)):
            _replaced[old.param] = old.name
            _places[shard] = _Place(ref(step), ref(unit), index)


def refuse_copies(unit: Unit, copies: Iterable[nn.Parameter]) -> None:
    """Have steps of optimizers over ``copies`` of the unit's parameters raise."""
    for found, copy in zip(unit.spec.refs, copies, strict=True):
        _replaced[copy] = found.name


@run_plainly
def optimizer_state_nbytes(step: Step) -> int:
    """Bytes that optimizers keep for the parameters of this model: on the device, or on the host."""
    if step.host is not None:
        return step.host.nbytes
    found: dict[int, int] = {}  # by address: some have tables in common
    for optimizer, (_, weak) in list(_members.items()):
        for unit, index in _alive(weak).get(step, []):
            for value in optimizer.state.get(unit.shards[index], {}).values():
                if isinstance(value, torch.Tensor) and value.dim():
                    for each in plain_tensors(value):
                        found[each.data_ptr()] = each.numel() * each.element_size()
    return sum(found.values())


@run_plainly
def expected_state_nbytes(step: Step) -> tuple[float, str]:
    """Bytes of optimizer state for the whole model, and of which optimizer: AdamW, if none has stepped."""
    trainable = [unit for unit in step.units if unit.spec.trainable]
    eight_bit = {
        id(unit.shards[index]): kept
        for optimizer, (_, weak) in list(_members.items())
        if (kept := eight_bit_of(optimizer)) is not None
        for unit, index in _alive(weak).get(step, [])
    }
    if not eight_bit:
        wide = sum(_state_numel(unit, step) * unit.spec.master_dtype.itemsize for unit in trainable)
        return 2 * wide, "AdamW"
    total = 0.0
    for unit in trainable:
        for shard, slot in zip(unit.shards, unit.spec.layout.slots, strict=True):
            kept = eight_bit.get(id(shard))
            if kept is not None:
                total += kept.expected_nbytes(shard, slot.numel)
            else:
                total += 2 * slot.numel * unit.spec.master_dtype.itemsize
    return total, "8-bit Adam"


def _state_numel(unit: Unit, step: Step) -> int:
    """Elements of one entry of state. On the host it is laid out as the masters, with padding."""
    layout = unit.spec.layout
    return layout.numel if step.host is not None else sum(slot.numel for slot in layout.slots)


def _meet(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Before any optimizer's step: be closest to it, so that hooks of the user's see guarded pieces."""
    if optimizer not in _met:
        pre = optimizer.register_step_pre_hook(_before_step)
        post = optimizer.register_step_post_hook(_after_step)
        _met[optimizer] = pre.id, post.id
    pre_id, post_id = _met[optimizer]
    pre_hooks: Any = optimizer._optimizer_step_pre_hooks
    post_hooks: Any = optimizer._optimizer_step_post_hooks
    pre_hooks.move_to_end(pre_id)
    post_hooks.move_to_end(post_id, last=False)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
    found = _find_members(optimizer)
    closure = kwargs["closure"] if "closure" in kwargs else next(iter(args[1:]), None)
    if not found or not callable(closure):
        _show_plain(optimizer, found)
        return None

    def with_plain_gradients() -> Any:
        """There may be backwards in it: gradients are those of the whole world when it is over."""
        for step in found:
            step.guard_again()
        result = closure()
        _show_plain(optimizer, found)
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": with_plain_gradients}
    return (args[0], with_plain_gradients, *args[2:]), kwargs


def _after_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    found, eight_bit = _find_members(optimizer), eight_bit_of(optimizer)
    if found and not _in_place.get(optimizer, False):
        if optimizer not in _in_place:
            optimizer.register_load_state_dict_post_hook(_forget_places)
        _in_place[optimizer] = True
        if eight_bit is None:
            on_device = [members for step, members in found.items() if step.host is None]
            make_contiguous(optimizer, [unit.shards[i] for members in on_device for unit, i in members])
    for step, members in found.items():
        step.end(members)
        if step.host is not None:
            continue  # its state stays guarded
        for unit, index in members:
            owner, layout = ref(step.owner), unit.layouts[index]
            for value in _sharded_state(optimizer, unit.shards[index], eight_bit):
                ShardTensor.guard(value, layout, owner)


def _show_plain(optimizer: Optimizer, found: dict[Step, list[tuple[Unit, int]]]) -> None:
    """Let ``optimizer`` see plain parameters, gradients and state.

    Where state is in host memory, the step is made here, unit by unit: nothing is left to do.
    """
    eight_bit = eight_bit_of(optimizer)
    left_out = getattr(optimizer, "found_inf", None)  # torch's: of fused optimizers under a gradient scaler
    for step, members in found.items():
        if step.host is not None:
            with step.host.streaming(optimizer, step.in_forward_order(members), members) as stream:
                step.begin(members, left_out)
                step.update(members, stream.update)
            continue
        step.begin(members, left_out)
        for unit, index in members:
            for value in _sharded_state(optimizer, unit.shards[index], eight_bit):
                if isinstance(value, ShardTensor):
                    _check_layout(unit, index, value)
                    value.unguard()
        if eight_bit is not None:
            eight_bit.prepare(members)


def _sharded_state(
    optimizer: Optimizer, shard: torch.nn.Parameter, eight_bit: EightBit | None
) -> list[torch.Tensor]:
    """State that has an element for each of ``shard``."""
    state = optimizer.state.get(shard, {})
    with plainly():
        if eight_bit is not None:
            state = eight_bit.elementwise(eight_bit.take_apart(state))
        return [
            value
            for value in state.values()
            if isinstance(value, torch.Tensor) and value.dim() and value.shape == shard.shape
        ]


def _check_layout(unit: Unit, index: int, value: ShardTensor) -> None:
    if value.shard_layout != unit.layouts[index]:
        raise SettingsError(
            f"optimizer state of {unit.layouts[index].label}: expected the piece of it that this "
            f"rank has, found a "
            "piece with other elements; load state of another rank or of other settings with mics.load"
        )


def _load_state_dict(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """``Optimizer.load_state_dict`` for all: for sharded parameters, whole tensors become pieces."""
    found = _find_members(optimizer) if any(p in _places for p in _params_of(optimizer)) else {}
    if not found:
        _original_load(optimizer, state_dict)
        return
    state_dict = _fitting(optimizer, state_dict)
    # What belongs to the host does not go by way of the device, where it might not fit.
    places = {id(unit.shards[i]): (step, unit, i) for step, own in found.items() for unit, i in own}
    for_host, state = [], dict(state_dict["state"])
    saved_ids = [saved_id for group in state_dict["param_groups"] for saved_id in group["params"]]
    for saved_id, param in zip(saved_ids, _params_of(optimizer), strict=True):
        step, unit, index = places.get(id(param), (None, None, -1))
        if step is not None and unit is not None and step.host is not None and saved_id in state:
            entries = sharded_entries(state[saved_id], param)
            state[saved_id] = {k: v for k, v in state[saved_id].items() if k not in entries}
            for_host.append((step.host, unit, index, entries))
    _original_load(optimizer, {**state_dict, "state": state})
    for host, unit, index, entries in for_host:
        host.adopt(optimizer, unit, index, entries)
    for hear in load_listeners:
        hear(optimizer)


def _fitting(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """``state_dict`` with this rank's pieces. Raises before anything is overwritten."""
    kind = type(optimizer).__name__
    if not {"state", "param_groups"} <= state_dict.keys():
        raise SettingsError(
            f"{kind}.load_state_dict: expected 'state' and 'param_groups', as in optimizer.state_dict(), "
            f"found {sorted(map(str, state_dict))[:4]}; mics.save and mics.load keep optimizer state"
        )
    groups, own = state_dict["param_groups"], optimizer.param_groups
    if [len(group["params"]) for group in groups] != [len(group["params"]) for group in own]:
        raise SettingsError(
            f"{kind}.load_state_dict: expected parameter groups of "
            f"{[len(g['params']) for g in own]} parameters, "
            f"found {[len(g['params']) for g in groups]}; build the optimizer with the groups it "
            f"was saved with"
        )
    for saved, group in zip(groups, own, strict=True):
        missing = (group.keys() - _OPTIONAL_KEYS) - saved.keys()
        if missing:
            raise SettingsError(
                f"{kind}.load_state_dict: expected the state of a {kind}, found one without "
                f"{sorted(missing)}; build the optimizer class that was saved"
            )
        if saved.get(_DECOUPLED, own_decay := group.get(_DECOUPLED)) != own_decay:  # Adam and AdamW
            raise SettingsError(
                f"{kind}.load_state_dict: expected the state of a {kind}, found one with "
                f"{_DECOUPLED}={saved[_DECOUPLED]}; build the optimizer class that was saved"
            )
    saved_ids = [saved_id for group in groups for saved_id in group["params"]]
    state = dict(state_dict["state"])
    for saved_id, param in zip(saved_ids, _params_of(optimizer), strict=True):  # on all ranks in turn
        if saved_id in state:
            state[saved_id] = _fitting_entries(optimizer, param, state[saved_id])
    return {**state_dict, "state": state}


def _fitting_entries(
    optimizer: Optimizer, param: torch.nn.Parameter, entries: dict[str, Any]
) -> dict[str, Any]:
    place = _places.get(param)
    step, unit = (None, None) if place is None else (place.step(), place.unit())
    if step is None or unit is None:
        return entries
    layout = unit.layouts[place.index]
    fitted = dict(entries)
    for key, value in entries.items():
        if isinstance(value, ShardTensor):
            _check_layout(unit, place.index, value)
        elif is_packed(value):
            pass  # 8-bit state: cut to this rank's blocks before the next step
        elif is_per_element(optimizer, param, key, value, layout.whole_shape):
            whole = value.full_tensor() if is_dtensor(value) else value
            fitted[key] = ShardTensor.guard(layout.own_part_of(whole).clone(), layout, ref(step.owner))
        elif isinstance(value, torch.Tensor) and value.dim():
            raise SettingsError(
                f"optimizer state {key!r} of {layout.label}: expected a tensor of the whole shape "
                f"{list(layout.whole_shape)}, found {list(value.shape)}; is it one rank's piece, or of "
                f"another model? "
                "mics.save and mics.load keep optimizer state on any number of ranks"
            )
    return fitted


def _params_of(optimizer: Optimizer) -> list[torch.nn.Parameter]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _forget_places(optimizer: Optimizer) -> None:
    """Loaded state is new tensors: bring them together after the next step."""
    _in_place[optimizer] = False


def _find_members(optimizer: Optimizer) -> dict[Step, list[tuple[Unit, int]]]:
    """The sharded parameters of ``optimizer`` by model, looked up again when its groups have changed."""
    params = tuple(id(param) for param in _params_of(optimizer))
    cached = _members.get(optimizer)
    if cached is not None and cached[0] == params:
        return _alive(cached[1])
    members = _look_up(optimizer)
    weak = [(ref(b), [(ref(unit), index) for unit, index in units]) for b, units in members.items()]
    _members[optimizer] = (params, weak)
    return members


def _look_up(optimizer: Optimizer) -> dict[Step, list[tuple[Unit, int]]]:
    members: dict[Step, list[tuple[Unit, int]]] = {}
    for param in _params_of(optimizer):
        if param in _replaced:
            raise SettingsError(
                f"{type(optimizer).__name__}: expected parameters of the sharded model, found "
                f"{_replaced[param]!r} as it was before mics.shard() or while unsharded, so this step "
                "would change nothing; build the optimizer from model.parameters() after "
                "mics.shard(model)"
            )
        place = _places.get(param)
        step, unit = (None, None) if place is None else (place.step(), place.unit())
        if step is not None and unit is not None and unit.spec.trainable:
            members.setdefault(step, []).append((unit, place.index))
    if members:
        _check_elementwise(optimizer)
    if any(step.host is not None for step in members):
        _check_divisible(optimizer)
    return members


def _alive(members: _Members) -> dict[Step, list[tuple[Unit, int]]]:
    found: dict[Step, list[tuple[Unit, int]]] = {}
    for weak, entries in members:
        step = weak()
        if step is not None:
            units = [(unit(), index) for unit, index in entries]
            found[step] = [(unit, index) for unit, index in units if unit is not None]
    return found


def _check_elementwise(optimizer: Optimizer) -> None:
    kind = type(optimizer)
    eight_bit = eight_bit_of(optimizer)
    if eight_bit is not None:
        problem = eight_bit.problem()
        if problem is not None:
            raise SettingsError(f"{kind.__name__}: {problem}")
        return
    reason = next(filter(None, map(_why_not, kind.__mro__)), None)
    # A subclass is known only as far as it steps like the class it comes from.
    known = [base for base in kind.__mro__ if base in _ELEMENTWISE]
    if reason is None and any(unwrap(kind.step) is unwrap(base.step) for base in known):
        return
    if reason is not None:
        raise SettingsError(
            f"{kind.__name__} cannot train a sharded model: {reason}, and a rank has only a part of each. "
            "Use an elementwise optimizer, for example torch.optim.AdamW"
        )
    raise SettingsError(
        f"{kind.__name__}: expected an optimizer known to update each element from that element alone "
        f"({', '.join(sorted(c.__name__ for c in _ELEMENTWISE))}), found one mics does not "
        "know; if it is "
        f"elementwise, say so once with mics.allow_optimizer({kind.__name__})"
    )


def _check_divisible(optimizer: Optimizer) -> None:
    """A step for each unit must be as good as one for all: of torch's own that is known."""
    kind = type(optimizer)
    if not any(unwrap(kind.step) is unwrap(base.step) for base in _TORCH):
        raise SettingsError(
            f'{kind.__name__}: expected one of torch\'s own optimizers with optimizer_state="host" '
            f"({', '.join(sorted(c.__name__ for c in _TORCH))}), found another, which may not be stepped "
            'unit by unit; shard the model with optimizer_state="device"'
        )


def _why_not(base: type) -> str | None:
    """Why an optimizer of this class is refused, whatever anybody says of it."""
    if base.__name__.lower().endswith(_QUANTIZED):
        return "it keeps its state in blocks of a few bits, which are not those of a shard"
    return _REFUSED.get(base.__name__)


_DECOUPLED = "decoupled_weight_decay"
_hooks_installed = False
_original_load = Optimizer.load_state_dict
_met: WeakKeyDictionary[Optimizer, tuple[int, int]] = WeakKeyDictionary()  # ids of our hooks on it
# Entries of a group that come and go with schedulers and torch versions.
_OPTIONAL_KEYS = {
    "params", "param_names", "initial_lr", "swa_lr", "max_lr", "min_lr", "max_momentum", "base_momentum",
    "decoupled_weight_decay", "fused", "foreach", "capturable", "differentiable", "maximize",
}  # fmt: skip


def _install_hooks() -> None:
    global _hooks_installed
    if not _hooks_installed:
        register_optimizer_step_pre_hook(_meet)
        # torch has no hook for loading on all optimizers, as it has for stepping.
        setattr(Optimizer, "load_state_dict", wraps(_original_load)(_load_state_dict))  # noqa: B010
        guard_initialisers()
        _hooks_installed = True

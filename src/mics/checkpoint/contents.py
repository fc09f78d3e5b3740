"""What a rank has of a model and its optimizer, tensor by tensor.

Names in a checkpoint are ``model.<parameter>`` and ``optimizer.state.<parameter>.<entry>``, as state dicts of
torch's own APIs have them once they are flattened. ``lost.<parameter>`` is what rounding has lost of
gradients between replicas, and later steps send.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.optim import Optimizer

from mics.checkpoint.records import MODEL, OPTIMIZER, TensorPart
from mics.engine import Engine
from mics.errors import SettingsError
from mics.gradients.eight_bit import eight_bit_of
from mics.gradients.trial_step import is_per_element
from mics.sharding.unit import Unit
from mics.state_dict import state_names

_LOST = "lost."
_CHECKPOINT_PREFIX = "_checkpoint_wrapped_module."
_EXTRA_STATE = "_extra_state"  # torch's name for what get_extra_state returns


@dataclass(frozen=True, kw_only=True)
class HeldParam:
    """A parameter: where it is, and all names it has in the state dict."""

    unit: Unit
    index: int
    names: tuple[str, ...]

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shard(self) -> nn.Parameter:
        return self.unit.shards[self.index]

    @property
    def values(self) -> Tensor:
        """What has the values of ``shard``."""
        return self.unit.masters.values[self.index]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.unit.spec.layout.slots[self.index].shape

    def span(self, *, once: bool) -> range:
        """The elements that this rank's shard has; with ``once`` those that no other rank has too."""
        share, spec = self.unit.share, self.unit.spec
        flat = share.piece_span(spec.layout) if once else share.master_span(spec)
        slot = spec.layout.slots[self.index]
        overlap = slot.overlap(flat)
        return range(overlap.start - slot.start, overlap.stop - slot.start)

    def part(self, name: str, values: Tensor, *, once: bool, block_numel: int = 1) -> TensorPart:
        """A tensor laid out as the shard (or the shard itself), as part of a whole tensor.

        Or one with a value for each block of ``block_numel`` elements, between which shards are cut.
        """
        have, want = (_blocks(self.span(once=each), block_numel) for each in (False, once))
        flat = values.detach().view(-1)
        layout = self.unit.spec.layout
        division = layout.slots[self.index].start // block_numel, layout.piece_numel // block_numel
        cut = flat[want.start - have.start : want.stop - have.start] if want else flat[:0]
        whole = range(math.prod(self.shape))
        return TensorPart(
            name=name,
            shape=self.shape if block_numel == 1 else (len(_blocks(whole, block_numel)),),
            span=want or range(0),
            values=cut,
            division=division if once else None,
        )


def _blocks(span: range, numel: int) -> range:
    """The blocks of ``numel`` elements that ``span`` consists of; the last of them may be shorter."""
    return range(span.start // numel, -(-span.stop // numel)) if span else range(0)


@dataclass(frozen=True, kw_only=True)
class WholeParam:
    """A parameter of a model that is not sharded."""

    names: tuple[str, ...]
    values: Tensor

    @property
    def name(self) -> str:
        return self.names[0]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.values.shape)

    def part(self, name: str, values: Tensor, *, once: bool) -> TensorPart:
        return TensorPart(
            name=name, shape=self.shape, span=range(values.numel()), values=values, whole=not once
        )


@dataclass(frozen=True, kw_only=True)
class Tensors:
    """What a model's state dict has of tensors."""

    params: Sequence[HeldParam | WholeParam]
    buffers: dict[str, Tensor]

    @property
    def names(self) -> list[str]:
        """Of parameters, also the further names of tied ones, and of buffers."""
        return [name for held in self.params for name in held.names] + list(self.buffers)


@dataclass(frozen=True, kw_only=True)
class Contents(Tensors):
    """A sharded model's state dict by kind."""

    params: list[HeldParam]
    module_state: dict[str, Any]

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters, as the checkpoint has them."""
        return {MODEL + alias: MODEL + held.name for held in self.params for alias in held.names[1:]}


def contents_of(model: nn.Module, engine: Engine) -> Contents:
    """Everything that ``model.state_dict()`` names, as it is: hooks may put copies there."""
    units = engine.members.units()
    places = {id(shard): (unit, i) for unit in units for i, shard in enumerate(unit.shards)}
    state = state_names(model)
    whole = tensors_of(model, state)
    buffers, known = whole.buffers, set(whole.names)
    module_state = {
        name: value
        for name, value in state.items()
        if name not in known and (name.endswith(_EXTRA_STATE) or not isinstance(value, Tensor))
    }
    found = [(*places[id(each.values)], each.names) for each in whole.params]
    params = [HeldParam(unit=unit, index=index, names=names) for unit, index, names in found]
    return Contents(params=params, buffers=buffers, module_state=module_state)


def tensors_of(model: nn.Module, state: Container[str]) -> Tensors:
    """The parameters of a model, tied ones once, and of its buffers those in its state dict."""
    params: dict[Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        params.setdefault(param, []).append(_without_wrapper(name))
    named = [(_without_wrapper(name), b) for name, b in model.named_buffers(remove_duplicate=False)]
    return Tensors(
        params=[WholeParam(names=tuple(names), values=param) for param, names in params.items()],
        buffers={name: b.detach() for name, b in named if name in state},
    )


def _without_wrapper(name: str) -> str:
    """As state dicts have it: torch's wrapper for activation checkpointing leaves itself out there."""
    return name.replace(_CHECKPOINT_PREFIX, "")


def state_name(param: str, entry: str) -> str:
    return f"{OPTIMIZER}state.{param}.{entry}"


def is_lost(key: str) -> bool:
    """Whether it is the name of what rounding has lost."""
    return key.startswith(_LOST)


def lost_parts(contents: Contents, engines: Iterable[Engine]) -> Iterator[TensorPart]:
    """What rounding has lost, once it is with the replica whose piece it is of (``gather_errors``)."""
    views = {
        each.unit: each.unit.views_of(each.unit.share.own_of(each.unit.spec, each.errors))
        for engine in engines
        for each in engine.shown.with_errors
        if each.errors is not None
    }
    for held in contents.params:
        if held.unit in views:
            yield held.part(_LOST + held.name, views[held.unit][held.index], once=True)


def parts_to_save(contents: Contents, optimizers: Sequence[Optimizer], *, rank: int) -> Iterator[TensorPart]:
    """What this rank writes: every element of every tensor is written by one rank."""
    for held in contents.params:
        yield held.part(MODEL + held.name, held.values, once=True)
    if rank == 0:
        for name, buffer in contents.buffers.items():
            yield _whole(MODEL + name, buffer)
    for held in contents.params:
        found = [each for each in optimizers if each.state.get(held.shard)]
        if len(found) > 1:
            raise SettingsError(f"{held.name}: expected one optimizer with state for it, found {len(found)}")
        for optimizer in found:
            yield from _state_parts(held, optimizer)


def _state_parts(held: HeldParam, optimizer: Optimizer) -> Iterator[TensorPart]:
    own = held.span(once=True)
    if not own:
        return  # also where an optimizer made state for nothing
    eight_bit, state = eight_bit_of(optimizer), optimizer.state[held.shard]
    if eight_bit is not None:
        state = eight_bit.pieces(held.shard, held.unit.layouts[held.index])
    for entry, value in state.items():
        name = state_name(held.name, entry)
        if eight_bit is not None and eight_bit.is_per_block(entry):
            yield held.part(name, value, once=True, block_numel=eight_bit.block_numel)
        elif is_per_element(optimizer, held.shard, entry, value, held.shard.shape):
            yield held.part(name, value, once=True)
        elif value is not None and own.start == 0:  # all ranks have the same: the first of them writes it
            if not isinstance(value, Tensor | int | float | bool):
                raise SettingsError(
                    f"{name}: expected a tensor or a number in the optimizer's state, found "
                    f"{type(value).__name__}"
                )
            yield _whole(name, value if isinstance(value, Tensor) else _number(value))


def _number(value: float) -> Tensor:
    """A number of an optimizer's state as a tensor whose format is the number's own."""
    return torch.tensor(value, dtype=torch.float32 if isinstance(value, float) else None, device="cpu")


def _whole(name: str, value: Tensor) -> TensorPart:
    flat = value.detach().reshape(-1)
    return TensorPart(name=name, shape=tuple(value.shape), span=range(flat.numel()), values=flat, whole=True)


def groups_by_name(optimizer: Optimizer, contents: Contents) -> list[dict[str, Any]]:
    """The optimizer's settings, with names in place of parameters."""
    names = {id(held.shard): held.name for held in contents.params}
    groups = []
    for group in optimizer.param_groups:
        strange = [tuple(param.shape) for param in group["params"] if id(param) not in names]
        if strange:
            raise SettingsError(
                f"optimizer: expected parameters of the sharded model, found one of shape {strange[0]} that "
                "is not; save it by extra_state, or give the optimizer that trains this model"
            )
        groups.append({**group, "params": [names[id(param)] for param in group["params"]]})
    return groups

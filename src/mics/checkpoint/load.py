"""Loading: each rank reads the elements that it has, whatever ranks wrote them."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeGuard

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from mics.checkpoint.blocks import BlockReader
from mics.checkpoint.contents import Contents, Held, Part, as_list, contents_of
from mics.checkpoint.folders import find_checkpoint
from mics.checkpoint.foreign import open_checkpoint
from mics.checkpoint.index import Index, StoredTensor
from mics.checkpoint.names import is_state, model_names, state_entries
from mics.checkpoint.random_state import restore_random_state
from mics.checkpoint.save import check_real, finish_saving
from mics.checkpoint.torch_format import IndexReader, PartLoadPlanner, rank_file
from mics.checkpoint.values import decode
from mics.comm.journal import collective_call
from mics.contiguous import Contiguous
from mics.engine import Engine, engine_of
from mics.errors import CheckpointError

_LOG: Final = logging.getLogger("mics")


@collective_call
def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra_state: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer. All ranks must call it.

    ``path``: a checkpoint, a folder of them (the latest is taken), one that torch.distributed.checkpoint
    wrote, or a folder of safetensors. Sizes of the world and of partition groups, optimizer sharding, units
    and devices may differ from those it was saved with.

    Objects of ``extra_state`` that have ``load_state_dict`` are given their state. Returned is all of the
    extra state: this rank's own where the world is as large as it was, else that of rank 0. Random state is
    restored where the world is as large as it was. With ``strict=False`` parameters that the checkpoint does
    not have stay as they are, and tensors that the model does not have are ignored.
    """
    with torch.inference_mode(False), torch.no_grad():
        return _load(Path(path), model, as_list(optimizer), extra_state or {}, strict=strict)


def _load(
    path: Path,
    model: nn.Module,
    optimizers: Sequence[Optimizer],
    extra_state: Mapping[str, Any],
    *,
    strict: bool,
) -> dict[str, Any]:
    engine = engine_of(model)
    check_real(engine, "mics.load")
    finish_saving(model)
    folder, index = _open(path, engine)
    # Everything that can be found wrong without values comes first: the model is still as it was.
    own = _read_own(folder, index, engine, extra_state)
    contents = contents_of(model, engine)
    wanted = _Wanted(index=index)
    _want_model(wanted, contents, strict=strict, base=getattr(model, "base_model_prefix", ""))
    fills = [_Fill.plan(wanted, contents, optimizer, strict=strict) for optimizer in optimizers]
    wanted.raise_problems(folder)
    if engine.world.rank == 0:
        for remark in filter(None, [index.about.get("not_read"), *wanted.remarks]):
            _LOG.warning("%s: %s", folder, remark)
    for unit in engine.units:
        unit.settle_params()
    try:
        _read(folder, index, wanted.parts, engine)
    finally:
        for held in contents.params:
            torch.autograd.graph.increment_version(held.shard)  # the units send new values around
    for tensor, place in wanted.strided:
        tensor.copy_(place)
    if index.module_state:
        state = decode(index.module_state)
        model.load_state_dict(
            {name: state[name] for name in contents.module_state if name in state}, strict=False
        )
    for fill in fills:
        fill.run()
    return _restore_own(index, engine, own, extra_state)


def _open(path: Path, engine: Engine) -> tuple[Path, Index]:
    """The folder and its index, the same on all ranks: ``latest`` may be moved while we look."""
    folder, error = None, None
    if engine.world.rank == 0:
        try:
            folder = find_checkpoint(path)
        except (CheckpointError, OSError) as caught:
            error = caught if isinstance(caught, CheckpointError) else CheckpointError(f"{path}: {caught}")
    folder, error = engine.world.gather_objects((folder, error))[0]
    if error is not None:
        raise error
    assert folder is not None
    index: Index | None = None
    try:
        index = open_checkpoint(folder)
    except (CheckpointError, OSError) as caught:
        error = caught if isinstance(caught, CheckpointError) else CheckpointError(f"{folder}: {caught}")
    _raise_first(engine.world.gather_objects(error))
    assert index is not None
    return folder, index


@dataclass(kw_only=True)
class _Wanted:
    """What this rank wants of a checkpoint, and what it does not find there."""

    index: Index
    parts: list[tuple[Part, str]] = field(
        default_factory=list
    )  # with the name that the checkpoint has for it
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    strided: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # and what is read in place of it

    def add_whole(self, tensor: Tensor, name: str, stored: StoredTensor) -> None:
        place = tensor
        if not tensor.is_contiguous():
            place = torch.empty_like(tensor, memory_format=torch.contiguous_format)
            self.strided.append((tensor, place))
        span, shape = range(tensor.numel()), tuple(tensor.shape)
        self.add(Part(name=name, shape=shape, span=span, values=place.view(-1), whole=True), name, stored)

    def add(self, part: Part, name: str, stored: StoredTensor) -> None:
        if stored.shape != part.shape:
            self.problems.append(f"{part.name}: expected shape {part.shape}, found {stored.shape}")
        elif part.span:
            self.parts.append((part, name))

    def raise_problems(self, folder: Path) -> None:
        if self.problems:
            more = f"\n  and {len(self.problems) - 8} more" if len(self.problems) > 8 else ""
            listed = "\n  ".join(self.problems[:8])
            raise CheckpointError(
                f"{folder}: expected a checkpoint of this model, found another:\n  {listed}{more}\n"
                "mics.load(..., strict=False) takes what fits by name"
            )


def _want_model(wanted: _Wanted, contents: Contents, *, strict: bool, base: str) -> None:
    index = wanted.index
    names = [name for held in contents.params for name in held.names] + list(contents.buffers)
    called = model_names(index, names, base=base)
    known = set()
    for held in contents.params:
        theirs = [called.stored(name) for name in held.names]
        found = next((name for name in theirs if index.find(name)), None)
        known |= set(theirs)
        if found is not None:
            wanted.add(held.part(held.name, held.shard, once=False), found, _stored(index, found))
        elif strict and math.prod(held.shape) > 0:
            wanted.problems.append(f"{held.name}: expected a parameter of this name, found none")
    for name, buffer in contents.buffers.items():
        known.add(called.stored(name))
        stored = index.find(called.stored(name))
        if stored is not None:
            wanted.add_whole(buffer, called.stored(name), stored)
        elif strict and buffer.numel() > 0:
            wanted.problems.append(f"{name}: expected a buffer of this name, found none")
    if strict:
        _refuse_strange(wanted, called.prefix, known)


def _refuse_strange(wanted: _Wanted, prefix: str, known: set[str]) -> None:
    """Tensors of a model that this model does not have. Where anything may stand beside it, only a remark."""
    index = wanted.index
    ours = [name for name in [*index.tensors, *index.aliases] if name.startswith(prefix)]
    strange = sorted(name for name in set(ours) - known if prefix or not is_state(name))
    if prefix:
        wanted.problems += [
            f"{name.removeprefix(prefix)}: expected no such tensor, the model has none of this name"
            for name in strange
        ]
    elif strange:
        wanted.remarks.append(f"the model has no {', '.join(strange[:5])}{', ...' if strange[5:] else ''}")


_Entries = dict[int, dict[str, Tensor]]  # by id of the shard: the entries of its state
# How an optimizer computes, not what: the one that is there knows what fits its device.
_IMPLEMENTATION: Final = frozenset({"foreach", "fused", "capturable", "differentiable"})
# What torch's schedulers leave among an optimizer's settings.
_OF_SCHEDULERS: Final = frozenset(
    {"initial_lr", "min_lr", "max_lr", "swa_lr", "base_momentum", "max_momentum"}
)


@dataclass(frozen=True, kw_only=True)
class _Fill:
    """The state and settings that an optimizer will be given."""

    optimizer: Optimizer
    entries: _Entries
    groups: list[dict[str, Any]]
    strict: bool

    @staticmethod
    def plan(wanted: _Wanted, contents: Contents, optimizer: Optimizer, *, strict: bool) -> _Fill:
        entries = _want_optimizer(wanted, contents, optimizer, strict=strict)
        groups = _settings(wanted, contents, optimizer, strict=strict)
        return _Fill(optimizer=optimizer, entries=entries, groups=groups, strict=strict)

    def run(self) -> None:
        """By the way that optimizers provide for it."""
        groups, state, number = [], {}, 0
        for group, settings in zip(self.optimizer.param_groups, self.groups, strict=True):
            numbers = []
            for param in group["params"]:
                if id(param) in self.entries:
                    state[number] = self.entries[id(param)]
                elif not self.strict and self.optimizer.state.get(param):
                    state[number] = dict(self.optimizer.state[param])
                numbers.append(number)
                number += 1
            groups.append({**settings, "params": numbers})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def _settings(
    wanted: _Wanted, contents: Contents, optimizer: Optimizer, *, strict: bool
) -> list[dict[str, Any]]:
    """Those of the checkpoint for each group of the optimizer, where it has any."""
    index = wanted.index
    options = {} if index.param_groups is None else _options_by_param(decode(index.param_groups))
    names = {id(held.shard): held.names for held in contents.params}
    found = []
    for group in optimizer.param_groups:
        saved = [options[n] for param in group["params"] for n in names.get(id(param), ()) if n in options]
        if any(each != saved[0] for each in saved):
            wanted.problems.append(
                "optimizer: expected the parameters of a group to have had the same settings, found "
                "different ones; group them as they were when the checkpoint was saved"
            )
        present = {key: value for key, value in group.items() if key != "params"}
        found.append({**present, **(saved[0] if saved else {})})
        if saved and strict:
            _refuse_other_class(wanted, optimizer, saved[0])
    return found


def _refuse_other_class(wanted: _Wanted, optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Each class has settings of its own: its state would not be found wrong before the next step."""
    own = optimizer.defaults.keys() - _IMPLEMENTATION
    missing, strange = sorted(own - saved.keys()), sorted(saved.keys() - own - _OF_SCHEDULERS)
    if missing and strange:  # one of both alone: another version of the same class
        wanted.problems.append(
            f"optimizer: expected the state of {type(optimizer).__name__}, with settings as "
            f"{', '.join(missing)}; found that of an optimizer with {', '.join(strange)}"
        )


def _want_optimizer(wanted: _Wanted, contents: Contents, optimizer: Optimizer, *, strict: bool) -> _Entries:
    """Memory for the state of every parameter that the checkpoint has state of, wanted from there."""
    entries = state_entries(wanted.index, [name for held in contents.params for name in held.names])
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    filled: _Entries = {}
    sharded: dict[tuple[str, torch.dtype], list[tuple[Held, str, StoredTensor]]] = {}  # what has no memory
    for held in contents.params:
        own = next((entries[name] for name in held.names if name in entries), {})
        if id(held.shard) not in trained or held.shard.numel() == 0:
            continue
        for entry, name in own.items():
            stored = _stored(wanted.index, name)
            if stored.whole or stored.shape != held.shape or (entry == "step" and not stored.shape):
                value = torch.empty(stored.shape, dtype=stored.dtype)
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
        store = Contiguous(found[0][0].shard.device)  # one buffer for each entry, as training leaves it
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


def _fits(value: Any, held: Held, stored: StoredTensor) -> TypeGuard[Tensor]:
    """Whether an optimizer that has stepped before has the very memory that is needed."""
    return (
        isinstance(value, Tensor)
        and (value.shape, value.dtype) == (held.shard.shape, stored.dtype)
        and value.device == held.shard.device
        and value.is_contiguous()
    )


def _options_by_param(groups: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {k: v for k, v in group.items() if k not in ("params", "param_names", *_IMPLEMENTATION)}
        for group in groups
        for name in group["params"]
    }


def _stored(index: Index, name: str) -> StoredTensor:
    found = index.find(name)
    assert found is not None, name
    return found


def _read(folder: Path, index: Index, parts: list[tuple[Part, str]], engine: Engine) -> None:
    group = engine.world.host_group()
    try:
        with engine.world.naming("load", str(folder), group), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_load(
                {},
                storage_reader=IndexReader(folder, index),
                planner=PartLoadPlanner(index, parts),
                process_group=group,
                no_dist=group is None,
            )
    except CheckpointException as error:
        _, (cause, _) = min(error.failures.items())
        if isinstance(cause, CheckpointError):
            raise CheckpointError(f"{cause}. Parameters that were read before are in the model") from None
        raise CheckpointError(f"{folder}: could not be read: {type(cause).__name__}: {cause}") from error


def _read_own(folder: Path, index: Index, engine: Engine, given: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's random state and extra state; an error on one rank is one on all."""
    same = index.about.get("world_size") == engine.world.size
    name = rank_file(engine.world.rank if same else 0)
    own: dict[str, Any] = {}
    error: CheckpointError | None = None
    try:
        if name in index.files:
            own = decode(json.loads(_content(folder / name, index, name)))
        extra = own.get("extra_state", {})
        missing = [key for key in given if key not in extra]
        if missing:
            had = ", ".join(map(repr, extra)) or "none"
            error = CheckpointError(f"{folder}: expected extra_state {missing[0]!r}, found {had}")
    except CheckpointError as caught:
        error = caught
    except Exception as caught:
        error = CheckpointError(f"{folder / name}: expected values that mics wrote, found {caught!r}")
    _raise_first(engine.world.gather_objects(error))
    return own


def _restore_own(
    index: Index, engine: Engine, own: Mapping[str, Any], given: Mapping[str, Any]
) -> dict[str, Any]:
    if index.about.get("world_size") == engine.world.size and "random" in own:
        restore_random_state(own["random"], engine.device)
    extra: dict[str, Any] = own.get("extra_state", {})
    for key, value in given.items():
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(extra[key])
    return extra


def _content(path: Path, index: Index, name: str) -> bytes:
    stored = index.files[name]
    with BlockReader(path, stored, [range(stored.nbytes)]) as reader:  # which looks at the size first
        content = bytearray(stored.nbytes)
        reader.read_into(0, memoryview(content))
    return bytes(content)


def _raise_first(errors: Iterable[CheckpointError | None]) -> None:
    """An error that one rank met is an error on all."""
    for error in errors:
        if error is not None:
            raise error

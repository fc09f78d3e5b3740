"""Loading: each rank reads the elements that it has, whatever ranks wrote them."""

from __future__ import annotations

import json
import logging
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.optim import Optimizer

from mics.checkpoint.blocks import BlockReader
from mics.checkpoint.contents import MODEL, Contents, Held, Part, contents_of
from mics.checkpoint.folders import find_checkpoint
from mics.checkpoint.foreign import open_checkpoint
from mics.checkpoint.index import Index, StoredTensor
from mics.checkpoint.random_state import restore_random_state
from mics.checkpoint.save import finish_saving
from mics.checkpoint.torch_format import IndexReader, PartLoadPlanner, rank_file
from mics.checkpoint.values import decode
from mics.contiguous import Contiguous
from mics.engine import Engine, engine_of
from mics.errors import CheckpointError

_LOG: Final = logging.getLogger("mics")


def load(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | None = None,
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
    engine = engine_of(model)
    finish_saving(model)
    folder, index = _open(Path(path), engine)
    contents = contents_of(model, engine)
    wanted = _Wanted(index=index)
    _want_model(wanted, contents, strict=strict)
    filled = None if optimizer is None else _want_optimizer(wanted, contents, optimizer, strict=strict)
    wanted.raise_problems(folder)
    for unit in engine.units:
        unit.settle_params()
    _read(folder, index, wanted.parts, engine)
    for held in contents.params:
        torch.autograd.graph.increment_version(held.shard)  # the units send new values around
    if index.module_state:
        state = decode(index.module_state)
        model.load_state_dict(
            {name: state[name] for name in contents.module_state if name in state}, strict=False
        )
    if optimizer is not None and filled is not None:
        _fill_optimizer(optimizer, contents, filled, index)
    return _restore_own(folder, index, engine, extra_state or {})


def _open(path: Path, engine: Engine) -> tuple[Path, Index]:
    """The folder and its index, the same on all ranks: ``latest`` may be moved while we look."""
    folder, error = None, None
    if engine.world.rank == 0:
        try:
            folder = find_checkpoint(path)
        except CheckpointError as caught:
            error = caught
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


def _want_model(wanted: _Wanted, contents: Contents, *, strict: bool) -> None:
    index = wanted.index
    names = [name for held in contents.params for name in held.names] + list(contents.buffers)
    prefix = _model_prefix(index, names)
    known = set()
    for held in contents.params:
        found = next((prefix + name for name in held.names if index.find(prefix + name)), None)
        known |= {prefix + name for name in held.names}
        if found is not None:
            wanted.add(held.part(held.name, held.shard, once=False), found, _stored(index, found))
        elif strict and math.prod(held.shape) > 0:
            wanted.problems.append(f"{held.name}: expected a parameter of this name, found none")
    for name, buffer in contents.buffers.items():
        known.add(prefix + name)
        stored = index.find(prefix + name)
        if stored is not None:
            assert buffer.is_contiguous(), "buffers are read into place"
            span = range(buffer.numel())
            part = Part(name=name, shape=tuple(buffer.shape), span=span, values=buffer.view(-1), whole=True)
            wanted.add(part, prefix + name, stored)
        elif strict and buffer.numel() > 0:
            wanted.problems.append(f"{name}: expected a buffer of this name, found none")
    if strict and prefix:
        ours = [name for name in [*index.tensors, *index.aliases] if name.startswith(prefix)]
        strange = sorted(set(ours) - known)
        wanted.problems += [
            f"{name.removeprefix(prefix)}: expected no such tensor, the model has none of this name"
            for name in strange
        ]


def _model_prefix(index: Index, names: Iterable[str]) -> str:
    """What stands before the model's names: ours is ``model.``, others have none or their own."""
    names = list(names)
    if not names or any(index.find(MODEL + name) for name in names):
        return MODEL
    first = max(names, key=len)
    ends = [key for key in index.tensors if key.endswith(first)]
    prefixes = sorted({key.removesuffix(first) for key in ends if ".state." not in key}, key=len)
    counts = {
        prefix: sum(index.find(prefix + name) is not None for name in names) for prefix in ["", *prefixes]
    }
    return max(counts, key=lambda prefix: counts[prefix])


_Filled = dict[int, dict[str, Tensor]]  # by id of the shard: the entries of its state


def _want_optimizer(wanted: _Wanted, contents: Contents, optimizer: Optimizer, *, strict: bool) -> _Filled:
    """Memory for the state of every parameter that the checkpoint has state of, wanted from there."""
    entries = _state_entries(wanted.index)
    trained = {id(param) for group in optimizer.param_groups for param in group["params"]}
    filled: _Filled = {}
    sharded: dict[tuple[str, torch.dtype], list[tuple[Held, str, StoredTensor]]] = {}
    for held in contents.params:
        own = next((entries[name] for name in held.names if name in entries), {})
        if id(held.shard) not in trained or held.shard.numel() == 0:
            continue
        for entry, name in own.items():
            stored = _stored(wanted.index, name)
            if stored.whole or stored.shape != held.shape or (entry == "step" and not stored.shape):
                value = torch.empty(stored.shape, dtype=stored.dtype)
                filled.setdefault(id(held.shard), {})[entry] = value
                span = range(value.numel())
                part = Part(name=name, shape=stored.shape, span=span, values=value.view(-1), whole=True)
                wanted.add(part, name, stored)
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


def _state_entries(index: Index) -> dict[str, dict[str, str]]:
    """For each parameter its entries of state, and their names: ``<any>.state.<parameter>.<entry>``."""
    found: dict[str, dict[str, str]] = {}
    for name in index.tensors:
        before, mark, rest = f".{name}".partition(".state.")
        if mark and before.count(".") <= 2:  # optimizer.state..., app.optim.state..., state...
            param, _, entry = rest.rpartition(".")
            found.setdefault(param, {})[entry] = name
    return found


def _fill_optimizer(optimizer: Optimizer, contents: Contents, filled: _Filled, index: Index) -> None:
    """Give the optimizer its state and its settings, by the way that optimizers provide."""
    options = _options_by_param(decode(index.param_groups)) if index.param_groups is not None else {}
    names = {id(held.shard): held.names for held in contents.params}
    groups, state, number = [], {}, 0
    for group in optimizer.param_groups:
        own = [
            options[name] for param in group["params"] for name in names.get(id(param), ()) if name in options
        ]
        if any(each != own[0] for each in own):
            raise CheckpointError(
                "optimizer: expected the parameters of a group to have had the same settings, found "
                "different ones; "
                "group them as they were when the checkpoint was saved"
            )
        saved = own[0] if own else {key: value for key, value in group.items() if key != "params"}
        numbers = []
        for param in group["params"]:
            if id(param) in filled:
                state[number] = filled[id(param)]
            numbers.append(number)
            number += 1
        groups.append({**{k: v for k, v in group.items() if k != "params"}, **saved, "params": numbers})
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def _options_by_param(groups: Sequence[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    return {
        name: {key: value for key, value in group.items() if key not in ("params", "param_names")}
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
        with engine.world.naming("load", str(folder)), warnings.catch_warnings():
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
            raise cause from None
        raise CheckpointError(f"{folder}: could not be read: {type(cause).__name__}: {cause}") from error


def _restore_own(folder: Path, index: Index, engine: Engine, given: Mapping[str, Any]) -> dict[str, Any]:
    """This rank's random state and extra state."""
    same = index.about.get("world_size") == engine.world.size
    name = rank_file(engine.world.rank if same else 0)
    own: dict[str, Any] = {}
    error: CheckpointError | None = None
    if name in index.files:
        try:
            own = decode(json.loads(_content(folder / name, index, name)))
        except CheckpointError as caught:
            error = caught
    _raise_first(engine.world.gather_objects(error))
    if same and "random" in own:
        restore_random_state(own["random"], engine.device)
    extra: dict[str, Any] = own.get("extra_state", {})
    for key, value in given.items():
        if key not in extra:
            raise CheckpointError(
                f"{folder}: expected extra_state {key!r}, found {', '.join(map(repr, extra)) or 'none'}"
            )
        if hasattr(value, "load_state_dict"):
            value.load_state_dict(extra[key])
    return extra


def _content(path: Path, index: Index, name: str) -> bytes:
    stored = index.files[name]
    content = bytearray(stored.nbytes)
    with BlockReader(path, stored, [range(stored.nbytes)]) as reader:
        reader.read_into(0, memoryview(content))
    return bytes(content)


def _raise_first(errors: Iterable[CheckpointError | None]) -> None:
    """An error that one rank met is an error on all."""
    for error in errors:
        if error is not None:
            raise error

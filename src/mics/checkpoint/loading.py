"""Loading: each rank reads the elements that it has, whatever ranks wrote them."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import torch
import torch.nn as nn
from torch.optim import Optimizer

from mics.checkpoint.arguments import as_extra_state, as_optimizers, as_place
from mics.checkpoint.contents import Contents, Tensors, contents_of, lost_parts, tensors_of
from mics.checkpoint.conversions import converted
from mics.checkpoint.names import is_state, model_names
from mics.checkpoint.opening import find_checkpoint, open_checkpoint
from mics.checkpoint.optimizers import Fill, check_groups, plan_fill
from mics.checkpoint.own_state import OwnState, read_own_state
from mics.checkpoint.reading import PartReader, Reading, nbytes_of
from mics.checkpoint.records import Index
from mics.checkpoint.saving import engine_in, join_hosts
from mics.checkpoint.storage import INDEX_NAME, Place
from mics.checkpoint.telling import told
from mics.checkpoint.together import Explain, together
from mics.checkpoint.values import decode
from mics.checkpoint.wanted import Wanted
from mics.comm.journal import collective_call
from mics.comm.world import World
from mics.engine import Engine, engines_of, settle_host
from mics.errors import CheckpointError
from mics.guard import plainly

T = TypeVar("T")
_LOG: Final = logging.getLogger("mics")


@collective_call
def load(
    path: str | Place,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra_state: Mapping[str, Any] | None = None,
    *,
    strict: bool = True,
) -> dict[str, Any]:
    """Load a checkpoint into a sharded model and its optimizer. All ranks must call it.

    ``path``: a checkpoint, a folder of them (the latest is taken), one that torch.distributed.checkpoint
    wrote, or a folder of safetensors; a path or a URL. Sizes of the world and of partition groups, optimizer
    sharding, units and devices may differ from those it was saved with.

    Objects of ``extra_state`` that have ``load_state_dict`` are given their state. Returned is all of the
    extra state: this rank's own where the world is as large as it was, else that of rank 0. Random state is
    restored where the world is as large as it was. With ``strict=False`` parameters that the checkpoint does
    not have stay as they are, and tensors that the model does not have are ignored.
    """
    world, host = join_hosts("mics.load")

    def agreed(action: Callable[[], T], explain: Explain | None = None) -> T:
        return together(host, "mics.load", action, explain)

    with torch.inference_mode(False), torch.no_grad(), plainly(), world.explaining("load", str(path)):
        # ``latest`` may be moved while we look: the first rank says which it is.
        found = agreed(lambda: find_checkpoint(as_place(path, "mics.load")) if host.rank == 0 else None)
        folder = host.all_gather(found)[0]

        def explain(rank: int, error: Exception) -> CheckpointError:
            return CheckpointError(
                f"{folder}: could not be read on rank {rank}: {type(error).__name__}: {error}"
            )

        prepared = agreed(
            lambda: _prepare(folder, world, model, optimizer, extra_state, strict=strict), explain
        )
        prepared.tell()
        agreed(prepared.read, explain)
        return agreed(prepared.restore, explain)


def misfits(folder: Place, model: nn.Module) -> list[str]:
    """What of a model that is not sharded, and may be on meta, a checkpoint has not: names and shapes."""
    tensors = tensors_of(model, model.state_dict())
    wanted = Wanted(index=converted(open_checkpoint(folder), model, tensors))
    _want_model(wanted, tensors, strict=True, base=getattr(model, "base_model_prefix", ""))
    return wanted.problems


@dataclass(frozen=True, kw_only=True)
class _Load:
    """A load of which everything is known but the values of tensors. The model is still as it was."""

    folder: Place
    index: Index
    engine: Engine
    model: nn.Module
    contents: Contents
    wanted: Wanted
    fills: list[Fill]
    module_state: dict[str, Any]
    own: OwnState
    reader: PartReader
    reading: Reading

    def tell(self) -> None:
        """What was not read, on the first rank."""
        if self.engine.world.rank == 0:
            for remark in filter(None, [self.index.about.get("not_read"), *self.wanted.remarks]):
                _LOG.warning("%s: %s", self.folder, remark)

    def read(self) -> None:
        """Read values into the model, and into memory for the optimizers' state."""
        for unit in self.engine.members.units():
            unit.settle_params()
        settle_host(self.model)
        for engine in engines_of(self.model):
            engine.shown.forget_errors()
        nbytes = nbytes_of(self.reading)
        try:
            with told("loading", self.folder, nbytes, rank=self.engine.world.rank) as advance:
                self.reader.read(self.reading, advance)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Parameters that were read before are in the model") from None
        finally:
            for held in self.contents.params:
                torch.autograd.graph.increment_version(held.values)  # the units send new values around
        for tensor, place in self.wanted.strided:
            tensor.copy_(place)

    def restore(self) -> dict[str, Any]:
        """Give everything else its state back; the extra state."""
        if self.module_state:
            self.model.load_state_dict(self.module_state, strict=False)
        for fill in self.fills:
            fill.run()
        return self.own.restore()


def _prepare(
    folder: Place, world: World, model: nn.Module, optimizer: Any, extra_state: Any, *, strict: bool
) -> _Load:
    """Everything that can be found wrong without values."""
    engine = engine_in(world, model, "mics.load")
    optimizers = as_optimizers(optimizer, "mics.load")
    given = as_extra_state(extra_state, "mics.load")
    contents = contents_of(model, engine)
    index = converted(open_checkpoint(folder), model, contents)
    own = read_own_state(folder, index, engine, given)
    wanted = Wanted(index=index)
    _want_model(wanted, contents, strict=strict, base=getattr(model, "base_model_prefix", ""))
    try:
        groups = None if index.param_groups is None else decode(index.param_groups)
        state = decode(index.module_state)
    except CheckpointError as error:
        raise CheckpointError(f"{folder / INDEX_NAME}: {error}") from None
    if strict:
        check_groups(wanted, contents, optimizers, groups)
    for part in lost_parts(contents, engines_of(model)):
        stored = index.find(part.name)
        if stored is not None:
            wanted.add(part, part.name, stored)
    fills = [plan_fill(wanted, contents, each, groups, strict=strict) for each in optimizers]
    wanted.raise_problems(folder)
    reader = PartReader(folder, index)
    return _Load(
        folder=folder,
        index=index,
        engine=engine,
        model=model,
        contents=contents,
        wanted=wanted,
        fills=fills,
        module_state={name: state[name] for name in contents.module_state if name in state},
        own=own,
        reader=reader,
        reading=reader.plan(wanted.parts),
    )


def _want_model(wanted: Wanted, contents: Tensors, *, strict: bool, base: str) -> None:
    index = wanted.index
    called = model_names(index, contents.names, base=base)
    known = set()
    for held in contents.params:
        theirs = [called.stored(name) for name in held.names]
        found = next((name for name in theirs if index.find(name)), None)
        known |= set(theirs)
        if found is not None:
            wanted.add(held.part(held.name, held.values, once=False), found, wanted.stored(found))
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


def _refuse_strange(wanted: Wanted, prefix: str, known: set[str]) -> None:
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

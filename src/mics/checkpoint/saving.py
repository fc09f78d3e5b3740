"""Saving: every rank writes its part, and the checkpoint has its name when all of it is on disk.

``mics.save`` writes from the memory of the model itself. With ``wait=False`` it copies what it will write,
and writes in a thread, with a group of its own beside those of the training.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
import torch.nn as nn
from torch.optim import Optimizer

import mics.checkpoint.folders as folders
from mics.checkpoint.arguments import as_extra_state, as_integer, as_optimizers, as_place
from mics.checkpoint.background import Saving, Staging, finish_all
from mics.checkpoint.contents import contents_of, groups_by_name, lost_parts, parts_to_save
from mics.checkpoint.formats.dcp_writing import PickledValues, pickled_values
from mics.checkpoint.own_state import own_state
from mics.checkpoint.snapshot import Snapshot
from mics.checkpoint.storage import Place
from mics.checkpoint.together import together
from mics.checkpoint.values import encode
from mics.comm.host_group import HostGroup
from mics.comm.journal import collective_call, in_call
from mics.comm.world import World, join_world
from mics.engine import Engine, engine_of, engines_of, settle_host
from mics.errors import CheckpointError, SettingsError
from mics.gradients.hops import gather_errors
from mics.guard import plainly

# The last save of each model in the background, and the memory it copies to; the next one waits for it.
_under_way: Final[weakref.WeakKeyDictionary[Engine, Saving]] = weakref.WeakKeyDictionary()
_staging: Final[weakref.WeakKeyDictionary[Engine, Staging]] = weakref.WeakKeyDictionary()


@collective_call
def save(
    path: str | Place,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra_state: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
) -> Saving:
    """Save a sharded model, its optimizer and whatever else a run needs to go on. All ranks must call it.

    ``path`` is the checkpoint's folder: a path, or a URL of an object store (``"s3://bucket/run"``). With
    ``step`` it is a folder of checkpoints instead: this one is ``path/step-N``, ``path/latest`` names it once
    it is complete, and the last ``keep`` of them stay.

    ``extra_state``: numbers, strings, tensors, containers of them, and objects with ``state_dict()`` (a
    scheduler, a gradient scaler, a data loader). Each rank's own is kept, as is its random state.

    With ``wait=False`` training goes on once everything is copied to host memory. The next save waits for
    this one, and raises what went wrong; so does ``wait()`` of what is returned. A script that ends before
    does not end until the checkpoint is on disk, or ends with an error.
    """
    began = time.perf_counter()
    world, host = join_hosts("mics.save")
    with plainly(), world.explaining("save", str(path)):
        # First what one rank alone may find wrong: state_dict() of somebody's object may be collective.
        root, folder = together(host, "mics.save", lambda: _places(path, step, host.rank), _cannot)
        snapshot = together(
            host,
            "mics.save",
            lambda: _prepare(world, host, model, optimizer, extra_state, root, folder, step, keep),
            _cannot,
        )
        _check_same(host, snapshot)
        engine = engine_of(model)
        for each in engines_of(model):
            gather_errors(each.shown)
        if not wait:
            snapshot = together(host, "mics.save", lambda: _staged(engine, snapshot), _cannot)
    given = as_place(path, "mics.save")
    saving = Saving(given if step is None else given / snapshot.folder.name)
    saving.nbytes = snapshot.parts_nbytes
    if wait:
        snapshot.write()
    else:
        _under_way[engine] = saving
        saving._start(snapshot.write)
    saving.stall = time.perf_counter() - began
    return saving


def join_hosts(what: str) -> tuple[World, HostGroup]:
    """The group that all ranks agree over. Made before anything can fail on one of them alone.

    Saves under way are over then, of all models: their messages are in the same group.
    """
    world = join_world()
    if world.imagined is not None:
        raise SettingsError(
            f"{what}: expected real ranks, found an emulated cluster: the other ranks' parameters do not "
            "exist"
        )
    finish_all()
    with world.naming("making", in_call("a group for objects")):
        return world, world.host_group()


def engine_in(world: World, model: nn.Module, what: str) -> Engine:
    """The engine of a model whose other ranks are there; raises what went wrong with its last save."""
    engine = engine_of(model)
    if engine.world is not world:
        raise SettingsError(
            f"{what}: expected a model that was sharded in the process group of now, found one of a group "
            "that was destroyed"
        )
    if engine.progress.suspended:
        raise SettingsError(
            f"{what}: expected a sharded model, found one inside mics.summon_full_params; leave it first"
        )
    saving = _under_way.pop(engine, None)
    if saving is not None:
        saving.wait()
    return engine


def _places(path: Any, step: Any, rank: int) -> tuple[Place, Place]:
    """What ``path`` means, and the folder of this checkpoint, which may be written."""
    step = as_integer(step, "step", least=0)
    root = as_place(path, "mics.save").resolve()  # the working directory may change while it is written
    folder = root if step is None else root / folders.step_name(step)
    if rank == 0:
        folders.check_replaceable(folder)
    return root, folder


def _prepare(
    world: World,
    host: HostGroup,
    model: nn.Module,
    optimizer: Any,
    extra_state: Any,
    root: Place,
    folder: Place,
    step: Any,
    keep: Any,
) -> Snapshot:
    """Everything that can be found wrong before anything is written."""
    engine = engine_in(world, model, "mics.save")
    step, keep = as_integer(step, "step", least=0), as_integer(keep, "keep", least=1)
    if keep is not None and step is None:
        raise SettingsError(f"mics.save: expected keep together with step, found keep={keep} alone")
    extra_state = as_extra_state(extra_state, "mics.save")
    optimizers = as_optimizers(optimizer, "mics.save")
    rank = world.rank
    contents = contents_of(model, engine)
    settle_host(model)
    parts = [*parts_to_save(contents, optimizers, rank=rank), *lost_parts(contents, engines_of(model))]
    groups = None if optimizer is None else [g for each in optimizers for g in groups_by_name(each, contents)]
    return Snapshot(
        root=root,
        folder=folder,
        step=step,
        keep=keep,
        world=world,
        host=host,
        parts=[part for part in parts if part.span],
        aliases=contents.aliases,
        about={
            "step": step,
            "world_size": world.size,
            "partition_size": engine.topology.partition_size,
            "torch": torch.__version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            "optimizers": [type(each).__qualname__ for each in optimizers],
        },
        param_groups=None if groups is None else encode(groups, "optimizer.param_groups"),
        module_state=encode(contents.module_state, "model"),
        own=own_state(engine, extra_state),
        position=_position(engine),
        values=pickled_values(groups, contents.module_state) if rank == 0 else PickledValues(),
    )


def _position(engine: Engine) -> int | None:
    """The piece that this rank writes of each unit."""
    units = engine.members.units()
    found = {unit.share.chunk * unit.spec.layout.num_pieces + unit.share.piece for unit in units}
    return found.pop() if len(found) == 1 else None


def _cannot(rank: int, error: Exception) -> Exception:
    """What somebody's state_dict() raises, or a folder that may not be looked into."""
    kind = CheckpointError if isinstance(error, OSError) else SettingsError
    return kind(f"mics.save: rank {rank} could not prepare it: {type(error).__name__}: {error}")


def _check_same(host: HostGroup, snapshot: Snapshot) -> None:
    meant = host.all_gather((str(snapshot.folder), snapshot.keep))
    if len(set(meant)) > 1:
        raise SettingsError(
            f"mics.save: expected all ranks to give the same path, step and keep, found "
            f"{sorted(set(meant), key=str)}"
        )


def _staged(engine: Engine, snapshot: Snapshot) -> Snapshot:
    """The snapshot with copies of its values, so that training can go on."""
    staging = _staging.get(engine)
    if staging is None:
        staging = _staging[engine] = Staging(
            engine.device, num_sharing=engine.topology.ranks_beside(engine.world.rank)
        )
    copied, ready = staging.copy(snapshot.parts)
    return replace(snapshot, parts=copied, ready=ready)

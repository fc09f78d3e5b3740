"""Saving: every rank writes its part, and the checkpoint has its name when all of it is on disk.

``mics.save`` writes from the memory of the model itself. With ``wait=False`` it copies what it will write,
and writes in a thread, with a process group of its own beside those of the training.
"""

from __future__ import annotations

import atexit
import json
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.optim import Optimizer

import mics.checkpoint.folders as folders
from mics.checkpoint.contents import (
    MODEL,
    Contents,
    Part,
    as_list,
    contents_of,
    groups_by_name,
    parts_to_save,
)
from mics.checkpoint.index import Index, StoredChunk, StoredTensor, write_index
from mics.checkpoint.random_state import random_state
from mics.checkpoint.staging import Staging
from mics.checkpoint.stock_values import StockValues, stock_values
from mics.checkpoint.torch_format import FileReport, PartSavePlanner, PartWriter
from mics.checkpoint.values import encode
from mics.comm.emulated import emulated_cluster
from mics.comm.journal import collective_call
from mics.comm.world import World
from mics.engine import Engine, engine_of
from mics.errors import CheckpointError, SettingsError


class Saving:
    """A save that is under way. ``stall`` is how long the training stood still for it, in seconds."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stall = 0.0
        self.nbytes = 0  # that this rank writes
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Path:
        """Wait until the checkpoint is on disk, or raise what prevented it. Returns its folder."""
        if self._thread is not None:
            self._thread.join()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        return self.folder


_LOG: Final = logging.getLogger("mics")
# The last save of each model in the background, and the memory it copies to; the next one waits for it.
_under_way: weakref.WeakKeyDictionary[Engine, Saving] = weakref.WeakKeyDictionary()
_running: set[Saving] = set()  # all that have not ended, whether or not their model is still there
_staging: weakref.WeakKeyDictionary[Engine, Staging] = weakref.WeakKeyDictionary()


@collective_call
def save(
    path: str | Path,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    extra_state: Mapping[str, Any] | None = None,
    *,
    step: int | None = None,
    keep: int | None = None,
    wait: bool = True,
) -> Saving:
    """Save a sharded model, its optimizer and whatever else a run needs to go on. All ranks must call it.

    ``path`` is the checkpoint's folder. With ``step`` it is a folder of checkpoints instead: this one is
    ``path/step-N``, ``path/latest`` names it once it is on disk, and the last ``keep`` of them stay.

    ``extra_state``: numbers, strings, tensors, containers of them, and objects with ``state_dict()`` (a
    scheduler, a gradient scaler, a data loader). Each rank's own is kept, as is its random state.

    With ``wait=False`` training goes on once everything is copied to host memory. The next save waits for
    this one, and raises what went wrong; so does ``wait()`` of what is returned. Call that before
    ``destroy_process_group()``: the ranks still have to tell each other that all is on disk.
    """
    began = time.perf_counter()
    engine = engine_of(model)
    check_real(engine, "mics.save")
    finish_saving(model)
    job = _agreed(engine, lambda: _prepare(engine, model, optimizer, extra_state or {}, path, step, keep))
    saving = Saving(Path(path) if step is None else Path(path) / job.folder.name)
    saving.nbytes = sum(part.nbytes for part in job.parts)
    if wait:
        job.run()
        saving.stall = time.perf_counter() - began
        return saving
    staging = _staging.get(engine)
    if staging is None:
        staging = _staging[engine] = Staging(
            engine.device, num_sharing=engine.topology.ranks_beside(engine.world.rank)
        )
    copied, ready = staging.copy(job.parts)
    job = replace(job, parts=copied, ready=ready)
    saving._thread = threading.Thread(target=_run, args=(job, saving), name="mics-save", daemon=True)
    _under_way[engine] = saving
    _running.add(saving)
    saving._thread.start()
    saving.stall = time.perf_counter() - began
    return saving


def finish_saving(model: nn.Module) -> None:
    """Wait for all saves under way, and raise what went wrong with that of this model.

    Those of other models too: there is one process group for this, and its messages must not be mixed up.
    """
    _finish_all()
    saving = _under_way.pop(engine_of(model), None)
    if saving is not None:
        saving.wait()


@atexit.register
def _finish_all() -> None:
    """A script that ends after ``save(wait=False)`` still has its checkpoint."""
    for saving in list(_running):
        if saving._thread is not None:
            saving._thread.join()


def _run(job: Job, saving: Saving) -> None:
    try:
        job.run()
    except BaseException as error:
        # At once: whoever never asks for the result must know too.
        _LOG.error("a save in the background failed: %s", error)
        saving._error = error
    finally:
        _running.discard(saving)


@dataclass(frozen=True, kw_only=True)
class Job:
    """Everything that is written, gathered while the model stood still."""

    root: Path
    folder: Path
    step: int | None
    keep: int | None
    rank: int
    world: World
    group: dist.ProcessGroup | None
    parts: Sequence[Part]
    contents: Contents
    about: dict[str, Any]
    param_groups: list[dict[str, Any]] | None
    module_state: dict[str, Any]
    state: bytes  # this rank's own
    values: StockValues  # for DCP's readers; on the first rank
    ready: torch.cuda.Event | None = None  # when the parts are copied
    progress: Callable[[int], None] | None = None  # told how many bytes are written next

    @property
    def aliases(self) -> dict[str, str]:
        """Further names of tied parameters, as the checkpoint has them."""
        return {MODEL + a: MODEL + b for a, b in self.contents.aliases.items()}

    def run(self) -> None:
        """Write it. Raises the same error on all ranks."""
        if self.ready is not None:
            self.ready.synchronize()
        writer = PartWriter(
            folders.partial_of(self.folder),
            self.parts,
            rank=self.rank,
            state=self.state,
            aliases=self.aliases,
            values=self.values,
        )
        try:
            with self.world.naming("save", str(self.folder.absolute()), self.group):
                self._write(writer)
        except CheckpointException as error:
            self._give_up()
            raise _explained(self.folder, error) from error
        except BaseException:
            self._give_up()
            raise

    def _write(self, writer: PartWriter) -> None:
        self._together(lambda: self._begin() if self.rank == 0 else None)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp_save(
                {},
                storage_writer=writer,
                planner=PartSavePlanner(self.parts, self.aliases, self.values, self.progress),
                process_group=self.group,
                no_dist=self.group is None,
            )
        self._together(lambda: self._publish(writer) if self.rank == 0 else None)

    def _begin(self) -> None:
        if self.step is not None:
            folders.sweep(self.root)
        folders.begin(self.folder)

    def _publish(self, writer: PartWriter) -> None:
        write_index(writer.folder, self._index(writer.reports))
        folders.publish(self.folder)
        if self.step is not None:
            folders.point_latest(self.root, self.folder.name)
            folders.prune(self.root, self.keep)

    def _index(self, reports: Sequence[FileReport]) -> Index:
        files = {name: file for report in reports for name, file in report.files.items()}
        partial = folders.partial_of(self.folder)
        for name, file in files.items():
            found = (partial / name).stat().st_size if (partial / name).exists() else None
            if found != file.nbytes:
                raise CheckpointError(
                    f"{partial / name}: expected the {file.nbytes:,} bytes that a rank wrote, found "
                    f"{found}; is this a folder that all nodes share?"
                )
        chunks: dict[str, list[StoredChunk]] = {}
        tensors: dict[str, StoredTensor] = {}
        for report in reports:
            tensors.update(report.tensors)
            for index, _, chunk in report.chunks:
                if chunk is not None:
                    chunks.setdefault(index.fqn, []).append(chunk)
        return Index(
            tensors={
                name: replace(tensor, chunks=tuple(chunks.get(name, ()))) for name, tensor in tensors.items()
            },
            files=files,
            aliases=self.aliases,
            about=self.about,
            param_groups=self.param_groups,
            module_state=self.module_state,
        )

    def _together(self, action: Any) -> None:
        """Do something on all ranks; if it fails on one, it fails on all."""
        error: BaseException | None = None
        try:
            action()
        except Exception as caught:
            error = caught
        if self.group is None:
            if error is not None:
                raise error if isinstance(error, CheckpointError) else _failed(self.folder, 0, error)
            return
        errors: list[BaseException | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(errors, _plain(error), group=self.group)
        for rank, each in enumerate(errors):
            if each is not None:
                raise each if isinstance(each, CheckpointError) else _failed(self.folder, rank, each)

    def _give_up(self) -> None:
        if self.rank == 0:
            folders.abandon(self.folder)


def _prepare(
    engine: Engine,
    model: nn.Module,
    optimizer: Optimizer | Sequence[Optimizer] | None,
    extra_state: Mapping[str, Any],
    path: str | Path,
    step: int | None,
    keep: int | None,
) -> Job:
    _check(step=step, keep=keep)
    root = Path(path).resolve()  # the working directory may change while it is written
    folder = root if step is None else root / folders.step_name(step)
    rank = engine.world.rank
    if rank == 0:
        folders.check_replaceable(folder)
    contents = contents_of(model, engine)
    optimizers = as_list(optimizer)
    groups = None if optimizer is None else [g for each in optimizers for g in groups_by_name(each, contents)]
    own = {
        "extra_state": encode(states_of(extra_state), "extra_state"),
        "random": encode(random_state(engine.device), "random"),
    }
    return Job(
        root=root,
        folder=folder,
        step=step,
        keep=keep,
        rank=rank,
        world=engine.world,
        group=engine.world.host_group(),
        parts=[part for part in parts_to_save(contents, optimizers, rank=rank) if part.span],
        contents=contents,
        about={
            "step": step,
            "world_size": engine.world.size,
            "partition_size": engine.topology.partition_size,
            "torch": torch.__version__,
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        },
        param_groups=None if groups is None else encode(groups, "optimizer.param_groups"),
        module_state=encode(contents.module_state, "model"),
        state=json.dumps(own).encode(),
        values=stock_values(groups, contents.module_state) if rank == 0 else StockValues(),
    )


def states_of(extra_state: Mapping[str, Any]) -> dict[str, Any]:
    """``extra_state`` with the states of objects in place of the objects."""
    for name, value in extra_state.items():
        if isinstance(value, Optimizer | nn.Module):
            raise SettingsError(
                f"extra_state.{name}: expected what is no part of the sharded model, found "
                f"{type(value).__name__}, whose state is this rank's part alone; several optimizers go to "
                "optimizer=[a, b], another model is saved by a call of its own"
            )
    return {
        name: value.state_dict() if hasattr(value, "state_dict") else value
        for name, value in extra_state.items()
    }


def _agreed(engine: Engine, prepare: Callable[[], Job]) -> Job:
    """The job of this rank, if all ranks have one and mean the same: one alone would wait for the others."""
    job, error = None, None
    try:
        job = prepare()
    except Exception as caught:
        error = caught
    errors: list[Exception | None] = engine.world.gather_objects(_plain(error))
    if error is not None:
        raise error
    for rank, theirs in enumerate(errors):
        if theirs is not None:
            raise SettingsError(
                f"mics.save: expected all ranks to save, found that rank {rank} cannot: {theirs}"
            )
    assert job is not None
    folders_meant = engine.world.gather_objects((str(job.folder.absolute()), job.keep))
    if len(set(folders_meant)) > 1:
        raise SettingsError(
            "mics.save: expected all ranks to give the same path, step and keep, found "
            f"{sorted(set(folders_meant))}"
        )
    return job


def check_real(engine: Engine, what: str) -> None:
    """Raise where there are no other ranks to save with, or to load for."""
    if engine.schedule.suspended:
        raise SettingsError(f"{what}: expected a sharded model, found one inside mics.summon; leave it first")
    if emulated_cluster() is not None:
        raise SettingsError(
            f"{what}: expected real ranks, found an emulated cluster: the other ranks' parameters do not "
            "exist"
        )


def _check(*, step: int | None, keep: int | None) -> None:
    if step is not None and step < 0:
        raise SettingsError(f"mics.save: expected a step of 0 or more, found {step}")
    if keep is not None and (keep < 1 or step is None):
        raise SettingsError(
            f"mics.save: expected keep of at least 1, together with step, found keep={keep} and step={step}"
        )


def _explained(folder: Path, error: CheckpointException) -> CheckpointError:
    """DCP's report of what failed on which rank, as one sentence."""
    rank, (cause, _) = min(error.failures.items())
    return cause if isinstance(cause, CheckpointError) else _failed(folder, rank, cause)


def _failed(folder: Path, rank: int, error: BaseException) -> CheckpointError:
    what = (
        error.strerror
        if isinstance(error, OSError) and error.strerror
        else f"{type(error).__name__}: {error}"
    )
    return CheckpointError(
        f"{folder}: rank {rank} could not write its part: {what}. What was there before is still there; "
        "make room or mend the folder, and save again"
    )


def _plain(error: BaseException | None) -> BaseException | None:
    """An error that can travel."""
    if error is None or isinstance(error, CheckpointError | OSError):
        return error
    return CheckpointError(f"{type(error).__name__}: {error}")

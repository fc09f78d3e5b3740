"""The checkpoints of ``mics train``: when one is written, and which one a run goes on from."""

import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

import torch
from torch import nn
from torch.optim import Optimizer

import mics
from mics.checkpoint.arguments import as_place
from mics.checkpoint.folders import latest_in, point_latest, step_name, steps_in
from mics.checkpoint.loading import misfits
from mics.checkpoint.opening import find_checkpoint
from mics.checkpoint.remote import remove
from mics.checkpoint.storage import Place, read_file, storage_of
from mics.comm import join_world
from mics.models.huggingface import FRESH
from mics.train.config import METRICS_FILE, TrainConfig
from mics.train.data import Dealing
from mics.train.folders import NO_JOB
from mics.train.model import seed_rank
from mics.train.ranks import Rank

T = TypeVar("T")
_JOB_FILE: Final = "job"
_MAX_JOB_NBYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a run goes on."""

    step: int
    """Steps done; 0 is the beginning."""
    folder: Place | None = None
    dealing: Dealing | None = None
    """How a step's sequences were dealt out when it was saved."""
    own: bool = True
    """Whether the checkpoint is of this run, so that its measurements go on too."""


class Checkpoints:
    """Writes a run's checkpoints and finds the one to go on from. Every method is called by all ranks."""

    def __init__(
        self,
        config: TrainConfig,
        me: Rank,
        *,
        model: nn.Module,
        optimizer: Optimizer,
        parts: Mapping[str, Any],
        data_digest: str,
        tokenizer: str,
        tell: Callable[[str], None],
    ) -> None:
        self._config = config
        self._me = me
        self._model = model
        self._optimizer = optimizer
        self._parts = parts  # with state_dict and load_state_dict: scheduler, meter, ...
        self._data = {"digest": data_digest, "tokenizer": tokenizer}
        self._tell = tell  # rank 0 shows it, the others do not
        self._saving: mics.Saving | None = None
        self._saved_step = -1
        self.dealing: Dealing | None = None  # of the steps to come

    def resume(self) -> Resumed:
        """Load the checkpoint that the settings mean, or make room for a run that begins anew.

        One that is torn is passed over for the one before it. Loading fails on all ranks or on none.
        """
        candidates, own = self._candidates()
        first_error: mics.CheckpointError | None = None
        for folder in candidates:
            place = _Place()
            try:
                mics.load(folder, self._model, self._optimizer, {**self._parts, **place.parts()})
            except mics.CheckpointError as error:
                first_error = first_error or error
                self._tell(f"mics: warning: {error}")
                continue
            if first_error is not None:
                self._tell(f"mics: warning: going back to {folder}")
            return self._resumed(folder, place, own=own)
        if first_error is not None:
            raise first_error
        return Resumed(step=0)

    def save_if_due(self, step: int) -> float | None:
        """Save after every interval. Returns how long training stood still for it, in seconds.

        A checkpoint that cannot be written (a full disk, a store that is away) is no reason to lose what
        comes after it: neither training nor the next checkpoint.
        """
        interval = self._config.checkpoint.interval
        if not interval or step % interval:
            return None
        began = time.perf_counter()
        self.finish_or_warn()  # of the save before, which is told of here alone: this one is begun anyway
        try:
            self._save(step, wait=not self._config.checkpoint.asynchronous)
        except mics.CheckpointError as error:
            self._warn(error)
            return None
        return time.perf_counter() - began

    def save_now(self, step: int) -> Place:
        """Have ``step`` on disk."""
        if step != self._saved_step:
            self._save(step, wait=True)
        self.finish()
        return self._config.checkpoint_dir / step_name(step)

    def finish(self) -> None:
        """Wait for what is being written, and raise what went wrong with it."""
        if self._saving is not None:
            self._saving.wait()

    def finish_or_warn(self) -> None:
        """The same where what comes next (the results, another checkpoint) is worth more than this one."""
        try:
            self.finish()
        except mics.CheckpointError as error:
            self._warn(error)

    def _warn(self, error: mics.CheckpointError) -> None:
        self._saved_step = -1
        self._tell(f"mics: warning: {error}. Training goes on without this checkpoint")

    def end_job(self) -> None:
        """The run is finished: the next one of this name begins anew."""
        if self._me.rank == 0:
            _forget_job(self._config.checkpoint_dir)

    def _save(self, step: int, *, wait: bool) -> None:
        assert self.dealing is not None
        extra = {**self._parts, "step": step, "data": {**self.dealing.as_dict(), **self._data}}
        self._saving = mics.save(
            self._config.checkpoint_dir,
            self._model,
            self._optimizer,
            extra,
            step=step,
            keep=self._config.checkpoint.keep,
            wait=wait,
        )
        self._saved_step = step

    def _resumed(self, folder: Place, place: "_Place", *, own: bool) -> Resumed:
        step, (dealing, data) = place.step.value, place.data.value
        if data.get("tokenizer", self._data["tokenizer"]) != self._data["tokenizer"]:
            raise mics.SettingsError(
                f"data: expected the tokenizer that the run of {folder} was trained with "
                f"({data['tokenizer']}), found another ({self._data['tokenizer']}); prepare "
                "the data with that tokenizer, or begin a run of another --name"
            )
        if dealing.num_ranks != self._me.num_ranks:
            # Nobody's random state fits. From the seed alone, dropout would repeat that of the beginning.
            seed_rank(self._config.seed, step=step, rank=self._me.rank)
        if own and self._me.rank == 0:
            _forget_later(self._config, folder, self._tell)
        self._tell(f"going on from {folder}, after step {step}")
        if data.get("digest", self._data["digest"]) != self._data["digest"]:
            self._tell(
                "mics: warning: data, seed: expected those of the checkpoint, found other files, weights, "
                "seq_len or seed: sequences that the run has seen may come again"
            )
        self._saved_step = step if own else -1
        return Resumed(step=step, folder=folder, dealing=dealing, own=own)

    def _candidates(self) -> tuple[list[Place], bool]:
        """Checkpoints to try, best first, and whether they are this run's: what rank 0 sees on its disk."""
        world = join_world()
        restarted = any(world.gather_objects(int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))))
        found: tuple[list[Place], bool] | mics.CheckpointError | mics.SettingsError | None = None
        if self._me.rank == 0:
            try:
                found = find_candidates(
                    self._config, restarted=restarted, environ=os.environ, tell=self._tell
                )
            except (mics.CheckpointError, mics.SettingsError) as error:
                found = error
            except OSError as error:
                found = mics.CheckpointError(f"{self._config.checkpoint_dir}: could not be used: {error}")
        found = world.gather_objects(found)[0]
        if isinstance(found, mics.CheckpointError | mics.SettingsError):
            raise found
        assert found is not None
        return found


class _Checked(Generic[T]):
    """A value that is taken from a checkpoint if it makes sense; else the load fails, on all ranks."""

    def __init__(self, check: Callable[[Any], T]) -> None:
        self._check = check

    def load_state_dict(self, state: Any) -> None:
        self.value = self._check(state)


class _Place:
    """Where in a run a checkpoint was made."""

    def __init__(self) -> None:
        self.step = _Checked(lambda step: _count(step, least=0))
        self.data = _Checked(_dealing_and_data)

    def parts(self) -> dict[str, Any]:
        return {"step": self.step, "data": self.data}


def _dealing_and_data(data: Mapping[str, Any]) -> tuple[Dealing, dict[str, Any]]:
    """How sequences were dealt out, and what they were: an early version's checkpoint says less."""
    names = ("digest", "tokenizer")
    counts = {name: _count(value, least=1) for name, value in data.items() if name not in names}
    return Dealing(**counts), {name: data[name] for name in names if name in data}


def _count(value: Any, *, least: int) -> int:
    if type(value) is not int or value < least:
        raise ValueError(f"expected a number from {least} on, found {value!r:.60}")
    return value


def check_places(config: TrainConfig) -> None:
    """Raise if the files that a run begins with, or its folder of checkpoints, cannot be read.

    A file of weights that is torn, a checkpoint of another model, a store that is not known or refuses us:
    the ranks would find out later.
    """
    wanted = config.checkpoint.resume
    try:
        weights, begin = config.model.weights, None
        if weights is not None:
            what, mend = "weights of the model that its config.json describes", "download the model again"
            _check_fits(config, weights, f"--model {weights}", what, f"{mend}, or {FRESH}")
        if config.checkpoint.interval or wanted == "latest":
            begin = latest_in(config.checkpoint_dir)
        if wanted not in ("auto", "latest"):
            begin = find_checkpoint(as_place(wanted, "checkpoint.resume"))
        if begin is not None and wanted != "auto":
            with suppress(mics.CheckpointError):  # of one that is torn, which the run passes over
                mend = "give the model settings that it was saved with, or another --name"
                _check_fits(config, begin, f"checkpoint.resume {begin}", "a checkpoint of this model", mend)
    except mics.CheckpointError as error:
        raise mics.SettingsError(str(error)) from None


def _check_fits(config: TrainConfig, folder: Place, setting: str, expected: str, mend: str) -> None:
    with torch.device("meta"):
        model = config.model.build().make()
    found = misfits(folder, model.float())
    if found:
        more = f", and {len(found) - 1:,} more" if found[1:] else ""
        raise mics.SettingsError(f"{setting}: expected {expected}, found another: {found[0]}{more}; {mend}")


def find_candidates(
    config: TrainConfig, *, restarted: bool, environ: Mapping[str, str], tell: Callable[[str], None] = print
) -> tuple[list[Place], bool]:
    """Checkpoints to go on from, best first, and whether they are this run's; none where it begins anew.

    ``tell`` is given a line where a run that begins anew moves those of an earlier one aside.
    """
    folder, wanted = config.checkpoint_dir, config.checkpoint.resume
    if wanted == "latest" or _same_job(folder, restarted=restarted, environ=environ):
        own = _newest_first(folder)
        if own or wanted in ("auto", "latest"):
            _note_job(config, environ)
            return own, True
    if wanted not in ("auto", "latest"):
        path = as_place(wanted, "checkpoint.resume")
        candidates = [find_checkpoint(path)]
        if candidates[0] != path:  # a folder of checkpoints
            candidates = _newest_first(path)
        if path.resolve() not in (folder.resolve(), *(each.resolve() for each in _newest_first(folder))):
            _move_aside(config, tell)
            _note_job(config, environ)
            return candidates, False
        _note_job(config, environ)
        return candidates, True
    _move_aside(config, tell)
    _note_job(config, environ)
    return [], True


def _newest_first(folder: Place) -> list[Place]:
    """The whole checkpoints in a folder: the one that ``latest`` names, then the steps before it."""
    latest = latest_in(folder)
    if latest is None:
        return []
    steps = [folder / step_name(step) for step in reversed(steps_in(folder))]
    # Where the very step is not in its place (killed while it was saved again), all others are before it.
    return [latest, *(steps[steps.index(latest) + 1 :] if latest in steps else steps)]


def _same_job(folder: Place, *, restarted: bool, environ: Mapping[str, str]) -> bool:
    """Whether the launcher's job is the one that these checkpoints are of.

    torchrun counts restarts after failures, but not those for nodes that joined or left: there the job's name
    tells. Without a name the count has to do.
    """
    job = environ.get("TORCHELASTIC_RUN_ID", NO_JOB)
    if job == NO_JOB:
        return restarted
    file = folder / _JOB_FILE
    return file.is_file() and read_file(file, most=_MAX_JOB_NBYTES).decode(errors="replace").strip() == job


def _note_job(config: TrainConfig, environ: Mapping[str, str]) -> None:
    if config.checkpoint.interval:
        folder, job = config.checkpoint_dir, environ.get("TORCHELASTIC_RUN_ID", NO_JOB)
        if isinstance(folder, Path):
            folder.mkdir(parents=True, exist_ok=True)
        storage_of(folder).write(folder / _JOB_FILE, f"{job}\n".encode())


def _forget_job(folder: Place) -> None:
    file = folder / _JOB_FILE
    if isinstance(file, Path):
        file.unlink(missing_ok=True)
        return
    try:
        remove([file])
    except mics.CheckpointError as error:  # the results are worth more
        logging.getLogger("mics").warning("%s", error)


def _move_aside(config: TrainConfig, tell: Callable[[str], None]) -> None:
    """Make room for a new run's checkpoints. Those of earlier runs stay, with their measurements.

    On a store nothing can be moved without a copy of every byte: there the user says what to do with them.
    """
    folder = config.checkpoint_dir
    found = steps_in(folder)
    if found and not isinstance(folder, Path):
        raise mics.SettingsError(
            f"checkpoint.folder {folder}: expected no checkpoints of another run, found "
            f"{step_name(found[-1])}; go on from it with --checkpoint.resume latest, or give another folder"
        )
    if found:
        assert isinstance(folder, Path)
        previous = _unused_previous(folder)
        folder.rename(previous)
        _keep_measurements(config, previous)
        tell(
            f"the checkpoints of an earlier run, up to {step_name(found[-1])}, are in {previous} now; "
            f"--checkpoint.resume {previous} goes on from them"
        )


def _forget_later(config: TrainConfig, chosen: Place, tell: Callable[[str], None]) -> None:
    """Let ``chosen`` be the latest. Those after it are torn, or of a course that is not taken again.

    On a disk they are moved aside, on a store they are removed.
    """
    folder = config.checkpoint_dir
    steps = steps_in(folder)
    chosen_step = next((step for step in steps if step_name(step) == chosen.name), None)
    later = [] if chosen_step is None else [step for step in steps if step > chosen_step]
    if later:
        point_latest(folder, chosen.name)
        if not isinstance(folder, Path):
            for step in later:
                storage_of(folder).remove(folder / step_name(step))
            return
        previous = _unused_previous(folder)
        previous.mkdir()
        for step in later:
            (folder / step_name(step)).rename(previous / step_name(step))
        _keep_measurements(config, previous)
        tell(f"the checkpoints after {chosen.name} are in {previous} now")


def _keep_measurements(config: TrainConfig, previous: Path) -> None:
    """Beside the checkpoints that they belong to: the run writes its own, from here on."""
    file = config.run_dir / METRICS_FILE
    if file.is_file():
        shutil.copyfile(file, previous / METRICS_FILE)


def _unused_previous(folder: Path) -> Path:
    """``checkpoints.previous``, or ``checkpoints.previous-2`` and so on: what is there is not replaced."""
    first = folder.with_name(folder.name + ".previous")
    names = (first if number == 1 else first.with_name(f"{first.name}-{number}") for number in count(1))
    return next(name for name in names if not name.exists())

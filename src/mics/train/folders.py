"""The folders of a run on this host: whether they can be written to, and that one run at a time does."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final, NamedTuple

from mics.comm import join_world
from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.train.ranks import Rank

NO_JOB: Final = "none"
"""What torchrun calls a job that was given no --rdzv-id."""
_LOCK_FILE: Final = "lock"
_MAX_HOLDER_NBYTES: Final = 1 << 10


def check_folders(config: TrainConfig, *, write: bool) -> None:
    """Raise if results or checkpoints cannot be written. A dry run only looks, others try."""
    folders = {"output_dir": config.run_dir}
    if config.checkpoint.interval:
        place = config.checkpoint_dir
        if isinstance(place, Path):
            folders["checkpoint.folder"] = place
        elif place.url.startswith("memory://"):
            raise SettingsError(
                f"checkpoint.folder: expected a folder or a store that all ranks share, found {place}, which "
                "is in the memory of each; give another"
            )
    for setting, folder in folders.items():
        try:
            if write:
                folder.mkdir(parents=True, exist_ok=True)
                with TemporaryFile(dir=folder):
                    pass
            else:
                _look(folder)
        except (OSError, ValueError) as error:
            why = error.strerror if isinstance(error, OSError) else error
            raise SettingsError(
                f"{setting}: expected a folder that can be written to, found {folder}: {why}; give another, "
                "or the right to write there"
            ) from None


def _look(folder: Path) -> None:
    """Raise if ``folder``, or the folder that it would be made in, cannot be written to."""
    there = next(each for each in (folder, *folder.parents) if each.exists())
    code = errno.EACCES if there.is_dir() else errno.ENOTDIR
    if code == errno.ENOTDIR or not os.access(there, os.W_OK | os.X_OK):
        raise OSError(code, os.strerror(code))


@contextmanager
def only_run(config: TrainConfig, *, job: str, is_launcher: bool = False) -> Iterator[list[int]]:
    """Refuse a second run in the same folders until this one ends. What a dead process held is free.

    The open files hold the locks: a process that goes on without this one is to inherit them. Processes of
    one ``job`` that a launcher started are one run.
    """
    own = _Holder(host=socket.gethostname(), process=os.getpid(), job=job, is_launcher=is_launcher)
    locks = {"name": config.run_dir / _LOCK_FILE}
    place = config.checkpoint_dir
    if config.checkpoint.interval and isinstance(place, Path):
        folder = place.resolve()  # it moves aside: beside it
        locks["checkpoint.folder"] = folder.parent / f".{folder.name}.{_LOCK_FILE}"
    with ExitStack() as stack:
        yield [
            number
            for setting, file in locks.items()
            for number in stack.enter_context(_locked(file, setting, config, own))
        ]


@contextmanager
def only_run_of_ranks(config: TrainConfig, me: Rank) -> Iterator[None]:
    """The same where every rank is there already: rank 0 does it, and all of them hear what came of it."""
    refused: SettingsError | None = None
    with ExitStack() as stack:
        if me.rank == 0:
            try:
                job = os.environ.get("TORCHELASTIC_RUN_ID", NO_JOB)
                stack.enter_context(only_run(config, job=job))
            except SettingsError as error:
                refused = error
        refused = join_world().gather_objects(refused)[0]
        if refused is not None:
            raise refused
        yield


class _Holder(NamedTuple):
    """Who holds a lock."""

    host: str = "?"
    process: int | str = "?"
    job: str = "?"
    is_launcher: bool = False

    @classmethod
    def read(cls, opened: int) -> _Holder:
        with suppress(OSError, ValueError, TypeError):
            return cls(*json.loads(os.read(opened, _MAX_HOLDER_NBYTES)))
        return cls()

    def write(self, opened: int) -> None:
        with suppress(OSError):  # of another user, who may let us read it alone
            os.ftruncate(opened, 0)
            os.write(opened, json.dumps(self).encode())

    def is_run_of(self, other: _Holder) -> bool:
        """Whether it is the same run: its launcher; or a host that is gone, which a file server has not seen.

        A job's name alone says little: two jobs may have one.
        """
        return self.job == other.job != NO_JOB and (self.is_launcher or self.host != other.host)


@contextmanager
def _locked(file: Path, setting: str, config: TrainConfig, own: _Holder) -> Iterator[list[int]]:
    """The open file, if this process locks it."""
    with ExitStack() as stack:
        held = []
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            opened = _open(file)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            own.write(opened)
            held.append(opened)
        except BlockingIOError:
            holder = _Holder.read(opened)
            if not holder.is_run_of(own):
                raise SettingsError(
                    f"{setting}: expected no other run that writes to {file.parent}, found process "
                    f"{holder.process} on host {holder.host}, or ranks that it started; wait until they end, "
                    f"or remove {file} if that host is gone, or give this run another name: "
                    f"--name {config.name}-2"
                ) from None
        except OSError as error:
            logging.getLogger("mics").warning(
                "%s: cannot be locked (%s): nothing keeps a second run from writing there too",
                file,
                error.strerror,
            )
        yield held


def _open(file: Path) -> int:
    try:
        return os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
    except PermissionError:
        return os.open(file, os.O_RDONLY)

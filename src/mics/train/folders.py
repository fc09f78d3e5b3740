"""The folders of a run on this host: whether they can be written to, and that one run at a time does."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

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
def only_run(config: TrainConfig, *, job: str) -> Iterator[list[int]]:
    """Refuse a second run in the same folders until this one ends. What a dead process held is free.

    The open files hold the locks: a process that goes on without this one is to inherit them. Processes of
    one ``job`` are one run.
    """
    locks = {"name": config.run_dir / _LOCK_FILE}
    place = config.checkpoint_dir
    if config.checkpoint.interval and isinstance(place, Path) and place.parent != config.run_dir:
        # Beside the folder, which moves aside.
        locks["checkpoint.folder"] = place.with_name(f".{place.name}.{_LOCK_FILE}")
    with ExitStack() as stack:
        yield [
            number
            for setting, file in locks.items()
            for number in stack.enter_context(_locked(file, setting, config, job=job))
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


@contextmanager
def _locked(file: Path, setting: str, config: TrainConfig, *, job: str) -> Iterator[list[int]]:
    """The open file, if this process locks it."""
    with ExitStack() as stack:
        held = []
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            opened = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
            stack.callback(os.close, opened)
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(opened, 0)
            os.write(opened, f"{socket.gethostname()} {os.getpid()} {job}\n".encode())
            held.append(opened)
        except BlockingIOError:
            host, process, theirs = (*os.read(opened, _MAX_HOLDER_NBYTES).decode().split(), *"???")[:3]
            if theirs != job or job == NO_JOB:
                raise SettingsError(
                    f"{setting}: expected no other run that writes to {file.parent}, found process {process} "
                    f"on host {host}, or ranks that it started; wait until they end, or give this run "
                    f"another name: --name {config.name}-2"
                ) from None
        except OSError as error:
            logging.getLogger("mics").warning(
                "%s: cannot be locked (%s): nothing keeps a second run from writing there too",
                file,
                error.strerror,
            )
        yield held

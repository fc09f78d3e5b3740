"""Saves that are written while training goes on."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

_LOG: Final = logging.getLogger("mics")


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
            _lost.discard(self)
            raise error
        return self.folder

    def _start(self, write: Callable[[], None]) -> None:
        self._thread = threading.Thread(target=self._run, args=(write,), name="mics-save", daemon=True)
        _running.add(self)
        self._thread.start()

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            # At once: whoever never asks for the result must know too.
            _LOG.error("a save in the background failed: %s", error)
            self._error = error
            _lost.add(self)
        finally:
            _running.discard(self)


_running: Final[set[Saving]] = set()  # all that have not ended, whether or not their model is still there
_lost: Final[set[Saving]] = set()  # those that failed, until somebody is told


def finish_all() -> None:
    """Wait for all saves under way, well or not."""
    for saving in list(_running):
        if saving._thread is not None:
            saving._thread.join()


@atexit.register
def _finish_script() -> None:
    """A script that ends after ``save(wait=False)`` still has its checkpoint, or does not end well."""
    finish_all()
    if not _lost:
        return
    for saving in _lost:
        print(
            f"mics: error: {saving.folder}: the script ended without this checkpoint: {saving._error}",
            file=sys.stderr,
        )
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(1)  # nothing else changes the exit code of an interpreter that is on its way out

"""Saves that are written while training goes on, from copies in host memory."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Final

import torch
from torch import Tensor

from mics.checkpoint.records import TensorPart
from mics.checkpoint.remote import RemotePath
from mics.checkpoint.storage import Place
from mics.layout.flat import round_up
from mics.sharding.host_memory import HostPool

_ALIGNMENT_NBYTES: Final = 64
_LOG: Final = logging.getLogger("mics")


class Saving:
    """A save that is under way. ``stall`` is how long the training stood still for it, in seconds."""

    def __init__(self, folder: Place) -> None:
        self.folder = folder
        self.stall = 0.0
        self.nbytes = 0  # that this rank writes
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    @property
    def done(self) -> bool:
        """Whether it is over, well or not."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Place:
        """Wait until the checkpoint is stored, or raise what prevented it. Returns its folder."""
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
        if isinstance(self.folder, RemotePath):
            _finish_before_pools()
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


@cache
def _finish_before_pools() -> None:
    """Finish uploads before the interpreter closes its thread pools, in which asyncio looks up hosts.

    ``atexit`` comes after that.
    """
    threading._register_atexit(finish_all)  # type: ignore[attr-defined]


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


class Staging:
    """One buffer for a rank's parts, kept from save to save. On a GPU it is pinned."""

    def __init__(self, device: torch.device, *, num_sharing: int) -> None:
        self._device = device
        self._pool = HostPool(
            pin=device.type == "cuda",
            num_sharing=num_sharing,
            user="mics.save(wait=False)",
            remedy="save with wait=True, which needs none",
        )

    def copy(self, parts: Sequence[TensorPart]) -> tuple[list[TensorPart], torch.cuda.Event | None]:
        """The parts in host memory, and when their values are there."""
        needed = sum(round_up(part.nbytes, _ALIGNMENT_NBYTES) for part in parts)
        buffer = self._pool.take(
            needed, "a copy of what is saved"
        )  # the save before is over: there is only this one
        self._pool.give_back(buffer)
        copied, start = [], 0
        for part in parts:
            place = buffer[start : start + part.nbytes].view(part.values.dtype)
            copied.append(replace(part, values=_copy(part.values, place)))
            start += round_up(part.nbytes, _ALIGNMENT_NBYTES)
        if self._device.type != "cuda":
            return copied, None
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))
        return copied, ready


def _copy(values: Tensor, place: Tensor) -> Tensor:
    # On the stream of the computation: the next update of these very tensors is ordered behind it.
    return place.copy_(values, non_blocking=True)

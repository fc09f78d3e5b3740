"""Puts faults into the rank that this process is, around functions of mics, which knows nothing of them."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.faults.fault import VARIABLE, Fault, decode


class Injector:
    """Fires the fault whose turn it is when this rank comes by its moment."""

    def __init__(self, faults: list[Fault], marks: Path, rank: int) -> None:
        self._faults = faults
        self._marks = marks  # a file for each fault that has happened, with the time
        self._rank = rank
        self.step = 0

    def pending(self, moment: str, step: int) -> tuple[int, Fault] | None:
        """The next fault, if it is due now, on whatever rank."""
        for number, fault in enumerate(self._faults):
            if not self._mark(number).exists():
                return (number, fault) if (fault.moment, fault.step) == (moment, step) else None
        return None

    def is_victim(self, fault: Fault) -> bool:
        return fault.rank == self._rank

    def fire_if_due(self, moment: str, step: int | None = None) -> None:
        found = self.pending(moment, self.step if step is None else step)
        if found is not None and self.is_victim(found[1]):
            self.fire(*found)

    def fire(self, number: int, fault: Fault) -> None:
        try:
            with self._mark(number).open("x") as file:  # once, whichever thread comes first
                print(time.time(), file=file)
        except FileExistsError:
            return
        match fault.kind:
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "stop":
                os.kill(os.getpid(), signal.SIGSTOP)
            case "node":
                os.kill(os.getppid(), signal.SIGKILL)  # the agent; the kernel ends its ranks
                time.sleep(60)
            case "term":
                os.kill(os.getpid(), signal.SIGTERM)
            case "loop":
                while True:
                    time.sleep(0.1)

    def _mark(self, number: int) -> Path:
        return self._marks / f"fault-{number}"


def inject() -> None:
    """Patch the functions that mark the moments."""
    from mics.checkpoint import blocks, folders
    from mics.comm.calls import GroupCalls
    from mics.data.prefetching import Prefetcher
    from mics.models.gpt import Block

    faults, marks = decode(os.environ[VARIABLE])
    injector = Injector(faults, Path(marks), int(os.environ["RANK"]))

    def note_step(original: Callable[..., Any], self: Any, step: int) -> Any:
        injector.step = step
        return original(self, step)

    def in_block(original: Callable[..., Any], self: Any, *args: Any) -> Any:
        if not self.training:
            return original(self, *args)
        injector.fire_if_due("forward")
        result = original(self, *args)
        if result.requires_grad:
            result.register_hook(lambda grad: injector.fire_if_due("backward"))
        return result

    def in_collective(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        found = injector.pending("collective", injector.step)
        if found is not None:
            if injector.is_victim(found[1]):
                threading.Timer(0.02, injector.fire, found).start()
            else:
                time.sleep(0.2)  # late, so that the victim waits for this rank when it is struck
        return original(self, *args, **kwargs)

    def in_write(original: Callable[..., Any], self: Any, content: Any) -> Any:
        if self.tell() > 0:  # in the middle of its file, of which something is on disk
            injector.fire_if_due("save", _step_of(self._sink._file.name))
        return original(self, content)

    def moving_latest(original: Callable[..., Any], root: Path, name: str) -> None:
        (root / "latest.tmp").write_text(name[: len(name) // 2])  # as it is found after a crash in between
        injector.fire_if_due("latest", _step_of(name))
        original(root, name)

    _around(Prefetcher, "get", note_step)
    _around(Block, "forward", in_block)
    _around(GroupCalls, "call", in_collective)
    _around(blocks.BlockWriter, "write", in_write)
    _around(folders, "point_latest", moving_latest)


def _step_of(path: object) -> int:
    """The step of a checkpoint by the name of its folder; training is ahead of what is being written."""
    found = re.search(r"step-(\d+)", str(path))
    return -1 if found is None else int(found[1])


def _around(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    original = getattr(owner, name)
    setattr(owner, name, lambda *args, **kwargs: wrapper(original, *args, **kwargs))

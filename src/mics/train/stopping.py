"""Leaving in order at SIGTERM: all ranks end after the same step, whichever of them was asked to.

The ranks agree through the store and not by a collective, so an ordinary step costs nothing::

    rank 0   step 7 --------- step 8 | waits         SIGTERM: says so in the store
    rank 1   step 7 ----- step 8 ----- step 9        reads it, and says that it is in step 9
    both     ... step 8 - step 9 - save - leave      the last step is the largest that any rank is in

A thread of each rank writes the step its main thread is in, and holds that thread back before the next one
until all ranks have done so: no rank begins a step that another will not take part in. A rank whose main
thread waits in a collective answers all the same.
"""

import os
import select
import signal
import socket
import sys
import threading
import time
from types import FrameType, TracebackType
from typing import Final, NoReturn, Self

from torch.distributed.distributed_c10d import PrefixStore, Store, _get_default_store

LEFT_CODE: Final = 128 + signal.SIGTERM
"""Exit code of a rank that saved and left: not zero, for the run is not finished."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS: Final = 0.25
_ANSWER_SECONDS: Final = 10.0
# A scheduler signals the launcher and the ranks, and the launcher the ranks again: that is one request.
_REPEAT_SECONDS: Final = 3.0


class Stopping:
    """Listens for signals and for the other ranks. Use as a context manager around the training."""

    def __init__(self, *, rank: int, num_ranks: int, step: int, store: Store | None = None) -> None:
        self._rank = rank
        self._num_ranks = num_ranks
        self._store = PrefixStore("mics-stop", _own_store() if store is None else store)
        self._lock = threading.Lock()
        self._step = step  # that the main thread is in, or has ended
        self._asked = False  # from here on the main thread waits for the agreement before each step
        self._agreed = threading.Event()
        self._last_step = 0  # once agreed
        self._closed = threading.Event()
        self._first_signal: float | None = None

    def __enter__(self) -> Self:
        self._signals, self._wakeup = socket.socketpair()
        self._wakeup.setblocking(False)
        # Python runs handlers in the main thread, which may wait in a collective: bytes arrive at once.
        self._old_wakeup = signal.set_wakeup_fd(self._wakeup.fileno(), warn_on_full_buffer=False)
        self._old_handlers = {number: signal.signal(number, _nothing) for number in _SIGNALS}
        self._thread = threading.Thread(target=self._listen, name="mics-stopping", daemon=True)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        for number, handler in self._old_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._old_wakeup)
        self._thread.join(timeout=4 * _POLL_SECONDS)
        if not self._thread.is_alive():  # else it waits for a store that does not answer
            self._signals.close()
            self._wakeup.close()

    def may_begin(self, step: int) -> bool:
        """Whether this rank takes part in ``step``; the same answer on all ranks."""
        with self._lock:
            if not self._asked:
                self._step = step
                return True
        self._agreed.wait()
        return step <= self._last_step

    def _listen(self) -> None:
        while not self._closed.is_set():
            ready, _, _ = select.select([self._signals], [], [], _POLL_SECONDS)
            if ready:
                self._note_signals(self._signals.recv(4096))
            try:
                self._answer()
            except RuntimeError:  # the store's host is gone; the next collective says more
                return

    def _note_signals(self, numbers: bytes) -> None:
        for number in numbers:
            if number not in _SIGNALS:
                continue
            now = time.monotonic()
            if self._first_signal is None:
                self._first_signal = now
                self._store.set("request", f"rank {self._rank} got {signal.Signals(number).name}")
            elif now - self._first_signal > _REPEAT_SECONDS:
                self._leave_now("asked a second time")

    def _answer(self) -> None:
        """Once somebody asks: say which step this rank is in, and learn which is the last."""
        if self._agreed.is_set() or not self._store.check(["request"]):
            return
        if not self._asked:
            with self._lock:
                self._asked, step = True, self._step
            self._asked_at = time.monotonic()
            self._store.set(f"step/{self._rank}", str(step))
        keys = [f"step/{rank}" for rank in range(self._num_ranks)]
        if self._store.check(keys):
            self._last_step = max(int(self._store.get(key)) for key in keys)
            self._agreed.set()
        elif time.monotonic() - self._asked_at > _ANSWER_SECONDS:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            self._leave_now(f"ranks {missing} did not answer for {_ANSWER_SECONDS:.0f} s: dead or stopped")

    def _leave_now(self, why: str) -> NoReturn:
        asked = self._store.get("request").decode()
        print(
            f"mics: rank {self._rank}: {asked}; leaving without a checkpoint: {why}",
            file=sys.stderr,
            flush=True,
        )
        # The main thread may wait for ranks that never come.
        os._exit(1)


def _nothing(signum: int, frame: FrameType | None) -> None:
    """The number has gone to the thread."""


def _own_store() -> Store:
    """A connection of our own: on the shared one we would wait behind others."""
    store = _get_default_store()
    return store.clone() if hasattr(store, "clone") else store

"""Making the next steps' batches in a thread, while the step before them is computed."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Final, Generic, TypeVar

Item = TypeVar("Item")
_POLL_SECONDS: Final = 0.1


class Prefetcher(Generic[Item]):
    """Makes items of consecutive numbers ahead of their use, at most ``depth`` of them.

    ``close`` ends the thread; as a daemon it never keeps a process alive.
    """

    def __init__(self, make: Callable[[int], Item], *, first: int, last: int, depth: int = 2) -> None:
        self._make = make
        self._next = first
        self._last = last
        self._ready: queue.Queue[tuple[int, Item | None, BaseException | None]] = queue.Queue(maxsize=depth)
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mics-data", daemon=True)
        self._thread.start()

    def get(self, number: int) -> tuple[Item, float]:
        """The item of ``number``, and the seconds waited for it. Raises what making it raised."""
        assert number == self._next <= self._last and not self._over.is_set()
        began = time.perf_counter()
        found, item, error = self._ready.get()
        if error is not None:
            self.close()
            raise error
        assert found == number and item is not None
        self._next += 1
        return item, time.perf_counter() - began

    def close(self) -> None:
        """End the thread. What it has made and nobody took is dropped."""
        self._over.set()
        self._thread.join()

    def _run(self) -> None:
        for number in range(self._next, self._last + 1):
            item, error = None, None
            try:
                item = self._make(number)
            except BaseException as caught:
                error = caught
            if not self._put((number, item, error)) or error is not None:
                return

    def _put(self, made: tuple[int, Item | None, BaseException | None]) -> bool:
        while not self._over.is_set():
            try:
                self._ready.put(made, timeout=_POLL_SECONDS)
            except queue.Full:
                continue
            return True
        return False

"""Who is still there: a heartbeat per rank in the store, read when a collective fails.

A backend that loses a peer says "connection closed" and gives an address, or says nothing. Each rank
therefore counts up in the store once a second, together with the collective it is in. A rank whose
collective failed watches the counters for a moment: the ones that stand still are dead or stopped.

On a GPU a collective does not fail, it waits. There each rank also listens to its neighbour, and writes an
obituary for one that has been silent for the timeout; whoever reads it names the dead rank and exits.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from datetime import timedelta

from torch.distributed.distributed_c10d import Store

_BEAT_SECONDS = 1.0
_WATCHED_BEATS = 3
_ASK_SECONDS = 8.0
_LEFT = "left"


class Liveness:
    """This rank's heartbeat, and the means to ask after the others."""

    def __init__(self, store: Store, *, rank: int, world_size: int, exit_after: float | None) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._exit_after = exit_after  # seconds of a neighbour's silence after which this process ends
        self._in = ("start", "mics.shard")  # kind and label of the latest collective
        self._num_entered = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mics-liveness", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    def enter(self, kind: str, label: str) -> None:
        """Note the collective this rank is about to join."""
        self._in = (kind, label)
        self._num_entered += 1

    def explain(self) -> str:
        """A sentence on the ranks that are gone, after watching for a few beats."""
        answers: list[str] = []
        # Beside us: over a network that is cut the store neither answers nor fails.
        asking = threading.Thread(target=lambda: answers.append(self._ask()), name="mics-ask", daemon=True)
        asking.start()
        asking.join(timeout=_ASK_SECONDS)
        if answers:
            return answers[0]
        return (
            f"The store has not answered for {_ASK_SECONDS:.0f} s: the network between this node and the one "
            "of rank 0 is probably cut. "
        )

    def _ask(self) -> str:
        before = self._read_all()
        time.sleep(_WATCHED_BEATS * _BEAT_SECONDS)
        after = self._read_all()
        if not after:
            return "No rank could be asked (the store is gone: rank 0 or its node is probably down). "
        left = [rank for rank, beat in after.items() if beat.startswith(_LEFT)]
        silent = [rank for rank, beat in after.items() if beat == before.get(rank) and rank not in left]
        if silent:
            return f"Dead, stopped or cut off: {_name(silent, after)}. "
        if left:
            return f"Left already: {_name(left, after)}. "
        behind = _furthest_behind(after, self._num_entered)
        if behind:
            return f"Every rank still answers, but one is behind: {_name(behind, after)}. "
        places = {beat.split("|", 2)[2] for beat in after.values() if beat.count("|") >= 2}
        kind, label = self._in
        if places - {f"{kind} of {label}"}:
            return f"Every rank still answers, but they are not all here: {_name(list(after), after)}. "
        return "Every rank still answers; the network between them may be cut. "

    def close(self) -> None:
        """Stop beating; the others read that this rank left."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=2 * _BEAT_SECONDS)
        if not self._thread.is_alive():  # else it waits for a store that does not answer, and so would we
            self._write(_LEFT)

    def _beat(self) -> None:
        count = 0
        neighbour = (self._rank + 1) % self._world_size
        heard, heard_at = "", time.monotonic()
        while self._write(str(count)) and not self._stop.wait(_BEAT_SECONDS):
            count += 1
            if self._exit_after is None:
                continue
            self._heed_obituary()
            beat = self._read(f"beat/{neighbour}")
            if beat != heard or beat.startswith(_LEFT):
                heard, heard_at = beat, time.monotonic()
            elif time.monotonic() - heard_at > self._exit_after:
                self._store.set("obituary", f"rank {neighbour} ({_describe(beat)})")

    def _heed_obituary(self) -> None:
        """End this process if some rank was found dead."""
        dead = self._read("obituary")
        if not dead:
            return
        kind, label = self._in
        print(
            f"mics: rank {self._rank}: {dead} has been silent for {self._exit_after:.0f} s; "
            f"this rank's latest collective was {kind} of {label}. Exiting.",
            file=sys.stderr,
            flush=True,
        )
        # The main thread waits inside the GPU runtime for a peer that will never come: only leaving helps.
        os._exit(1)

    def _write(self, beat: str) -> bool:
        kind, label = self._in
        try:
            self._store.set(f"beat/{self._rank}", f"{beat}|{self._num_entered}|{kind} of {label}")
        except RuntimeError:  # the store's host is gone: nothing left to tell
            return False
        return True

    def _read(self, key: str) -> str:
        try:
            return self._store.get(key).decode() if self._store.check([key]) else ""
        except RuntimeError:
            return ""

    def _read_all(self) -> dict[int, str]:
        beats = {rank: self._read(f"beat/{rank}") for rank in range(self._world_size) if rank != self._rank}
        return beats if any(beats.values()) else {}


def start_liveness(store: Store, *, rank: int, world_size: int, timeout: timedelta, on_gpu: bool) -> Liveness:
    """Begin beating. On a GPU a rank ends itself when its neighbour falls silent for the timeout."""
    exit_after = min(timeout.total_seconds(), 60.0) if on_gpu else None
    return Liveness(store, rank=rank, world_size=world_size, exit_after=exit_after)


def _furthest_behind(beats: dict[int, str], num_entered: int) -> list[int]:
    """The rank that has joined fewer collectives than all others, if it is one: it is who they wait for."""
    counts = {rank: int(beat.split("|", 2)[1]) for rank, beat in beats.items() if beat.count("|") >= 2}
    fewest = min(counts.values(), default=num_entered)
    found = [rank for rank, count in counts.items() if count == fewest]
    return found if len(found) == 1 and fewest < num_entered else []


def _name(ranks: list[int], beats: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} ({_describe(beats[rank])})" for rank in ranks)


def _describe(beat: str) -> str:
    if not beat:
        return "never heard from"
    state, num_entered, where = beat.split("|", 2)
    verb = "left after" if state == _LEFT else "last seen in"
    return f"{verb} collective {num_entered}, {where}"

"""Who is still there, and who went another way: what ranks tell each other beside the collectives.

A backend that loses a peer says "connection closed" and gives an address, or says nothing. Each rank
therefore counts up in the store once a second, together with the collective it is in. A rank whose
collective failed watches the counters for a moment: the ones that stand still are dead or stopped. If none
does, it compares what each rank did in each group (journal.py), and says which call is missing where.

A rank that has joined nothing for a moment also compares its journals with those of its neighbours: one that
did something else at the same place went another way, and no waiting will mend that. On a GPU a collective
does not fail, it waits; there a neighbour that has been silent for the timeout is dead.

The first rank to find out leaves its verdict in the store. All others raise it at their next collective, or
have the one fail that they wait in; those that wait inside the GPU runtime print it and exit.
"""

from __future__ import annotations

import atexit
import json
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Final

from torch import nn
from torch.distributed import ProcessGroup, get_process_group_ranks
from torch.distributed.distributed_c10d import Store

from mics.comm.journal import (
    SAME_CALLS,
    Account,
    Accounts,
    Action,
    Journal,
    conflicts,
    differences,
    name_ranks,
    parted,
)
from mics.comm.messages import break_off
from mics.errors import CollectiveError

_BEAT_SECONDS: Final = 1.0
_WATCHED_BEATS: Final = 3
_POLL_SECONDS: Final = 0.02
_ASK_SECONDS: Final = 8.0
_MAX_SILENCE_SECONDS: Final = 60.0
_LEAD_SECONDS: Final = 10.0  # before the backend's own timeout, which would end the process with less to say
_LEFT: Final = "left"
_PARTED: Final = "Ranks went different ways"
_MAX_DIFFERENCES: Final = 4
_MAX_PLACES: Final = 8
_NOT_THE_USERS: Final = frozenset({*sys.stdlib_module_names, "torch", "mics"}) - {"__main__"}


class Liveness:
    """This rank's heartbeat, its journals, and the means to ask after the others."""

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout: timedelta, on_gpu: bool) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._on_gpu = on_gpu
        seconds = timeout.total_seconds()
        self._max_silence = min(seconds, _MAX_SILENCE_SECONDS)
        self._patience = max(seconds / 2, seconds - _LEAD_SECONDS)  # with ranks that are merely behind
        self._journals: dict[str, Journal] = {}
        self._in: Action = ("start", "mics.shard")  # the latest collective
        self._num_entered = 0
        self._verdict = ""  # why no collective can succeed any more
        self._has_raised = False
        self._heard, self._heard_at = "", time.monotonic()  # of the next rank
        self._main = threading.main_thread().ident
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="mics-liveness", daemon=True)
        self._thread.start()
        atexit.register(self.close)

    # -- what this rank does ------------------------------------------------------------------------

    def journal(self, purpose: str, group: ProcessGroup) -> Journal:
        """This rank's journal of a group, of which there is one for each ``purpose`` and set of ranks."""
        ranks = get_process_group_ranks(group)
        key = f"{purpose}:{','.join(map(str, ranks))}"
        if key not in self._journals:
            journal = Journal(ranks, partial(break_off, group))
            self._journals = {**self._journals, key: journal}  # the heartbeat iterates over them
        return self._journals[key]

    def enter(self, journal: Journal, kind: str, label: str) -> None:
        """Note the collective this rank is about to join."""
        if self._verdict:
            self._has_raised = True
            self._wait_until_all_know()
            raise CollectiveError(f"{kind} of {label} was not begun. {self._verdict}")
        self._in = action = (kind, label)
        journal.add(action)
        self._num_entered += 1

    # -- what the others do -------------------------------------------------------------------------

    def explain(self) -> str:
        """Sentences on the ranks that are gone or elsewhere, after watching for a few beats."""
        self._has_raised = True
        if self._verdict:
            return self._verdict
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

    def exchange(self, key: str, value: str, ranks: Sequence[int] | None = None) -> dict[int, str]:
        """``value`` of each rank that gives one under this key within a few beats; no collective."""
        deadline = time.monotonic() + _WATCHED_BEATS * _BEAT_SECONDS
        waiting = set(range(self._world_size) if ranks is None else ranks) - {self._rank}
        found = {self._rank: value}
        self._set(f"{key}/{self._rank}", value)
        while waiting and time.monotonic() < deadline:
            found |= {rank: text for rank in waiting if (text := self._read(f"{key}/{rank}"))}
            waiting -= set(found)
            time.sleep(_POLL_SECONDS if waiting else 0)
        return dict(sorted(found.items()))

    def _ask(self) -> str:
        if not self._publish() or not self._set("asked", "yes"):
            return "No rank could be asked (the store is gone: rank 0 or its node is probably down). "
        before, entered = self._read_all(), self._num_entered
        time.sleep(_WATCHED_BEATS * _BEAT_SECONDS)
        after = self._read_all()
        if not after:
            return "No rank could be asked (the store is gone: rank 0 or its node is probably down). "
        left = [rank for rank, beat in after.items() if beat.startswith(_LEFT)]
        silent = [rank for rank, beat in after.items() if beat == before.get(rank) and rank not in left]
        if silent:
            return f"Dead, stopped or cut off: {_name(silent, after)}. "
        # Ranks that go on are not lost: what failed was this one's alone, a save in the background say.
        still = [rank for rank, beat in after.items() if _entered(beat) == _entered(before.get(rank, ""))]
        verdict = self._read("verdict")
        if not verdict and entered == self._num_entered:
            verdict = self._judge([self._rank, *still])
        if left:
            return f"{verdict}Left already: {_name(left, after)}. "
        behind = _furthest_behind(after, self._num_entered)
        if behind and not verdict.startswith(_PARTED):
            return f"{verdict}Every rank still answers, but one is behind: {_name(behind, after)}. "
        return verdict or "Every rank still answers; the network between them may be cut. "

    def _judge(self, ranks: Sequence[int]) -> str:
        """A verdict from the accounts of ``ranks``, if they differ."""
        by_rank, places = self._accounts(ranks)
        found = differences(by_rank)
        if not found:
            return ""
        headline = _PARTED if parted(found) else "A call is missing"
        return self._pronounce(_verdict(headline, [str(difference) for difference in found], places))

    def _pronounce(self, verdict: str) -> str:
        """Leave a verdict for all ranks, unless there is one: which counts."""
        try:
            self._verdict = self._store.compare_set("verdict", "", verdict).decode()
            self._store.set("asked", "yes")
        except RuntimeError:  # nobody left to tell
            self._verdict = verdict
        return self._verdict

    # -- the heartbeat ------------------------------------------------------------------------------

    def close(self) -> None:
        """Stop beating; the others read that this rank left."""
        if self._stop.is_set():
            return
        self._stop.set()
        self._thread.join(timeout=2 * _BEAT_SECONDS)
        if not self._thread.is_alive():  # else it waits for a store that does not answer, and so would we
            self._publish("the end of the program")
            self._write(_LEFT)
        self._journals = {}  # they hold process groups, each with threads of its own
        atexit.unregister(self.close)

    def _beat(self) -> None:
        count = 0
        entered, entered_at = 0, time.monotonic()
        while self._write(str(count)) and not self._stop.wait(_BEAT_SECONDS):
            count += 1
            now = time.monotonic()
            if self._read("asked"):
                self._publish()
                self._verdict = self._verdict or self._read("verdict")
            if self._verdict:
                self._set(f"knows/{self._rank}", "yes")
            if self._on_gpu:
                self._listen(now)
            if self._num_entered != entered:
                entered, entered_at = self._num_entered, now
            elif now - entered_at > _WATCHED_BEATS * _BEAT_SECONDS:
                self._watch(now - entered_at)

    def _listen(self, now: float) -> None:
        """Has the next rank been silent for too long?"""
        neighbour = (self._rank + 1) % self._world_size
        beat = self._read(f"beat/{neighbour}")
        if beat != self._heard or beat.startswith(_LEFT):
            self._heard, self._heard_at = beat, now
        elif now - self._heard_at > self._max_silence:
            self._pronounce(
                f"rank {neighbour} ({_describe(beat)}) has been silent for {self._max_silence:.0f} s. "
            )

    def _watch(self, seconds: float) -> None:
        """This rank has joined nothing for so long: have the others of its groups gone another way?"""
        if self._verdict:
            self._leave()
            return
        self._publish()
        # Where a group is not at one place, two members next to each other are not.
        nexts = {_next(journal.ranks, self._rank) for journal in self._journals.values()}
        found = differences(self._accounts([self._rank, *nexts])[0])
        if conflicts(found) or (self._on_gpu and found and seconds > self._patience):
            self._set("asked", "yes")
            self._stop.wait(1.5 * _BEAT_SECONDS)  # for the accounts of all ranks
            self._judge(range(self._world_size))

    def _leave(self) -> None:
        """End what this rank waits for in vain."""
        if self._has_raised:
            return
        if not self._on_gpu:
            for journal in self._journals.values():
                journal.break_off()
            return
        # The main thread waits inside the GPU runtime: nothing but leaving helps.
        kind, label = self._in
        print(
            f"mics: rank {self._rank}: {self._verdict} This rank's latest collective was {kind} of {label}. "
            "Exiting.",
            file=sys.stderr,
            flush=True,
        )
        self._wait_until_all_know()
        if not self._has_raised:
            os._exit(1)

    def _wait_until_all_know(self) -> None:
        """Until every rank has read the verdict, for a few beats at most.

        NCCL ends a process whose peer is gone. So nobody goes before all have something better to say.
        """
        if not self._on_gpu:
            return
        deadline = time.monotonic() + _WATCHED_BEATS * _BEAT_SECONDS
        waiting = set(range(self._world_size)) - {self._rank}
        self._set(f"knows/{self._rank}", "yes")
        while waiting and time.monotonic() < deadline:
            waiting = {rank for rank in waiting if not self._read(f"knows/{rank}")}
            time.sleep(_POLL_SECONDS if waiting else 0)

    # -- the store ----------------------------------------------------------------------------------

    def _publish(self, place: str | None = None) -> bool:
        """Write down what this rank did in each of its groups, and where its program is."""
        entered = self._num_entered  # before the journals: who has gone on since is passed over
        accounts = {key: journal.account() for key, journal in self._journals.items()}
        groups = {key: (each.ranks, each.count, each.recent) for key, each in accounts.items()}
        place = _place(self._main) if place is None else place
        return self._set(
            f"account/{self._rank}", json.dumps({"entered": entered, "place": place, "groups": groups})
        )

    def _accounts(self, ranks: Sequence[int]) -> tuple[dict[int, Accounts], dict[int, str]]:
        """What these ranks wrote down and where their programs are, of those that have not gone on since."""
        by_rank: dict[int, Accounts] = {}
        places: dict[int, str] = {}
        for rank in sorted(set(ranks)):
            text = self._read(f"account/{rank}")
            if not text:
                continue
            account = json.loads(text)
            if _entered(self._read(f"beat/{rank}")) != account["entered"]:
                continue
            places[rank] = account["place"]
            by_rank[rank] = {
                key: Account(ranks=tuple(members), count=count, recent=tuple(map(tuple, recent)))
                for key, (members, count, recent) in account["groups"].items()
            }
        return by_rank, places

    def _write(self, beat: str) -> bool:
        kind, label = self._in
        return self._set(f"beat/{self._rank}", f"{beat}|{self._num_entered}|{kind} of {label}")

    def _set(self, key: str, value: str) -> bool:
        try:
            self._store.set(key, value)
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


def _verdict(headline: str, clauses: Sequence[str], places: Mapping[int, str]) -> str:
    """Sentences on how ranks differ, where their programs are, and what to do."""
    more = [] if len(clauses) <= _MAX_DIFFERENCES else [f"and {len(clauses) - _MAX_DIFFERENCES} more"]
    found = "; ".join([*clauses[:_MAX_DIFFERENCES], *more])
    at: dict[str, list[int]] = {}
    for rank, place in places.items():
        if place:
            at.setdefault(place, []).append(rank)
    known = [f"{name_ranks(ranks)} at {place}" for place, ranks in at.items()][:_MAX_PLACES]
    where = f" ({', '.join(known)})" if known else ""
    return f"{headline}: {found}{where}. {SAME_CALLS}. "


def _place(thread: int | None) -> str:
    """The line that a thread is at, of code that is neither ours nor torch's nor Python's own.

    Of the program, not of a model that it calls: that is the same on all ranks.
    """
    place = ""
    frame = sys._current_frames().get(thread or 0)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module == nn.Module.__module__:
            place = ""
        elif not place and module.partition(".")[0] not in _NOT_THE_USERS:
            code = frame.f_code
            place = f"{Path(code.co_filename).name}:{frame.f_lineno} in {code.co_name}"
        frame = frame.f_back
    return place


def _next(ranks: Sequence[int], rank: int) -> int:
    return ranks[(ranks.index(rank) + 1) % len(ranks)]


def _furthest_behind(beats: dict[int, str], num_entered: int) -> list[int]:
    """The rank that has joined fewer collectives than all others, if it is one: it is who they wait for."""
    counts = {rank: _entered(beat) for rank, beat in beats.items() if beat}
    fewest = min(counts.values(), default=num_entered)
    found = [rank for rank, count in counts.items() if count == fewest]
    return found if len(found) == 1 and fewest < num_entered else []


def _entered(beat: str) -> int:
    """How many collectives the rank of this beat had joined."""
    return int(beat.split("|", 2)[1]) if beat else -1


def _name(ranks: list[int], beats: dict[int, str]) -> str:
    return ", ".join(f"rank {rank} ({_describe(beats[rank])})" for rank in ranks)


def _describe(beat: str) -> str:
    if not beat:
        return "never heard from"
    state, num_entered, where = beat.split("|", 2)
    verb = "left after" if state == _LEFT else "last seen in"
    return f"{verb} collective {num_entered}, {where}"

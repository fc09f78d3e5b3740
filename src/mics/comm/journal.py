"""What each rank did in each process group, and how two accounts of that differ.

All members of a group call its collectives in one order. So the n-th of them must be the same on every
member: where it is not, the ranks went different ways, and where one member has no n-th, a call is missing
there. No tensors and no process groups here: liveness.py carries accounts from rank to rank.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import Final, ParamSpec, TypeVar

_NUM_RECENT: Final = 32  # in each group: enough to tell where ranks parted, little enough for the store
_MAX_NAMED: Final = 8
_VERBS: Final = {
    "all-gather": "gather",
    "gather": "gather",
    "reduce-scatter": "reduce",
    "all-reduce": "reduce",
    "broadcast": "broadcast",
    "step": "enter",
}
SAME_CALLS: Final = (
    "Every rank must make the same calls in the same order. Call the same modules on all ranks: draw "
    "LayerDrop or stochastic depth from the same seed on all of them, skip a batch on all ranks or on none, "
    "and edit parameters on all of them. Do not put evaluation, mics.save, mics.full_state_dict or "
    "mics.clip_grad_norm_ under `if rank == 0`: call them on every rank, and write or print on one"
)

P = ParamSpec("P")
T = TypeVar("T")
Action = tuple[str, str]
"""Kind and label of a collective."""
_current = threading.local()


@contextmanager
def calling(name: str) -> Iterator[None]:
    """Collectives that this thread joins meanwhile are of the public call ``name``; the outermost counts."""
    if getattr(_current, "name", None) is not None:
        yield
        return
    _current.name = name
    try:
        yield
    finally:
        _current.name = None


def collective_call(function: Callable[P, T]) -> Callable[P, T]:
    """A public call that all ranks must make: errors name it."""

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        with calling(f"mics.{function.__name__}"):
            return function(*args, **kwargs)

    return called


def in_call(label: str) -> str:
    """``label`` with the public call that this thread is in."""
    name = getattr(_current, "name", None)
    return label if name is None else f"{label} ({name})"


class Journal:
    """The collectives that this rank has joined in one group: how many, and the latest of them."""

    def __init__(self, ranks: Sequence[int], break_off: Callable[[], None]) -> None:
        self.ranks = tuple(ranks)
        self.break_off = break_off  # have everything fail that waits in this group
        self.count = 0
        self._recent: deque[tuple[int, Action]] = deque(maxlen=_NUM_RECENT)  # numbered from 1

    def add(self, action: Action) -> None:
        self.count += 1
        self._recent.append((self.count, action))

    def account(self) -> Account:
        """As of now. Another thread may be adding: entries bring their numbers, so they fit together."""
        try:
            recent = tuple(self._recent)
        except RuntimeError:  # one was added while they were read
            return self.account()
        count = recent[-1][0] if recent else 0
        return Account(ranks=self.ranks, count=count, recent=tuple(action for _, action in recent))


@dataclass(frozen=True, kw_only=True)
class Account:
    """A journal at one moment, as others read it."""

    ranks: tuple[int, ...]
    count: int
    recent: tuple[Action, ...]
    """The latest; the last is number ``count``."""

    def number(self, number: int) -> Action | None:
        """Collective ``number``, counted from 1, if it is remembered."""
        index = number - self.count + len(self.recent) - 1
        return self.recent[index] if 0 <= index < len(self.recent) else None


Accounts = Mapping[str, Account]
"""One rank's, by group."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Ranks of one group that did not do the same: what each did, and who did nothing."""

    done: dict[Action, tuple[int, ...]]
    missing: tuple[int, ...] = ()

    def __str__(self) -> str:
        if not self.missing:
            return different_ways(self.done)
        ((kind, label), ranks), *_ = self.done.items()
        return f"{kind} of {label} is called by {name_ranks(ranks)} and not by {name_ranks(self.missing)}"


def different_ways(done: Mapping[Action, Sequence[int]]) -> str:
    """One clause for what each of several ranks does at the same place."""
    clauses = []
    for (kind, label), ranks in sorted(done.items(), key=lambda item: min(item[1])):
        verb = _VERBS.get(kind)
        plural = "" if len(ranks) > 1 else "s"
        clauses.append(
            f"{name_ranks(ranks)} {verb}{plural} {label}"
            if verb is not None
            else f"{name_ranks(ranks)} call{plural} {kind} of {label}"
        )
    return ", ".join(clauses)


def differences(by_rank: Mapping[int, Accounts]) -> list[Difference]:
    """Where the ranks of each group differ first. Empty if each group is at one place in all its members."""
    groups = sorted({key for accounts in by_rank.values() for key in accounts})
    found = []
    for key in groups:
        ranks = next(accounts[key].ranks for accounts in by_rank.values() if key in accounts)
        unheard = Account(ranks=ranks, count=0, recent=())
        members = {rank: by_rank[rank].get(key, unheard) for rank in ranks if rank in by_rank}
        difference = _difference(members)
        if difference is not None:
            found.append(difference)
    return found


def conflicts(found: Sequence[Difference]) -> list[Difference]:
    """Those that no waiting will mend: members did different things at the same place."""
    return [difference for difference in found if len(difference.done) > 1]


def parted(found: Sequence[Difference]) -> bool:
    """Whether ranks did different things, rather than that some have not come as far as the others."""
    ahead = {rank for difference in found for ranks in difference.done.values() for rank in ranks}
    behind = {rank for difference in found for rank in difference.missing}
    return bool(conflicts(found) or ahead & behind)


def _difference(members: Mapping[int, Account]) -> Difference | None:
    fewest = min(account.count for account in members.values())
    most = max(account.count for account in members.values())
    for number in range(max(1, most - _NUM_RECENT), most + 1):
        done: dict[Action, tuple[int, ...]] = {}
        for rank, account in sorted(members.items()):
            action = account.number(number)
            if action is not None:
                done[action] = (*done.get(action, ()), rank)
        if len(done) > 1:
            return Difference(done=done)
        if number > fewest and done:
            behind = tuple(rank for rank, account in sorted(members.items()) if account.count < number)
            return Difference(done=done, missing=behind)
    return None


def name_ranks(ranks: Sequence[int]) -> str:
    """ "rank 3", "ranks 0, 1 and 5"."""
    numbers = [str(rank) for rank in ranks]
    if len(numbers) == 1:
        return f"rank {numbers[0]}"
    if len(numbers) > _MAX_NAMED:
        return f"ranks {', '.join(numbers[: _MAX_NAMED - 1])} and {len(numbers) - _MAX_NAMED + 1} more"
    return f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"

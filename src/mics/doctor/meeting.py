"""Ranks meet in the launcher's store: it works where gloo and NCCL do not, and knows who has not come."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, TypeVar

import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore

from mics.doctor.facts import decode
from mics.errors import MicsError, SettingsError

T = TypeVar("T")
_LAST_SECONDS: Final = 3.0


class NotJoinedError(MicsError):
    """The ranks' store cannot be reached, or rank 0 never spoke."""


@dataclass(frozen=True, kw_only=True)
class Meeting:
    """This rank among the others. Rank 0 collects and announces, the others tell and hear."""

    store: PrefixStore
    rank: int
    num_ranks: int

    def tell(self, stage: str, value: str) -> None:
        self.store.set(f"{stage}/{self.rank}", value)

    def collect(self, stage: str, ranks: Iterable[int], seconds: float) -> dict[int, bytes]:
        """What each rank told, of those that did so in time."""
        keys = {rank: f"{stage}/{rank}" for rank in ranks}
        if not keys:
            return {}
        try:
            self.store.wait(list(keys.values()), timedelta(seconds=max(0.1, seconds)))
            there = list(keys)
        except dist.DistStoreError:
            there = [rank for rank, key in keys.items() if self.store.check([key])]
        return {rank: self.store.get(keys[rank]) for rank in there}

    def collect_as(self, kind: type[T], stage: str, ranks: Iterable[int], seconds: float) -> dict[int, T]:
        return {rank: decode(kind, data) for rank, data in self.collect(stage, ranks, seconds).items()}

    def announce(self, stage: str, value: str) -> None:
        self.store.set(f"announced/{stage}", value)

    def hear(self, stage: str, seconds: float) -> bytes:
        """What rank 0 announced."""
        key = f"announced/{stage}"
        try:
            self.store.wait([key], timedelta(seconds=seconds))
            value: bytes = self.store.get(key)
            return value
        except dist.DistError as error:
            raise NotJoinedError(
                f"rank {self.rank}: expected rank 0 to announce {stage!r} within {seconds:.0f} s, found "
                "nothing; look at what rank 0 printed, and whether its host still answers"
            ) from error

    def leave(self) -> None:
        """The process that holds the store leaves last: others may still read it."""
        self.store.add("left", 1)
        deadline = time.monotonic() + _LAST_SECONDS
        if self.rank == 0:
            while self.store.add("left", 0) < self.num_ranks and time.monotonic() < deadline:
                time.sleep(0.02)


def join(environ: Mapping[str, str], timeout: float) -> Meeting:
    """Connect to the store that the launcher's variables name; rank 0 opens it where no launcher has."""
    try:
        rank, num_ranks = int(environ["RANK"]), int(environ["WORLD_SIZE"])
        host, port = environ.get("MASTER_ADDR", "127.0.0.1"), int(environ.get("MASTER_PORT", "29500"))
    except (KeyError, ValueError) as error:
        raise SettingsError(
            f"expected whole numbers in the launcher's variables RANK, WORLD_SIZE and MASTER_PORT, found "
            f"{error}; start with torchrun, or unset RANK so that mics doctor starts its own ranks"
        ) from None
    by_launcher = environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True)
    try:
        store = TCPStore(
            host,
            port,
            num_ranks,
            is_master=rank == 0 and not by_launcher,
            timeout=timedelta(seconds=timeout),
            wait_for_workers=False,  # or nobody could say who is missing
            multi_tenant=True,
        )
    except (dist.DistError, RuntimeError, ValueError) as error:
        raise NotJoinedError(
            f"rank {rank} on {os.uname().nodename}: expected to reach MASTER_ADDR={host}, "
            f"MASTER_PORT={port} within {timeout:.0f} s, found: {str(error).splitlines()[0]}; check that the "
            "address is rank 0's, that its port is open in the firewall and that rank 0 runs"
        ) from None
    attempt = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = environ.get("TORCHELASTIC_RUN_ID", "")
    return Meeting(store=PrefixStore(f"mics-doctor-{name}-{attempt}", store), rank=rank, num_ranks=num_ranks)

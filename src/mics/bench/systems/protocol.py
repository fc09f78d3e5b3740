"""The seam between a benchmark and the systems it compares: what a system is, and what it must do."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

from torch import Tensor

from mics.bench.job import Job
from mics.errors import MicsError

Batch = tuple[Tensor, Tensor]
"""tokens and targets [micro_batch, token] int64, both on the job's device."""


class SystemUnavailable(MicsError):  # noqa: N818 - it says what is the case, not that something broke
    """A system cannot run here: a package is missing, of the wrong version, or needs other hardware."""


class Trainer(Protocol):
    """A model under one system, ready to train."""

    same_start: bool
    """Masters start from exactly the values all systems share; False: from those rounded to the parameters'
    format, so that losses drift apart by that rounding."""

    def step(self, batches: Sequence[Batch]) -> Tensor:
        """One optimizer step over the micro-steps of ``batches``.

        Returns this rank's mean loss, detached and still on the device: nothing waits on the host.
        """

    def close(self) -> None:
        """Let go of the model and everything the system holds for it."""


@dataclass(frozen=True, kw_only=True)
class System:
    """One way to train a job."""

    name: str
    build: Callable[[Job], Trainer]
    """Build and shard the model on this rank. Every rank of the default process group calls it, in the same
    order among systems. Raises ``SystemUnavailable`` before any collective if it cannot run here."""
    needs: tuple[str, ...] = ()
    """What ``pip install`` must be given besides torch."""
    isolated: bool = False
    """It changes torch for everybody in the process, so it must have a process of its own."""
    partition: Literal["group", "world", "state", "none"] = "group"
    """Over what it shards: partition groups of the job's size, the world, or nothing. state: parameters over
    nothing, gradients and optimizer state over the world."""
    about: str = ""
    """How it is set up, in a few words."""

    def partition_size(self, job: Job, world_size: int) -> int:
        """Ranks that together hold one copy of the parameters."""
        return {"group": job.partition_size, "world": world_size, "state": 1, "none": 1}[self.partition]


def check_batches(job: Job, batches: Sequence[Batch]) -> None:
    """Every system trains the same number of micro-steps, or the comparison means nothing."""
    if len(batches) != job.accumulation:
        raise ValueError(f"batches: expected accumulation={job.accumulation} of them, found {len(batches)}")

"""What to measure: a list of runs that travels to the processes that do it, and what comes back."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from mics.bench.clock import GpuClock
from mics.bench.job import Job
from mics.bench.timeline import Exposure
from mics.cost.clusters import Cluster, Link
from mics.models import GPTConfig
from mics.utils.numbers import plural


@dataclass(frozen=True, kw_only=True)
class Run:
    """One system, built and trained for a few steps."""

    number: int
    system: str
    job: Job
    world_size: int
    cluster: Cluster | None = None
    """The cluster to emulate; None on real ranks."""
    record: bool = False
    """Also look into one step: where its time goes (emulated clusters)."""
    clock: GpuClock | None = None
    """Of the GPU whose time is shown; None: this device's own."""
    scaled_from: tuple[int, ...] = ()
    """Nobody ran it: it is what runs of so many blocks come to."""

    @property
    def blocks(self) -> str:
        """How much of the model ran; empty: all of it."""
        layers = self.job.model.num_layers
        if self.scaled_from:
            return f"{layers}, scaled from {' and '.join(map(str, self.scaled_from))} of {layers} blocks"
        return "" if self.job.whole_layers is None else f"{layers} of {self.job.whole_layers} blocks"

    @property
    def row(self) -> str:
        """Runs of one row of the table are repeats of each other."""
        where = "ranks" if self.cluster is None else f"{self.cluster.name}:{self.cluster.num_nodes}"
        depth = "" if self.job.whole_layers is None else f"/{self.job.model.num_layers}-blocks"
        return f"{where}/{self.job.partition_size}/{self.job.accumulation}/{self.system}{depth}"

    @property
    def title(self) -> str:
        """What a reader calls it."""
        where = "" if self.cluster is None else f" of {self.cluster.name}, emulated"
        return (
            f"{self.system} on {self.world_size:,} ranks{where}, partition size {self.job.partition_size}, "
            f"{plural(self.job.accumulation, 'accumulation step')}{self.blocks and f', {self.blocks}'}"
        )


@dataclass(frozen=True, kw_only=True)
class RunPlan:
    """The runs, in the order in which they are made."""

    runs: tuple[Run, ...]
    num_warmup_steps: int
    num_steps: int
    folder: str
    """Where traces and pictures go."""

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, file: Path) -> RunPlan:
        found = json.loads(file.read_text())
        return cls(**{**found, "runs": tuple(_run(run) for run in found["runs"])})


def _run(found: dict[str, Any]) -> Run:
    cluster = found["cluster"]
    if cluster is not None:
        links = {link: Link(**cluster[link]) for link in ("intra", "inter")}
        cluster = Cluster(**{**cluster, **links})
    clock = None if found["clock"] is None else GpuClock.of(found["clock"])
    read = {"job": job_from(found["job"]), "cluster": cluster, "clock": clock}
    return Run(**{**found, **read, "scaled_from": tuple(found["scaled_from"])})


def job_from(found: dict[str, Any]) -> Job:
    """A job from what ``dataclasses.asdict`` made of it."""
    return Job(**{**found, "model": GPTConfig(**found["model"])})


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one run measured, or why it could not."""

    number: int
    error: str | None = None
    step_seconds: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    """Of every step from the first, mean over ranks."""
    same_start: bool = True
    host_seconds: float | None = None
    """What the host needs to issue a step (GPUs: on a CPU it is the step)."""
    tokens_per_step: int = 0
    """Of one rank."""
    peak_allocated_nbytes: int | None = None
    peak_reserved_nbytes: int | None = None
    num_alloc_retries: int | None = None
    uplink_nbytes: int | None = None
    """Sent per step by the busiest host, from its interface's counter."""
    exposure: Exposure | None = None

    def as_line(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Outcome:
        found = {key: value for key, value in json.loads(line).items() if key in _OUTCOME_FIELDS}
        if found.get("exposure") is not None:
            found["exposure"] = Exposure(**found["exposure"])
        return cls(**found)


_OUTCOME_FIELDS = {item.name for item in fields(Outcome)}


def interleave(
    systems: Sequence[str],
    rows: Sequence[tuple[Job, Cluster | int]],
    *,
    repeats: int,
    record: bool,
) -> tuple[Run, ...]:
    """Every system once, then every system again: what changes with time then hits all of them.

    A row is a job and where it runs: an emulated cluster, or so many real ranks.
    """
    runs: list[Run] = []
    for repeat in range(repeats):
        for job, place in rows:
            cluster = None if isinstance(place, int) else place
            world_size = place if isinstance(place, int) else place.world_size
            for system in systems:
                runs.append(
                    Run(
                        number=len(runs),
                        system=system,
                        job=job,
                        world_size=world_size,
                        cluster=cluster,
                        record=record and repeat == 0,
                    )
                )
    return tuple(runs)

"""Runs brought together: one row a system and setting, with medians, and what is to be said about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any, Final

from mics.bench.job import Job
from mics.bench.plan import Outcome, Run
from mics.bench.systems import SYSTEMS
from mics.cost.clusters import Cluster
from mics.models import GPTConfig
from mics.utils.numbers import listed, percent, plural, seconds, times

_DISAGREE: Final = "LOSSES DISAGREE"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The repeats of one system in one setting."""

    run: Run
    outcomes: tuple[Outcome, ...]
    peak_tflops: float | None

    @property
    def good(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.error is None]

    @property
    def error(self) -> str | None:
        """Why it could not run; None where at least one repeat could."""
        return None if self.good else self.outcomes[0].error

    @property
    def world_size(self) -> int:
        return self.run.world_size

    @property
    def partition_size(self) -> int:
        """Ranks that together hold one copy of the parameters under this system."""
        return SYSTEMS[self.run.system].partition_size(self.run.job, self.world_size)

    @property
    def setting(self) -> str:
        job = self.run.job
        where = "" if self.run.cluster is None else f"{self.run.cluster.name} emulated, "
        return (
            f"{where}{plural(self.world_size, 'rank')}, partition size {job.partition_size}, "
            f"{plural(job.accumulation, 'accumulation step')}{self.run.blocks and f', {self.run.blocks}'}"
        )

    @property
    def step_seconds(self) -> tuple[float, float, float]:
        """Median, lowest and highest of all timed steps."""
        timed = self._timed
        return statistics.median(timed), min(timed), max(timed)

    @property
    def num_timed(self) -> int:
        return len(self._timed)

    @property
    def _timed(self) -> list[float]:
        return [second for outcome in self.good for second in outcome.step_seconds]

    @property
    def tflops(self) -> float:
        """Model TFLOP/s of one GPU; of all ranks together on a CPU, whose cores they share."""
        flops = self.good[0].tokens_per_step * self.run.job.model.flops_per_token
        return flops / self.step_seconds[0] / 1e12 * (1 if self.run.job.device == "cuda" else self._sharing)

    @property
    def _sharing(self) -> int:
        return 1 if self.run.cluster is not None else self.world_size

    @property
    def mfu(self) -> float | None:
        return None if self.peak_tflops is None else self.tflops / self.peak_tflops

    def median(self, value: Callable[[Outcome], float | None]) -> float | None:
        """Median over repeats of something they may not all have."""
        found = [x for x in map(value, self.good) if x is not None]
        return statistics.median(found) if found else None

    def as_dict(self) -> dict[str, Any]:
        """Everything, for the JSON file."""
        return {
            "system": self.run.system,
            "world_size": self.world_size,
            "run": asdict(self.run),
            "error": self.error,
            "step_seconds": None if self.error else self.step_seconds,
            "tflops": None if self.error else self.tflops,
            "mfu": None if self.error else self.mfu,
            "outcomes": [asdict(outcome) for outcome in self.outcomes],
        }


def summarise(runs: Sequence[Run], outcomes: Sequence[Outcome], peak_tflops: float | None) -> list[Row]:
    """Rows in the order in which they were first run."""
    grouped: dict[tuple[str, Job, Cluster | None], list[tuple[Run, Outcome]]] = {}
    for run, outcome in zip(runs, outcomes, strict=True):
        grouped.setdefault((run.system, run.job, run.cluster), []).append((run, outcome))
    rows = []
    for pairs in grouped.values():
        run = pairs[0][0]
        peak = peak_tflops if run.clock is None else run.clock.peak_tflops
        rows.append(Row(run=run, outcomes=tuple(outcome for _, outcome in pairs), peak_tflops=peak))
    return rows


def verdict(rows: Sequence[Row]) -> list[str]:
    """Who won and by how much, who did not run, and whether the losses agree."""
    said = []
    for setting, group in groupby(rows, key=lambda row: row.setting):
        rows_of_setting = list(group)
        ran = sorted(
            (row for row in rows_of_setting if row.error is None), key=lambda row: row.step_seconds[0]
        )
        if len(ran) > 1:
            said.append(f"{setting}: {_ranking(ran)}")
        said += [
            f"{setting}: {row.run.system} did not run: {row.error}"
            for row in rows_of_setting
            if row.error is not None
        ]
        for row in ran:
            failed = [outcome for outcome in row.outcomes if outcome.error is not None]
            if failed:
                said.append(
                    f"{setting}: {row.run.system} failed in {len(failed)} of {len(row.outcomes)} repeats: "
                    f"{failed[0].error}"
                )
        if ran and ran[0].run.cluster is None:
            said.append(f"{setting}: {_losses(ran)}")
    if any(row.run.cluster is not None for row in rows):
        said.append("Losses are not compared: an emulated cluster's other ranks do not compute.")
    said += [_count_of_flops(model) for model in dict.fromkeys(row.run.job.model for row in rows)]
    return said


def _count_of_flops(model: GPTConfig) -> str:
    ratio = model.six_n_flops_per_token / model.flops_per_token
    return (
        "TFLOP/s count what is multiplied: no lookups, nothing that is recomputed. "
        f"By 6 N and attention, N being all parameters, they would be {ratio:.3f} times as many."
    )


def _ranking(ran: Sequence[Row]) -> str:
    """The shortest median first. Nobody wins whose slowest step is not before every step of the others."""
    best = ran[0]
    close = [row for row in ran[1:] if row.step_seconds[1] <= best.step_seconds[2]]
    ratios = ", ".join(
        f"{row.run.system} {times(row.step_seconds[0] / best.step_seconds[0])}"
        for row in ran[1:]
        if row not in close
    )
    if min(row.num_timed for row in ran) < 2:
        every = ", ".join(f"{row.run.system} {seconds(row.step_seconds[0])}" for row in ran)
        return f"{every}; from one timed step nobody knows the noise: raise --steps or --repeats."
    if not close:
        return f"{best.run.system} has the shortest step; {ratios} its time."
    spans = listed([f"{row.run.system} ({_span(row)})" for row in (best, *close)])
    others = f"; {ratios} the time of {best.run.system}" if ratios else ""
    return f"within noise: {spans} overlap, so none is faster{others}."


def _span(row: Row) -> str:
    """From the fastest to the slowest timed step."""
    return f"{seconds(row.step_seconds[1])} to {seconds(row.step_seconds[2])}"


def _losses(ran: Sequence[Row]) -> str:
    """Whether systems that computed for real saw the same losses."""
    if len(ran) < 2:
        return "losses are not compared: fewer than two systems ran."
    job = ran[0].run.job
    # A format's own rounding, amplified over the steps: a wrong gradient is off by far more.
    allowed = 1e-4 if (job.param_dtype, job.reduce_dtype) == ("float32", "float32") else 2e-2
    worst, where = 0.0, ""
    first = ran[0].good[0].losses
    for row in ran:
        for outcome in row.good:
            for ours, theirs in zip(first, outcome.losses, strict=True):
                difference = abs(ours - theirs) / max(1e-12, abs(ours))
                difference = difference if math.isfinite(difference) else math.inf
                if difference > worst:
                    worst = difference
                    where = f"{ran[0].run.system} {ours:.6f}, {row.run.system} {theirs:.6f}"
    if worst <= allowed:
        return f"losses of all {len(ran)} systems agree to {percent(worst)} (allowed {percent(allowed)})."
    return f"{_DISAGREE} by {percent(worst)} ({where}); allowed is {percent(allowed)}."


def agree(rows: Sequence[Row]) -> bool:
    """No system computed something else."""
    return not any(_DISAGREE in line for line in verdict(rows))

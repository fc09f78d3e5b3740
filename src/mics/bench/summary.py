"""Runs brought together: one row a system and setting, with medians, and what is to be said about them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, Final

from mics.bench.job import Job
from mics.bench.plan import Outcome, Run
from mics.bench.systems import SYSTEMS
from mics.cost.clusters import Cluster
from mics.cost.memory import DRIVER_NBYTES
from mics.models import GPTConfig
from mics.utils.numbers import listed, memory, milliseconds, percent, plural, seconds, times

_DISAGREE: Final = "LOSSES DISAGREE"
_LONGER: Final = 1.1  # times the slowest timed step: what computes longer than that is another step
_SHORTER: Final = 0.8  # times the fastest one
_HOST_SHARE: Final = 0.9  # of a step: a host that takes more of it decides how long it is
_MOST: Final = 0.5  # of a gap between two systems: what explains more of it explains it


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

    @property
    def compute_seconds(self) -> float | None:
        """Of the step that was looked into; None where none was."""
        return self.median(lambda found: None if found.exposure is None else found.exposure.compute_seconds)

    @property
    def exposed_seconds(self) -> float | None:
        """Of the same step: links were busy and nothing computed."""
        return self.median(
            lambda found: None if found.exposure is None else sum(found.exposure.exposed_seconds.values())
        )

    @property
    def breakdown_differs(self) -> bool:
        """The step that was looked into is not like those that were timed."""
        computed, exposed = self.compute_seconds, self.exposed_seconds
        if computed is None or exposed is None:
            return False
        idle = self.median(lambda found: None if found.exposure is None else found.exposure.idle_seconds)
        _, low, high = self.step_seconds
        return computed > _LONGER * high or computed + exposed + (idle or 0.0) < _SHORTER * low

    @property
    def shortage(self) -> str | None:
        """Why the emulated GPU would run out of memory, though this device did not."""
        known = 0.0 if self.run.cluster is None else self.run.cluster.memory_nbytes
        peak = self.median(lambda found: found.peak_allocated_nbytes)
        if self.run.job.device != "cuda" or not known or peak is None or peak <= known - DRIVER_NBYTES:
            return None
        return f"needs {memory(peak)} of the {memory(known - DRIVER_NBYTES)} that a program has there"

    @property
    def host_bound(self) -> bool:
        """The host issues a step hardly faster than it takes: on another GPU's clock it counts many times."""
        host = self.median(lambda found: found.host_seconds)
        factor = 1.0 if self.run.clock is None else self.run.clock.factor
        return host is not None and factor * host > _HOST_SHARE * self.step_seconds[0]

    @property
    def comparable(self) -> bool:
        """Its step is one of the GPU that it stands for: not this host's, nor of a GPU with more memory."""
        return self.error is None and not self.shortage and not self.waits_for_host

    @property
    def waits_for_host(self) -> bool:
        """This machine's host decided about the step of an emulated one."""
        return self.run.cluster is not None and self.host_bound

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
            "shortage": None if self.error else self.shortage,
            "host_bound": None if self.error else self.host_bound,
            "breakdown_differs": None if self.error else self.breakdown_differs,
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
        compared = [row for row in ran if row.comparable]
        if len(compared) > 1:
            said.append(f"{setting}: {_ranking(compared)}")
        said += [f"{setting}: {warning(row)}" for row in ran if row.breakdown_differs]
        said += [f"{setting}: {row.run.system} would not run: {row.shortage}" for row in ran if row.shortage]
        said += [
            f"{setting}: {row.run.system} waits for the host of this machine, so its step is not that of the "
            "GPU and is compared with no other; a larger --micro-batch gives the GPU more to do"
            for row in ran
            if row.waits_for_host
        ]
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
    said += [_count_of_flops(model) for model in _whole_models(rows)]
    return said


def _whole_models(rows: Sequence[Row]) -> list[GPTConfig]:
    """Of each model the deepest that ran or was scaled to."""
    models = sorted((row.run.job.model for row in rows), key=lambda model: model.num_layers)
    return list({replace(model, num_layers=1): model for model in models}.values())


def _count_of_flops(model: GPTConfig) -> str:
    ratio = model.six_n_flops_per_token / model.flops_per_token
    return (
        "TFLOP/s count what is multiplied: no lookups, nothing that is recomputed. "
        f"By 6 N and attention, N being all parameters, they would be {ratio:.3f} times as many."
    )


def _ranking(ran: Sequence[Row]) -> str:
    """The shortest median first, where there is one.

    Nobody wins whose slowest step is not before every step of the others. Nor is a system ranked whose
    computation takes longer by as much as its step does: that is the device's doing, or the noise's.
    """
    if min(row.num_timed for row in ran) < 2:
        every = ", ".join(f"{row.run.system} {seconds(row.step_seconds[0])}" for row in ran)
        return f"{every}; from one timed step nobody knows the noise: raise --steps or --repeats."
    best, *others = ran
    close = [row for row in others if row.step_seconds[1] <= best.step_seconds[2]]
    apart = [row for row in others if row not in close]
    unlike = [row for row in apart if best.breakdown_differs or row.breakdown_differs]
    computed = [row for row in apart if row not in unlike and _computation_explains(best, row)]
    slower = [row for row in apart if row not in unlike and row not in computed]
    ratios = ", ".join(
        f"{row.run.system} {times(row.step_seconds[0] / best.step_seconds[0])}" for row in slower
    )
    if not (close or unlike or computed):
        return f"{best.run.system} has the shortest step; {ratios} its time."
    parts = []
    if close:
        spans = listed([f"{row.run.system} ({_span(row)})" for row in (best, *close)])
        parts.append(f"within noise: {spans} overlap, so none is faster")
    parts += [_words_on_computation(best, row) for row in computed]
    if unlike:
        names = listed([row.run.system for row in unlike])
        parts.append(
            f"{names} and {best.run.system} are not ranked: no breakdown of the timed steps says what tells "
            "them apart"
        )
    if ratios:
        parts.append(f"{ratios} the time of {best.run.system}")
    return f"{'; '.join(parts)}."


def _computation_explains(best: Row, row: Row) -> bool:
    """Most of what a system takes longer is computing, which the network has no part in."""
    ours, theirs = best.compute_seconds, row.compute_seconds
    if ours is None or theirs is None:
        return False
    return theirs - ours >= _MOST * (row.step_seconds[0] - best.step_seconds[0])


def _words_on_computation(best: Row, row: Row) -> str:
    ours, theirs = best.compute_seconds or 0.0, row.compute_seconds or 0.0
    low, high = sorted((best.exposed_seconds or 0.0, row.exposed_seconds or 0.0))
    return (
        f"no ranking of {best.run.system} and {row.run.system}: computation explains the gap between "
        f"{milliseconds(best.step_seconds[0])} and {milliseconds(row.step_seconds[0])} (computing "
        f"{milliseconds(ours)} and {milliseconds(theirs)}, exposed communication {milliseconds(low)} to "
        f"{milliseconds(high)})"
    )


def warning(row: Row) -> str:
    """That the breakdown is of another step than those that were timed."""
    return (
        f"the breakdown of {row.run.system} is not of the timed step (* in the table): it computed "
        f"{milliseconds(row.compute_seconds or 0.0)}, the timed steps took {_span(row)}. Do not subtract "
        "one from the other; run it again with nothing else on this machine."
    )


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

"""Whether the planner favours anybody: its steps beside the emulated ones, system by system.

    python -m benchmarks.published.beside_planner

Every setting that a GPU has measured for `docs/published.md`, but where the host decided. Twice: with the
planner's network, which gives EFA less bandwidth and more latency than its data sheet, and with the network
that the emulation had. Only the second compares computation with computation.
"""

from __future__ import annotations

import shlex
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

from benchmarks.published.dated import by_date
from benchmarks.published.emulate import Measured, is_sound
from benchmarks.published.planned import setting_of
from benchmarks.published.results import RESULTS, THEME, read
from benchmarks.published.rows import Point

from mics.cost.clusters import find_cluster
from mics.planner.systems import predict_quickly


@dataclass(frozen=True, kw_only=True)
class Beside:
    """One measured setting, and what the planner says of it."""

    measured: Measured
    point: Point
    planned_seconds: float
    on_that_network: float
    """With the network of the emulation."""

    @property
    def is_ours(self) -> bool:
        return self.measured.system == "mics"

    @property
    def error(self) -> float:
        """Of computation and overlap, as a share: on one network."""
        assert self.measured.step_seconds is not None
        return self.on_that_network / self.measured.step_seconds - 1


def point_of(measured: Measured) -> Point:
    """What ran, from the command that ran it."""
    words = shlex.split(measured.command)[2:]
    given = {name: value for name, value in pairwise(words) if name.startswith("--")}
    kept = "checkpoint" if given["--checkpoint"] == "True" else "kept"
    return Point(
        model=given["--model"],
        cluster=given["--cluster"],
        system=given["--systems"],
        partition_size=int(given["--partition-size"]),
        micro_batch=int(given["--micro-batch"]),
        accumulation=int(given["--accumulation"]),
        seq_len=int(given["--seq-len"]),
        activations="offload" if "--offload" in words else kept,
        kernels="current",
    )


def measured() -> Iterator[Measured]:
    """The newest of each setting; host-bound ones and those of too few blocks left out."""
    newest = {
        each.command: each
        for file in by_date(RESULTS, THEME)
        for result in read(file)
        for each in result.measured
        if each.step_seconds is not None and " --seq-len " in each.command and is_sound(each)
    }
    yield from (each for each in newest.values() if not each.host_bound)


def beside(found: Measured) -> Beside:
    """The same setting, simulated."""
    point = point_of(found)
    setting = setting_of(point)
    there = replace(setting, cluster=find_cluster(point.cluster))
    return Beside(
        measured=found,
        point=point,
        planned_seconds=predict_quickly(setting, point.system).step_seconds,
        on_that_network=predict_quickly(there, point.system).step_seconds,
    )


def main() -> None:
    """Print the table, and what it comes to for mics and for the others."""
    rows = [beside(each) for each in measured()]
    print("| model | cluster | system | setting | emulated | planner | | on that network | |")
    print("|---|---|---|---|---:|---:|---:|---:|---:|")
    for row in sorted(rows, key=lambda row: (row.point.cluster, row.point.model, row.point.system)):
        seconds = row.measured.step_seconds
        assert seconds is not None
        planned = f"{row.planned_seconds:.1f} s | {100 * (row.planned_seconds / seconds - 1):+.0f}%"
        print(
            f"| {row.point.model} | {row.point.cluster} | {row.point.system} | {row.measured.setting} | "
            f"{seconds:.1f} s | {planned} | {row.on_that_network:.1f} s | {100 * row.error:+.0f}% |"
        )
    for name, errors in (
        ("mics", [row.error for row in rows if row.is_ours]),
        ("others", [row.error for row in rows if not row.is_ours]),
    ):
        print(
            f"{name}: {len(errors)} settings, on that network {100 * statistics.median(errors):+.0f}% in the "
            f"middle, {100 * min(errors):+.0f} to {100 * max(errors):+.0f}%"
        )


if __name__ == "__main__":
    main()

"""Dated results of one experiment, and the newest of each."""

from __future__ import annotations

import datetime
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from benchmarks.published import trillion
from benchmarks.published.dated import by_date, dated_file, day_of, machine_of
from benchmarks.published.emulate import Job, Measured, jobs_of, known_of, share_of_2022, those_of
from benchmarks.published.planned import ratio_of_drops
from benchmarks.published.predict import PeerAtBest, Range
from benchmarks.published.rows import EXPERIMENTS, Measure, Row, rows_of

RESULTS: Final = Path(__file__).resolve().parents[1] / "results"
THEME: Final = "published"
_RUNS_OF_A_DROP: Final = 4
HOST_BOUND: Final = "host-bound here"
IN_NO_PACKAGE: Final = "in no package"
PLANNER: Final = "planner"
"""In place of the hardware, where nothing was measured."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """What is known of one experiment."""

    experiment: str
    predicted: dict[str, Range | None]
    """By row."""
    peers: dict[str, list[PeerAtBest]]
    """By row: systems at their own best, predicted."""
    measured: tuple[Measured, ...] = ()
    command: str = ""
    versions: str = ""
    seconds: float = 0.0
    """That this took."""
    made: str = field(default="", compare=False)
    """When it was written. Of one day the later prediction counts, measured beside it or not."""

    def emulated(self, row: Row) -> Range | None:
        """What was measured of a row, in its own measure; None: not run."""
        return _range(self._values(row))

    def blocks(self, row: Row) -> list[int | None]:
        """How many of its blocks ran, of what is measured of a row; None: all."""
        found = {each.layers for _, each in self._runs(row, "row", "against") if each and each.step_seconds}
        return sorted(found, key=lambda layers: -(layers or math.inf))

    def why_not(self, row: Row) -> str:
        """What kept a measurement of the row from being one; empty: nothing, or it was not tried."""
        if not list(jobs_of(row)):
            return IN_NO_PACKAGE
        tried = [each for _, each in self._runs(row, "row", "against") if each]
        errors = [f"did not run: {each.error}" for each in tried if each.error]
        return next(iter([*errors, *(HOST_BOUND for each in tried if each.host_bound)]), "")

    def with_kernels_of_2022(self, row: Row) -> Range | None:
        """The same speed with the documents' kernels; None: not run, or a ratio, which has no kernels."""
        if row.measure is not Measure.TFLOPS:
            return None
        pairs = [(job, _tflops(each)) for job, each in self._runs(row, "row")]
        return _range([None if value is None else value * share_of_2022(job) for job, value in pairs])

    def _values(self, row: Row) -> list[float | None]:
        """None: it did not run, or the host decided."""
        ours = [each for _, each in self._runs(row, "row")]
        if row.measure is Measure.TFLOPS:
            return [_tflops(each) for each in ours]
        theirs = [each for _, each in self._runs(row, "against")]
        if row.measure is Measure.DROP:
            return [_drops([_tflops(each) for each in (*ours, *theirs)])]
        return [_ratio(row, one, other) for one, other in zip(ours, theirs, strict=True)]

    def _runs(self, row: Row, *roles: str) -> list[tuple[Job, Measured | None]]:
        """What a row is made of, with what is known of each."""
        its = [each for each in self.measured if each.key == row.key]
        return [(job, known_of(job, its)) for job in jobs_of(row) if job.role in roles]


def _tflops(found: Measured | None) -> float | None:
    return None if found is None or found.host_bound else found.tflops


def _range(values: Sequence[float | None]) -> Range | None:
    found = [value for value in values if value is not None]
    if not found:
        return None
    return Range(low=min(found), high=max(found), num_points=len(values), num_fitting=len(found))


def _drops(found: Sequence[float | None]) -> float | None:
    speeds = [each for each in found if each]
    return ratio_of_drops(speeds) if len(speeds) == _RUNS_OF_A_DROP else None


def _ratio(row: Row, ours: Measured | None, theirs: Measured | None) -> float | None:
    speed, other = _tflops(ours), _tflops(theirs)
    if not ours or not theirs or not speed or not other:
        return None
    if row.measure is Measure.SLOWDOWN:
        assert ours.step_seconds and theirs.step_seconds
        return 100 * (ours.step_seconds / theirs.step_seconds - 1)
    ratio = speed / other
    return 100 * ratio if row.measure is Measure.SCALING else ratio


def error_of(row: Row, found: Range | None) -> str:
    """Difference of the nearest end of a range from what is published, in per cent; from a bound, of both.

    A bound is kept where the whole range is below it. Where the low end alone is, or is within 10%, the
    prediction is right (`Row.is_right`) and the words say so.
    """
    if found is None:
        return ""
    if row.at_most:
        if found.high <= row.published:
            return "below the bound"
        low, high = (f"{100 * (value / row.published - 1):+.0f}%" for value in (found.low, found.high))
        where = "partly below" if found.low <= row.published else "above"
        if where == "above" and row.is_right(found.low, found.high):
            where = "above, the low end within 10%"
        return f"{low if low == high else f'{low} to {high}'}: {where}"
    if found.low <= row.published <= found.high:
        return "inside"
    nearest = min((found.low, found.high), key=lambda value: abs(value - row.published))
    return f"{100 * (nearest / row.published - 1):+.1f}%"


def write(result: Result, folder: Path) -> Path:
    """Into the file of today and this hardware, in place of what it has of the experiment.

    What was measured today in settings that are no system's best any more stays: other pages quote it.
    """
    file = dated_file(folder, THEME, None if result.measured else PLANNER)
    found = _read(file) if file.exists() else {}
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    again = {each.command for each in result.measured}
    before = found[result.experiment].measured if result.experiment in found else ()
    measured = (*result.measured, *(each for each in before if each.command not in again))
    found[result.experiment] = replace(result, measured=measured, made=now)
    file.write_text(json.dumps({name: asdict(each) for name, each in found.items()}, indent=1))
    return file


def measured_before(experiment: str, folder: Path, *, any_day: bool = False) -> tuple[Measured, ...]:
    """What this hardware has measured of an experiment, the newest first: today, or on ``any_day``."""
    today = dated_file(folder, THEME)
    same = [file for file in by_date(folder, THEME) if machine_of(file) == machine_of(today)]
    return _measured(experiment, folder, same if any_day else [file for file in same if file == today])


def _measured(experiment: str, folder: Path, files: Sequence[Path]) -> tuple[Measured, ...]:
    """All that files have of an experiment, the newest first, after a run of the whole largest model."""
    whole = trillion.measured_whole(folder) if experiment == trillion.THEME else ()
    found = [each for file in reversed(files) if (each := _read(file).get(experiment)) is not None]
    return (*whole, *(measured for each in found for measured in each.measured))


def _read(file: Path) -> dict[str, Result]:
    return {name: _result(found) for name, found in json.loads(file.read_text()).items()}


def _result(found: dict[str, Any]) -> Result:
    ranges = {key: None if each is None else Range(**each) for key, each in found["predicted"].items()}
    peers = {key: [PeerAtBest(**peer) for peer in peers] for key, peers in found["peers"].items()}
    measured = tuple(Measured(**each) for each in found["measured"])
    return Result(**{**found, "predicted": ranges, "peers": peers, "measured": measured})


def read(file: Path) -> list[Result]:
    """All experiments of one file, in the documents' order."""
    found = _read(file)
    return [found[name] for name in EXPERIMENTS if name in found]


def newest(experiment: str, folder: Path = RESULTS) -> Result | None:
    """The newest prediction of an experiment and peers, with what any day measured of them; None: nothing.

    The same is known to ``--missing``. What has fewer blocks than `mics bench` scales from today is left out.
    """
    files = by_date(folder, THEME)
    rows = rows_of(experiment)
    keys = {row.key for row in rows}
    dated = [(day_of(file), _read(file).get(experiment)) for file in files]
    known = [(day, each) for day, each in dated if each is not None and set(each.predicted) == keys]
    found = [each for _, each in sorted(known, key=lambda pair: (pair[0], pair[1].made))]
    if not found:
        return None
    peers = next((each.peers for each in reversed(found) if each.peers), {})
    jobs = [job for row in rows for job in jobs_of(row, peers.get(row.key, ()))]
    measured = tuple(those_of(jobs, _measured(experiment, folder, files)))
    return replace(found[-1], measured=measured, peers=peers)

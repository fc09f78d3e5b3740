"""``python -m benchmarks.published``."""

from __future__ import annotations

import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Final

import torch
import tyro
from benchmarks.published import page
from benchmarks.published.dated import hardware
from benchmarks.published.emulate import jobs_of, measure, those_of
from benchmarks.published.predict import peers_at_best, predict_row
from benchmarks.published.results import RESULTS, Result, measured_before, write
from benchmarks.published.rows import EXPERIMENTS, rows_of

import mics
from mics.utils.command_line import parse

_AT_ONCE: Final = 3  # settings that one process measures, before they are written
_EXPERIMENTS = f"some of {', '.join(EXPERIMENTS)}"


@dataclass(frozen=True, kw_only=True)
class Published:
    """Repeat published experiments at their own settings: planner, one GPU as rank 0, and peers beside it.

    One experiment a word: what a document says, what the planner predicts over all that the document leaves
    open, what this GPU measures in the document's GPU's time, and other systems at their own best settings.
    """

    experiments: Annotated[
        tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(help=_EXPERIMENTS, metavar="EXPERIMENT ...")
    ] = ()
    all: bool = False
    """All experiments."""
    plan_only: bool = False
    """Predict and do not measure: needs no GPU."""
    list: bool = False
    """Print the experiments and their published figures, and stop."""
    peers: bool = True
    """Also other systems, each at its own best setting."""
    missing: bool = False
    """Measure only what no result of this GPU has, of whatever day. Without it, what none of today has."""
    results: Path = Path("benchmarks/results")
    """Folder for dated results (JSON and Markdown)."""
    out: Path = Path("runs/published")
    """Folder for what each measurement leaves: tables, traces, timelines."""
    page: bool = True
    """Write the tables and pictures of docs/published.md again."""

    def chosen(self) -> tuple[str, ...]:
        unknown = [name for name in self.experiments if name not in EXPERIMENTS]
        if unknown:
            raise SystemExit(
                f"experiments: expected some of {', '.join(EXPERIMENTS)}, found {', '.join(unknown)}; "
                "--list shows what each is"
            )
        if self.all == bool(self.experiments):
            found = "both" if self.all else "neither"
            raise SystemExit(
                f"experiments, --all: expected one of them, found {found}; say which to repeat, such as "
                f"{EXPERIMENTS[0]}, or --all"
            )
        return EXPERIMENTS if self.all else self.experiments


def main(args: Sequence[str] | None = None) -> int:
    """Parse, repeat, write. 2 if the command cannot be."""
    words = list(sys.argv[1:] if args is None else args)
    config = parse(Published, words, prog="python -m benchmarks.published")
    if config.list:
        print("\n".join(listed()))
        return 0
    chosen = config.chosen()
    if not config.plan_only and not torch.cuda.is_available():
        raise SystemExit("a measurement: expected a CUDA device, found none; add --plan-only")
    config.results.mkdir(parents=True, exist_ok=True)
    told = {
        "--plan-only": config.plan_only,
        "--no-peers": not config.peers,
        "--missing": config.missing,
    }
    said = [*(["--all"] if config.all else chosen), *(flag for flag, is_set in told.items() if is_set)]
    command = shlex.join(["python", "-m", "benchmarks.published", *said])
    file = None
    for experiment in chosen:
        result = replace(repeat(experiment, config), command=command)
        file = write(result, config.results)  # a later run of the day goes on from there
        print("\n".join(page.section(result)), flush=True)
    assert file is not None
    file.with_suffix(".md").write_text(page.document(file))
    print(f"written: {file} and its Markdown", flush=True)
    if config.page and config.results.resolve() == RESULTS:
        from benchmarks.published import pictures  # matplotlib takes a second

        page.main()
        pictures.main()
    return 0


def repeat(experiment: str, config: Published) -> Result:
    """One experiment: predict, then measure."""
    began = time.perf_counter()
    rows = rows_of(experiment)
    predicted = {row.key: predict_row(row) for row in rows}
    compared = [row for row in rows if row.system in ("mics-published", "zero3")][:1]
    peers = {row.key: peers_at_best(row) for row in compared if config.peers}
    versions = f"mics {mics.__version__}, torch {torch.__version__}, python {platform.python_version()}"
    found = Result(experiment=experiment, predicted=predicted, peers=peers, versions=f"{versions}, no GPU")
    if config.plan_only:
        return replace(found, seconds=time.perf_counter() - began)
    # Peers last: their smallest micro-batches take longest. A call that is broken off keeps what was written.
    jobs = [job for row in rows for job in jobs_of(row, peers.get(row.key, ()))]
    jobs.sort(key=lambda job: job.role == "peer")
    known = measured_before(experiment, config.results, any_day=config.missing)
    for first in range(0, len(jobs), _AT_ONCE):
        known = (*measure(jobs[first : first + _AT_ONCE], config.out / experiment, known), *known)
        found = replace(
            found,
            measured=tuple(those_of(jobs, known)),
            versions=f"{versions}, {hardware()}",
            seconds=time.perf_counter() - began,
        )
        write(found, config.results)
    return found


def listed() -> list[str]:
    """What can be repeated."""
    lines = []
    for experiment in EXPERIMENTS:
        lines.append(experiment)
        lines += [f"  {row.what}: {page.published_in_words(row)}" for row in rows_of(experiment)]
    return lines

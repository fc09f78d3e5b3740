"""Start the processes that make a plan's runs, and go on with the rest when one takes them down."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Protocol

from mics.bench.plan import Outcome, RunPlan
from mics.bench.systems import SYSTEMS

Launcher = Callable[[list[str]], list[str]]
"""From the arguments of a Python process (``-m module ...``) to the command that starts it."""

_RANK: Final = re.compile(r"^(\[rank\d+\]:\s*)+")
"""That torch begins lines with: once for each process group that there was."""


def in_one_process(arguments: list[str]) -> list[str]:
    return [sys.executable, *arguments]


def in_ranks(num_ranks: int) -> Launcher:
    def launch(arguments: list[str]) -> list[str]:
        return [
            sys.executable, "-m", "torch.distributed.run", "--standalone",
            "--nproc-per-node", str(num_ranks), *arguments,
        ]  # fmt: skip

    return launch


class Showing(Protocol):
    """Whoever looks at the runs."""

    def say(self, text: str) -> None:
        """A line about them."""

    def advance(self, amount: float = 1) -> None:
        """So many more are over, well or not."""


def supervise(
    plan: RunPlan, launcher: Launcher, *, timeout: float, show: Showing, cwd: Path | None = None
) -> list[Outcome]:
    """Make all runs. A run that crashes or hangs is an outcome with an error, and the others still happen."""
    outcomes: dict[int, Outcome] = {}
    left = [run.number for run in plan.runs]
    with tempfile.TemporaryDirectory(prefix="mics-bench-") as scratch:
        file = Path(scratch) / "plan.json"
        plan.write(file)
        attempt = 0
        while left:
            numbers = _together(plan, left)
            attempt += 1
            results, log = Path(scratch) / f"results-{attempt}", Path(scratch) / f"log-{attempt}"
            chosen = ",".join(map(str, numbers))
            command = launcher(["-m", "mics.bench.worker", str(file), str(results), chosen])
            problem = _run(command, results, log, timeout=timeout, show=show, cwd=cwd)
            started, found = read_results(results)
            outcomes.update(found)
            broken = [number for number in started if number not in found]
            if not found and not broken:
                broken = numbers[:1]  # it never got to the first
            for number in broken:
                outcomes[number] = Outcome(number=number, error=problem or "ended without a result")
                show.say(f"{plan.runs[number].row}: {outcomes[number].error}")
            show.advance(len(broken))
            left = [number for number in left if number not in outcomes]
    return [outcomes[run.number] for run in plan.runs]


def _together(plan: RunPlan, left: Sequence[int]) -> list[int]:
    """The next runs that can share a process: all up to one that must have its own."""
    first = plan.runs[left[0]]
    if SYSTEMS[first.system].isolated:
        return [first.number]
    shared: list[int] = []
    for number in left:
        if SYSTEMS[plan.runs[number].system].isolated:
            break
        shared.append(number)
    return shared


def _run(
    command: list[str],
    results: Path,
    log: Path,
    *,
    timeout: float,
    show: Showing,
    cwd: Path | None,
) -> str | None:
    """Run to the end, or until no result has come for ``timeout`` seconds. What went wrong, if it did."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, cwd=cwd, start_new_session=True, env=_environment()
        )
    began, shown, over = time.time(), 0, 0
    try:
        while True:
            try:
                status: int | None = process.wait(timeout=0.5)
            except subprocess.TimeoutExpired:
                status = None
            shown = _show(log, shown, show.say)
            before, over = over, _num_over(results)
            show.advance(over - before)
            if status is not None:
                return None if status == 0 else _reason(log, status)
            if time.time() - max(began, _changed(results), _changed(log)) > timeout:
                return f"nothing happened for {timeout:.0f} s: it hangs, or --timeout is too short"
    finally:
        _end(process)


def _environment() -> dict[str, str]:
    # Those of a launcher around this process are not meant for the ones it starts.
    launched = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")
    environment = {name: value for name, value in os.environ.items() if name not in launched}
    environment.setdefault("OMP_NUM_THREADS", "1")
    environment.setdefault("PYTHONUNBUFFERED", "1")
    # For every system alike: otherwise what the allocator reserves is mostly holes between activations.
    environment.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    return environment


def _changed(file: Path) -> float:
    return file.stat().st_mtime if file.exists() else 0.0


def _num_over(results: Path) -> int:
    """Runs that have a result; the last line may be half written."""
    lines = results.read_bytes().split(b"\n")[:-1] if results.exists() else []
    return sum(not line.startswith(b'{"started"') for line in lines)


def _show(log: Path, shown: int, say: Callable[[str], None]) -> int:
    """Pass on the worker's own progress lines; everything else stays in the log."""
    text = log.read_bytes()[shown:]
    whole = text[: text.rfind(b"\n") + 1]
    for line in whole.decode(errors="replace").splitlines():
        if line.lstrip().startswith("["):
            head = line.lstrip()[1:].split("]")[0]
            if "/" in head and head.replace("/", "").isdecimal():
                say(line.strip())
    return shown + len(whole)


def _reason(log: Path, status: int) -> str:
    """The last error in the log, in a line."""
    lines = [_RANK.sub("", line) for line in log.read_text(errors="replace").splitlines()]
    errors = [line.strip() for line in lines if "Error" in line and not line.startswith(("Traceback", " "))]
    told = errors[0] if errors else (lines[-1].strip() if lines else "no output")
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"{how}: {told[:400]}"


def read_results(results: Path) -> tuple[list[int], dict[int, Outcome]]:
    """Numbers of the runs that were begun, and the outcomes of those that ended."""
    started: list[int] = []
    found: dict[int, Outcome] = {}
    if results.exists():
        for line in results.read_text().splitlines():
            if "started" in json.loads(line):
                started.append(json.loads(line)["started"])
            else:
                outcome = Outcome.from_line(line)
                found[outcome.number] = outcome
    return started, found


def _end(process: subprocess.Popen[bytes]) -> None:
    """Leave nothing running."""
    for sign, patience in ((signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0)):
        if process.poll() is None:
            try:
                os.killpg(process.pid, sign)
                process.wait(timeout=patience)
            except (ProcessLookupError, subprocess.TimeoutExpired):
                continue

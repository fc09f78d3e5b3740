"""A run of ``mics train`` with faults in it, watched from outside."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Final

from benchmarks.faults.fault import VARIABLE, Fault, encode

from mics.checkpoint.blocks import verify_file
from mics.checkpoint.index import read_index
from mics.checkpoint.opening import find_checkpoint

REPOSITORY: Final = Path(__file__).resolve().parents[2]
LEFT: Final = 143
_GOES_ON: Final = re.compile(r"going on from \S*step-(\d+)")

SMALL: Final = [
    *("--launch.device", "cpu", "--launch.timeout-seconds", "10"),
    *("--sharding.param-dtype", "bf16"),  # as on a GPU, where new parameters go to replicas as moves
    *("--model.num-layers", "2", "--model.hidden-size", "32", "--model.seq-len", "32"),
    *("--model.dropout", "0.1", "--batch-size", "2", "--micro-steps", "2"),
    *("--report.interval", "1", "--report.eval-interval", "5", "--report.eval-batches", "1"),
    *("--report.sample-tokens", "0", "--report.no-save-weights"),
]
"""A model that trains in no time, with a dropout that tells whether random states come back."""


@dataclass(frozen=True, kw_only=True)
class Observation:
    """What happened after one fault."""

    fault: Fault
    noticed_seconds: float | None
    """Until the first of the other ranks had recorded its error; None where the launcher was told first."""
    over_seconds: float
    """Until the launcher had ended all ranks and started them again."""
    message: str
    latest: str
    """What ``latest`` names at that time; every byte of it has been checked."""
    resumed_step: int | None = None


@dataclass(kw_only=True)
class Job:
    """Runs until it is finished, in one folder, started again whenever it leaves with 143."""

    folder: Path
    args: Sequence[str]
    faults: Sequence[Fault] = ()
    observations: list[Observation] = field(default_factory=list)
    output: str = ""

    @property
    def run_dir(self) -> Path:
        return self.folder / "job"

    def run(self, *, timeout_s: float = 600.0) -> int:
        """Returns the exit code of the last start."""
        self.folder.mkdir(parents=True, exist_ok=True)
        deadline = time.monotonic() + timeout_s
        code, more = LEFT, []
        while code == LEFT:
            code = self._start(more, timeout_s=max(1.0, deadline - time.monotonic()))
            if code == LEFT:
                self._observe("left with exit code 143", time.time())
            more = ["--checkpoint.resume", "latest"]
        self._note_resumed()
        return code

    def losses(self) -> dict[tuple[int, str], float]:
        """Every loss that was recorded, by step and kind."""
        return losses_in(self.run_dir / "metrics.jsonl")

    def stalls(self) -> list[float]:
        """Seconds for which training stood still at each save that rank 0 has recorded."""
        rows = map(json.loads, (self.run_dir / "metrics.jsonl").read_text().splitlines())
        return [row["checkpoint_stall_seconds"] for row in rows if "checkpoint_stall_seconds" in row]

    def _start(self, more: Sequence[str], *, timeout_s: float) -> int:
        command = [sys.executable, "-m", "mics.cli", "train"]
        command += ["--output-dir", str(self.folder), "--name", "job", *SMALL, *self.args, *more]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        with subprocess.Popen(command, env=self.environment(), text=True, **pipes) as process:
            assert process.stdout is not None and process.stderr is not None
            readers = [
                threading.Thread(target=self._read, args=(process.stdout, False)),
                threading.Thread(target=self._read, args=(process.stderr, True)),
            ]
            for reader in readers:
                reader.start()
            try:
                return process.wait(timeout=timeout_s)
            finally:
                process.terminate()  # where it is not over
                for reader in readers:
                    reader.join()

    def environment(self) -> dict[str, str]:
        """What makes the ranks meet the faults."""
        path = [str(Path(__file__).parent / "injected"), str(REPOSITORY / "src"), str(REPOSITORY)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path)}
        return (
            {**environment, VARIABLE: encode(self.faults, str(self.folder))} if self.faults else environment
        )

    def _read(self, stream: IO[str], errors: bool) -> None:
        for line in stream:
            self.output += line
            if errors and "starting all ranks again" in line:
                self._observe(line.strip().removeprefix("mics: "), time.time())
            elif _GOES_ON.search(line):
                self._note_resumed(line)

    def _observe(self, message: str, now: float) -> None:
        self._note_resumed()
        number = len(self.observations)
        fired_at = float((self.folder / f"fault-{number}").read_text())
        folder = find_checkpoint(self.run_dir / "checkpoints") if self._has_checkpoint() else None
        if folder is not None:
            for name, stored in read_index(folder).files.items():
                verify_file(folder / name, stored)
        errors = [file.stat().st_mtime for file in self.run_dir.glob("logs/**/error.json")]
        after = [written - fired_at for written in errors if written >= fired_at]
        self.observations.append(
            Observation(
                fault=self.faults[number],
                noticed_seconds=min(after, default=None),
                over_seconds=now - fired_at,
                message=message,
                latest="" if folder is None else folder.name,
            )
        )

    def _has_checkpoint(self) -> bool:
        return (self.run_dir / "checkpoints" / "latest").exists()

    def _note_resumed(self, line: str = "") -> None:
        """Where the run went on after the last fault; one that says nothing began anew."""
        if self.observations and self.observations[-1].resumed_step is None:
            found = _GOES_ON.search(line)
            step = 0 if found is None else int(found[1])
            self.observations[-1] = replace(self.observations[-1], resumed_step=step)


def losses_in(metrics: Path) -> dict[tuple[int, str], float]:
    """Every loss in a file of measurements, by step and kind; a step that occurs twice is an error."""
    found: dict[tuple[int, str], float] = {}
    for line in metrics.read_text().splitlines():
        row = json.loads(line)
        for kind in ("loss", "validation_loss"):
            if kind in row:
                assert (row["step"], kind) not in found, f"step {row['step']} is recorded twice"
                found[row["step"], kind] = row[kind]
    return found

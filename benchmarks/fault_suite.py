"""Faults at random points of `mics train`: does every run end with the losses of one that had none?

    python -m benchmarks.fault_suite --seeds 0 1 2 3 4 5 6 7 --faults 3 --out faults.md

Every seed is a run of its own with faults one after the other; odd seeds save synchronously. Each fault kills
or stops a rank, kills a node, or asks to leave; in the forward, in the backward, inside a collective, while a
rank writes its part of a checkpoint, or while `latest` is moved. The run is started again by `mics train`
itself, or by us after it has left. At each restart every byte of what `latest` names is checked, and at the
end every loss is compared with the reference, bit for bit.
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks.faults.fault import KINDS, MOMENTS, draw_faults
from benchmarks.faults.job import Job, Observation

NUM_STEPS = 24
INTERVAL = 4


def main() -> int:
    options = _options()
    folder = Path(tempfile.mkdtemp(prefix="mics-faults-"))
    args = ["--steps", str(NUM_STEPS), "--checkpoint.interval", str(INTERVAL)]
    args += ["--launch.simulated-nodes", "2", "--launch.ranks-per-node", str(options.ranks_per_node)]
    args += ["--launch.max-restarts", str(options.faults + 1)]
    reference = Job(folder=folder / "reference", args=args)
    assert reference.run() == 0, reference.output
    rows, num_bad, stalls = [_HEAD], 0, reference.stalls()
    print(_HEAD, flush=True)
    for seed in options.seeds:
        job = _run(seed, folder / f"seed-{seed}", args, options)
        equal = job.losses() == reference.losses()
        stalls += job.stalls() if seed % 2 == 0 else []
        for number, observation in enumerate(job.observations):
            rows.append(_row(f"{seed}.{number}", observation, asynchronous=seed % 2 == 0, equal=equal))
            print(rows[-1], flush=True)
            num_bad += not equal
        num_bad += abs(len(job.observations) - options.faults)
    rows += ["", _summary(stalls, num_faults=len(rows) - 1, num_bad=num_bad)]
    print("\n".join(rows[-2:]))
    if options.out is not None:
        options.out.write_text("\n".join(rows) + "\n")
    shutil.rmtree(folder)
    return int(num_bad > 0)


def _run(seed: int, folder: Path, args: Sequence[str], options: argparse.Namespace) -> Job:
    faults = draw_faults(
        seed,
        num_faults=options.faults,
        num_steps=NUM_STEPS,
        interval=INTERVAL,
        num_ranks=2 * options.ranks_per_node,
        kinds=options.kinds,
    )
    how = "--checkpoint.asynchronous" if seed % 2 == 0 else "--checkpoint.no-asynchronous"
    job = Job(folder=folder, args=[*args, how], faults=faults)
    code = job.run()
    if code != 0:
        print(job.output, file=sys.stderr)
        raise SystemExit(f"seed {seed}: expected exit code 0, found {code}; the run is in {folder}")
    return job


_HEAD = (
    "| seed | what | when | noticed after s | started again after s | message | went on after step | losses "
    "equal |\n|---|---|---|---:|---:|---|---:|---|"
)


def _row(number: str, seen: Observation, *, asynchronous: bool, equal: bool) -> str:
    moment = MOMENTS[seen.fault.moment]
    if seen.fault.moment in ("save", "latest"):
        moment += ", beside the training" if asynchronous else ", training stands still"
    noticed = "" if seen.noticed_seconds is None else f"{seen.noticed_seconds:.1f}"
    message = re.sub(r"\S+/checkpoints/", "", seen.message.split("; starting all ranks again")[0])
    return (
        f"| {number} | {seen.fault.describe()} | step {seen.fault.step}, {moment} | {noticed} | "
        f"{seen.over_seconds:.1f} | {message} | {seen.resumed_step} | {'yes' if equal else 'NO'} |"
    )


def _summary(stalls: Sequence[float], *, num_faults: int, num_bad: int) -> str:
    return (
        f"{num_faults} faults, {num_faults - num_bad} of them with all losses equal to the bit. Stall for an "
        f"asynchronous save: median {statistics.median(stalls) * 1e3:.0f} ms, longest "
        f"{max(stalls) * 1e3:.0f} ms ({len(stalls)} saves)."
    )


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)))
    parser.add_argument("--faults", type=int, default=3, help="faults in each run")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--ranks-per-node", type=int, default=1)
    parser.add_argument("--out", type=Path, help="file for the table")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

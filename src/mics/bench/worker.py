"""The process that makes the runs of a plan: ``python -m mics.bench.worker PLAN RESULTS FIRST``.

Under a launcher it is one rank of many. It notes each run before it starts, so that whoever started it knows
which run took it down.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from mics.bench.measure import measure
from mics.bench.plan import RunPlan
from mics.train.ranks import share_gpu


def work(plan: RunPlan, results: Path, numbers: list[int]) -> None:
    """Make the runs with these numbers, one after the other, and write a line for each."""
    if plan.runs[0].cluster is None:
        _join(plan.runs[0].job.device)
    writes = int(os.environ.get("RANK", "0")) == 0
    wanted = [run for run in plan.runs if run.number in numbers]
    for run in wanted:
        if writes:
            _append(results, json.dumps({"started": run.number}))
            print(f"[{run.number + 1}/{len(plan.runs)}] {run.row}", flush=True)
        outcome = measure(run, plan)
        if writes:
            _append(results, outcome.as_line())
    if dist.is_initialized():
        dist.destroy_process_group()


def _join(device: str) -> None:
    """The ranks that the launcher gave, or this process alone."""
    if "RANK" not in os.environ:
        os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="0")
    if device == "cuda":
        if int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count():
            share_gpu(int(os.environ["RANK"]), os.environ)
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    if not dist.is_initialized():
        dist.init_process_group("nccl" if device == "cuda" else "gloo")


def _append(results: Path, line: str) -> None:
    with results.open("a") as file:
        file.write(line + "\n")


if __name__ == "__main__":
    work(
        RunPlan.read(Path(sys.argv[1])), Path(sys.argv[2]), [int(number) for number in sys.argv[3].split(",")]
    )

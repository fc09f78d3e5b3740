"""What ``mics.profile`` costs, and whether its times are those of the kernels themselves. Needs a GPU.

    python benchmarks/profile_accuracy.py --model gpt-3.6b --cluster benchmarks/clusters/ordinary.yaml:64

This GPU is rank 0 of an emulated cluster. Steps with and without a profile take turns; then one profile runs
inside torch's profiler, which sees every kernel, and both add up the same steps.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import torch

import mics
from mics.bench.config import Training
from mics.bench.measure import _batches
from mics.bench.systems.with_mics import build_mics
from mics.bench.timeline import Timeline, record
from mics.cost.clusters import find_cluster
from mics.diagnostics.step_times import DATA
from mics.diagnostics.tape import DeviceClock
from mics.utils.intervals import Interval, subtract, total, union

NUM_STEPS = 4


def timed(step: Callable[[], object], count: int) -> list[float]:
    """Seconds from step to step on the GPU."""
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    return [before.elapsed_time(after) * 1e-3 for before, after in pairwise(marks)]


def seconds_per_mark(device: torch.device, count: int = 1000) -> float:
    """What a mark takes the host."""
    clock = DeviceClock(device, num_spare=count)
    began = time.perf_counter()
    for _ in range(count):
        clock.mark()
    return (time.perf_counter() - began) / count


def from_kernels(timeline: Timeline, end: float, count: int) -> dict[str, float]:
    """Seconds per step until ``end``. New parameters that are on their way then are the next step's."""

    def until_end(intervals: list[Interval]) -> list[Interval]:
        return [(start, min(stop, end)) for start, stop in intervals if start < end]

    compute = until_end(timeline.busy("compute"))
    links = union(each for lane in ("intra", "inter") for each in timeline.busy(lane))
    exposed = total(subtract(until_end(links), compute))
    return {
        "computation": total(compute) / count,
        "exposed": exposed / count,
        "idle": (end - total(compute) - exposed) / count,
    }


def compare(arguments: argparse.Namespace, partition_size: int) -> None:
    cluster = find_cluster(arguments.cluster)
    config = Training(model=arguments.model, accumulation=arguments.accumulation)
    job = config.job(partition_size, cluster.world_size)
    device = torch.device("cuda", torch.cuda.current_device())
    with mics.emulate(cluster, imagined=job.imagined) as emulation:
        trainer = build_mics(job)
        batches = _batches(job, 1, device)[0]
        model = trainer._model

        def step() -> None:
            trainer.step(batches)

        for _ in range(4):
            step()
        off, on = [], []
        for _ in range(3):
            off += timed(step, NUM_STEPS)
            profile = mics.profile(model, steps=NUM_STEPS, warmup=0, folder=None, show=False)
            on += timed(step, NUM_STEPS)[:-1]  # the last one reads the tape
            assert profile.finished
        assert profile._tape is not None
        marks = profile._tape.num_marks / NUM_STEPS
        cost = statistics.median(on) / statistics.median(off) - 1
        folder = arguments.out / f"p{partition_size}"
        profile = mics.profile(model, steps=NUM_STEPS, warmup=0, folder=folder, show=False)
        timeline, _ = record(lambda: [step() for _ in range(NUM_STEPS)], emulation, device)
        assert profile.report is not None
        times = profile.report.times
        outside = times.kinds.get(DATA, 0.0)  # starting torch's profiler, for the most part
        step_seconds = times.seconds - outside
        kernels = from_kernels(timeline, step_seconds * NUM_STEPS, NUM_STEPS)
        print(f"{arguments.model} on {cluster.name}:{cluster.num_nodes}, partition size {partition_size}")
        print(
            f"  cost: {statistics.median(off) * 1e3:.1f} ms off, {statistics.median(on) * 1e3:.1f} ms on: "
            f"{cost:+.2%}; {marks:.0f} marks per step of {seconds_per_mark(device) * 1e6:.1f} us"
        )
        rows = {
            "computation": (times.computation, kernels["computation"]),
            "computation and host": (times.own - outside, kernels["computation"] + kernels["idle"]),
            "exposed": (times.exposed, kernels["exposed"]),
        }
        for name, (ours, theirs) in rows.items():
            difference = (ours - theirs) / step_seconds
            both = f"{ours * 1e3:.1f} ms, kernels {theirs * 1e3:.1f} ms"
            print(f"  {name}: {both}: {difference:+.2%} of the step")
        print(profile.report)
        trainer.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-3.6b")
    parser.add_argument("--cluster", default="benchmarks/clusters/ordinary.yaml:64")
    parser.add_argument("--partition-size", type=int, nargs="+", default=[8, 512])
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("runs/profile-accuracy"))
    arguments = parser.parse_args()
    for size in arguments.partition_size:
        compare(arguments, size)


if __name__ == "__main__":
    main()

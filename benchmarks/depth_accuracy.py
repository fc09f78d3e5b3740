"""How far `--layers` is off: a model that fits whole, run whole and scaled from two of its depths.

    python benchmarks/depth_accuracy.py                              # gpt-3.6b: 4 and 8 of 16 blocks, and 16
    python benchmarks/depth_accuracy.py --model gpt-small --cluster p4d.24xlarge:2

Every system runs the two depths and the whole model in turn, in the same process. It prints what each took,
the whole model as the two depths scale it, and the difference.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile

from mics.bench.config import Training
from mics.bench.depths import two_depths, with_whole_models
from mics.bench.measure import measure
from mics.bench.models import BENCH_MODELS
from mics.bench.plan import Outcome, Run, RunPlan, interleave
from mics.bench.summary import Row, summarise
from mics.cost.clusters import find_cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(BENCH_MODELS), default="gpt-3.6b")
    parser.add_argument("--layers", type=int, help="the deeper of the two; unset: half of the model")
    parser.add_argument("--cluster", default="p4d.24xlarge:64")
    parser.add_argument("--partition-size", type=int, default=8)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--offload", action="store_true")
    parser.add_argument("--systems", nargs="+", default=["mics", "hsdp", "fsdp2"])
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=2)
    args = parser.parse_args()
    cluster = find_cluster(args.cluster)
    training = Training(model=args.model, accumulation=args.accumulation, offload=args.offload)
    whole = training.job(args.partition_size, cluster.world_size)
    layers = args.layers or whole.model.num_layers // 2
    depths = two_depths(whole, layers)
    rows = [(job, cluster) for job in (*depths, whole)]
    runs = interleave(args.systems, rows, repeats=args.repeats, record=False)
    with tempfile.TemporaryDirectory() as folder:
        plan = RunPlan(runs=runs, num_warmup_steps=args.warmup, num_steps=args.steps, folder=folder)
        outcomes = [measure(run, plan) for run in runs]
    pairs = list(zip(runs, outcomes, strict=True))
    ran = _rows([pair for pair in pairs if pair[0].job == whole])
    scaled = _rows([pair for pair in pairs if pair[0].job != whole])
    print(
        f"{args.model} on {args.cluster}, partition size {args.partition_size}: ms a step, GiB at the peak\n"
    )
    heads = [f"{layers // 2} blocks", f"{layers}", f"{whole.model.num_layers}, scaled", "it ran", "error"]
    print(f"| system | {' | '.join([*heads, 'GiB, scaled', 'it ran', 'error'])} |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for system in args.systems:
        guess, *raw = [row for row in scaled if row.run.system == system]
        (truth,) = [row for row in ran if row.run.system == system]
        print(_line(system, raw, guess, truth))


def _rows(pairs: list[tuple[Run, Outcome]]) -> list[Row]:
    runs, outcomes = [run for run, _ in pairs], [outcome for _, outcome in pairs]
    return summarise(*with_whole_models(runs, outcomes), peak_tflops=None)


def _line(system: str, raw: list[Row], guess: Row, truth: Row) -> str:
    for row in (*raw, guess, truth):
        if row.error is not None:
            return f"| {system} | did not run: {row.error} |"
    times = [1e3 * row.step_seconds[0] for row in (*raw, guess, truth)]
    cells = [*(f"{time:.1f}" for time in times), _difference(times[-2], times[-1])]
    peaks = [_peak(guess), _peak(truth)]
    if all(peaks):
        cells += [*(f"{peak:.2f}" for peak in peaks), _difference(*peaks)]
    return f"| {system} | " + " | ".join(cells) + " |"


def _difference(guess: float, truth: float) -> str:
    return f"{100 * (guess / truth - 1):+.1f}%"


def _peak(row: Row) -> float:
    return statistics.median([(found.peak_allocated_nbytes or 0) / 2**30 for found in row.good])


if __name__ == "__main__":
    main()

"""Steps that a calibrated plan predicts against steps that are run.

    python -m benchmarks.calibration_accuracy --rates 25mbit 50mbit 100mbit   # namespace hosts (root)
    python -m benchmarks.calibration_accuracy --on gpu --model gpt-118m        # NCCL ranks that share a GPU

Two nodes of two ranks calibrate, write the cluster file, train real steps with `MICS_CLUSTER` naming it, and
ask the planner's simulation for the same setting. This is done several times in turns, because other load on
the machine changes: a round is compared with its own calibration, and the medians of all rounds are compared.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

import mics
from mics.calibrate.cluster_file import write_cluster
from mics.calibrate.collectives import Groups
from mics.calibrate.computing import ModelWork
from mics.calibrate.run import calibrate_world, node_indices
from mics.comm import World, join_world
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import shape_of_config
from mics.models import GPT, GPT_SIZES
from mics.planner.hardware import planned_cluster
from mics.planner.systems import Prediction, predict
from mics.train.config import LaunchSettings
from mics.train.ranks import joined

NUM_NODES = 2


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--on", choices=("namespace", "gpu"), default="namespace")
    found.add_argument("--rates", nargs="+", default=["25mbit", "50mbit", "100mbit"], help="of uplinks")
    found.add_argument("--ranks", type=int, default=2, help="ranks of each of the two nodes")
    found.add_argument("--model", default="gpt-tiny", choices=sorted(GPT_SIZES))
    found.add_argument("--partition-sizes", type=int, nargs="+", default=[2])
    found.add_argument("--batch-size", type=int, default=1, help="sequences of a micro-step on a rank")
    found.add_argument("--accumulation", type=int, default=1)
    found.add_argument("--rounds", type=int, default=5)
    found.add_argument(
        "--steps", type=int, default=3, help="measured, in pairs, after two pairs that are not"
    )
    found.add_argument("--max-seconds", type=float, default=60.0, help="of one calibration")
    found.add_argument("--max-mib", type=int, default=64, help="the largest collective that is calibrated")
    found.add_argument("--timeout", type=float, default=900.0, help="of one rate, in seconds")
    found.add_argument(
        "--kernels", action="store_true", help="print which kernels a GPU ran, and for how long"
    )
    found.add_argument("--name", default="calibrate", help="of the namespace cluster")
    found.add_argument("--json", type=Path, help="keep all rounds in this file")
    found.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return found


def main() -> None:
    args = parser().parse_args()
    if args.worker is not None:
        worker(args)
        return
    rows: list[dict[str, Any]] = []
    print(_HEAD, flush=True)
    for rate in args.rates if args.on == "namespace" else ["one GPU"]:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "rounds.json"
            run_ranks(args, rate, out)
            found = json.loads(out.read_text())
        for size in args.partition_sizes:
            own = [{"rate": rate, **row} for row in found if row["partition_size"] == size]
            rows += own
            print(_row(rate, size, own), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


_HEAD = (
    "| network | p | uplink fitted MB/s | measured ms (rounds) | predicted ms (rounds) | exposed | "
    "error of medians | errors of rounds |\n|---|---:|---:|---:|---:|---:|---:|---|"
)


def _row(rate: str, size: int, rounds: Sequence[dict[str, Any]]) -> str:
    measured = [1e3 * row["measured"] for row in rounds]
    predicted = [1e3 * row["predicted"] for row in rounds]
    middle, expected = statistics.median(measured), statistics.median(predicted)
    uplink = statistics.median(row["inter_bandwidth"] for row in rounds) / 1e6
    exposed = statistics.median(row["exposed"] / row["predicted"] for row in rounds)
    errors = ", ".join(f"{100 * (p / m - 1):+.1f}%" for p, m in zip(predicted, measured, strict=True))
    return (
        f"| {rate} | {size} | {uplink:.2f} | {middle:.0f} ({min(measured):.0f} to {max(measured):.0f}) | "
        f"{expected:.0f} ({min(predicted):.0f} to {max(predicted):.0f}) | {100 * exposed:.0f}% | "
        f"{100 * (expected / middle - 1):+.1f}% | {errors} |"
    )


def run_ranks(args: argparse.Namespace, rate: str, out: Path) -> None:
    """All ranks of one rate, to their end."""
    passed = [arg for arg in sys.argv[1:] if arg]
    program = ["-m", "benchmarks.calibration_accuracy", *passed, "--worker", str(out)]
    if args.on == "namespace":
        cluster = [*("--name", args.name, "--hosts", str(NUM_NODES), "--ranks", str(args.ranks))]
        limits = ["--rate", rate, "--timeout", str(args.timeout)]
        command = [sys.executable, "-m", "benchmarks.cluster", "run", *cluster, *limits, "--", *program]
        subprocess.run(command, check=True, stdout=sys.stderr)
        return
    environ = {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **os.environ}
    agents = []
    for node in range(NUM_NODES):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", str(NUM_NODES)),
            *("--nproc-per-node", str(args.ranks), "--node-rank", str(node)),
            *("--master-addr", "127.0.0.1", "--master-port", "29571"),
        ]
        agents.append(subprocess.Popen([*torchrun, *program], stdout=sys.stderr, env=environ))
    try:
        codes = [agent.wait(timeout=args.timeout) for agent in agents]
    finally:
        for agent in agents:
            if agent.poll() is None:
                agent.terminate()
                agent.wait(timeout=40)
    if any(codes):
        raise SystemExit(f"the ranks failed with exit codes {codes}")


def worker(args: argparse.Namespace) -> None:
    """One rank: rounds of calibration, prediction and steps."""
    # All nodes are on one machine: on a GPU all ranks share it.
    sharing = NUM_NODES * args.ranks if args.on == "gpu" else None
    with joined(LaunchSettings(ranks_per_gpu=sharing)) as me:
        world = join_world()
        groups = Groups.of(world, node_indices(world.node_names()))
        work = ModelWork(config=GPT_SIZES[args.model], batch_size=args.batch_size, device=me.device)
        file = args.worker.with_suffix(".yaml")
        rows = []
        for number in range(args.rounds):
            found = calibrate_world(
                world, groups, work, max_nbytes=args.max_mib << 20, max_seconds=args.max_seconds
            )
            if me.rank == 0:
                write_cluster(file, found, model=args.model, backend="")
                print(f"round {number + 1}: calibrated\n{file.read_text()}", file=sys.stderr, flush=True)
            world.host_group().all_gather(None)
            os.environ["MICS_CLUSTER"] = str(file)
            for size in args.partition_sizes:
                expected = prediction(args, file, size)
                seconds = measured_step(world, args, size, me.device)
                rows.append(
                    {
                        "partition_size": size,
                        "predicted": expected.step_seconds,
                        "compute": expected.compute_seconds,
                        "links": expected.link_seconds,
                        "exposed": sum(expected.exposed_seconds.values()),
                        "measured": seconds,
                        "inter_bandwidth": found.cluster.inter.bandwidth,
                        "cluster": file.read_text(),
                    }
                )
                if me.rank == 0:
                    shown = {key: value for key, value in rows[-1].items() if key != "cluster"}
                    print(f"round {number + 1}: {shown}", file=sys.stderr, flush=True)
        if me.rank == 0:
            args.worker.write_text(json.dumps(rows))


def prediction(args: argparse.Namespace, file: Path, partition_size: int) -> Prediction:
    """What `mics plan --cluster FILE` simulates for exactly this setting."""
    return predict(
        Setting(
            model=shape_of_config(args.model, GPT_SIZES[args.model]),
            cluster=planned_cluster(f"{file}:{NUM_NODES}"),
            partition_size=partition_size,
            micro_batch=args.batch_size,
            accumulation=args.accumulation,
            activations=Keeping(checkpoint=False),
        )
    )


def measured_step(world: World, args: argparse.Namespace, partition_size: int, device: torch.device) -> float:
    """Median seconds of a step of a real training, on the slowest rank."""
    torch.manual_seed(0)
    config = GPT_SIZES[args.model]
    with device:
        model = GPT(config)
    mics.shard(model, partition_size=partition_size, optimizer_sharding="world")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    shape = args.batch_size, config.seq_len + 1
    batches = [torch.randint(config.vocab_size, shape, device=device) for _ in range(args.accumulation)]

    def two_steps() -> None:
        """At once: new parameters reach the replicas under the next forward."""
        for _ in range(2):
            for tokens in mics.microsteps(model, batches):
                (model(tokens[:, :-1], tokens[:, 1:]) / len(batches)).backward()
            optimizer.step()
            optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    seconds = []
    for _ in range(2 + args.steps):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        world.host_group().all_gather(None)
        began = time.perf_counter()
        two_steps()
        seconds.append((time.perf_counter() - began) / 2)
    if args.kernels and device.type == "cuda":
        print(f"rank {world.rank}, p={partition_size}: {kernels(two_steps)}", file=sys.stderr, flush=True)
    every = world.host_group().all_gather(seconds[2:])
    return statistics.median(max(each) for each in zip(*every, strict=True))


def kernels(two_steps: Callable[[], None]) -> str:
    """Milliseconds of a step in which a GPU's own kernels of each kind ran, and their number."""
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        two_steps()
    found: dict[str, list[tuple[float, float]]] = {}
    for event in profiler.events():
        if event.device_type == torch.profiler.DeviceType.CUDA:
            kind = event.name.partition("(")[0] if "nccl" in event.name.lower() else "computation"
            found.setdefault(kind, []).append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    lines = [f"{kind} {length(spans) / 2:.1f} ms ({len(spans) // 2})" for kind, spans in found.items()]
    every = [span for spans in found.values() for span in spans]
    both = length(every) / 2
    whole = (max(end for _, end in every) - min(start for start, _ in every)) / 2
    return f"{'; '.join(sorted(lines))}; any {both:.1f} of {whole:.1f} ms"


def length(spans: Sequence[tuple[float, float]]) -> float:
    """Of the union of intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(spans):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


if __name__ == "__main__":
    main()

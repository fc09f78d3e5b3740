"""What the replica audit costs: time of an optimizer step with an audit every step, every 100, and with none.

    torchrun --nproc-per-node 2 benchmarks/audit_cost.py
    python benchmarks/audit_cost.py --hidden-size 2048 --layers 16 --tokens 1024 --partition-size 8

With a launcher: gloo ranks on the CPU. Without one and with a GPU: rank 0 of an emulated cluster of two nodes
of eight, on which digests are real and peers are imagined. The three settings take turns step by step in one
process, so that whatever else the machine does hits all alike. The processor's time of the whole process,
lanes included, is what other work on the machine disturbs least; on a GPU it is what issuing a step costs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist

import mics
from mics.models.gpt import GPT, GPTConfig

NAMES = {0: "none", 100: "every 100 steps", 1: "every step"}  # by interval
NUM_WARM_UP = 5  # steps: plans are recorded, homes are given
CLUSTER = mics.Cluster(
    num_nodes=2,
    ranks_per_node=8,
    intra=mics.Link(bandwidth=450e9, latency=3e-6),
    inter=mics.Link(bandwidth=50e9, latency=10e-6),
)


def trainer(
    shape: GPTConfig, interval: int, args: argparse.Namespace, device: torch.device
) -> Callable[[], None]:
    """Something that trains a model of its own by one optimizer step."""
    torch.manual_seed(0)
    model = GPT(shape).to(device)
    mics.shard(model, partition_size=args.partition_size, audit_interval=interval)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(shape.vocab_size, (args.batch, shape.seq_len), device=device)

    def step() -> None:
        for batch in mics.microsteps(model, [tokens]):
            model(batch, batch).backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def seconds(step: Callable[[], None], device: torch.device) -> tuple[float, float]:
    """Time of a step, all ranks together: on the clock, and of this process's processor."""
    settle(device)
    start = time.perf_counter(), time.process_time()
    step()
    settle(device)
    return time.perf_counter() - start[0], time.process_time() - start[1]


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    else:
        dist.barrier()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--partition-size", type=int, default=1)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--steps", type=int, default=300)
    args = parser.parse_args()
    launched = "RANK" in os.environ
    if not launched and not torch.cuda.is_available():
        parser.error("expected torchrun or a GPU, found neither; start it as the first line of the help says")
    device = torch.device("cpu" if launched else "cuda")
    around: AbstractContextManager[object] = nullcontext() if launched else mics.emulate(CLUSTER)
    if launched:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    shape = GPTConfig(
        num_layers=args.layers, num_heads=4, hidden_size=args.hidden_size, vocab_size=512, seq_len=args.tokens
    )
    with around:
        steps = {interval: trainer(shape, interval, args, device) for interval in NAMES}
        turns = [
            {interval: seconds(step, device) for interval, step in steps.items()}
            for _ in range(NUM_WARM_UP + args.steps)
        ]
        if dist.get_rank() == 0:
            report(turns[NUM_WARM_UP:], dist.get_world_size() // args.partition_size)
    if launched:
        dist.destroy_process_group()


def report(turns: list[dict[int, tuple[float, float]]], num_replicas: int) -> None:
    """Medians forget what happens once in 100 steps, and outliers; means remember both."""
    print(f"{num_replicas} replicas, {len(turns)} steps of each setting in turns")
    print("| audit | clock, median ms | against none | processor, mean ms | against none |")
    print("|---|---:|---:|---:|---:|")
    for interval, name in NAMES.items():
        cells = []
        for clock, average in enumerate((statistics.median, statistics.fmean)):
            found, without = (average([turn[which][clock] for turn in turns]) for which in (interval, 0))
            cells += [f"{1000 * found:.2f}", f"{found / without:.4f}"]
        print(f"| {name} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()

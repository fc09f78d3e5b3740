"""One GPT with torchao's Float8Linear, under mics and under FSDP2: step time, peak memory, bytes.

    python -m benchmarks.float8_beside_fsdp2                        # 4 NCCL ranks, on one GPU or several
    python -m benchmarks.float8_beside_fsdp2 --ranks 2 --size gpt-tiny --seq-len 64 --steps 4    # CPUs

The same model, batches and optimizer; blocks are compiled. Weights are gathered in bfloat16 and cast in their
modules, or gathered in float8. FSDP2 finds the scales by ``precompute_float8_dynamic_scale_for_fsdp`` after
each step. Each run has its own processes, so that none warms another.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torchao.float8 import (
    Float8LinearConfig,
    convert_to_float8_training,
    precompute_float8_dynamic_scale_for_fsdp,
)

import mics
from mics.models.gpt import GPT
from mics.models.sizes import find_size
from mics.train.ranks import share_gpu

_WARMUP = 4
_HEAD = "| system | gathered in | step ms (rounds) | of FSDP2 | peak GiB | last loss |"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    found.add_argument("--ranks", type=int, default=4)
    found.add_argument("--partition-sizes", type=int, nargs="+", help="of mics; all divisors unless given")
    found.add_argument(
        "--size", default="gpt-350m", help="ranks that share a GPU talk over sockets: a small one"
    )
    found.add_argument("--seq-len", type=int, default=1024)
    found.add_argument("--batch-size", type=int, default=4, help="sequences of a micro-step on a rank")
    found.add_argument("--accumulation", type=int, default=2)
    found.add_argument("--steps", type=int, default=8, help=f"timed, after {_WARMUP} that are not")
    found.add_argument("--rounds", type=int, default=2)
    found.add_argument("--no-compile", action="store_true")
    found.add_argument("--timeout", type=float, default=300.0, help="of one run, in seconds")
    found.add_argument("--json", type=Path, help="keep all rounds in this file")
    found.add_argument("--system", help=argparse.SUPPRESS)
    found.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    return found


def main() -> None:
    args = parser().parse_args()
    if args.worker is not None:
        worker(args)
        return
    sizes = args.partition_sizes or [size for size in range(1, args.ranks + 1) if args.ranks % size == 0]
    layouts = [f"fsdp2-{args.ranks}", *(f"mics-{size}" for size in sizes)]
    runs = [f"{layout}-{dtype}" for layout in layouts for dtype in ("bfloat16", "float8")]
    rows: dict[str, list[dict[str, Any]]] = {run: [] for run in runs}
    for number in range(args.rounds):
        for run in runs if number % 2 == 0 else reversed(runs):
            rows[run].append(one_run(args, run))
            print(f"round {number + 1}: {run} {rows[run][-1]}", file=sys.stderr, flush=True)
    print("\n".join(table(rows, args.ranks)), flush=True)
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


def table(rows: dict[str, list[dict[str, Any]]], ranks: int) -> list[str]:
    """One line a run, its rounds as a range."""
    lines = [_HEAD, "|---|---|---:|---:|---:|---:|"]
    medians = {run: statistics.median(row["seconds"] for row in found) for run, found in rows.items()}
    for run, found in rows.items():
        name, size, dtype = run.split("-")
        each = sorted(1e3 * row["seconds"] for row in found)
        beside = medians[run] / medians[f"fsdp2-{ranks}-{dtype}"]
        peak = max(row["allocated"] for row in found) / 2**30
        lines.append(
            f"| {name}, p={size} | {dtype} | {1e3 * medians[run]:.0f} ({each[0]:.0f} to {each[-1]:.0f}) | "
            f"{beside:.2f} x | {peak:.2f} | {found[-1]['loss']:.4f} |"
        )
    return lines


def one_run(args: argparse.Namespace, system: str) -> dict[str, Any]:
    """One system, in processes of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        program = ["-m", "benchmarks.float8_beside_fsdp2", *sys.argv[1:]]
        environ = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **os.environ}
        command = [*torchrun, "--nproc-per-node", str(args.ranks), *program]
        command += ["--system", system, "--worker", str(out)]
        subprocess.run(command, check=True, stdout=sys.stderr, env=environ, timeout=args.timeout)
        found: dict[str, Any] = json.loads(out.read_text())
    return found


def worker(args: argparse.Namespace) -> None:
    """One rank of one system."""
    rank, on_gpu = int(os.environ["RANK"]), torch.cuda.is_available()
    device = torch.device("cuda", rank % torch.cuda.device_count()) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        if torch.cuda.device_count() < args.ranks:
            share_gpu(rank, os.environ)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    model, update = system_of(args, device)
    vocab = find_size(args.size).vocab_size
    generator = torch.Generator().manual_seed(rank)
    seconds, loss = [], torch.zeros(())
    for step in range(_WARMUP + args.steps):
        shape = args.accumulation, args.batch_size, args.seq_len + 1
        tokens = torch.randint(vocab, shape, generator=generator).to(device)
        if on_gpu:
            torch.cuda.synchronize()
            if step == _WARMUP:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = update(model, tokens)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    found = torch.tensor([statistics.median(seconds[_WARMUP:]), peak], dtype=torch.float64, device=device)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if rank == 0:
        row = {"seconds": found[0].item(), "allocated": found[1].item(), "loss": loss.item()}
        args.worker.write_text(json.dumps(row))
    dist.barrier()
    dist.destroy_process_group()


def system_of(
    args: argparse.Namespace, device: torch.device
) -> tuple[nn.Module, Callable[[nn.Module, Tensor], Tensor]]:
    """The model as one system shards it, and its optimizer step."""
    name, size, dtype = args.system.split("-")
    by_float8 = dtype == "float8"
    torch.manual_seed(0)
    with device:
        model: Any = GPT(find_size(args.size))
    emulate = device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9)
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=by_float8, emulate=emulate)
    convert_to_float8_training(model, module_filter_fn=lambda _, name: "blocks" in name, config=config)
    for block in () if args.no_compile else model.blocks:
        block.compile()
    if name == "mics":
        precision = mics.Precision(param_dtype=torch.bfloat16)
        model = mics.shard(model, partition_size=int(size), precision=precision)
    else:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        mesh = init_device_mesh(device.type, (int(size),))
        for block in model.blocks:
            fully_shard(block, mp_policy=policy, mesh=mesh)
        fully_shard(model, mp_policy=policy, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def update(model: Any, tokens: Tensor) -> Tensor:
        last = torch.zeros(())
        for batch in mics.microsteps(model, tokens) if name == "mics" else tokens:
            last = model(batch[:, :-1], batch[:, 1:])
            (last / len(tokens)).backward()
        optimizer.step()
        if name == "fsdp2" and by_float8:
            precompute_float8_dynamic_scale_for_fsdp(model)
        optimizer.zero_grad()
        return last.detach()

    return model, update


if __name__ == "__main__":
    main()

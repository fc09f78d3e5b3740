"""How long training stands still for a save, and how much slower it is while one is written.

    torchrun --nproc-per-node 2 benchmarks/save_stall.py
    python benchmarks/save_stall.py --model gpt-1.3b --batch 4     # one GPU

Steps without saves, steps beside a save in the background, and a save that is waited for, in one run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from pathlib import Path

import torch
import torch.distributed as dist

import mics
from mics.models import GPT, GPT_SIZES

ON_GPU = torch.cuda.is_available()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--model", choices=sorted(GPT_SIZES), default="nano")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=16, help="of each kind")
    parser.add_argument("--saves", type=int, default=3)
    parser.add_argument("--folder", type=Path, default=Path("runs/save-stall"))
    args = parser.parse_args()
    if "RANK" in os.environ:
        dist.init_process_group("nccl" if ON_GPU else "gloo")
    device = torch.device("cuda" if ON_GPU else "cpu")
    torch.manual_seed(0)
    config = GPT_SIZES[args.model]
    with torch.device("meta"):
        model = GPT(config)
    mics.shard(model, precision=mics.Precision(param_dtype=torch.bfloat16 if ON_GPU else torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    tokens = torch.randint(0, config.vocab_size, (args.batch, config.seq_len + 1), device=device)

    def step() -> float:
        began = time.perf_counter()
        model(tokens[:, :-1], tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
        if ON_GPU:
            torch.cuda.synchronize()
        return time.perf_counter() - began

    for _ in range(4):
        step()
    alone = [step() for _ in range(args.steps)]
    rows = []
    for number in range(args.saves):
        began = time.perf_counter()
        saving = mics.save(args.folder, model, optimizer, step=number, keep=1, wait=False)
        if ON_GPU:
            torch.cuda.synchronize()  # the copies, which the next step would wait for
        stall = time.perf_counter() - began
        beside = []
        for _ in range(args.steps):  # as many on every rank
            took = step()
            if not saving.done or not beside:
                beside.append(took)
        saving.wait()
        rows.append((stall, statistics.median(beside), len(beside)))
    began = time.perf_counter()
    mics.save(args.folder / "waited", model, optimizer)
    waited = time.perf_counter() - began
    if not dist.is_initialized() or dist.get_rank() == 0:
        usual = statistics.median(alone)
        print(f"{args.model}, {saving.nbytes / 1e9:.2f} GB a rank; a step takes {1e3 * usual:.0f} ms")
        print("| save | stands still ms | a step meanwhile ms | steps until it was written |")
        print("|---|---:|---:|---:|")
        for number, (stall, beside, count) in enumerate(rows):
            name = "in the background, the first" if number == 0 else "in the background"
            steps = f"{count}" if count < args.steps else f"{count} or more"
            print(f"| {name} | {1e3 * stall:.0f} | {1e3 * beside:.0f} | {steps} |")
        print(f"| waited for | {1e3 * waited:.0f} | | |")
        shutil.rmtree(args.folder)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

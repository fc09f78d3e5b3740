"""How fast token shards are made and read, without a model.

    python benchmarks/data_speed.py
    python benchmarks/data_speed.py --ranks 8 --seq-len 2048 --batch 4 --seconds 10

Prepares random words with a BPE tokenizer, then lets one process do the reading of all ranks of a node: for
each rank the batches of consecutive steps, through the same prefetching thread as in mics train.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from mics.data import TokenData
from mics.data.documents import DocumentFormat
from mics.data.packing import Objective
from mics.data.preparing import Preparing, prepare
from mics.data.tokenizer import load_tokenizer
from mics.data.training_tokenizer import train_tokenizer
from mics.train.data import Batches
from mics.train.sequences import ShardSequences

NEEDED = 8 * 10_000  # tokens per second of a node


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--seq-len", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--megabytes", type=int, default=16, help="of text to prepare")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    args = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="mics-data-speed-"))
    try:
        data = _prepare(folder, args)
        print("| batches | tokens/s | of the 80,000 that 8 ranks need | CPU us per 1,000 tokens |")
        print("|---|---:|---:|---:|")
        for objective in ("causal", "masked"):
            _read(data, objective, args)
    finally:
        shutil.rmtree(folder)


def _prepare(folder: Path, args: argparse.Namespace) -> TokenData:
    text = folder / "text.txt"
    generator = np.random.default_rng(0)
    letters = generator.integers(ord("a"), ord("z") + 1, (20_000, 7), dtype=np.uint8)
    words = [row[: 2 + number % 6].tobytes().decode() for number, row in enumerate(letters)]
    with text.open("w") as file:
        while file.tell() < args.megabytes * 10**6:
            chosen = generator.zipf(1.3, 200_000) % len(words)
            for start in range(0, len(chosen), 500):
                file.write(" ".join(words[each] for each in chosen[start : start + 500]) + "\n\n")
    tokenizer = folder / "tokenizer"
    small = folder / "small.txt"
    small.write_text(text.read_text()[:2_000_000])
    train_tokenizer((small,), tokenizer, vocab_size=16_000, reading=DocumentFormat(), objective="masked")
    asked = Preparing(
        files=(text,),
        out=folder / "shards",
        reading=DocumentFormat(separator="blank-line"),
        shard_tokens=500_000,
        validation_share=0.1,
        workers=args.workers,
    )
    began, cpu = time.perf_counter(), time.process_time()
    index = prepare(asked, load_tokenizer(str(tokenizer)))
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    total = sum(shard.num_tokens for shard in index.shards)
    print(
        f"prepare: {total:,} tokens of {text.stat().st_size / 1e6:.0f} MB, {args.workers} workers: ", end=""
    )
    print(f"{wall:.1f} s, {total / wall:,.0f} tokens/s; {total / cpu:,.0f} per second of CPU\n")
    return TokenData.open(folder / "shards")


def _read(data: TokenData, objective: Objective, args: argparse.Namespace) -> None:
    sequences = ShardSequences(
        [data, data], seq_len=args.seq_len, vocab_size=16_000, seed=0, weights=(1, 3), objective=objective
    )
    ranks = [
        Batches(
            sequences=sequences,
            batch_size=args.batch,
            micro_steps=1,
            rank=rank,
            num_ranks=args.ranks,
            device=torch.device("cpu"),
        )
        for rank in range(args.ranks)
    ]
    feeds = [rank.prefetch(first=1, last=10**9) for rank in ranks]
    began, cpu = time.perf_counter(), time.process_time()
    step = 0
    while time.perf_counter() - began < args.seconds:
        step += 1
        for feed in feeds:
            feed.get(step)
    wall, cpu = time.perf_counter() - began, time.process_time() - cpu
    for feed in feeds:
        feed.close()
    tokens = step * args.ranks * args.batch * args.seq_len
    rate = tokens / wall
    print(f"| {objective} | {rate:,.0f} | {rate / NEEDED:.0f} x | {cpu / tokens * 1e9:,.0f} |")


if __name__ == "__main__":
    main()

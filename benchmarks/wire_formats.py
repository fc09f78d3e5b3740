"""What gradients in bfloat16 do to the loss: the same training with each format on the wire.

    torchrun --nproc-per-node 4 benchmarks/wire_formats.py

A byte-level GPT on the bundled text, float32 parameters, so that the wire is all that differs. Hop 1 is
looked at with one partition group of all ranks, hop 2 with as many replicas as ranks.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist

import mics
from mics.models.gpt import GPT, GPTConfig
from mics.train.data import Batches
from mics.train.sequences import TextSequences, load_text

SHAPE = GPTConfig(num_layers=3, num_heads=4, hidden_size=96, vocab_size=256, seq_len=64)
BF16 = torch.bfloat16


def train(partition_size: int, precision: mics.Precision, num_steps: int, seed: int) -> tuple[float, float]:
    """Mean training loss of the last tenth of the steps, and the validation loss at the end."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(seed)
    model = mics.shard(GPT(SHAPE), partition_size=partition_size, precision=precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    text = load_text(None, validation_share=0.1, seq_len=SHAPE.seq_len)
    batches = Batches(
        sequences=TextSequences(text=text, seq_len=SHAPE.seq_len, seed=seed),
        batch_size=4,
        micro_steps=2,
        rank=rank,
        num_ranks=num_ranks,
        device=torch.device("cpu"),
    )
    losses = torch.zeros(num_steps)
    for step in range(num_steps):
        micro_batches = batches.train(step)
        for tokens, targets in mics.microsteps(model, micro_batches):
            loss = model(tokens, targets) / len(micro_batches)
            loss.backward()
            losses[step] += loss.detach()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        validation = torch.stack([model(*batch) for batch in batches.validation(4)]).mean()
    found = torch.stack([losses[-num_steps // 10 :].mean(), validation])
    dist.all_reduce(found)
    training, validated = (found / num_ranks).tolist()
    return training, validated


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everybody = dist.get_world_size()
    rows = [
        ("float32 everywhere", 1, mics.Precision()),
        ("hop 2 in bfloat16", 1, mics.Precision(replica_reduce_dtype=BF16)),
        ("float32 everywhere", everybody, mics.Precision()),
        ("hop 1 in bfloat16", everybody, mics.Precision(reduce_dtype=BF16)),
    ]
    if dist.get_rank() == 0:
        print("| wire | p | seed | training loss | validation loss |\n|---|---:|---:|---:|---:|", flush=True)
    for seed in range(args.seeds):
        for name, partition_size, precision in rows:
            training, validation = train(partition_size, precision, args.steps, seed)
            if dist.get_rank() == 0:
                print(
                    f"| {name} | {partition_size} | {seed} | {training:.4f} | {validation:.4f} |", flush=True
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

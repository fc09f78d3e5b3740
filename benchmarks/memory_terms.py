"""Memory per rank, term by term, against the formula: GPT of 124 M parameters, bf16, AdamW.

    torchrun --nproc-per-node 4 benchmarks/memory_terms.py

P is the number of parameters, p the partition size (2), R the number of replicas; one unit is gathered ahead.
The terms are read off the real tensors after three optimizer steps.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

import mics
from mics.engine import engine_of
from mics.models.gpt import GPT
from mics.models.sizes import GPT_SIZES


def nbytes(tensors: list[torch.Tensor]) -> int:
    """Bytes of distinct memory behind ``tensors``."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def measure(size: str, partition_size: int, device: torch.device) -> list[tuple[str, str, float, float]]:
    """Name, formula, expected bytes and measured bytes of every term on this rank."""
    config = GPT_SIZES[size]
    with torch.device("meta"):
        model = GPT(config)
    precision = mics.Precision(param=torch.bfloat16)
    mics.shard(model, partition_size=partition_size, precision=precision, prefetch=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    engine = engine_of(model)
    units = engine.units
    tokens = torch.randint(0, config.vocab_size, (1, 32), device=device)
    for _ in range(3):
        model(tokens, tokens).backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    moments = [t for state in optimizer.state.values() for t in state.values() if t.dim() > 0]
    gradients = [u.gradients.shard for u in units if u.gradients.shard is not None]
    reducing = [tensor for b in engine.boundary.reduce_buffers() for tensor in (b.full, b.shard)]
    p, replicas = partition_size, dist.get_world_size() // partition_size
    params = config.num_parameters
    largest = max(unit.spec.layout.numel for unit in units)
    block = max(u.spec.layout.numel for u in units if u.spec.name.startswith("blocks"))
    root = sum(u.spec.layout.numel for u in units if u.spec.name == "GPT")  # tied weights: held throughout
    return [
        ("parameters", "2P/p", 2 * params / p, nbytes([u.param_shard for u in units])),
        ("gradients", "4P/p", 4 * params / p, nbytes(gradients)),
        ("masters", "4P/(pR)", 4 * params / (p * replicas), nbytes([u.master for u in units])),
        ("moments", "8P/(pR)", 8 * params / (p * replicas), nbytes(moments)),
        ("arena", "2 x (tied weights + 3 blocks)", 2 * (root + 3 * block), nbytes([u.flat for u in units])),
        ("reduce buffer", "4 x largest unit x (1 + 1/p)", 4 * largest * (1 + 1 / p), nbytes(reducing)),
        ("exchange (gloo only)", "4 x largest unit x (1 + 1/p)" if device.type == "cpu" else "0",
         4 * largest * (1 + 1 / p) if device.type == "cpu" else 0, engine.mesh.staging_nbytes()),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", default="gpt-124m")
    parser.add_argument("--partition-size", type=int, default=2)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    terms = measure(args.size, args.partition_size, torch.device("cpu"))
    if dist.get_rank() == 0:
        world_size = dist.get_world_size()
        table = Table(title=f"{args.size}, {world_size} ranks, partition size {args.partition_size}, rank 0")
        for column in ("term", "formula", "expected MiB", "measured MiB", "ratio"):
            table.add_column(column, justify="left" if column in ("term", "formula") else "right")
        for name, formula, expected, measured in terms:
            ratio = f"{measured / expected:.4f}" if expected else "-"
            table.add_row(name, formula, f"{expected / 2**20:.2f}", f"{measured / 2**20:.2f}", ratio)
        Console(width=110).print(table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Host cost: dispatched operators that sharding adds to each block of a model and step.

    torchrun --nproc-per-node 2 benchmarks/dispatched_ops.py

Counts every operator PyTorch's dispatcher sees in one steady optimizer step (forward, backward, gradient
clipping, AdamW) of a GPT, for plain training, FSDP2 and mics, at two depths. The difference between the
depths is the cost of a block; minus that of plain training, it is what sharding adds. With gloo mics adds
the exchange and the ordered sum of its reduce-scatter; with NCCL that is one collective.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

import mics
from mics.models.gpt import GPT, GPTConfig

DEPTHS = (4, 8)


class OpCounter(TorchDispatchMode):
    """Counts operators by name."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.counts[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def shard_with_mics(model: nn.Module) -> None:
    mics.shard(
        model,
        partition_size=dist.get_world_size(),
        precision=mics.Precision(param_dtype=torch.bfloat16),
        # On a CPU lanes are threads, which this count would not see.
        prefetch="auto" if torch.cuda.is_available() else 0,
    )


def shard_with_fsdp2(model: nn.Module) -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def train_plainly(model: nn.Module) -> None:
    """No sharding: the floor."""


SYSTEMS: dict[str, Callable[[nn.Module], None]] = {
    "plain": train_plainly,
    "fsdp2": shard_with_fsdp2,
    "mics": shard_with_mics,
}


def count_step(system: str, num_layers: int, device: torch.device) -> Counter[str]:
    """Operators of the third optimizer step."""
    torch.manual_seed(0)
    config = GPTConfig(num_layers=num_layers, num_heads=2, hidden_size=64, vocab_size=256, seq_len=32)
    model = GPT(config).to(device)
    SYSTEMS[system](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    tokens = torch.randint(0, 256, (2, 32), device=device)
    counter = OpCounter()
    for step in range(3):
        if step == 2:
            counter.__enter__()
        model(tokens, tokens).backward()
        if system == "mics":
            mics.clip_grad_norm_(model, 1.0)
        else:
            nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
    counter.__exit__(None, None, None)
    return counter.counts


def per_block(system: str, device: torch.device) -> Counter[str]:
    """Operators that one more block adds to a step."""
    shallow, deep = (count_step(system, depth, device) for depth in DEPTHS)
    num_blocks = DEPTHS[1] - DEPTHS[0]
    names = shallow.keys() | deep.keys()
    return Counter({name: (deep[name] - shallow[name]) / num_blocks for name in names})


def main() -> None:
    rank = int(os.environ["RANK"])
    num_gpus = torch.cuda.device_count()
    # NCCL lets ranks share a GPU only if each claims a host of its own.
    use_gpu = num_gpus > 1 or (num_gpus == 1 and "NCCL_HOSTID" in os.environ)
    device = torch.device("cuda", rank % num_gpus) if use_gpu else torch.device("cpu")
    if use_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if use_gpu else "gloo")
    counts = {system: per_block(system, device) for system in SYSTEMS}
    if dist.get_rank() == 0:
        plain = counts["plain"]
        totals = {system: sum(count.values()) for system, count in counts.items()}
        for system in ("fsdp2", "mics"):
            extra = counts[system]
            added = {
                name.removeprefix("aten.").removeprefix("_c10d_functional."): extra[name] - plain[name]
                for name in sorted(extra.keys() | plain.keys(), key=lambda n: plain[n] - extra[n])
                if extra[name] != plain[name]
            }
            print(
                f"{system}: {totals[system] - totals['plain']:.1f} operators a block and step beyond "
                "plain training"
            )
            print("   ", json.dumps(added))
        ratio = (totals["mics"] - totals["plain"]) / (totals["fsdp2"] - totals["plain"])
        print(f"mics / fsdp2: {ratio:.2f}   (torch {torch.__version__}, {dist.get_backend()})")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

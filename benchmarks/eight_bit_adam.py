"""Losses and optimizer state of 8-bit Adam beside AdamW in float32: a small GPT on bytes of a text.

    torchrun --nproc-per-node 2 benchmarks/eight_bit_adam.py

Each optimizer trains from the same weights on the same batches, once for each seed. Rows: the loss of
passages that were not trained on, and the state's bytes per parameter, of all ranks together. Libraries that
are not installed are left out. Torchao compiles its step with --compile alone: on a CPU it takes a minute for
each shape.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from importlib import import_module, resources
from importlib.util import find_spec

import torch
import torch.distributed as dist
from torch import Tensor

import mics
from mics.models import GPT, GPTConfig

OPTIMIZERS = {
    "AdamW": "torch.optim.AdamW",
    "torchao": "torchao.optim.AdamW8bit",
    "bitsandbytes": "bitsandbytes.optim.AdamW8bit",
}
NUM_HELD_OUT = 64  # passages


def main() -> None:
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dist.init_process_group()
    if device == "cuda":
        torch.cuda.set_device(dist.get_node_local_rank() % torch.cuda.device_count())
    if not options.compile:
        torch.compiler.set_stance("force_eager")
    text = torch.tensor(list(resources.files("mics.train").joinpath("fables.txt").read_bytes()))
    found: dict[str, list[float]] = {}
    state: dict[str, float] = {}
    for name in options.optimizers:
        module, _, kind = OPTIMIZERS[name].rpartition(".")
        if find_spec(module.partition(".")[0]) is None:
            continue
        for seed in range(options.seeds):
            loss, nbytes = train(options, text, seed, device, getattr(import_module(module), kind))
            found.setdefault(name, []).append(loss)
            state[name] = nbytes
            if dist.get_rank() == 0:
                print(f"{name}, seed {seed}: {loss:.4f}", flush=True)
    if dist.get_rank() == 0:
        print("\n| optimizer | " + " | ".join(f"seed {n}" for n in range(options.seeds)), end="")
        print(" | mean | bytes per parameter |\n|---|" + "---:|" * (options.seeds + 2))
        for name, losses in found.items():
            cells = [*losses, statistics.mean(losses)]
            print(f"| {name} | {' | '.join(f'{cell:.4f}' for cell in cells)} | {state[name]:.2f} |")
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--optimizers", nargs="+", choices=list(OPTIMIZERS), default=list(OPTIMIZERS))
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--seq", type=int, default=32)
    parser.add_argument("--batch", type=int, default=8, help="passages per step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--compile", action="store_true")
    return parser.parse_args()


def train(
    options: argparse.Namespace,
    text: Tensor,
    seed: int,
    device: str,
    optimizer_class: Callable[..., torch.optim.Optimizer],
) -> tuple[float, float]:
    """The loss of passages that were held out, and bytes of optimizer state per parameter."""
    torch.manual_seed(seed)
    shape = GPTConfig(
        num_layers=options.layers,
        num_heads=options.hidden // 32,
        hidden_size=options.hidden,
        vocab_size=256,
        seq_len=options.seq,
    )
    model = mics.shard(GPT(shape).to(device))
    optimizer = optimizer_class(model.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
    split = len(text) * 9 // 10
    draws = torch.Generator().manual_seed(seed)
    for _ in range(options.steps):
        tokens = passages(text[:split], options.seq, options.batch, draws)
        own = tokens[dist.get_rank() :: dist.get_world_size()].to(device)
        model(own[:, :-1], own[:, 1:]).backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    held_out = passages(text[split:], options.seq, NUM_HELD_OUT, torch.Generator().manual_seed(0)).to(device)
    with torch.no_grad():
        loss = model(held_out[:, :-1], held_out[:, 1:]).item()
    nbytes = torch.tensor(float(mics.memory_report(model, show=False)["optimizer state"].measured or 0))
    nbytes = nbytes.to(device)
    dist.all_reduce(nbytes)
    return loss, nbytes.item() / mics.num_parameters(model)


def passages(text: Tensor, length: int, count: int, draws: torch.Generator) -> Tensor:
    """Random ones: [count, length + 1]."""
    starts = torch.randint(len(text) - length - 1, (count,), generator=draws)
    return torch.stack([text[start : start + length + 1] for start in starts])


if __name__ == "__main__":
    main()

"""Pretrain a GPT: accumulation, warmup and cosine decay, evaluation, resume on any number of ranks.

--data is a file of uint16 tokens that ends in .bin (nanoGPT's prepare.py writes it), or any other file, read
as bytes. The same command continues from the latest checkpoint in --out. Several machines: see launch/.
"""

import argparse
import math
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import mics

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--data", type=Path, required=True)
parser.add_argument("--out", type=Path, default="runs/gpt")
sizes = {"layers": 12, "width": 768, "heads": 12, "context": 1024, "batch-size": 12, "global-batch": 480}
lengths = {"steps": 600_000, "warmup": 2000, "interval": 500, "eval-batches": 20, "lr": 6e-4}
for name, default in {**sizes, **lengths}.items():  # batch-size: sequences per rank and micro-batch
    parser.add_argument(f"--{name}", type=type(default), default=default, help=" ")
args = parser.parse_args()
is_tokens = args.data.suffix == ".bin"


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, args.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, width: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(args.context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(args.layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        for p in self.parameters():
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.norm(x)).float().flatten(0, 1), targets.flatten())


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
rank, world = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
accumulation, rest = divmod(args.global_batch, args.batch_size * world)
assert not rest, f"--global-batch must be a multiple of --batch-size x ranks = {args.batch_size * world}"
data = np.memmap(args.data, dtype=np.uint16 if is_tokens else np.uint8, mode="r")
train, val = np.split(data, [len(data) * 9 // 10])


def batches(source: np.ndarray, seed: int, count: int) -> list[tuple[Tensor, Tensor]]:
    """`count` batches for this rank; all ranks' together depend on the seed, not on the number of ranks."""
    rng = np.random.default_rng(seed)
    starts = rng.integers(len(source) - args.context, size=count * args.batch_size * world)[rank::world]
    rows = torch.stack([torch.from_numpy(source[i : i + args.context + 1].astype(np.int64)) for i in starts])
    return [(t[:, :-1], t[:, 1:]) for t in rows.to(device).split(args.batch_size)]


def report(text: str, loss: Tensor) -> None:
    dist.all_reduce(loss)  # every rank has the loss of its own batches
    if rank == 0:
        print(f"{text} {loss.item() / world:.4f}", flush=True)


def schedule(step: int) -> float:
    progress = min(1.0, max(0, step - args.warmup) / max(1, args.steps - args.warmup))
    return min(1.0, (step + 1) / args.warmup) * (0.55 + 0.45 * math.cos(math.pi * progress))


torch.manual_seed(0)
model = GPT(50304 if is_tokens else 256, args.width)
dtype = torch.bfloat16 if device == "cuda" else torch.float32  # masters stay fp32
mics.shard(model, precision=mics.Precision(param_dtype=dtype))
decay, rest = ([p for p in model.parameters() if (p.dim() >= 2) == is_matrix] for is_matrix in (True, False))
groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=device == "cuda")
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule)
state, step = {"scheduler": scheduler}, 0
if (args.out / "latest").exists():
    step = mics.load(args.out, model, optimizer, state)["step"]

while step < args.steps:
    total, lr = torch.zeros((), device=device), scheduler.get_last_lr()[0]
    for x, y in mics.microsteps(model, batches(train, 1 + step, accumulation)):
        loss = model(x, y) / accumulation
        loss.backward()
        total += loss.detach()
    norm = mics.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()
    step += 1
    report(f"step {step} lr {lr:.2e} norm {norm.item():.3f} loss", total)
    if step % args.interval == 0 or step == args.steps:
        with torch.no_grad():  # every rank evaluates its share
            total = torch.stack([model(x, y) for x, y in batches(val, 0, args.eval_batches)]).mean()
        report(f"step {step} val_loss", total)
        mics.save(args.out, model, optimizer, {**state, "step": step}, step=step, keep=3, wait=False)
dist.destroy_process_group()

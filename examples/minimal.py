from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import mics

# Start with torchrun, kill it, and start it again on another number of ranks.
device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group()  # NCCL for tensors on a GPU, gloo for those on the CPU
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())
torch.manual_seed(0)  # the same data and the same initial weights on every rank
dataset = [(x, x.sin()) for x in torch.randn(512, 16)]
model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(4)))
mics.shard(model.to(device))  # or partition_size=8: one copy of the parameters per 8 ranks
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # built after sharding
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=128 // dist.get_world_size(), sampler=sampler)  # per step: 128
first = mics.load("checkpoints", model, optimizer)["epoch"] if Path("checkpoints/latest").exists() else 0
for epoch in range(first, 10):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        for x, y in mics.microsteps(model, zip(inputs.split(16), targets.split(16), strict=True)):
            loss = nn.functional.mse_loss(model(x.to(device)), y.to(device)) * len(x) / len(inputs)
            loss.backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    print(f"rank {dist.get_rank()}: epoch {epoch}, loss {loss.item() * len(inputs) / len(x):.4f}", flush=True)
    mics.save("checkpoints", model, optimizer, {"epoch": epoch + 1}, step=epoch + 1, keep=2)  # on all ranks
dist.destroy_process_group()

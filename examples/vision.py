"""Train a small ViT on images drawn in this file, with augmentation and held-out accuracy."""

import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler

import mics

parser = argparse.ArgumentParser(formatter_class=argparse.ArgumentDefaultsHelpFormatter)
parser.add_argument("--images", type=int, default=8192, help="training images")
parser.add_argument("--batch-size", type=int, default=64, help="images per rank")
parser.add_argument("--epochs", type=int, default=5)
parser.add_argument("--width", type=int, default=192)
parser.add_argument("--depth", type=int, default=6)
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--workers", type=int, default=0, help="processes per rank that load images")
parser.add_argument("--partition-size", type=int, help="ranks per copy of the parameters; None: mics chooses")
args = parser.parse_args()


class Stripes(Dataset):
    """Noisy stripes of random width and colour in four directions; the direction is the class."""

    def __init__(self, num_images: int, seed: int, *, augment: bool) -> None:
        self.num_images, self.seed, self.augment = num_images, seed, augment

    def __len__(self) -> int:
        return self.num_images

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(self.seed + index)
        label = index % 4
        y, x = torch.meshgrid(torch.arange(32.0), torch.arange(32.0), indexing="ij")
        phase = (x, y, x + y, x - y)[label] / torch.empty(()).uniform_(1, 2, generator=generator)
        colour = torch.rand(3, 1, 1, generator=generator)
        image = colour * torch.sin(phase) + 0.3 * torch.randn(3, 32, 32, generator=generator)
        if self.augment and torch.rand(()) < 0.5:
            image = image.flip(0)  # channels
        return image, label


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, width: int, depth: int, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Sequential(  # a convolutional stem: 32 x 32 pixels become 8 x 8 patches
            nn.Conv2d(3, width // 2, 3, stride=2, padding=1),
            nn.GELU(),
            nn.Conv2d(width // 2, width, 2, stride=2),
        )
        self.positions = nn.Parameter(0.02 * torch.randn(1, 64, width))
        self.blocks = nn.Sequential(*(Block(width, heads=4) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2) + self.positions
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


device = "cuda" if torch.cuda.is_available() else "cpu"
dist.init_process_group("nccl" if device == "cuda" else "gloo")
if device == "cuda":
    torch.cuda.set_device(dist.get_node_local_rank())

torch.manual_seed(0)
model = ViT(args.width, args.depth, num_classes=4)
mics.shard(model, partition_size=args.partition_size)  # bf16 parameters and activations on a GPU
optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.05)
train = Stripes(args.images, seed=0, augment=True)
test = Stripes(max(64, args.images // 8), seed=10**6, augment=False)
sampler = DistributedSampler(train, drop_last=True)
loader = DataLoader(train, args.batch_size, sampler=sampler, num_workers=args.workers, drop_last=True)
test_loader = DataLoader(test, args.batch_size, sampler=DistributedSampler(test, shuffle=False))
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, args.lr, total_steps=args.epochs * len(loader))
torch.manual_seed(1 + dist.get_rank())  # other augmentations on every rank

for epoch in range(args.epochs):
    sampler.set_epoch(epoch)
    model.train()
    for images, labels in loader:
        loss = F.cross_entropy(model(images.to(device)), labels.to(device), label_smoothing=0.1)
        loss.backward()
        mics.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    model.eval()
    counts = torch.zeros(2, device=device)  # right, all
    with torch.no_grad():
        for images, labels in test_loader:  # every rank evaluates its share
            right = model(images.to(device)).argmax(dim=1) == labels.to(device)
            counts += torch.stack([right.sum(), torch.tensor(len(right), device=device)])
    dist.all_reduce(counts)
    if dist.get_rank() == 0:
        print(
            f"epoch {epoch} loss {loss.item():.4f} accuracy {(counts[0] / counts[1]).item():.4f}", flush=True
        )
dist.destroy_process_group()

"""How fast checkpoints are written and read beside the disk itself, and what they cost in memory and waiting.

    torchrun --nproc-per-node 2 benchmarks/checkpoint_speed.py
    torchrun --nproc-per-node 2 benchmarks/checkpoint_speed.py --parameters 2e8 --folder /mnt/shared

Ranks save a model and its AdamW state (12 bytes a parameter). Before each save and each load the same ranks
write and read as many bytes plainly, in the same folder: the ratio is what to look at. Files are dropped from
the page cache before they are read.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mics

GIB = 2**30
_BLOCK = 8 << 20


class Model(nn.Module):
    """Matrices without a forward: nothing is trained here."""

    def __init__(self, num_parameters: int, width: int) -> None:
        super().__init__()
        count = max(1, round(num_parameters / width**2))
        self.blocks = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))


@dataclass
class Peak:
    """The largest anonymous memory of this process while it is watched, beyond that at the start."""

    nbytes: int = 0
    _stop: threading.Event = field(default_factory=threading.Event)

    def watch(self) -> None:
        first = anonymous_nbytes()
        while not self._stop.wait(0.02):
            self.nbytes = max(self.nbytes, anonymous_nbytes() - first)


def anonymous_nbytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("RssAnon:"))


@contextmanager
def watched() -> Iterator[Peak]:
    peak = Peak()
    thread = threading.Thread(target=peak.watch)
    thread.start()
    try:
        yield peak
    finally:
        peak._stop.set()
        thread.join()


def seconds_of(action: Callable[[], object]) -> float:
    dist.barrier()
    began = time.perf_counter()
    action()
    dist.barrier()
    return time.perf_counter() - began


def write_plainly(file: Path, nbytes: int) -> None:
    block = memoryview(os.urandom(_BLOCK))
    with file.open("wb", buffering=0) as stream:
        for start in range(0, nbytes, _BLOCK):
            stream.write(block[: nbytes - start])
        os.fsync(stream.fileno())


def read_plainly(file: Path) -> None:
    buffer = bytearray(_BLOCK)
    with file.open("rb", buffering=0) as stream:
        while stream.readinto(buffer):
            pass


def drop_from_cache(folder: Path) -> None:
    for file in folder.iterdir():
        descriptor = os.open(file, os.O_RDONLY)
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


def build(num_parameters: int) -> tuple[nn.Module, torch.optim.Optimizer, int]:
    width = 4096 if num_parameters >= 1e8 else 512
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Model(num_parameters, width)
    mics.shard(model, partition_size=dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():  # as if it had stepped, without the memory of a step
        with torch.no_grad():
            param.normal_()
        state = {"exp_avg": torch.randn_like(param), "exp_avg_sq": torch.rand_like(param)}
        optimizer.state[param] = {"step": torch.tensor(1.0), **state}
    shard = sum(12 * param.numel() for param in model.parameters())
    return model, optimizer, shard


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--parameters", type=float, default=1e9)
    parser.add_argument("--folder", type=Path, default=Path("runs/checkpoint-speed"))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--no-background",
        action="store_true",
        help="leave out what needs the model's size in host memory again",
    )
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank = dist.get_rank()
    args.folder.mkdir(parents=True, exist_ok=True)
    model, optimizer, shard = build(int(args.parameters))
    total = shard * dist.get_world_size()
    plain, checkpoint = args.folder / "plain", args.folder / "checkpoint"
    plain.mkdir(exist_ok=True)
    found: dict[str, list[float]] = {"disk write": [], "save": [], "disk read": [], "load": []}
    peaks: dict[str, int] = {"save": 0, "load": 0}
    for _ in range(args.repeats):
        file = plain / f"{rank}"
        found["disk write"].append(seconds_of(lambda file=file: write_plainly(file, shard)))
        with watched() as peak:
            found["save"].append(seconds_of(lambda: mics.save(checkpoint, model, optimizer)))
        peaks["save"] = max(peaks["save"], peak.nbytes)
        for folder in (plain, checkpoint):
            drop_from_cache(folder)
        found["disk read"].append(seconds_of(lambda file=file: read_plainly(file)))
        with watched() as peak:
            found["load"].append(seconds_of(lambda: mics.load(checkpoint, model, optimizer)))
        peaks["load"] = max(peaks["load"], peak.nbytes)
    if rank == 0:
        print(f"{dist.get_world_size()} ranks, {total / GIB:.2f} GiB, {shard / GIB:.2f} GiB a rank")
        print("| | GB/s, median | all | of the disk's |\n|---|---:|---|---:|")
        for name, seconds in found.items():
            speeds = [total / each / 1e9 for each in seconds]
            reference = found["disk write" if name in ("disk write", "save") else "disk read"]
            shares = [theirs / ours for ours, theirs in zip(seconds, reference, strict=True)]
            listed = ", ".join(f"{speed:.2f}" for speed in speeds)
            print(
                f"| {name} | {statistics.median(speeds):.2f} | {listed} | {statistics.median(shares):.0%} |"
            )
        for name, nbytes in peaks.items():
            print(f"host memory of rank 0 beyond its model, at the peak of a {name}: {nbytes / GIB:.2f} GiB")
    if not args.no_background:
        with watched() as peak:
            savings = []
            for _ in range(2):
                savings.append(mics.save(checkpoint, model, optimizer, wait=False))
                savings[-1].wait()
        if rank == 0:
            first, second = (saving.stall for saving in savings)
            print(f"and of a save in the background: {peak.nbytes / GIB:.2f} GiB; training stood still for")
            print(f"{first:.2f} s at the first, which allocates, and {second:.2f} s at the second")
    if rank == 0:
        shutil.rmtree(args.folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

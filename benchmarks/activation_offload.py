"""What activation offload costs and what it makes room for, on one GPU as rank 0 of an emulated node.

    python benchmarks/activation_offload.py compare
    python benchmarks/activation_offload.py walk

compare: step time and memory of mics without and with offload and of FSDP2 (HSDP where the cluster has
replicas) with torch's save_on_cpu, then the largest micro-batch of each. walk: memory reports on the way to a
larger model. On a CPU both run a small model and show times and named terms alone.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import mics
from mics.bench.job import Job
from mics.bench.models import BENCH_MODELS
from mics.bench.picture import draw_timeline
from mics.bench.systems import SYSTEMS
from mics.bench.timeline import exposure, record
from mics.cost.clusters import find_cluster
from mics.engine import engine_of
from mics.sharding.whole import HomeSegment, WholeParameters

GIB = 2**30
PARTITION_SIZE = 8
WAYS = {
    "mics, no offload": ("mics", False),
    "mics, offload": ("mics", True),
    "FSDP2, save_on_cpu": ("fsdp2", True),
    "HSDP, save_on_cpu": ("hsdp", True),
}
ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")


@dataclass
class Found:
    """Of one way. Bytes and seconds."""

    steps: list[float]
    saved: int = 0  # by all blocks in a forward
    stays: int = 0  # of that, on the device
    most: int = 0  # on the device at once, with what is on its way
    peak: int = 0
    retries: int = 0
    largest: int = 0
    largest_seconds: float = 0.0
    largest_peak: int = 0
    largest_retries: int = 0
    largest_holes: int = 0  # reserved by the allocator beyond what is allocated at the peak
    largest_allocations: int = 0  # for gathered parameters, in the second step of that size
    largest_without_retries: int = 0


def job_of(
    model: str, *, offload: bool, checkpoint: bool = True, partition_size: int = PARTITION_SIZE
) -> Job:
    found = BENCH_MODELS[model]
    return Job(
        model=found.config,
        partition_size=partition_size,
        micro_batch=found.micro_batch,
        accumulation=1,
        checkpoint=checkpoint,
        param_dtype="bfloat16" if ON_GPU else "float32",
        reduce_dtype="float32",
        device="cuda" if ON_GPU else "cpu",
        offload=offload,
    )


def batch_of(job: Job, rows: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    tokens = torch.randint(0, job.model.vocab_size, (rows, job.model.seq_len + 1), device=DEVICE)
    return [(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())]


def seconds_of(step: Callable[[], object]) -> float:
    sync()
    began = time.perf_counter()
    step()
    sync()
    return time.perf_counter() - began


def sync() -> None:
    if ON_GPU:
        torch.cuda.synchronize()


def retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0)) if ON_GPU else 0


def compare(args: argparse.Namespace) -> None:
    """Measure every way, one after the other in this process, and print a table."""
    results: dict[str, Found] = {}
    has_replicas = find_cluster(args.cluster).world_size > PARTITION_SIZE
    for name, (system, offload) in WAYS.items():
        if args.only and name not in args.only:
            continue
        if system == ("fsdp2" if has_replicas else "hsdp"):
            continue  # the one that shards over the world is no match for partition groups, and the reverse
        job = job_of(args.model, offload=offload)
        job = replace(job, model=replace(job.model, loss_in_pieces=args.loss_in_pieces))
        if args.vocab_size is not None:
            job = replace(job, model=replace(job.model, vocab_size=args.vocab_size))
        with mics.emulate(find_cluster(args.cluster)) as emulation:
            trainer: Any = SYSTEMS[system].build(job)
            found = measure(trainer, job, args)
            if name == "mics, offload":
                mics.memory_report(trainer._model)
                offloader = engine_of(trainer._model).offloader
                expected = offloader.expected_nbytes() if offloader is not None else None
                assert offloader is not None and expected is not None
                found.stays, found.most = expected.stays, offloader.held_nbytes()
                found.saved = expected.stays + expected.on_host
                picture(trainer, job, emulation, args.out)
            first = args.grow_from[min(len(results), len(args.grow_from) - 1)]
            results[name] = grow(trainer, job, found, first, args)
            trainer.close()
        forget()
        print(name, results[name], f"{time.perf_counter():.0f} s", flush=True)
    plain, ours = results.get("mics, no offload"), results.get("mics, offload")
    if ours is not None:
        print(
            f"\ninputs of all blocks: {ours.saved / GIB:.2f} GiB; with offload {ours.stays / GIB:.2f} GiB "
            f"remain on the device ({100 * ours.stays / max(1, ours.saved):.1f}%), "
            f"{ours.most / GIB:.2f} GiB at once with what is on its way"
        )
    if plain is not None and ours is not None:
        print(f"a step with offload takes {min(ours.steps) / min(plain.steps):.4f} of one without")
    print()
    print(
        "| | step ms, lowest | all | peak GiB | retries "
        "| largest rows | its step ms | a row | its peak | its retries | its holes "
        "| allocations for parameters | largest without retries |"
    )
    print("|---|---:|---|---:|---:|---:|---:|---:|---:|---:|---:|---:|---:|")
    for name, found in results.items():
        cells = (
            f"{1e3 * min(found.steps):.0f}",
            ", ".join(f"{1e3 * seconds:.0f}" for seconds in found.steps),
            f"{found.peak / GIB:.1f}",
            f"{found.retries}",
            f"{found.largest or 'none tried'}",
            f"{1e3 * found.largest_seconds:.0f}",
            f"{1e3 * found.largest_seconds / max(1, found.largest):.0f}",
            f"{found.largest_peak / GIB:.1f}",
            f"{found.largest_retries}",
            f"{100 * found.largest_holes / max(1, found.largest_peak):.1f}%",
            f"{found.largest_allocations}",
            f"{found.largest_without_retries or '-'}",
        )
        print(f"| {name} | {' | '.join(cells)} |")


def measure(trainer: Any, job: Job, args: argparse.Namespace) -> Found:
    batches = batch_of(job, job.micro_batch)
    for _ in range(args.warmup):
        trainer.step(batches)
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    before_retries = retries()
    found = Found(steps=[seconds_of(lambda: trainer.step(batches)) for _ in range(args.steps)])
    found.peak = torch.cuda.max_memory_allocated() if ON_GPU else 0
    found.retries = retries() - before_retries
    return found


def grow(trainer: Any, job: Job, found: Found, rows: int, args: argparse.Namespace) -> Found:
    """Larger micro-batches, from ``rows`` on, until one does not fit."""
    taken = take_all_but(args.memory_gib)
    while rows <= args.grow_to:
        batches = batch_of(job, rows)
        if ON_GPU:
            torch.cuda.empty_cache()  # what a smaller size left is in the way of this one
            torch.cuda.reset_peak_memory_stats()
        try:
            # The first of a size asks for host memory, and leaves the allocator as later ones find it.
            before_first = retries()
            seconds_of(lambda batches=batches: trainer.step(batches))
            before_second = retries()
            with counted_allocations() as allocations:
                took = seconds_of(lambda batches=batches: trainer.step(batches))
        except torch.OutOfMemoryError:
            break
        in_first, in_second = before_second - before_first, retries() - before_second
        print(
            f"    {rows} rows: {took:.2f} s, {in_first} and {in_second} retries, {holes_text()}, "
            f"{len(allocations)} allocations for parameters, "
            f"{time.perf_counter():.0f} s on the clock",
            flush=True,
        )
        found = replace(
            found,
            largest=rows,
            largest_seconds=took,
            largest_peak=torch.cuda.max_memory_allocated() - taken.nbytes if ON_GPU else 0,
            largest_retries=in_second,
            largest_holes=holes(),
            largest_allocations=len(allocations),
            largest_without_retries=found.largest_without_retries if in_first or in_second else rows,
        )
        rows += args.grow_by
    return found


def holes() -> int:
    """Bytes that the allocator has reserved beyond what is allocated, each at its peak."""
    return torch.cuda.max_memory_reserved() - torch.cuda.max_memory_allocated() if ON_GPU else 0


def holes_text() -> str:
    if not ON_GPU:
        return "no device memory"
    return f"{holes() / GIB:.2f} GiB ({100 * holes() / torch.cuda.max_memory_allocated():.1f}%) of holes"


@contextmanager
def counted_allocations() -> Iterator[list[int]]:
    """Inside, the sizes of all memory that mics asks for to gather parameters in."""
    found: list[int] = []
    enter, acquire = HomeSegment.enter, WholeParameters.acquire

    def counted_enter(segment: HomeSegment) -> None:
        if not segment.memory.untyped_storage().nbytes():
            found.append(segment.memory.numel())
        enter(segment)

    def counted_acquire(whole: WholeParameters) -> None:
        if whole.is_own and not whole.at_home:
            found.append(whole.nbytes)
        acquire(whole)

    with (
        patch.object(HomeSegment, "enter", counted_enter),
        patch.object(WholeParameters, "acquire", counted_acquire),
    ):
        yield found


def take_all_but(gib: float) -> torch.Tensor:
    """Memory that makes the GPU one of ``gib`` GiB, as long as it is held.

    Not by set_per_process_memory_fraction: that refuses a request if what is reserved and all of the request
    are more than the limit, also where most of it would have come from what is reserved, and counts a retry.
    """
    if not ON_GPU:
        return torch.empty(0)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    nbytes = max(0, int(free + torch.cuda.memory_reserved() - gib * GIB))
    with torch.cuda.stream(torch.cuda.Stream()):  # in a segment of its own
        return torch.empty(nbytes, dtype=torch.uint8, device=DEVICE)


def picture(trainer: Any, job: Job, emulation: Any, folder: Path) -> None:
    batches = batch_of(job, job.micro_batch)
    timeline, collectives = record(lambda: trainer.step(batches), emulation, DEVICE)
    found = exposure(timeline, collectives, emulation.cluster.ranks_per_node)
    folder.mkdir(parents=True, exist_ok=True)
    draw_timeline(folder / "offload.timeline.png", timeline, found, title="activation offload")


def walk(args: argparse.Namespace) -> None:
    """Partition size, then checkpointing, then offload: a memory report after each."""
    ways = [  # name, partition size, checkpoint, offload
        ("partition size 1", 1, False, False),
        ("partition size 8", PARTITION_SIZE, False, False),
        ("and checkpointing", PARTITION_SIZE, True, False),
        ("and offload", PARTITION_SIZE, True, True),
    ]
    for name, partition_size, checkpoint, offload in ways:
        job = job_of(args.model, offload=offload, checkpoint=checkpoint, partition_size=partition_size)
        with mics.emulate(find_cluster(args.cluster)):
            trainer: Any = SYSTEMS["mics"].build(job)
            batches = batch_of(job, job.micro_batch)
            for _ in range(3):
                trainer.step(batches)
            if ON_GPU:
                torch.cuda.reset_peak_memory_stats()
            took = seconds_of(lambda trainer=trainer, batches=batches: trainer.step(batches))
            print(f"\n== {name}: {1e3 * took:.0f} ms a step", flush=True)
            mics.memory_report(trainer._model)
            trainer.close()
        forget()


def forget() -> None:
    for _ in range(3):
        gc.collect()
    if ON_GPU:
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=("compare", "walk"))
    parser.add_argument("--model", help="one of `mics bench --model`")
    parser.add_argument("--cluster", default="benchmarks/clusters/ordinary.yaml:1")
    parser.add_argument("--only", nargs="+", choices=tuple(WAYS), help="of compare; all by default")
    parser.add_argument("--vocab-size", type=int, help="of compare; few words leave the peak to the backward")
    parser.add_argument(
        "--loss-in-pieces",
        action="store_true",
        help="of compare; no float32 copies of all logits, for all ways",
    )
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument(
        "--memory-gib", type=float, default=80.0, help="device memory that may be used while growing"
    )
    parser.add_argument(
        "--grow-from", type=int, nargs="+", default=[6, 24], help="rows, for each way; the last for the rest"
    )
    parser.add_argument("--grow-by", type=int, default=2)
    parser.add_argument("--grow-to", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path("runs/offload"))
    args = parser.parse_args()
    if args.model is None:
        args.model = {"compare": "gpt-20b", "walk": "gpt-3.6b"}[args.what] if ON_GPU else "gpt-small"
    {"compare": compare, "walk": walk}[args.what](args)


if __name__ == "__main__":
    main()

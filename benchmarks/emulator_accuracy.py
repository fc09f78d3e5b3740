"""Emulated time of collectives against the arithmetic, on this GPU (or CPU).

    python benchmarks/emulator_accuracy.py [--json FILE]

Two tables: single collectives of many sizes, and sequences on several streams and groups that share links.
Times on a GPU are CUDA events around the calls, so they include the launches.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import mics
from mics.cost.clusters import Cluster, Link
from mics.cost.collectives import Kind, Span, cost

CLUSTER = Cluster(
    num_nodes=64,
    ranks_per_node=8,
    intra=Link(bandwidth=300e9, latency=3e-6),
    inter=Link(bandwidth=50e9, latency=20e-6),
)
NODE = tuple(range(8))
ACROSS = tuple(range(0, 512, 8))


def timed(work: Callable[[], None], device: torch.device) -> float:
    """Seconds that ``work`` takes on the device."""
    if device.type == "cpu":
        began = time.perf_counter()
        work()
        return time.perf_counter() - began
    before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(2_000_000)  # the host gets ahead, so that only the device's time is between the events
    before.record()
    work()
    after.record()
    torch.cuda.synchronize()
    return before.elapsed_time(after) * 1e-3


def single_collectives(device: torch.device, repeats: int) -> list[dict[str, object]]:
    """One collective at a time, from the smallest to the largest that training issues."""
    rows = []
    groups = {"node": dist.new_group(list(NODE)), "across": dist.new_group(list(ACROSS)), "world": None}
    spans = {
        "node": Span.of(CLUSTER, NODE),
        "across": Span.of(CLUSTER, ACROSS),
        "world": Span.of(CLUSTER, range(CLUSTER.world_size)),
    }
    for where, group in groups.items():
        for exponent in range(12, 30, 3):
            size = spans[where].size
            numel = max(1, 2**exponent // 2 // size) * size
            whole = torch.randn(numel, device=device).to(torch.bfloat16)
            part = torch.empty(numel // size, dtype=torch.bfloat16, device=device)
            calls: dict[Kind, Callable[[], None]] = {
                Kind.ALL_GATHER: lambda w=whole, p=part, g=group: dist.all_gather_into_tensor(w, p, group=g),
                Kind.REDUCE_SCATTER: lambda w=whole, p=part, g=group: dist.reduce_scatter_tensor(
                    p, w, group=g
                ),
                Kind.ALL_REDUCE: lambda w=whole, g=group: dist.all_reduce(w, group=g),
            }
            for kind, call in calls.items():
                call()
                found = statistics.median(timed(call, device) for _ in range(repeats))
                expected = cost(CLUSTER, kind, spans[where], 2 * numel).seconds
                rows.append(_row(f"{kind} over {where}", 2 * numel, expected, found))
    return rows


def shared_links(device: torch.device, repeats: int) -> list[dict[str, object]]:
    """Collectives at the same time: those of one link take turns, those of two links do not."""
    node, across = dist.new_group(list(NODE)), dist.new_group(list(ACROSS))
    other = dist.new_group(list(range(CLUSTER.world_size)))
    numel = 2**25
    whole = [torch.randn(numel, device=device).to(torch.bfloat16) for _ in range(3)]

    def gather(group: dist.ProcessGroup | None, index: int) -> dist.Work:
        size = dist.get_world_size(group)
        own = whole[index].view(size, -1)[0]
        return dist.all_gather_into_tensor(whole[index], own, group=group, async_op=True)

    def seconds(kind: Kind, ranks: tuple[int, ...] | range) -> float:
        return cost(CLUSTER, kind, Span.of(CLUSTER, ranks), 2 * numel).seconds

    world = range(CLUSTER.world_size)
    cases: dict[str, tuple[list[dist.ProcessGroup | None], float]] = {
        "two on the uplink": ([None, other], 2 * seconds(Kind.ALL_GATHER, world)),
        "node and uplink": (
            [node, across],
            max(seconds(Kind.ALL_GATHER, NODE), seconds(Kind.ALL_GATHER, ACROSS)),
        ),
        "two groups on the uplink and one in the node": (
            [None, across, node],
            seconds(Kind.ALL_GATHER, world) + seconds(Kind.ALL_GATHER, ACROSS),
        ),
    }
    rows = []
    for name, (groups, expected) in cases.items():

        def together(chosen: list[dist.ProcessGroup | None] = groups) -> None:
            for work in [gather(group, index) for index, group in enumerate(chosen)]:
                work.wait()

        together()
        found = statistics.median(timed(together, device) for _ in range(repeats))
        rows.append(_row(name, 2 * numel * len(groups), expected, found))
    return rows


def host_seconds(device: torch.device, calls: int = 500) -> float:
    """Host time of issuing one collective."""
    token = torch.zeros(8, device=device)
    group = dist.new_group([0, 1])
    dist.all_reduce(token, group=group)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(token, group=group)
    return (time.perf_counter() - began) / calls


def _row(name: str, nbytes: int, expected: float, found: float) -> dict[str, object]:
    return {"collective": name, "nbytes": nbytes, "expected_us": expected * 1e6, "found_us": found * 1e6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    with mics.emulate(CLUSTER):
        rows = single_collectives(device, args.repeats) + shared_links(device, args.repeats)
        host_us = host_seconds(device) * 1e6
    worst = 0.0
    for row in rows:
        expected, found = float(row["expected_us"]), float(row["found_us"])  # type: ignore[arg-type]
        error = found - expected
        excess = max(0.0, min(abs(error) / expected / 0.05, abs(error) / 5.0))
        worst = max(worst, excess)
        print(
            f"{row['collective']:<46} {row['nbytes']:>11,} B  expected {expected:>11.1f} us  found "
            f"{found:>11.1f} us  {error:>+8.1f} us {100 * error / expected:>+7.2f}%"
        )
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    print(
        f"{name}: worst error is {worst:.2f} of the allowed 5% or 5 us; {host_us:.1f} us of host time a call"
    )
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()

"""Times gloo's collectives on a namespace cluster, and the bytes they put on each host's uplink.

    python -m benchmarks.cluster run --hosts 4 --ranks 2 --rate 500mbit \\
        -- -m benchmarks.cluster.collectives --out collectives.json

Every collective runs over three divisions of the ranks. In each division all groups work at the same time, as
they do in training:

    world     one group of all ranks
    across    ranks of equal place on their hosts, one group per place: all of it crosses uplinks
    within    ranks of one host, one group per host: none of it crosses uplinks

`seconds` is the median over repeats of the slowest rank's time. The barriers around each repeat cross the
uplinks too; their bytes are measured on their own and taken off `uplink_nbytes`.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from benchmarks.cluster.counters import uplink_nbytes

SIZES = (64 << 10, 512 << 10, 4 << 20)
"""Bytes of the full buffer: what an all-gather ends with, what a reduce-scatter or all-to-all starts from."""
NUM_REPEATS = 5

_all_gather = cast(Callable[..., object], getattr(dist, "all_gather_single", dist.all_gather_into_tensor))
"""Renamed in torch 2.13, which warns about the old name."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Where this rank is."""

    rank: int
    num_hosts: int
    ranks_per_host: int

    @property
    def host(self) -> int:
        return self.rank // self.ranks_per_host

    def divisions(self) -> dict[str, list[list[int]]]:
        """Ranks of every group, by name of the division."""
        k, world = self.ranks_per_host, self.num_hosts * self.ranks_per_host
        return {
            "world": [list(range(world))],
            "across": [list(range(place, world, k)) for place in range(k)],
            "within": [list(range(host * k, (host + 1) * k)) for host in range(self.num_hosts)],
        }


@dataclass(frozen=True, kw_only=True)
class Measurement:
    """One collective over one division at one size."""

    kind: str
    division: str
    groups: list[list[int]]
    nbytes: int
    seconds: float
    repeats: list[float]
    """Seconds of the slowest rank, each repeat."""
    uplink_nbytes: list[int]
    """Bytes a repeat sent over each host's uplink, without the barriers around it."""


@dataclass(frozen=True, kw_only=True)
class Buffers:
    """What one size needs on this rank: fp32, made before the clock starts."""

    full: torch.Tensor
    exchanged: torch.Tensor
    """As ``full``: one piece from each rank of the group."""
    shard: torch.Tensor
    """The size of ``full`` over the group's."""

    @classmethod
    def of(cls, nbytes: int, group_size: int) -> Buffers:
        shard_numel = nbytes // 4 // group_size
        full = torch.ones(shard_numel * group_size)
        return cls(full=full, exchanged=torch.empty_like(full), shard=torch.ones(shard_numel))


Collective = Callable[[Buffers, dist.ProcessGroup, int], None]
"""Runs to its end on one rank: its buffers, its group, and the group's first rank."""


def nothing(buffers: Buffers, group: dist.ProcessGroup, first: int) -> None:
    """What measuring itself costs."""


def all_gather(buffers: Buffers, group: dist.ProcessGroup, first: int) -> None:
    _all_gather(buffers.full, buffers.shard, group=group)


def all_reduce(buffers: Buffers, group: dist.ProcessGroup, first: int) -> None:
    dist.all_reduce(buffers.full, group=group)


def broadcast(buffers: Buffers, group: dist.ProcessGroup, first: int) -> None:
    dist.broadcast(buffers.full, src=first, group=group)


def all_to_all(buffers: Buffers, group: dist.ProcessGroup, first: int) -> None:
    dist.all_to_all_single(buffers.exchanged, buffers.full, group=group)


def reduce_scatter(buffers: Buffers, group: dist.ProcessGroup, first: int) -> None:
    """An exchange and a sum: gloo's own reduce-scatter sends as much as an all-reduce."""
    dist.all_to_all_single(buffers.exchanged, buffers.full, group=group)
    torch.sum(buffers.exchanged.view(-1, buffers.shard.numel()), dim=0, out=buffers.shard)


COLLECTIVES: dict[str, Collective] = {
    function.__name__: function
    for function in (all_gather, all_reduce, broadcast, all_to_all, reduce_scatter)
}


def repeat(
    collective: Collective, buffers: Buffers, group: dist.ProcessGroup, first: int, cluster: Cluster
) -> tuple[list[float], list[float]]:
    """Seconds of each repeat on the slowest rank, and mean bytes a repeat sent over each host's uplink."""
    collective(buffers, group, first)
    dist.barrier()
    seconds = torch.zeros(NUM_REPEATS, dtype=torch.float64)
    sent_before = uplink_nbytes().sent_nbytes
    for index in range(NUM_REPEATS):
        dist.barrier()
        start = time.perf_counter()
        collective(buffers, group, first)
        seconds[index] = time.perf_counter() - start
    dist.barrier()
    sent = torch.zeros(cluster.num_hosts, dtype=torch.float64)
    if cluster.rank % cluster.ranks_per_host == 0:
        sent[cluster.host] = (uplink_nbytes().sent_nbytes - sent_before) / NUM_REPEATS
    dist.barrier()
    dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
    dist.all_reduce(sent)
    return seconds.tolist(), sent.tolist()


def measure(cluster: Cluster) -> list[Measurement]:
    """Every collective at every size over every division that has more than one rank to a group."""
    measurements: list[Measurement] = []
    for division, groups in cluster.divisions().items():
        if len(groups[0]) == 1:
            continue
        process_groups = [dist.new_group(ranks) for ranks in groups]
        mine = next(index for index, ranks in enumerate(groups) if cluster.rank in ranks)
        group, first = process_groups[mine], groups[mine][0]
        assert isinstance(group, dist.ProcessGroup)
        _, idle = repeat(nothing, Buffers.of(SIZES[0], len(groups[0])), group, first, cluster)
        for nbytes in SIZES:
            buffers = Buffers.of(nbytes, len(groups[0]))
            for kind, collective in COLLECTIVES.items():
                seconds, sent = repeat(collective, buffers, group, first, cluster)
                measurements.append(
                    Measurement(
                        kind=kind,
                        division=division,
                        groups=groups,
                        nbytes=buffers.full.nbytes,
                        seconds=statistics.median(seconds),
                        repeats=seconds,
                        uplink_nbytes=[round(total - bare) for total, bare in zip(sent, idle, strict=True)],
                    )
                )
    return measurements


def table(measurements: list[Measurement]) -> str:
    lines = [f"{'kind':<15}{'division':<10}{'buffer KiB':>11}{'ms':>9}{'busiest uplink / buffer':>25}"]
    lines += [
        f"{m.kind:<15}{m.division:<10}{m.nbytes / 1024:>11.0f}{m.seconds * 1e3:>9.2f}"
        f"{max(m.uplink_nbytes) / m.nbytes:>25.3f}"
        for m in measurements
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="time gloo's collectives on a namespace cluster")
    parser.add_argument("--out", type=Path, help="write every measurement there, as JSON")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    ranks_per_host = int(os.environ["LOCAL_WORLD_SIZE"])
    cluster = Cluster(
        rank=dist.get_rank(),
        num_hosts=dist.get_world_size() // ranks_per_host,
        ranks_per_host=ranks_per_host,
    )
    measurements = measure(cluster)
    if cluster.rank == 0:
        print(table(measurements), flush=True)
        if args.out is not None:
            report = {
                "num_hosts": cluster.num_hosts,
                "ranks_per_host": cluster.ranks_per_host,
                "rate": os.environ["MICS_UPLINK_RATE"],
                "delay": os.environ["MICS_UPLINK_DELAY"],
                "torch": torch.__version__,
                "measurements": [asdict(measurement) for measurement in measurements],
            }
            args.out.write_text(json.dumps(report, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A calibration from its first collective to its cluster, as every rank runs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch

from mics.calibrate.beside import measure_beside_link, measure_links_together
from mics.calibrate.clock import Stopwatch
from mics.calibrate.collectives import Groups, measure_series
from mics.calibrate.computing import NUM_STAGES, Machine, ModelWork, device_name, measure_machine
from mics.calibrate.fit import LINK_NAMES, CollectiveTime, fit_links, with_link
from mics.comm import World
from mics.cost.clusters import Cluster, assumed_cluster
from mics.cost.gpus import GPUS
from mics.errors import SettingsError
from mics.train.hardware import peak_tflops

_COMPUTE_SHARE: Final = 0.3  # of the time
_COLLECTIVES_SHARE: Final = 0.5
_BESIDE_SHARE: Final = 0.06  # for each link beside computation, and for links beside each other
_MEMORY_SHARE: Final = 0.2  # of a device's free memory, for the largest buffer: there are up to four of them
_CGROUP_LIMIT: Final = Path("/sys/fs/cgroup/memory.max")


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured, and the cluster that explains it."""

    cluster: Cluster
    machine: Machine
    points: tuple[CollectiveTime, ...]
    seconds: float


def node_indices(names: Sequence[str]) -> list[int]:
    """For each rank the number of its node; an error where nodes have different numbers of ranks."""
    nodes = list(dict.fromkeys(names))
    counts = {name: names.count(name) for name in nodes}
    if len(names) < 2:
        raise SettingsError(
            "expected at least 2 ranks, found 1; start it as the training is started, for "
            "example torchrun --nproc-per-node 2 -m mics.cli calibrate"
        )
    if len(set(counts.values())) > 1:
        found = ", ".join(f"{count} on node {name}" for name, count in counts.items())
        raise SettingsError(f"expected as many ranks on every node, found {found}; start as many on each")
    return [nodes.index(name) for name in names]


def num_stages(groups: Groups) -> int:
    """Of one calibration."""
    return NUM_STAGES + len(list(groups.series())) + len(groups.collectives)


def calibrate_world(
    world: World,
    groups: Groups,
    work: ModelWork,
    *,
    max_nbytes: int,
    max_seconds: float,
    advance: Callable[[], object] = lambda: None,
) -> Calibration:
    """Measure everything, on all ranks at once; all of them come to the same answer."""
    watch = Stopwatch(world.host_group(), work.device, max_seconds=max_seconds)
    memory, shared = memory_of(work.device, groups.ranks_per_node, watch)
    max_nbytes = min(max_nbytes, int(min(watch.tell(_free_nbytes(work.device) / shared)) * _MEMORY_SHARE))
    machine = measure_machine(watch, work, max_seconds=_COMPUTE_SHARE * max_seconds, advance=advance)
    points = _measure_collectives(
        watch,
        groups,
        work.device,
        max_nbytes=max_nbytes,
        max_seconds=_COLLECTIVES_SHARE * max_seconds,
        advance=advance,
    )
    cluster = fit_links(_unmeasured(work.device, groups), points)
    largest = {
        name: max(point.nbytes for point in points if point.division == name) for name in groups.collectives
    }
    share = _BESIDE_SHARE * max_seconds
    for name in LINK_NAMES:
        if name in groups.collectives:
            beside = measure_beside_link(
                watch, work, groups, cluster, name, max_nbytes=largest[name], max_seconds=share
            )
            slow = replace(getattr(cluster, name), slowdown=beside)
            cluster = with_link(cluster, name, slow)
            advance()
    if len(groups.collectives) > 1:
        found = measure_links_together(
            watch, groups, cluster, work.device, max_nbytes=largest, max_seconds=share
        )
        cluster = replace(cluster, link_slowdown=found)
        advance()
    host = min(watch.tell(host_nbytes()))
    return Calibration(
        cluster=_with_machine(cluster, machine, memory_nbytes=memory, host_nbytes=host),
        machine=machine,
        points=tuple(points),
        seconds=max_seconds - watch.left,
    )


def _measure_collectives(
    watch: Stopwatch,
    groups: Groups,
    device: torch.device,
    *,
    max_nbytes: int,
    max_seconds: float,
    advance: Callable[[], object],
) -> list[CollectiveTime]:
    """Every series, each with its share of the time that is left."""
    points: list[CollectiveTime] = []
    series = list(groups.series())
    ends = watch.left - min(max_seconds, max(0.0, watch.left))
    for number, (division, kind) in enumerate(series):
        share = max(0.0, watch.left - ends) / (len(series) - number)
        points += measure_series(
            watch, groups, division, kind, device=device, max_nbytes=max_nbytes, max_seconds=share
        )
        advance()
    return points


def _with_machine(cluster: Cluster, machine: Machine, *, memory_nbytes: float, host_nbytes: float) -> Cluster:
    device = machine.computing.device
    peak = peak_tflops(device) if device != "cpu" else None
    return replace(
        cluster,
        flops=machine.matrix_flops,
        peak_flops=peak * 1e12 if peak else max(machine.wide_flops, machine.matrix_flops),
        memory_nbytes=float(memory_nbytes),
        memory_bandwidth=machine.memory_bandwidth,
        host_nbytes=float(host_nbytes),
        host_bandwidth=machine.host_bandwidth,
        gpu=_known_gpu(device),
        computing=machine.computing,
    )


def _unmeasured(device: torch.device, groups: Groups) -> Cluster:
    """A cluster of this size, with links that measured ones replace."""
    name = device_name(device) if device.type == "cuda" else None
    found = assumed_cluster(name, num_nodes=groups.num_nodes, ranks_per_node=groups.ranks_per_node)
    return replace(found, name="measured")


def memory_of(device: torch.device, ranks_per_node: int, watch: Stopwatch) -> tuple[float, int]:
    """Bytes of memory that one rank has, on the rank that has least, and ranks that share the device."""
    if device.type != "cuda":
        return min(watch.tell(host_nbytes() / ranks_per_node)), ranks_per_node
    properties = torch.cuda.get_device_properties(device)
    gpus = watch.tell(str(properties.uuid))
    shared = max(gpus.count(gpu) for gpu in gpus)
    return min(watch.tell(properties.total_memory)) / shared, shared


def _free_nbytes(device: torch.device) -> float:
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return float(min(pages, host_nbytes()))


def host_nbytes() -> float:
    """Memory of this node, or what a container has of it."""
    total = float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    try:
        limit = _CGROUP_LIMIT.read_text().strip()
    except OSError:
        return total
    return min(total, float(limit)) if limit.isdecimal() else total


def _known_gpu(name: str) -> str:
    """A name of cost/gpus.py, where it is there under the whole of its name."""
    words = name.lower().replace("-", " ").split()
    return next((gpu for gpu in GPUS if gpu in words), "")

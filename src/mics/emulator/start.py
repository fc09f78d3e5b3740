"""The ``emulated`` backend of torch.distributed, and the one call that starts it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from urllib.parse import parse_qsl, unquote, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store

from mics.cost.clusters import Cluster, find_cluster
from mics.emulator.fabric import Fabric, Imagined
from mics.emulator.group import EmulatedGroup
from mics.emulator.log import Collective
from mics.errors import SettingsError
from mics.utils.emulated_backend import NAME

_DEFAULT = "p4d.24xlarge"

_armed: Fabric | None = None  # for the world that is about to be initialised


class Emulation:
    """An emulated cluster that is running in this process. Also a context manager, which ends it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric
        self._world = dist.group.WORLD

    @property
    def cluster(self) -> Cluster:
        return self._fabric.cluster

    @property
    def dilation(self) -> float:
        """Seconds of the cluster in one of this machine."""
        return self._fabric.dilation

    def clear(self) -> None:
        """Forget the collectives so far."""
        self._fabric.clear()

    def collectives(self) -> list[Collective]:
        """Every collective since the last ``clear`` (a GPU's last 65536), in order of issue."""
        return self._fabric.collectives()

    def blocked(self) -> list[tuple[float, float]]:
        """On the CPU: when this process stood still for a collective, as (from, to) in seconds."""
        return self._fabric.blocked()

    @contextmanager
    def free(self) -> Iterator[None]:
        """Inside, collectives take no time: what is left is the cost of issuing them."""
        self._fabric.free = True
        try:
            yield
        finally:
            self._fabric.free = False

    def close(self) -> None:
        """End it: afterwards no process group is initialised, unless somebody initialised another."""
        if dist.is_initialized() and dist.group.WORLD is self._world:
            dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def emulate(
    cluster: Cluster | str,
    *,
    timeout: timedelta = timedelta(minutes=10),
    imagined: Imagined = "different",
    dilation: float = 1.0,
) -> Emulation:
    """Make this process rank 0 of ``cluster``, a `Cluster` or what ``--cluster`` takes ("p4d.24xlarge:16").

    It initialises torch.distributed with the ``emulated`` backend. Collectives take the time that the
    cluster's cost model gives and write plausible data; everything else is real. ``imagined`` is what
    other ranks hold of the parameters: something like what this one does, "copies" of it, or "zeros". A GPU
    multiplies the last two faster than real ones: they are there to compare with figures that were made so.
    ``dilation``: how many times as fast this device computes as the cluster's own. Links are as many times
    faster, so that computing and communicating keep their ratio; multiply the times that you measure with it.
    """
    if not 0 < dilation < math.inf:
        raise SettingsError(f"dilation: expected a number above 0, found {dilation!r}")
    found = find_cluster(cluster) if isinstance(cluster, str) else cluster
    if dist.is_initialized():
        raise SettingsError(
            "mics.emulate: expected no process group, found an initialised one; call "
            "torch.distributed.destroy_process_group() first"
        )
    fabric = _arm(found)
    fabric.imagined = imagined
    fabric.dilation = dilation
    dist.init_process_group(NAME, store=HashStore(), rank=0, world_size=found.world_size, timeout=timeout)
    return Emulation(fabric)


def emulated_cluster() -> Cluster | None:
    """The cluster that this process emulates, or None where the process group is a real one."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return world.fabric.cluster if isinstance(world, EmulatedGroup) else None


def _arm(cluster: Cluster) -> Fabric:
    global _armed
    _armed = Fabric(cluster)
    return _armed


def create(options: Any, backend_options: Any) -> EmulatedGroup:
    """A group for torch: the first one is the world and brings the cluster into being."""
    global _armed
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    world = dist.group.WORLD if dist.is_initialized() else None
    if isinstance(world, EmulatedGroup):
        fabric = world.fabric
    elif _armed is not None:
        fabric = _armed
    else:
        fabric = Fabric(_default_cluster(options.group_size))
    _armed = None
    return EmulatedGroup(fabric, ranks, options.group_rank, options.timeout)


def _default_cluster(world_size: int) -> Cluster:
    """Without `emulate`: what MICS_CLUSTER names, with as many nodes as the world needs."""
    cluster = find_cluster(os.environ.get("MICS_CLUSTER", _DEFAULT))
    if world_size < cluster.ranks_per_node:
        return replace(cluster, num_nodes=1, ranks_per_node=world_size)
    if world_size % cluster.ranks_per_node:
        raise SettingsError(
            f"emulated world of {world_size}: expected whole nodes of {cluster.ranks_per_node} ranks "
            f"({cluster.name}); choose a multiple, or another cluster with MICS_CLUSTER or mics.emulate()"
        )
    return replace(cluster, num_nodes=world_size // cluster.ranks_per_node)


def rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=10), **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """``init_process_group("emulated", init_method="emulated://p4d.24xlarge:16")``."""
    parsed = urlparse(url)
    cluster = find_cluster(unquote(parsed.netloc + parsed.path))
    asked = {key: int(value) for key, value in parse_qsl(parsed.query)}
    rank, world_size = asked.get("rank", 0), asked.get("world_size", cluster.world_size)
    if world_size != cluster.world_size or not 0 <= rank < world_size:
        raise SettingsError(
            f"{url}: expected a rank of the cluster's {cluster.world_size}, found rank {rank} of {world_size}"
        )
    _arm(cluster)
    yield HashStore(), rank, world_size

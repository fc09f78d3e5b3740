"""The ``emulated`` backend of torch.distributed, and the one call that starts it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import Any, Self
from urllib.parse import unquote, urlparse

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, Store
from torch.distributed.rendezvous import register_rendezvous_handler

from mics.clusters import find_cluster
from mics.comm.emulated.fabric import Fabric
from mics.comm.emulated.group import NAME, EmulatedGroup
from mics.comm.emulated.log import Collective
from mics.errors import SettingsError
from mics.topology import Cluster

_DEFAULT = "p4d.24xlarge"

_fabric: Fabric | None = None  # of the default group that is initialised now


class Emulation:
    """An emulated cluster that is running in this process. Also a context manager, which ends it."""

    def __init__(self, fabric: Fabric) -> None:
        self._fabric = fabric

    @property
    def cluster(self) -> Cluster:
        return self._fabric.cluster

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
        """End it: afterwards no process group is initialised."""
        global _fabric
        if _fabric is self._fabric:
            _fabric = None
            if dist.is_initialized():
                dist.destroy_process_group()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def emulate(cluster: Cluster | str, *, timeout: timedelta = timedelta(minutes=10)) -> Emulation:
    """Make this process rank 0 of ``cluster``, a `Cluster` or what ``--cluster`` takes ("p4d.24xlarge:16").

    It initialises torch.distributed with the ``emulated`` backend. Collectives take the time that the
    cluster's cost model gives and write plausible data; everything else is real.
    """
    found = find_cluster(cluster) if isinstance(cluster, str) else cluster
    if dist.is_initialized():
        raise SettingsError(
            "mics.emulate: expected no process group, found an initialised one; call "
            "torch.distributed.destroy_process_group() first"
        )
    fabric = _start(found)
    dist.init_process_group(NAME, store=HashStore(), rank=0, world_size=found.world_size, timeout=timeout)
    return Emulation(fabric)


def emulated_cluster() -> Cluster | None:
    """The cluster that this process emulates, or None where the process group is a real one."""
    if _fabric is None or not dist.is_initialized():
        return None
    return _fabric.cluster if isinstance(dist.group.WORLD, EmulatedGroup) else None


def _start(cluster: Cluster) -> Fabric:
    global _fabric
    _fabric = Fabric(cluster)
    return _fabric


def _create(options: Any, backend_options: Any) -> EmulatedGroup:
    """A group for torch: the first one is the world and brings the cluster into being."""
    global _fabric
    ranks = list(options.global_ranks_in_group) or list(range(options.group_size))
    if _fabric is None or not dist.is_initialized():
        size = options.group_size
        if _fabric is None or _fabric.cluster.world_size != size:
            _fabric = Fabric(_default_cluster(size))
    return EmulatedGroup(_fabric, ranks, options.group_rank, options.timeout)


def _default_cluster(world_size: int) -> Cluster:
    """Without `emulate`: what MICS_CLUSTER names, with as many nodes as the world needs."""
    cluster = find_cluster(os.environ.get("MICS_CLUSTER", _DEFAULT))
    return replace(cluster, num_nodes=-(-world_size // cluster.ranks_per_node))


def _rendezvous(
    url: str, timeout: timedelta = timedelta(minutes=10), **_: Any
) -> Iterator[tuple[Store, int, int]]:
    """``init_process_group("emulated", init_method="emulated://p4d.24xlarge:16")``."""
    parsed = urlparse(url)
    cluster = find_cluster(unquote(parsed.netloc + parsed.path))
    _start(cluster)
    yield HashStore(), 0, cluster.world_size


def _register() -> None:
    if hasattr(dist.Backend, NAME.upper()):
        return
    dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])
    register_rendezvous_handler(NAME, _rendezvous)


_register()

"""The device meshes peers are given: torch's names for partition and replication groups."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch.distributed as dist

from mics.bench.job import Job
from mics.emulator import emulated_cluster

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def world_mesh(job: Job) -> DeviceMesh:
    """One partition group of all ranks."""
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh(job.device, (dist.get_world_size(),), mesh_dim_names=("partition",))


def replica_mesh(job: Job) -> DeviceMesh:
    """(replicas, partition): partition groups of neighbouring ranks, as mics and torchrun number them."""
    from torch.distributed.device_mesh import init_device_mesh

    world_size, partition_size = dist.get_world_size(), job.partition_size
    if world_size % partition_size:
        raise ValueError(
            f"partition_size: expected a divisor of the world size {world_size}, found {partition_size}"
        )
    return init_device_mesh(
        job.device, (world_size // partition_size, partition_size), mesh_dim_names=("replicas", "partition")
    )


def node_mesh(job: Job, ranks_per_node: int) -> DeviceMesh:
    """(nodes, ranks of a node), as torchrun numbers them."""
    from torch.distributed.device_mesh import init_device_mesh

    world_size = dist.get_world_size()
    if world_size % ranks_per_node:
        raise ValueError(
            f"ranks per node: expected a divisor of the world size {world_size}, found {ranks_per_node}"
        )
    return init_device_mesh(
        job.device, (world_size // ranks_per_node, ranks_per_node), mesh_dim_names=("nodes", "ranks")
    )


def ranks_per_node() -> int:
    """Of the emulated cluster, or as the launcher says."""
    cluster = emulated_cluster()
    return cluster.ranks_per_node if cluster else int(os.environ.get("LOCAL_WORLD_SIZE", "1"))

"""The device meshes peers are given: torch's names for partition and replication groups."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.distributed as dist

from mics.bench.job import Job

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

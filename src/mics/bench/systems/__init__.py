"""The systems that can be compared, by name. Peers are imported when they are built, not before."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from mics.bench.systems.protocol import Batch, System, SystemUnavailable, Trainer
from mics.bench.systems.with_ddp import build_ddp
from mics.bench.systems.with_deepspeed import (
    MICS_VERSION,
    build_deepspeed_mics,
    build_deepspeed_zero2,
    build_deepspeed_zeropp,
    build_zero3,
)
from mics.bench.systems.with_fsdp import build_fsdp2, build_hsdp, build_hsdp_kept
from mics.bench.systems.with_megatron import PACKAGE, build_megatron, build_megatron_bf16
from mics.bench.systems.with_mics import (
    build_mics,
    build_mics_host,
    build_mics_int4,
    build_mics_int8,
    build_mics_partition,
    build_mics_uncompressed,
)
from mics.bench.systems.with_zero2 import build_zero2, build_zero2_reduce
from mics.bench.systems.with_zeropp import build_zeropp

_ALL: Final = (
    System(name="mics", build=build_mics, about="this library, with its defaults"),
    System(
        name="mics-partition",
        build=build_mics_partition,
        about="this library, optimizer state over the partition group alone, as HSDP has it",
    ),
    System(
        name="mics-host",
        build=build_mics_host,
        about="this library, masters and optimizer state in host memory between steps",
    ),
    System(
        name="mics-uncompressed",
        build=build_mics_uncompressed,
        about="this library, new parameters sent to the replicas as they are",
    ),
    System(
        name="mics-int8",
        build=build_mics_int8,
        about="this library, gradients between replicas and all between nodes of a partition group in int8",
    ),
    System(
        name="mics-int4",
        build=build_mics_int4,
        about="the same, gradients between replicas in int4",
    ),
    System(name="fsdp2", build=build_fsdp2, partition="world", about="torch fully_shard over the world"),
    System(name="hsdp", build=build_hsdp, about="torch fully_shard over partition groups, with replicas"),
    System(
        name="hsdp-kept",
        build=build_hsdp_kept,
        about="hsdp with every parameter gathered once a step and kept until its last use",
    ),
    System(
        name="ddp",
        build=build_ddp,
        partition="none",
        about="torch DistributedDataParallel; bfloat16 is autocast",
    ),
    System(
        name="zero2",
        build=build_zero2,
        partition="state",
        about="ZeRO-2: DeepSpeed's stage 2 schedule, our implementation",
    ),
    System(
        name="zero2-reduce",
        build=build_zero2_reduce,
        partition="state",
        about="the same with one reduce to each owner, as DeepSpeed without use_multi_rank_bucket_allreduce",
    ),
    System(
        name="zeropp",
        build=build_zeropp,
        partition="world",
        about="ZeRO++: DeepSpeed's schedule (int8 gathers, hpZ, int4 gradients), our implementation on FSDP2",
    ),
    System(
        name="megatron-fsdp",
        build=build_megatron,
        needs=(PACKAGE,),
        about="Megatron-FSDP v2, gradients accumulated in the reduction format",
    ),
    System(
        name="megatron-fsdp-bf16",
        build=build_megatron_bf16,
        needs=(PACKAGE,),
        about="Megatron-FSDP v2, gradients accumulated in the parameters' format",
    ),
    System(
        name="deepspeed-zero2",
        build=build_deepspeed_zero2,
        needs=("deepspeed",),
        isolated=True,
        partition="state",
        about="DeepSpeed ZeRO-2: whole parameters, gradients and optimizer state over the world",
    ),
    System(
        name="deepspeed-zero3",
        build=build_zero3,
        needs=("deepspeed",),
        isolated=True,
        partition="world",
        about="DeepSpeed ZeRO-3 over the world",
    ),
    System(
        name="deepspeed-zeropp",
        build=build_deepspeed_zeropp,
        needs=("deepspeed",),
        isolated=True,
        partition="world",
        about="DeepSpeed ZeRO++: ZeRO-3 over the world, int8 gathers, hpZ over the node, int4 gradients",
    ),
    System(
        name="deepspeed-mics",
        build=build_deepspeed_mics,
        needs=(f"deepspeed=={MICS_VERSION}",),
        isolated=True,
        about="DeepSpeed MiCS over partition groups",
    ),
)

SYSTEMS: Final[Mapping[str, System]] = MappingProxyType({system.name: system for system in _ALL})

__all__ = ["SYSTEMS", "Batch", "System", "SystemUnavailable", "Trainer"]

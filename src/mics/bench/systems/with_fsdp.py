"""PyTorch's FSDP2, over the world or (HSDP) over partition groups with replicas.

Set up as torchtitan does: embedding, blocks and head are sharded one by one, the head stays gathered after
the forward because the backward begins with it, and the rest belongs to the root.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn

from mics.bench.job import Job
from mics.bench.systems.loop import Loop, Microsteps
from mics.bench.systems.mesh import replica_mesh, world_mesh
from mics.bench.systems.protocol import Batch
from mics.bench.systems.start import device_of, inner_units, materialise, meta_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import FSDPModule


def build_fsdp2(job: Job) -> Loop:
    """One partition group as large as the world. Gradients are reduce-scattered in every micro-step."""
    return build_sharded(job, world_mesh(job))


def build_hsdp(job: Job) -> Loop:
    """Partition groups of the job's size, with replicas that are all-reduced in the last micro-step only."""
    return build_sharded(job, _mesh(job))


def build_hsdp_kept(job: Job) -> Loop:
    """The same with parameters that stay gathered from their first use in a step to their last."""
    return build_sharded(job, _mesh(job), reshard_after_forward=False, microsteps=_kept)


def _mesh(job: Job) -> DeviceMesh:
    return world_mesh(job) if job.partition_size == dist.get_world_size() else replica_mesh(job)


def build_sharded(
    job: Job,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool | int = True,
    microsteps: Microsteps | None = None,
    use: Callable[[nn.Module], None] | None = None,
) -> Loop:
    """``use``: told of the sharded model, before it trains."""
    # Here, not above: it takes a second, which nobody should wait for who compares other systems.
    from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(
        param_dtype=None if job.param is torch.float32 else job.param, reduce_dtype=job.reduce
    )
    shard = partial(fully_shard, mesh=mesh, mp_policy=policy)
    model, device = meta_model(job), device_of(job)
    for unit in inner_units(model):
        materialise(unit, device)  # right before sharding, so that only one unit is ever whole
        shard(unit, reshard_after_forward=reshard_after_forward)
    materialise(model, device)
    if not job.model.tie_weights:
        assert isinstance(model.embedding, FSDPModule)
        model.embedding.set_unshard_in_backward(False)  # a lookup's backward needs no weights
        shard([model.norm, model.head], reshard_after_forward=False)
    shard(model)
    if use is not None:
        use(model)
    return Loop(job, model, microsteps=microsteps or _announced)


def _announced(model: FSDPModule, batches: Sequence[Batch]) -> Iterator[Batch]:
    """Tell replicas when to meet.

    Not ``set_is_last_backward``, which is for several forwards before their backwards: when one micro-step
    follows the other, it keeps the order of the earlier forward, and the backward's prefetch then gathers a
    unit that nobody needs.
    """
    for index, batch in enumerate(batches):
        model.set_requires_all_reduce(index == len(batches) - 1)
        yield batch


def _kept(model: FSDPModule, batches: Sequence[Batch]) -> Iterator[Batch]:
    """The same, and release parameters after the last backward only."""
    for index, batch in enumerate(_announced(model, batches)):
        model.set_reshard_after_backward(index == len(batches) - 1)
        yield batch

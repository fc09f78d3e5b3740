"""Megatron-FSDP v2 (``megatron_fsdp.experimental``): NVIDIA's flat-buffer FSDP, without copies as in mics.

Two things cannot be set in it, and a table that shows it should say so: hop 1 moves gradients in the
parameters' format whatever ``reduce_dtype`` says, and optimizer state is sharded over the partition group
alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, Protocol

import torch
import torch.distributed as dist
from torch import nn

from mics.bench.job import Job
from mics.bench.systems.loop import Loop, adamw
from mics.bench.systems.mesh import replica_mesh, world_mesh
from mics.bench.systems.protocol import Batch, SystemUnavailable
from mics.bench.systems.start import device_of, inner_units, materialise, meta_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PACKAGE: Final = "megatron-fsdp==0.6.1"


def build_megatron(job: Job) -> Loop:
    """Gradients accumulated, and sent between replicas, in the job's reduction format."""
    return _build(job, main_grads=job.reduce)


def build_megatron_bf16(job: Job) -> Loop:
    """Its default: gradients accumulated and sent in the parameters' format, faster and less exact."""
    return _build(job, main_grads=None)


def _build(job: Job, *, main_grads: torch.dtype | None) -> Loop:
    peer = _import_peer()
    _check(job)
    alone = job.partition_size == dist.get_world_size()
    mesh = world_mesh(job) if alone else replica_mesh(job)
    placements = _placements(peer, mesh)
    policy = import_module("megatron_fsdp").MixedPrecisionPolicy(main_grads_dtype=main_grads)
    model = meta_model(job)
    # Inner units first, as it demands. The head is one of its own: as part of the root it would be gathered
    # before the first block, with nothing to hide behind.
    for unit in (*inner_units(model), model.head, model):
        _shard_unit(peer, job, unit, mesh, placements, policy)
    optimizer = adamw(model, job)
    peer.fully_shard_optimizer(optimizer)
    return Loop(job, model, optimizer=optimizer, microsteps=partial(_announced, peer.microbatch))


def _placements(peer: Any, mesh: DeviceMesh) -> Any:
    """Everything flat over the partition group; over replicas, gradients wait unreduced for the boundary."""
    flat, whole = peer.Flat(), peer.Replicate()
    if mesh.ndim == 1:
        return peer.Placements(dp_axes=[0], parameter=[flat], gradient=[flat], optimizer=[flat])
    unreduced = peer.Partial(dist.ReduceOp.AVG)
    return peer.Placements(
        dp_axes=[0, 1], parameter=[whole, flat], gradient=[unreduced, flat], optimizer=[whole, flat]
    )


def _shard_unit(peer: Any, job: Job, unit: nn.Module, mesh: DeviceMesh, placements: Any, policy: Any) -> None:
    fresh = set(materialise(unit, device_of(job)))
    masters = {name: param.detach() for name, param in unit.named_parameters() if param in fresh}
    for param in fresh:
        param.data = param.data.to(job.param)
    peer.fully_shard(unit, mesh, placements, policy)
    if job.param is torch.float32:
        return
    # It made its masters from the rounded parameters; give them what they were rounded from.
    groups: Any = unit.parameter_groups
    for group in groups:
        exact = peer.DBuffer.distribute_tensors(
            [masters[name] for name in group.parameter_names], mesh, group.main_weight.placements
        )
        group.main_weight.local_buffer.copy_(exact.local_buffer)


class _Microbatch(Protocol):
    def __call__(self, module: nn.Module, is_last: bool) -> AbstractContextManager[None]: ...


def _announced(microbatch: _Microbatch, model: nn.Module, batches: Sequence[Batch]) -> Iterator[Batch]:
    for index, batch in enumerate(batches):
        with microbatch(model, is_last=index == len(batches) - 1):
            yield batch


def _import_peer() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it misses Transformer Engine, which nothing here needs
            return import_module("megatron_fsdp.experimental")
    except ImportError as error:
        raise SystemUnavailable(
            f"megatron-fsdp: expected its package, found none that imports ({error}); pip install {PACKAGE}"
        ) from error


def _check(job: Job) -> None:
    if job.device != "cuda":
        raise SystemUnavailable(
            f"megatron-fsdp: expected device 'cuda', found {job.device!r}: it runs on CUDA streams only "
            "(torch says 'Expected a cuda device, but got: cpu'); compare it on a GPU"
        )
    if job.model.tie_weights:
        raise SystemUnavailable(
            "megatron-fsdp: expected tie_weights=False, found True: it takes a tied parameter for two; "
            "compare it on a model that is not tied"
        )

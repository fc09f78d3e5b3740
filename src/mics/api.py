"""The public calls: shard a model, announce boundaries, clip."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from mics.activations.policy import Activations
from mics.build import build
from mics.choices import choose_partition_size
from mics.comm import Traffic, join_world
from mics.config import (
    OptimizerSharding,
    OptimizerState,
    agreed,
    check_settings,
    compare,
    describe,
    ranks_on_gpu,
    whole_node,
)
from mics.cost.clusters import with_shared_gpus
from mics.engine import engine_of, engines_of
from mics.errors import SettingsError
from mics.layout.compression import LOSSLESS, Compression
from mics.layout.order import Prefetch
from mics.layout.precision import Precision
from mics.schedule.methods import follow_method
from mics.utils.deprecation import takes_old_keywords

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


@takes_old_keywords("mics.shard", lean="low_memory")
def shard(
    model: nn.Module,
    *,
    partition_size: int | None = None,
    units: Iterable[nn.Module | type[nn.Module]] | None = None,
    mesh: DeviceMesh | None = None,
    hierarchical: Literal["auto"] | bool = "auto",
    optimizer_sharding: OptimizerSharding = "world",
    optimizer_state: OptimizerState = "device",
    precision: Precision | None = None,
    prefetch: Literal["auto"] | int | Prefetch = "auto",
    activations: Activations | None = None,
    low_memory: Literal["auto"] | bool = "auto",
    audit_interval: Literal["auto"] | int = "auto",
    compression: Compression | None = LOSSLESS,
) -> nn.Module:
    """Shard ``model`` in place over partition groups and return it.

    Args:
        partition_size: ranks that together hold one copy of the parameters; a divisor of the world size.
            None: the smallest whose share of the model leaves half of a GPU's memory to activations (see
            ``mics plan``); without a GPU one node if its ranks divide the world, else the whole world.
        units: modules, or classes of modules, that are gathered and released as a whole. By default the
            entries of every list of repeated blocks. The rest goes to units of its own.
        mesh: a 2-D ``DeviceMesh`` (replicas outside, partition inside) instead of ``partition_size``.
        hierarchical: gather and reduce in two stages where a partition group has as many ranks on each of
            several nodes: where the cost model says that it pays ("auto"), always (True) or never (False).
            Replicas on one node meet before what they send is rounded, unless this is False.
        optimizer_sharding: "world" divides masters and optimizer state over partition x replication,
            "partition" over the partition group alone, which takes more memory. "auto": the latter where the
            cost model says that it saves time (narrow gradients, recomputed units, several replicas) and
            half of a device's memory is left to activations.
        optimizer_state: "host" keeps masters and optimizer state in pinned host memory between steps. A step
            brings one unit after the other to the device, updates it there, to the same bits, and takes it
            back: 12 bytes per parameter of the shard are free for a small cost in time. For torch's own
            optimizers.
        precision: dtypes of parameters, reduction and masters; by default bfloat16 parameters with float32
            masters on CUDA, and float32 on the CPU.
        prefetch: units to gather ahead of their use, or a ``mics.Prefetch`` that limits their bytes too;
            "auto" takes as many as the cost model says hide the gathers, and where the network is as busy as
            the GPU lets units stay gathered in memory that is left (``Prefetch.stay_nbytes``). Gradients are
            reduced and new parameters spread beside the computation too, unless it is 0: then everything
            runs where it is issued.
        activations: which units are recomputed in the backward, and what of their activations goes to
            host memory meanwhile; None leaves the model as it is.
        low_memory: hold as little memory as possible, for a small cost in time. Gradients and the buffers
            they are reduced in have memory from the first backward to the next forward that finds all of
            them cleared (call ``zero_grad()`` before it), the loss may use that of unsharded units. There
            is no second copy of parameters whose masters are all on this rank (one replica, or
            optimizer_sharding="partition"). "auto": where activations are offloaded.
        audit_interval: optimizer steps from one comparison of the replicas' parameters to the next (see
            ``mics.audit_replicas``); "auto" is 100, and 0 never compares. A difference raises
            ``mics.ReplicaError`` one boundary later.
        compression: what travels in fewer bytes than it has in memory. By default new parameters of 16 bits
            go to the replicas as how far each has moved, to the same bits. ``mics.Compression`` has formats
            that round, too. None: nothing.

    The cost model takes the network to be an ordinary one. ``MICS_CLUSTER`` tells it better: the name of a
    cluster or a file, as for ``mics emulate --cluster``.
    """
    world = join_world()
    nodes = world.node_names()
    settings, error = None, None
    try:
        size = partition_size
        if size is None:
            size = whole_node(nodes)
            if mesh is None and isinstance(model, nn.Module):
                on_host = optimizer_state == "host"
                size = choose_partition_size(model, world, nodes, compression, state_on_host=on_host)
        settings = check_settings(
            model,
            world,
            partition_size=size,
            units=units,
            mesh=mesh,
            hierarchical=hierarchical,
            optimizer_sharding=optimizer_sharding,
            optimizer_state=optimizer_state,
            precision=precision or Precision(),
            prefetch=prefetch,
            activations=activations,
            low_memory=low_memory,
            audit_interval=audit_interval,
            compression=compression,
            nodes=nodes,
        )
    except Exception as caught:
        # Tell the others before raising: they would wait for this rank in the exchange.
        error = caught
    if error is None and mesh is not None and partition_size is not None:
        error = SettingsError("mics.shard: expected partition_size or mesh, found both; give one of them")
    accounts = world.gather_objects(describe(world, model, settings, error))
    if error is not None:
        raise error
    assert settings is not None
    compare(accounts)
    sharing = ranks_on_gpu(accounts, world)
    if sharing > 1:
        settings = replace(settings, cluster=with_shared_gpus(settings.cluster), ranks_on_gpu=sharing)
    return build(model, world, agreed(settings, accounts), nodes, share_links=sharing > 1)


def microsteps(model: nn.Module, batches: Iterable[T]) -> Iterator[T]:
    """Iterate over the micro-batches of one optimizer step, announcing the last one.

    Hop 2 then runs unit by unit within the last backward instead of when the gradients are first needed.
    """
    parts = [engine.progress for engine in engines_of(model)]
    try:
        iterator = iter(batches)
    except TypeError as error:
        raise SettingsError(
            f"microsteps: expected the micro-batches of one optimizer step, found {batches!r}; pass a list"
        ) from error
    try:
        upcoming = next(iterator)
    except StopIteration:
        return
    try:
        for following in iterator:
            for progress in parts:
                progress.announce(last=False)
            yield upcoming
            upcoming = following
        for progress in parts:
            progress.announce(last=True)
        yield upcoming
    finally:
        for progress in parts:
            progress.announce(last=None)


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float | str = 2.0) -> Tensor:
    """Clip the gradients of the whole model to ``max_norm`` and return their norm before, on the device.

    One fused computation, one all-reduce, no waiting on the host; once more for each part sharded later.
    """
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise SettingsError(f"clip_grad_norm_: expected max_norm >= 0, found {max_norm!r}")
    try:
        exponent = float(norm_type)  # "inf" too, as in torch
    except (TypeError, ValueError):
        exponent = 0.0
    if not exponent > 0:
        raise SettingsError(f"clip_grad_norm_: expected norm_type > 0 (or inf), found {norm_type!r}")
    with torch.no_grad():
        clips = [engine.clip for engine in engines_of(model)]
        norms = [clip.norm(exponent) for clip in clips]
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), exponent)
        for clip in clips:
            clip.scale_to(float(max_norm), total)
    return total


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let a method other than ``forward`` compute with the parameters of a sharded model.

    ``name`` is that of a method of ``model``, or a path to one of a submodule ("encoder.embed"). Only calls
    of modules gather parameters by themselves; this one then does too, and its results may be part of a loss.
    Methods with usual names (``forward_features``, ``encode_image``, ``decode``, ``loss``...) are found by
    ``mics.shard``. A method that only calls the model itself (``generate`` of most models) needs nothing.
    """
    follow_method(engine_of(model).autograd, model, name)


def traffic(model: nn.Module) -> Traffic:
    """Collectives joined and bytes sent by this rank since the model was sharded."""
    engines = engines_of(model)
    for engine in engines:
        engine.mesh.lanes.drain()  # what is under way counts
    calls, nbytes = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for found in [engine.traffic.snapshot() for engine in engines]:
        calls.update(found.calls)
        nbytes.update(found.nbytes)
    return Traffic(calls=dict(calls), nbytes=dict(nbytes))

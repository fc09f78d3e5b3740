"""The public calls: shard a model, announce boundaries, clip."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from mics.assign import ParamRef, Site
from mics.boundary import Boundary
from mics.buffers import BufferSync, keeps_statistics
from mics.comm import Traffic, TrafficCounter, World, join_world
from mics.comm.world import MeshCollectives
from mics.engine import Engine, attach_engine, engine_of
from mics.errors import SettingsError
from mics.layout import plan_layout
from mics.materialize import drop_originals, fill_unit, initial_values, place_buffers
from mics.optimizer_hooks import register_params
from mics.precision import Precision
from mics.schedule import Schedule, ScheduledSite
from mics.settings import OptimizerSharding, Settings, check_settings, compare, describe, whole_node
from mics.state import shard_of_full
from mics.topology import Topology, plan_topology
from mics.unit import Unit
from mics.unit_spec import Share, UnitSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def shard(
    model: nn.Module,
    *,
    partition_size: int | None = None,
    units: Iterable[nn.Module | type[nn.Module]] | None = None,
    mesh: DeviceMesh | None = None,
    hierarchical: Literal["auto"] | bool = "auto",
    optimizer_sharding: OptimizerSharding = "world",
    precision: Precision | None = None,
    prefetch: Literal["auto"] | int = "auto",
) -> nn.Module:
    """Shard ``model`` in place over partition groups and return it.

    Args:
        partition_size: ranks that together hold one copy of the parameters; a divisor of the world size.
            None: one node if its ranks divide the world, else the whole world.
        units: modules, or classes of modules, that are gathered and released as a whole. By default the
            entries of every list of repeated blocks. The rest goes to units of its own.
        mesh: a 2-D ``DeviceMesh`` (replicas outside, partition inside) instead of ``partition_size``.
        hierarchical: gather and reduce in two stages where a partition group fills several whole nodes
            ("auto" and True), or always in one (False).
        optimizer_sharding: "world" divides masters and optimizer state over partition x replication,
            "partition" over the partition group alone.
        precision: formats of parameters, reduction and masters; by default bfloat16 parameters with float32
            masters on CUDA, and float32 on the CPU.
        prefetch: units to gather ahead of their use. Gradients are reduced and new parameters spread beside
            the computation too, unless it is 0: then everything runs where it is issued.
    """
    world = join_world()
    nodes = world.node_names()
    settings, error = None, None
    try:
        settings = check_settings(
            model,
            world,
            partition_size=whole_node(nodes) if partition_size is None else partition_size,
            units=units,
            mesh=mesh,
            hierarchical=hierarchical,
            optimizer_sharding=optimizer_sharding,
            precision=precision or Precision(),
            prefetch=prefetch,
        )
    except Exception as caught:
        # Tell the others before raising: they would wait for this rank in the exchange.
        error = caught
    if error is None and mesh is not None and partition_size is not None:
        error = SettingsError("mics.shard: expected partition_size or mesh, found both; give one of them")
    accounts = world.gather_objects(describe(world, settings, error))
    if error is not None:
        raise error
    assert settings is not None
    compare(accounts)
    return _build(model, world, settings, nodes)


def microsteps(model: nn.Module, batches: Iterable[T]) -> Iterator[T]:
    """Iterate over the micro-batches of one optimizer step, announcing the last one.

    Hop 2 then runs unit by unit within the last backward instead of when the gradients are first needed.
    """
    engine = engine_of(model)
    boundary, schedule = engine.boundary, engine.schedule
    iterator = iter(batches)
    try:
        upcoming = next(iterator)
    except StopIteration:
        return
    try:
        for following in iterator:
            schedule.more_to_come = True
            yield upcoming
            upcoming = following
        schedule.more_to_come = False
        boundary.announced = True
        yield upcoming
    finally:
        boundary.announced = schedule.more_to_come = False


def clip_grad_norm_(model: nn.Module, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Clip the gradients of the whole model to ``max_norm`` and return their norm before, on the device.

    One fused computation, one all-reduce, no waiting on the host.
    """
    if not isinstance(max_norm, int | float) or not max_norm >= 0:
        raise SettingsError(f"clip_grad_norm_: expected max_norm >= 0, found {max_norm!r}")
    if not norm_type > 0:
        raise SettingsError(f"clip_grad_norm_: expected norm_type > 0 (or inf), found {norm_type!r}")
    with torch.no_grad():
        return engine_of(model).boundary.clip_grad_norm_(float(max_norm), float(norm_type))


def traffic(model: nn.Module) -> Traffic:
    """Collectives joined and bytes sent by this rank since the model was sharded."""
    engine = engine_of(model)
    engine.mesh.lanes.drain()  # what is under way counts
    return engine.traffic.snapshot()


# -- building ---------------------------------------------------------------------------------------


def _build(model: nn.Module, world: World, settings: Settings, node_names: list[str]) -> nn.Module:
    order = {name: index for index, name in enumerate(dict.fromkeys(node_names))}
    topology = plan_topology(
        [order[name] for name in node_names],
        partition_groups=settings.partition_groups,
        hierarchical=settings.hierarchical,
    )
    world.start_liveness(settings.device)
    counter = TrafficCounter()
    overlap = settings.prefetch > 0
    mesh = world.collectives(topology, counter, settings.device, overlap=overlap)
    share = Share(
        chunk=topology.chunk(world.rank),
        piece=topology.piece(world.rank),
        masters_over_replicas=settings.optimizer_sharding == "world",
    )
    with torch.no_grad():
        place_buffers(model, settings.device, mesh.world)
        scheduled = _build_sites(model, settings, topology, share, mesh)
    all_units = list(dict.fromkeys(unit for site in scheduled for unit in site.units))
    boundary = Boundary(
        all_units,
        mesh=mesh,
        world_size=world.size,
        device=settings.device,
        num_reduce_buffers=2 if overlap else 1,
    )
    schedule = Schedule(
        scheduled,
        reduce=boundary.reduce,
        before_root=BufferSync(model, mesh.world),
        prefetch=settings.prefetch,
    )
    boundary.follow(schedule)
    register_params(boundary)
    for module in model.modules():
        if module._parameters:
            module._register_load_state_dict_pre_hook(shard_of_full, with_module=True)
    engine = Engine(
        world=world,
        topology=topology,
        mesh=mesh,
        units=all_units,
        schedule=schedule,
        boundary=boundary,
        traffic=counter,
        device=settings.device,
    )
    attach_engine(model, engine)
    return model


def _build_sites(
    model: nn.Module, settings: Settings, topology: Topology, share: Share, mesh: MeshCollectives
) -> list[ScheduledSite]:
    scheduled: list[ScheduledSite] = []
    index = itertools.count()
    for site in settings.sites:
        built = [unit for earlier in scheduled for unit in earlier.units]
        values = initial_values(model, site, settings.device, built)
        specs = _unit_specs(site, settings, topology, index)
        units = [
            Unit(
                spec,
                share,
                mesh=mesh,
                device=settings.device,
            )
            for spec in specs
        ]
        for unit in units:
            fill_unit(unit, values, mesh.world)
        drop_originals(site)
        lowered = [
            spec.param_dtype for spec in specs if spec.param_dtype not in {r.param.dtype for r in spec.refs}
        ]
        scheduled.append(
            ScheduledSite(
                name=site.name, module=site.module, units=units, cast_to=lowered[0] if lowered else None
            )
        )
    scheduled += _holders_elsewhere(settings.sites, scheduled)
    if not any(site.module is model for site in scheduled):
        # The root is always followed: its outputs are where backward begins.
        scheduled.append(ScheduledSite(name="", module=model, units=[]))
    return scheduled


def _holders_elsewhere(sites: Sequence[Site], scheduled: Sequence[ScheduledSite]) -> list[ScheduledSite]:
    """Sites for modules that hold tied parameters of another site.

    The module around all holders gathers them in its forward. A method that calls a holder without going
    through that forward (``model.encode()``) needs them too.
    """
    own = {id(site.module) for site in sites}
    extra: dict[int, ScheduledSite] = {}
    for site, built in zip(sites, scheduled, strict=True):
        for ref in site.params:
            for holder, _ in ref.places:
                if len(ref.places) > 1 and id(holder) not in own:
                    unit = next(unit for unit in built.units if ref in unit.spec.refs)
                    entry = extra.setdefault(
                        id(holder), ScheduledSite(name=ref.name.rpartition(".")[0], module=holder, units=[])
                    )
                    entry.units += [unit] if unit not in entry.units else []
    return list(extra.values())


def _unit_specs(site: Site, settings: Settings, topology: Topology, index: Iterator[int]) -> list[UnitSpec]:
    """One unit for each combination of formats and trainability in a site: usually one."""
    precision, device = settings.precision, settings.device
    groups: dict[tuple[torch.dtype, torch.dtype, bool], list[ParamRef]] = {}
    for ref in site.params:
        dtype = ref.param.dtype
        # Norms with running statistics compute in their buffers' format, and take activations in any.
        keeps = any(keeps_statistics(module) for module, _ in ref.places)
        param_dtype = dtype if keeps else precision.param_dtype(dtype, device)
        key = (param_dtype, precision.master_dtype(dtype), ref.param.requires_grad)
        groups.setdefault(key, []).append(ref)
    specs = []
    for (param_dtype, master_dtype, trainable), refs in groups.items():
        reduce_dtype = precision.reduce_dtype(param_dtype)
        layout = plan_layout(
            [(ref.name, tuple(ref.param.shape)) for ref in refs],
            itemsize=min(param_dtype.itemsize, reduce_dtype.itemsize),
            num_chunks=topology.partition_size,
            num_pieces=topology.num_replicas,
        )
        name = site.name or type(site.module).__name__
        if len(groups) > 1:
            name += f"[{'trainable' if trainable else 'frozen'} {str(param_dtype).removeprefix('torch.')}]"
        specs.append(
            UnitSpec(
                index=next(index),
                name=name,
                refs=tuple(refs),
                layout=layout,
                trainable=trainable,
                param_dtype=param_dtype,
                master_dtype=master_dtype if trainable else param_dtype,
                reduce_dtype=reduce_dtype,
                grad_dtype=master_dtype if trainable else param_dtype,
            )
        )
    return specs

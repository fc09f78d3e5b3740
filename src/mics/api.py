"""The public calls: shard a model, announce boundaries, clip."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from mics.assign import ParamRef, Site, assign_sites
from mics.boundary import Boundary
from mics.buffers import BufferSync, keeps_statistics
from mics.comm import Traffic, TrafficCounter, World, join_world
from mics.comm.world import MeshCollectives
from mics.engine import Engine, attach_engine, engine_of, is_sharded
from mics.errors import MicsError, SettingsError
from mics.layout import plan_layout
from mics.materialize import drop_originals, fill_unit, initial_values, place_buffers
from mics.optimizer_hooks import register_params
from mics.precision import Precision
from mics.schedule import Schedule, ScheduledSite
from mics.state import shard_of_full
from mics.topology import Topology, check_partition_groups, check_partition_size, plan_topology
from mics.unit import ParameterTable, Share, Unit, UnitSpec

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")
OptimizerSharding = Literal["world", "partition"]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What the user asked for, checked, before anything is touched."""

    partition_groups: tuple[tuple[int, ...], ...]
    hierarchical: bool
    optimizer_sharding: OptimizerSharding
    precision: Precision
    device: torch.device
    sites: list[Site]
    buffers: list[tuple[str, Tensor]]


def shard(
    model: nn.Module,
    *,
    partition_size: int | None = None,
    units: Iterable[nn.Module | type[nn.Module]] | None = None,
    mesh: DeviceMesh | None = None,
    hierarchical: Literal["auto"] | bool = "auto",
    optimizer_sharding: OptimizerSharding = "world",
    precision: Precision | None = None,
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
    """
    world = join_world()
    nodes = world.node_names()
    settings, error = None, None
    try:
        settings = _check(
            model,
            world,
            partition_size=_whole_node(nodes) if partition_size is None else partition_size,
            units=units,
            mesh=mesh,
            hierarchical=hierarchical,
            optimizer_sharding=optimizer_sharding,
            precision=precision or Precision(),
        )
    except Exception as caught:
        # Tell the others before raising: they would wait for this rank in the exchange.
        error = caught
    if error is None and mesh is not None and partition_size is not None:
        error = SettingsError("mics.shard: expected partition_size or mesh, found both; give one of them")
    accounts = world.gather_objects(_account(world, settings, error))
    if error is not None:
        raise error
    assert settings is not None
    _compare(accounts)
    return _build(model, world, settings, nodes)


def microsteps(model: nn.Module, batches: Iterable[T]) -> Iterator[T]:
    """Iterate over the micro-batches of one optimizer step, announcing the last one.

    Hop 2 then runs unit by unit within the last backward instead of when the gradients are first needed.
    """
    boundary = engine_of(model).boundary
    iterator = iter(batches)
    try:
        upcoming = next(iterator)
    except StopIteration:
        return
    try:
        for following in iterator:
            yield upcoming
            upcoming = following
        boundary.announced = True
        yield upcoming
    finally:
        boundary.announced = False


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
    return engine_of(model).traffic.snapshot()


# -- checking ---------------------------------------------------------------------------------------


def _check(
    model: nn.Module,
    world: World,
    *,
    partition_size: int,
    units: Iterable[nn.Module | type[nn.Module]] | None,
    mesh: DeviceMesh | None,
    hierarchical: Literal["auto"] | bool,
    optimizer_sharding: OptimizerSharding,
    precision: Precision,
) -> _Settings:
    if not isinstance(model, nn.Module):
        raise SettingsError(f"mics.shard: expected an nn.Module, found {type(model).__name__}")
    sparse = next((n for n, m in model.named_modules() if isinstance(m, nn.Embedding) and m.sparse), None)
    if sparse is not None:
        raise SettingsError(
            f"mics.shard: expected dense gradients, found sparse=True on the embedding {sparse!r}; "
            "build it with "
            "sparse=False"
        )
    sharded = (
        isinstance(module._parameters, ParameterTable) or is_sharded(module) for module in model.modules()
    )
    names = (name for name, _ in model.named_modules())
    inside = next((name for name, is_inside in zip(names, sharded, strict=True) if is_inside), None)
    if inside is not None:
        raise SettingsError(
            f"mics.shard: expected a model that is not sharded yet, found {inside or 'the model'!r} "
            "already sharded; call mics.shard once, on the outermost module"
        )
    if hierarchical not in ("auto", True, False):
        raise SettingsError(f'hierarchical: expected "auto", True or False, found {hierarchical!r}')
    if optimizer_sharding not in ("world", "partition"):
        raise SettingsError(
            f'optimizer_sharding: expected "world" or "partition", found {optimizer_sharding!r}'
        )
    if not isinstance(precision, Precision):
        raise SettingsError(f"precision: expected a mics.Precision, found {precision!r}")
    return _Settings(
        partition_groups=_partition_groups(world, partition_size, mesh),
        hierarchical=hierarchical is not False,
        optimizer_sharding=optimizer_sharding,
        precision=precision,
        device=_device_of(model, world),
        buffers=list(model.named_buffers()),
        sites=assign_sites(model, [units] if isinstance(units, type) else units),
    )


def _partition_groups(
    world: World, partition_size: int, mesh: DeviceMesh | None
) -> tuple[tuple[int, ...], ...]:
    if mesh is not None:
        if not hasattr(mesh, "mesh"):
            raise SettingsError(f"mesh: expected a torch.distributed DeviceMesh, found {mesh!r}")
        if mesh.ndim != 2:
            raise SettingsError(
                f"mesh: expected 2 axes (replicas, partition), found {mesh.ndim}; use for example "
                'init_device_mesh("cuda", (num_replicas, partition_size))'
            )
        groups = [tuple(int(rank) for rank in row) for row in mesh.mesh.tolist()]
        check_partition_groups(groups, world.size)
        return tuple(groups)
    check_partition_size(partition_size, world.size)
    starts = range(0, world.size, partition_size)
    return tuple(tuple(range(start, start + partition_size)) for start in starts)


def _whole_node(nodes: Sequence[str]) -> int:
    """The number of ranks of a node, if all have the same number; else everybody."""
    sizes = {nodes.count(node) for node in nodes}
    return sizes.pop() if len(sizes) == 1 else len(nodes)


def _device_of(model: nn.Module, world: World) -> torch.device:
    """Where shards will live. All parameters must be on one device, and within reach of the collectives."""
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
        if param.grad is not None:
            raise SettingsError(
                f"mics.shard: expected parameters without gradients, found one on {name!r}, which "
                "would be lost; call "
                "model.zero_grad() first, or step before sharding"
            )
        if param._backward_hooks or param._post_accumulate_grad_hooks:
            raise SettingsError(
                f"mics.shard: expected parameters without hooks, found one on {name!r}, which would "
                "never run on a "
                "sharded model; change gradients between backward and optimizer.step() instead"
            )
        is_dtensor = hasattr(param, "device_mesh")  # importing the class would cost every start a second
        if is_dtensor or param.dtype.is_complex:
            kind = "a DTensor" if is_dtensor else f"format {param.dtype}"
            raise SettingsError(
                f"mics.shard: expected ordinary real parameters, found {name!r} as {kind}; shard the "
                "plain model"
            )
        devices.setdefault(param.device, name)
    if len(devices) > 1:
        found = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise SettingsError(
            f"mics.shard: expected all parameters on one device, found {found}; move the model to one"
        )
    given = next(iter(devices), None)
    device = world.backend_device(None if given is None or given.type == "meta" else given)
    if given is not None and given.type == "cuda" and given.index != torch.cuda.current_device():
        raise SettingsError(
            "mics.shard: expected parameters on this rank's current device "
            f"cuda:{torch.cuda.current_device()}, found "
            f"{devices[given]!r} on {given}; call torch.cuda.set_device(local_rank) before building the model"
        )
    return device


def _account(world: World, settings: _Settings | None, error: Exception | None) -> dict[str, Any]:
    """What this rank is about to do, for comparison with the others."""
    account: dict[str, Any] = {"rank": world.rank, "error": None}
    if settings is None or error is not None:
        return account | {"error": f"{type(error).__name__}: {error}"}
    described = [
        f"{site.name}: {ref.name} {tuple(ref.param.shape)} {ref.param.dtype} "
        f"trainable={ref.param.requires_grad}"
        for site in settings.sites
        for ref in site.params
    ]
    described += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in settings.buffers]
    return account | {
        "partition groups": settings.partition_groups,
        "hierarchical": settings.hierarchical,
        "optimizer_sharding": settings.optimizer_sharding,
        "precision": str(settings.precision),
        "device type": settings.device.type,
        "torch version": torch.__version__.split("+")[0],
        "number of parameters and buffers": len(described),
        "units, parameters and buffers": hashlib.sha256("\n".join(described).encode()).hexdigest()[:16],
    }


def _compare(accounts: Sequence[dict[str, Any]]) -> None:
    """Raise if a rank failed, or if the ranks are not about to do the same."""
    failed = [account for account in accounts if account["error"] is not None]
    if failed:
        raise MicsError(
            f"mics.shard failed on rank {failed[0]['rank']}, so it cannot go on here: {failed[0]['error']}"
        )
    for key in accounts[0]:
        if key == "rank":
            continue
        first = accounts[0][key]
        other = next((account for account in accounts if account[key] != first), None)
        if other is not None:
            raise SettingsError(
                f"mics.shard: expected the same {key} on all ranks, found {first} on rank 0 and "
                f"{other[key]} on rank "
                f"{other['rank']}; build the same model and pass the same settings everywhere"
            )


# -- building ---------------------------------------------------------------------------------------


def _build(model: nn.Module, world: World, settings: _Settings, node_names: list[str]) -> nn.Module:
    order = {name: index for index, name in enumerate(dict.fromkeys(node_names))}
    topology = plan_topology(
        [order[name] for name in node_names],
        partition_groups=settings.partition_groups,
        hierarchical=settings.hierarchical,
    )
    world.start_liveness(settings.device)
    counter = TrafficCounter()
    mesh = world.collectives(topology, counter)
    share = Share(
        chunk=topology.chunk(world.rank),
        piece=topology.piece(world.rank),
        masters_over_replicas=settings.optimizer_sharding == "world",
    )
    with torch.no_grad():
        place_buffers(model, settings.device, mesh.world)
        scheduled = _build_sites(model, settings, topology, share, mesh)
    all_units = list(dict.fromkeys(unit for site in scheduled for unit in site.units))
    boundary = Boundary(all_units, mesh=mesh, world_size=world.size, device=settings.device)
    schedule = Schedule(scheduled, reduce=boundary.reduce, before_root=BufferSync(model, mesh.world))
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
    model: nn.Module, settings: _Settings, topology: Topology, share: Share, mesh: MeshCollectives
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
                partition=mesh.partition,
                replication=mesh.replication,
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


def _unit_specs(site: Site, settings: _Settings, topology: Topology, index: Iterator[int]) -> list[UnitSpec]:
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

"""The public calls: shard a model, announce boundaries, clip."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from mics.activations import Activations, apply_activations
from mics.assign import Site
from mics.audit import AuditReport, ReplicaAudit
from mics.boundary import Boundary
from mics.buffers import BufferSync
from mics.choices import Choices, choose_partition_size, choose_topology, replicas_exchange, unit_specs
from mics.clusters import with_shared_gpus
from mics.comm import Traffic, TrafficCounter, World, join_world
from mics.comm.emulated import emulated_cluster
from mics.comm.world import MeshCollectives
from mics.contiguous import Contiguous
from mics.conversions import refuse_conversions, refuse_tracing
from mics.engine import Engine, Members, attach_engine, engine_of, engines_of
from mics.errors import SettingsError
from mics.forward_methods import follow_method, follow_usual_methods
from mics.guard import ShardOwner
from mics.materialize import as_it_was, drop_originals, fill_unit, initial_values, place_buffers
from mics.optimizer_hooks import register_params
from mics.plans import Prefetch
from mics.precision import Precision
from mics.schedule import Schedule
from mics.scheduled_site import ScheduledSite
from mics.settings import (
    OptimizerSharding,
    Settings,
    check_settings,
    compare,
    describe,
    ranks_on_gpu,
    whole_node,
)
from mics.state import agree_on_full, shard_of_full
from mics.topology import Topology
from mics.unit import Unit, UnitMemory
from mics.unit_spec import Share
from mics.wrappers import refuse_wrappers

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
    prefetch: Literal["auto"] | int | Prefetch = "auto",
    activations: Activations | None = None,
    lean: Literal["auto"] | bool = "auto",
    audit_interval: Literal["auto"] | int = "auto",
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
        optimizer_sharding: "world" divides masters and optimizer state over partition x replication,
            "partition" over the partition group alone.
        precision: formats of parameters, reduction and masters; by default bfloat16 parameters with float32
            masters on CUDA, and float32 on the CPU.
        prefetch: units to gather ahead of their use, or a ``mics.Prefetch`` that limits their bytes too;
            "auto" takes as many as the cost model says hide the gathers, and where the network is as busy as
            the GPU lets units stay gathered in memory that is left (``Prefetch.stay_nbytes``). Gradients are
            reduced and new parameters spread beside the computation too, unless it is 0: then everything
            runs where it is issued.
        activations: which units are computed again in the backward, and what of their activations goes to
            host memory meanwhile; None leaves the model as it is.
        lean: hold as little memory as possible, for a small cost in time. Gradients and the buffers they are
            reduced in have memory from the first backward to the next forward that finds all of them cleared
            (call ``zero_grad()`` before it), gathered units only while they are needed. There is no second
            copy of parameters whose masters are all on this rank (one replica, or
            optimizer_sharding="partition"). "auto": where activations are offloaded.
        audit_interval: optimizer steps from one comparison of the replicas' parameters to the next (see
            ``mics.audit``); "auto" is 100, and 0 never compares. A difference raises ``mics.ReplicaError``
            one boundary later.

    The cost model takes the network to be an ordinary one. ``MICS_CLUSTER`` tells it better: the name of a
    cluster or a file, as for ``mics emulate --cluster``.
    """
    world = join_world()
    nodes = world.node_names()
    settings, error = None, None
    try:
        size = partition_size
        if size is None:
            asks = mesh is None and isinstance(model, nn.Module)
            size = choose_partition_size(model, world, nodes) if asks else whole_node(nodes)
        settings = check_settings(
            model,
            world,
            partition_size=size,
            units=units,
            mesh=mesh,
            hierarchical=hierarchical,
            optimizer_sharding=optimizer_sharding,
            precision=precision or Precision(),
            prefetch=prefetch,
            activations=activations,
            lean=lean,
            audit_interval=audit_interval,
            nodes=nodes,
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
    sharing = ranks_on_gpu(accounts)
    if sharing > 1:
        settings = replace(settings, cluster=with_shared_gpus(settings.cluster), ranks_on_gpu=sharing)
    return _build(model, world, settings, nodes, share_links=sharing > 1)


def microsteps(model: nn.Module, batches: Iterable[T]) -> Iterator[T]:
    """Iterate over the micro-batches of one optimizer step, announcing the last one.

    Hop 2 then runs unit by unit within the last backward instead of when the gradients are first needed.
    """
    engines = engines_of(model)
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
            for engine in engines:
                engine.schedule.more_to_come = True
            yield upcoming
            upcoming = following
        for engine in engines:
            engine.schedule.more_to_come = False
            engine.boundary.announced = True
        yield upcoming
    finally:
        for engine in engines:
            engine.boundary.announced = engine.schedule.more_to_come = False


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
        boundaries = [engine.boundary for engine in engines_of(model)]
        norms = [boundary.gradient_norm(exponent) for boundary in boundaries]
        total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms), exponent)
        for boundary in boundaries:
            boundary.clip_to(float(max_norm), total)
    return total


def register_forward_method(model: nn.Module, name: str) -> None:
    """Let a method other than ``forward`` compute with the parameters of a sharded model.

    ``name`` is that of a method of ``model``, or a path to one of a submodule ("encoder.embed"). Only calls
    of modules gather parameters by themselves; this one then does too, and its results may be part of a loss.
    Methods with usual names (``forward_features``, ``encode_image``, ``decode``, ``loss``...) are found by
    ``mics.shard``. A method that only calls the model itself (``generate`` of most models) needs nothing.
    """
    follow_method(engine_of(model).schedule, model, name)


def nonfinite_units(model: nn.Module) -> list[str]:
    """The units whose gradient has a NaN or an infinity anywhere in the world, the same list on all ranks.

    For when the norm that ``clip_grad_norm_`` returned is not finite. Clipping by such a norm spoils all
    gradients, so until new ones come this tells what clipping found: units whose own norm is not finite.

    All ranks must call it. One small all-reduce, and the host waits for the answer.
    """
    with torch.no_grad():
        return [name for engine in engines_of(model) for name in engine.boundary.nonfinite_units()]


def audit(model: nn.Module) -> AuditReport:
    """Compare the parameters of all replicas now: a report if they are equal, else ``mics.ReplicaError``.

    The ranks of a replication group must hold equal parameters, bit for bit; ``mics.shard`` has that checked
    from time to time, and this checks it at once, for example after loading a checkpoint. Edits since the
    last forward are carried to all replicas first. Module buffers are not compared.

    All ranks must call it, between optimizer steps. Three small collectives; the host waits for the answer.
    """
    first, *rest = [engine.boundary.audit.now() for engine in engines_of(model)]
    return replace(
        first,
        num_units=first.num_units + sum(report.num_units for report in rest),
        nbytes=first.nbytes + sum(report.nbytes for report in rest),
    )


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


# -- building ---------------------------------------------------------------------------------------


def _build(
    model: nn.Module, world: World, settings: Settings, node_names: list[str], *, share_links: bool
) -> nn.Module:
    order = {name: index for index, name in enumerate(dict.fromkeys(node_names))}
    topology = choose_topology(settings, [order[name] for name in node_names], talk=world.rank == 0)
    world.start_liveness(settings.device)
    counter = TrafficCounter()
    overlap = settings.prefetch is None or settings.prefetch.units > 0
    mesh = world.collectives(
        topology,
        counter,
        settings.device,
        overlap=overlap,
        share_links=share_links,
        exchange_replicas=replicas_exchange(settings, topology),
    )
    share = Share(
        chunk=topology.chunk(world.rank),
        piece=topology.piece(world.rank),
        masters_over_replicas=settings.optimizer_sharding == "world",
    )
    owner = ShardOwner(world=mesh.world)
    with torch.no_grad(), as_it_was(model):
        place_buffers(model, settings.device, mesh.world)
        scheduled, gradient_memory = _build_sites(model, settings, topology, share, mesh, owner)
    all_units = list(dict.fromkeys(unit for site in scheduled for unit in site.units))
    choices = Choices(settings, topology, all_units)
    boundary = Boundary(
        all_units,
        mesh=mesh,
        world_size=world.size,
        device=settings.device,
        # One for each stage: while one unit crosses the network, the next is added up inside the node.
        num_reduce_buffers=2 if overlap and any(topology.two_stage) else 1,
        audit=ReplicaAudit(
            all_units,
            mesh=mesh,
            ranks=next(group for group in topology.replication_groups() if world.rank in group),
            interval=settings.audit_interval,
            device=settings.device,
        ),
        owner=owner,
        gradient_memory=gradient_memory,
        lends_memory=settings.lean,
        reduction_share=choices.reduction_share,
        replica_batch_nbytes=choices.replica_batch_nbytes if overlap else 0,
        choose_prefetch=choices.prefetch if settings.prefetch is None else None,
    )
    synchronize_buffers = BufferSync(model, mesh.world)
    offloader, saved_inputs = None, None
    if settings.activations is not None:
        applied = apply_activations(
            settings.activations,
            settings.blocks,
            settings.recomputed,
            device=settings.device,
            is_parameter=lambda tensor: any(unit.holds(tensor) for unit in all_units if unit.gathered),
            # An emulated node's other ranks are imagined: they take no memory.
            ranks_on_node=1 if emulated_cluster() is not None else node_names.count(node_names[world.rank]),
        )
        offloader, saved_inputs = applied.offloader, applied.inputs

    def before_forward() -> None:
        refuse_tracing()
        members.check()
        boundary.before_forward()
        if offloader is not None:
            offloader.begin()
        synchronize_buffers()

    schedule = Schedule(
        scheduled,
        reduce=boundary.reduce,
        before_root=before_forward,
        on_gather=boundary.tick,
        plans=choices.plans(),
        has_arena=not settings.lean,
    )
    members = Members(model, schedule, on_change=synchronize_buffers.look_again)
    boundary.follow(schedule)
    register_params(boundary)
    model._register_load_state_dict_pre_hook(agree_on_full, with_module=True)
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
        members=members,
        traffic=counter,
        device=settings.device,
        ranks_on_gpu=settings.ranks_on_gpu,
        offloader=offloader,
        saved_inputs=saved_inputs,
        recomputed=frozenset(itertools.compress(settings.blocks, settings.recomputed)),
    )
    attach_engine(model, engine)
    refuse_conversions(model)
    follow_usual_methods(schedule)
    members.check()
    refuse_wrappers(model)
    return model


def _build_sites(
    model: nn.Module,
    settings: Settings,
    topology: Topology,
    share: Share,
    mesh: MeshCollectives,
    owner: ShardOwner,
) -> tuple[list[ScheduledSite], Contiguous]:
    """All sites with their units, and the memory of the units' gradients."""
    scheduled: list[ScheduledSite] = []
    index = itertools.count()
    specs_of = [unit_specs(site, settings, topology, index) for site in settings.sites]
    memory = UnitMemory([spec for specs in specs_of for spec in specs], share, settings.device)
    for site, specs in zip(settings.sites, specs_of, strict=True):
        built = [unit for earlier in scheduled for unit in earlier.units]
        values = initial_values(model, site, settings.device, built)
        units = [Unit(spec, share, mesh=mesh, memory=memory, owner=owner) for spec in specs]
        for unit in units:
            fill_unit(unit, values, mesh.world)
        drop_originals(site)
        lowered = [
            spec.param_dtype for spec in specs if spec.param_dtype not in {r.param.dtype for r in spec.refs}
        ]
        scheduled.append(
            ScheduledSite(
                name=site.name,
                module=site.module,
                units=units,
                cast_to=lowered[0] if lowered else None,
            )
        )
    scheduled += _holders_elsewhere(settings.sites, scheduled)
    followed = {id(site.module) for site in scheduled}
    for name, module in model.named_modules():
        # The root is always followed: its outputs are where backward begins. An encoder reads weights of its
        # first layer before it calls it.
        if id(module) not in followed and (module is model or isinstance(module, nn.TransformerEncoder)):
            scheduled.append(ScheduledSite(name=name, module=module, units=[]))
    return scheduled, memory.gradients


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

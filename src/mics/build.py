"""From a checked config to a wired engine, in the order of the reading."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
import torch.nn as nn

from mics.activations.policy import Applied, apply_activations
from mics.choices import (
    Choices,
    choose_optimizer_sharding,
    choose_topology,
    replicas_exchange,
    say_what_does_not_pay,
    spans_nodes,
    unit_specs,
)
from mics.comm import TrafficCounter, World
from mics.comm.world import MeshCollectives
from mics.config import Settings
from mics.diagnostics.audit import ReplicaAudit
from mics.engine import Engine, Members, attach_engine
from mics.gradients.agreement import Agreement
from mics.gradients.clip import Clip
from mics.gradients.hops import Hops, Joining
from mics.gradients.host_state import HostState
from mics.gradients.optimizer import register_params
from mics.gradients.reduce_buffers import ReduceBuffers
from mics.gradients.shown import ShownGradients
from mics.gradients.step import Step
from mics.guard import ShardOwner
from mics.layout.assign import Site
from mics.layout.order import Plans
from mics.layout.topology import Topology
from mics.schedule.autograd import Autograd
from mics.schedule.events import Event, Events, Listener, Progress, What
from mics.schedule.log import StepLog
from mics.schedule.methods import follow_usual_methods
from mics.schedule.residency import Residency, StaysOld
from mics.schedule.sites import ScheduledSite
from mics.sharding.buffers import BufferSync
from mics.sharding.contiguous import Contiguous
from mics.sharding.conversions import refuse_conversions, refuse_tracing
from mics.sharding.host_memory import HostPool
from mics.sharding.materialize import InitialValues, as_it_was, drop_originals, fill_unit, place_buffers
from mics.sharding.refresh import MovedValues, ToPartitionGroup, ToReplicas, is_moved
from mics.sharding.spec import Share
from mics.sharding.unit import Unit, UnitMemory
from mics.sharding.wrappers import refuse_wrappers
from mics.state_dict import agree_on_full, shard_of_full


def build(
    model: nn.Module, world: World, settings: Settings, node_names: list[str], *, share_links: bool
) -> nn.Module:
    """Shard ``model`` in place, and attach the engine that trains it."""
    order = {name: index for index, name in enumerate(dict.fromkeys(node_names))}
    topology = choose_topology(settings, [order[name] for name in node_names], talk=world.rank == 0)
    settings = replace(settings, optimizer_sharding=choose_optimizer_sharding(settings, topology))
    if world.rank == 0:
        say_what_does_not_pay(settings, topology)
    world.start_liveness(settings.device)
    counter = TrafficCounter()
    mesh = world.collectives(
        topology,
        counter,
        settings.device,
        overlap=settings.overlaps,
        share_links=share_links,
        exchange_replicas=replicas_exchange(settings, topology),
    )
    share = Share(
        chunk=topology.chunk(world.rank),
        piece=topology.piece(world.rank),
        masters_over_replicas=settings.optimizer_sharding == "world",
    )
    owner = ShardOwner(members=mesh.groups.members, device=settings.device)
    # An emulated node's other ranks are imagined: they take no memory.
    ranks_on_node = 1 if world.imagined is not None else node_names.count(node_names[world.rank])
    host = _host_state(settings, mesh, owner, ranks_on_node)
    with torch.no_grad(), as_it_was(model):
        place_buffers(model, settings.device, mesh.world)
        sites = _build_sites(model, settings, topology, share, mesh, owner, host)
    engine = _wire(model, world, settings, mesh, counter, sites, owner, host, ranks_on_node=ranks_on_node)
    register_params(engine.step)
    model._register_load_state_dict_pre_hook(agree_on_full, with_module=True)
    for module in model.modules():
        if module._parameters:
            module._register_load_state_dict_pre_hook(shard_of_full, with_module=True)
    attach_engine(model, engine)
    refuse_conversions(model)
    follow_usual_methods(engine.autograd)
    engine.members.check()
    refuse_wrappers(model)
    return model


def _wire(
    model: nn.Module,
    world: World,
    settings: Settings,
    mesh: MeshCollectives,
    counter: TrafficCounter,
    sites: Sequence[ScheduledSite],
    owner: ShardOwner,
    host: HostState | None,
    *,
    ranks_on_node: int,
) -> Engine:
    """The parts of the engine. Each is given what it needs, and hears of events in the order written here."""
    units = list(dict.fromkeys(unit for site in sites for unit in site.units))
    choices = Choices(settings, mesh.groups.topology, units)
    events, progress = Events(), Progress()
    log = StepLog(unit.spec for unit in units)
    plans = choices.plans()
    moves = settings.compression.refresh == "lossless" and any(map(is_moved, units))
    has_replicas = mesh.groups.replication.size > 1
    crosses = spans_nodes(mesh.groups.topology)
    moves_old = moves and not has_replicas and crosses
    residency = _residency(units, settings, choices, events, plans, progress, log, moves_old=moves_old)
    shown, hops = _gradients(settings, mesh, units, choices, events, progress, log, owner)
    agreement = _agreement(settings, mesh, units, choices, plans, progress, log, shown)
    step = Step(
        units, hops, shown, agreement=agreement, events=events, plans=plans, progress=progress, host=host
    )
    if moves_old or (moves and has_replicas):
        route = ToPartitionGroup(residency.transitions) if moves_old else ToReplicas(crosses=crosses)
        step.moved = MovedValues(units, settings.device, route, imagined=world.imagined is not None)
    autograd = Autograd(sites, events=events, progress=progress)
    synchronize_buffers = BufferSync(model, mesh.world, mesh.lanes)
    members = Members(model, autograd, on_change=synchronize_buffers.look_again)
    activations = _activations(settings, units, events, ranks_on_node)
    events[What.FORWARD_CALLED] += [_hearing(refuse_tracing), _hearing(members.check)]
    if activations is not None and activations.offloader is not None:
        events[What.FORWARD_BEGINS].append(_hearing(activations.offloader.begin))
    events[What.FORWARD_BEGINS].append(_hearing(synchronize_buffers))
    return Engine(
        world=world,
        mesh=mesh,
        device=settings.device,
        units=units,
        events=events,
        progress=progress,
        residency=residency,
        autograd=autograd,
        shown=shown,
        hops=hops,
        step=step,
        clip=Clip(hops, shown, agreement=agreement, device=settings.device, synchronize=step.synchronize),
        members=members,
        traffic=counter,
        ranks_on_gpu=settings.ranks_on_gpu,
        activations=activations,
    )


def _residency(
    units: Sequence[Unit],
    settings: Settings,
    choices: Choices,
    events: Events,
    plans: Plans,
    progress: Progress,
    log: StepLog,
    *,
    moves_old: bool,
) -> Residency:
    return Residency(
        units,
        events=events,
        plans=plans,
        progress=progress,
        log=log,
        low_memory=settings.low_memory,
        edits_show=any(map(_edits_show, units)),
        room=choices.room,
        stays_old=StaysOld(progress, settings.audit_interval) if moves_old else None,
    )


def _host_state(
    settings: Settings, mesh: MeshCollectives, owner: ShardOwner, ranks_on_node: int
) -> HostState | None:
    if settings.optimizer_state == "device":
        return None
    make_pool = partial(
        HostPool,
        pin=settings.device.type == "cuda",
        num_sharing=ranks_on_node,
        user='mics.shard(optimizer_state="host")',
        remedy='keep it on the device with optimizer_state="device"',
    )
    return HostState(settings.device, lanes=mesh.lanes, owner=owner, make_pool=make_pool)


def _gradients(
    settings: Settings,
    mesh: MeshCollectives,
    units: Sequence[Unit],
    choices: Choices,
    events: Events,
    progress: Progress,
    log: StepLog,
    owner: ShardOwner,
) -> tuple[ShownGradients, Hops]:
    trained = [unit for unit in units if unit.spec.trainable]
    memory = Contiguous(settings.device)
    shown = ShownGradients(trained, owner=owner, memory=memory)
    # One buffer for each stage: while one unit crosses the network, the next is added up inside the node.
    two_stages = settings.overlaps and any(mesh.groups.topology.two_stage)
    joining = choices.joining() if settings.overlaps else Joining()
    hops = Hops(
        trained,
        events=events,
        progress=progress,
        log=log,
        shown=shown,
        memory=memory,
        buffers=ReduceBuffers(
            [unit.spec for unit in trained],
            count=2 if two_stages else 1,
            device=settings.device,
            joined_nbytes=joining.hop_1_nbytes,
        ),
        low_memory=settings.low_memory,
        reduction_share=choices.reduction_share,
        batch_nbytes=choices.replica_batch_nbytes if settings.overlaps else 0,
        joining=joining,
    )
    return shown, hops


def _agreement(
    settings: Settings,
    mesh: MeshCollectives,
    units: Sequence[Unit],
    choices: Choices,
    plans: Plans,
    progress: Progress,
    log: StepLog,
    shown: ShownGradients,
) -> Agreement:
    groups = mesh.groups.topology.replication_groups
    audit = ReplicaAudit(
        units,
        mesh=mesh,
        ranks=next(group for group in groups if mesh.world.position in group),
        interval=settings.audit_interval,
        device=settings.device,
    )
    return Agreement(
        [unit for unit in units if unit.spec.trainable],
        shown,
        mesh=mesh,
        device=settings.device,
        log=log,
        plans=plans,
        progress=progress,
        checks=[audit],
        choose_prefetch=choices.prefetch if settings.prefetch is None else None,
    )


def _activations(
    settings: Settings, units: Sequence[Unit], events: Events, ranks_on_node: int
) -> Applied | None:
    if settings.activations is None:
        return None
    return apply_activations(
        settings.activations,
        settings.recomputed,
        device=settings.device,
        is_parameter=lambda tensor: any(unit.whole.holds(tensor) for unit in units if unit.gathered),
        events=events,
        ranks_on_node=ranks_on_node,
    )


def _edits_show(unit: Unit) -> bool:
    """Whether gathers read the masters as they are: parameters and masters are one memory, on this rank."""
    one_memory = unit.master.data_ptr() == unit.param_shard.data_ptr()
    alone = unit.groups.replication.size == 1 or not unit.share.masters_over_replicas
    return unit.spec.trainable and one_memory and alone


def _hearing(function: Callable[[], object]) -> Listener:
    def hear(event: Event) -> None:
        function()

    return hear


def _build_sites(
    model: nn.Module,
    settings: Settings,
    topology: Topology,
    share: Share,
    mesh: MeshCollectives,
    owner: ShardOwner,
    host: HostState | None,
) -> list[ScheduledSite]:
    """All sites with their units, which hold their values from here on."""
    scheduled: list[ScheduledSite] = []
    index = itertools.count()
    specs_of = [unit_specs(site, settings, topology, index) for site in settings.sites]
    pool = None if host is None else host.masters
    memory = UnitMemory([spec for specs in specs_of for spec in specs], share, settings.device, pool=pool)
    initial_values = InitialValues(model, settings.device)
    for site, specs in zip(settings.sites, specs_of, strict=True):
        values = initial_values.of(site)
        units = [Unit(spec, share, groups=mesh.groups, memory=memory, owner=owner) for spec in specs]
        for unit in units:
            fill_unit(unit, values)
        drop_originals(site)
        lowered = [
            spec.seen_dtype for spec in specs if spec.seen_dtype not in {r.param.dtype for r in spec.refs}
        ]
        scheduled.append(
            ScheduledSite(
                name=site.name,
                module=site.module,
                units=units,
                cast_to=lowered[0] if lowered else None,
            )
        )
    for unit in [unit for site in scheduled for unit in site.units]:
        unit.held.show(unit.shards)
    scheduled += _holders_elsewhere(settings.sites, scheduled)
    followed = {id(site.module) for site in scheduled}
    for name, module in model.named_modules():
        # The root is always followed: its outputs are where backward begins. An encoder reads weights of its
        # first layer before it calls it.
        if id(module) not in followed and (module is model or isinstance(module, nn.TransformerEncoder)):
            scheduled.append(ScheduledSite(name=name, module=module, units=[]))
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

"""From what the user asked for to what is built: stages, units, how far ahead, what travels together."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, Literal

import torch
import torch.nn as nn

from mics.comm import World
from mics.comm.quantized import codec_of
from mics.config import Settings, cluster_for, device_of, imagined_memory, whole_node
from mics.cost.auto import Turn, batch_nbytes, exchange_pays, latency_nbytes, two_stages_pay
from mics.cost.collectives import Kind, Span
from mics.cost.depth import MicroStep, batching_for, forward_seconds, reduction_share
from mics.cost.memory import ADAM_NBYTES, MASTER_NBYTES, USABLE
from mics.cost.modules import shape_of_module
from mics.cost.setting import fitting_partition, refresh_nbytes
from mics.cost.stages import Shares, hop_2_stages, rounding_times
from mics.errors import SettingsError
from mics.gradients.hops import Joining
from mics.layout.assign import ParamRef, Site
from mics.layout.compression import LOSSLESS, UNCOMPRESSED, Compression
from mics.layout.flat import plan_layout
from mics.layout.order import Plans, Prefetch
from mics.layout.topology import Topology, plan_topology, why_not_two_stage
from mics.sharding.buffers import keeps_statistics
from mics.sharding.float8 import Float8Format
from mics.sharding.spec import UnitSpec
from mics.sharding.unit import Unit

_log = logging.getLogger("mics")
_said: set[str] = set()


def choose_topology(settings: Settings, node_of: Sequence[int], *, talk: bool) -> Topology:
    """Who holds what, gathered in one stage or in two. ``talk``: this rank says what the user should know."""
    groups, wanted = settings.partition_groups, settings.hierarchical
    plan = partial(
        plan_topology,
        node_of,
        partition_groups=groups,
        replicas_in_stages=wanted is not False and _encodes_hop_2(settings),
    )
    topology = plan(hierarchical=wanted is not False)
    reason = why_not_two_stage(topology) if wanted is not False else None
    if reason is not None and talk:
        _warn_once(
            f"gathering and reducing in one stage: {reason}. Partition groups that fill nodes equally move "
            "less over the network"
        )
    chooses = wanted == "auto" and any(topology.two_stage) and settings.sites
    if chooses and not _two_stages_pay(settings, _span(topology)):
        return plan(hierarchical=False)
    return topology


def _encodes_hop_2(settings: Settings) -> bool:
    is_narrow = settings.precision.dtype_of_hop_2(torch.float32) is not torch.float32
    return settings.compression.hop2 is not None or is_narrow


def say_what_does_not_pay(settings: Settings, topology: Topology) -> None:
    """Say which formats were asked for where nothing is sent in them, or more than without."""
    compression = settings.compression
    for name, reason in _idle(topology).items():
        format = getattr(compression, name)
        if reason and format is not None:
            _warn_once(f"compression: {name}={format!r} changes nothing: {reason}")
    wire_nbytes = settings.precision.reduce_dtype.itemsize
    on_a_node = 1 if any(topology.two_stage) or not spans_nodes(topology) else _most_on_a_node(topology)
    times = on_a_node * compression.inter_reduce_nbytes(wire_nbytes) / wire_nbytes
    if compression.inter_reduce is not None and times > 1:
        _warn_once(
            f"compression: inter_reduce={compression.inter_reduce!r} sends {times:.1f} times the bytes of "
            f"None between nodes: in one stage each of a node's {on_a_node} ranks sends to every other node; "
            "leave it out, or have two stages (hierarchical, partition groups that fill nodes equally)"
        )
    times, span = _hop_2_times(settings, topology), _replica_span(topology)
    if times > 1:
        _warn_once(
            f"compression: hop2={compression.hop2!r} sends {times:.1f} times the bytes of None between "
            f"nodes: in one stage each of a node's {span.on_a_node} replicas sends to every other node; "
            "leave it out, or have two stages (hierarchical, as many replicas on each node, ranks "
            "numbered node by node)"
        )


def _hop_2_times(settings: Settings, topology: Topology) -> float:
    """How many times the bytes of None rounded gradients send between nodes, of the largest site."""
    trained = [ref.param for site in settings.sites for ref in site.params if ref.param.requires_grad]
    rounds = settings.compression.hop2 is not None and not topology.replicas_two_stage
    if topology.num_replicas == 1 or not rounds or not trained:
        return 0.0
    masters = {settings.precision.dtype_of_master(param.dtype) for param in trained}
    hop_2 = partial(
        hop_2_stages,
        settings.cluster,
        _replica_span(topology),
        max(map(_trained_numel, settings.sites)) / topology.partition_size,
        wire_nbytes=max(settings.precision.dtype_of_hop_2(dtype).itemsize for dtype in masters),
        exchanges=replicas_exchange(settings, topology),
        whole=settings.optimizer_sharding == "partition",
    )
    return rounding_times(hop_2, settings.compression)


def _most_on_a_node(topology: Topology) -> int:
    """Ranks of a partition group."""
    nodes = [Counter(topology.node_of[rank] for rank in group) for group in topology.partition_groups]
    return max(max(each.values()) for each in nodes)


def _idle(topology: Topology) -> dict[str, str]:
    """Formats in which nothing is sent, and why."""
    inside = "" if spans_nodes(topology) else "every partition group is inside one node"
    alone = "there are no replicas" if topology.num_replicas == 1 else ""
    return {"hop2": alone, "inter_gather": inside, "inter_reduce": inside}


def _warn_once(message: str) -> None:
    if message not in _said:
        _said.add(message)
        _log.warning("%s", message)


def _two_stages_pay(settings: Settings, span: Span) -> bool:
    """For the site with the most to gather."""
    site = max(settings.sites, key=lambda site: _nbytes(site, settings))
    dtypes = [_gathered_dtype(ref, settings) for ref in site.params]
    param_nbytes = max(dtype.itemsize for dtype in dtypes)
    wire_nbytes = max(settings.precision.dtype_of_hop_1(dtype).itemsize for dtype in dtypes)
    return two_stages_pay(
        settings.cluster,
        span,
        gathered=_nbytes(site, settings),
        reduced=wire_nbytes * _trained_numel(site),
        shares=Shares.of(settings.compression, param_nbytes=param_nbytes, wire_nbytes=wire_nbytes),
    )


def choose_partition_size(
    model: nn.Module,
    world: World,
    nodes: Sequence[str],
    compression: Compression | None = LOSSLESS,
    *,
    state_on_host: bool = False,
) -> int:
    """The smallest group whose share of the model leaves half of a GPU's memory to activations.

    Without a GPU, one node: nobody says how much of a host's memory is whose.
    """
    device = device_of(model, world)
    cluster = cluster_for(device, nodes, world)
    node = whole_node(nodes)
    if device.type != "cuda" or cluster.world_size != world.size:
        return node
    try:
        shape = shape_of_module(model, name=type(model).__name__)
    except SettingsError:  # a model with no matrices
        return node
    total = torch.cuda.get_device_properties(device).total_memory
    limit = imagined_memory(world) or total
    memory = min(total, limit)
    found = fitting_partition(
        shape,
        cluster,
        memory_nbytes=memory,
        state_on_host=state_on_host,
        # What else was given is refused later, on all ranks together.
        compression=compression if isinstance(compression, Compression) else UNCOMPRESSED,
    )
    return world.size if found is None else found


def choose_optimizer_sharding(settings: Settings, topology: Topology) -> Literal["world", "partition"]:
    """Whether every partition group has whole masters: as asked, or where that saves time and fits.

    The answer rests on what all ranks have compared, so that it is the same on all of them.
    """
    if settings.optimizer_sharding != "auto":
        return settings.optimizer_sharding
    trained = [site for site in settings.sites if _trained_numel(site)]
    is_short = settings.low_memory or settings.optimizer_state == "host"
    if is_short or not trained or not _whole_masters_fit(settings, topology.partition_size):
        return "world"
    dtypes = [
        settings.precision.dtype_of_master(ref.param.dtype)
        for site in trained
        for ref in site.params
        if ref.param.requires_grad
    ]
    again = {
        id(module) for block, taken in settings.recomputed.items() if taken for module in block.modules()
    }
    forwards = [forward_seconds(settings.cluster, _trained_numel(site), 1) for site in trained]
    turn = Turn(
        cluster=settings.cluster,
        replication=_replica_span(topology),
        partition_size=topology.partition_size,
        numels=[_trained_numel(site) for site in trained],
        forwards=forwards,
        backwards=[
            (3 if id(site.module) in again else 2) * seconds
            for site, seconds in zip(trained, forwards, strict=True)
        ],
        wire_nbytes=max(settings.precision.dtype_of_hop_2(dtype).itemsize for dtype in dtypes),
        compression=settings.compression,
        two_stage=topology.replicas_two_stage,
        refresh_nbytes=refresh_nbytes(
            max(_param_nbytes(site, settings) for site in trained),
            lossless=settings.compression.refresh == "lossless",
        ),
    )
    return "partition" if turn.whole_masters_pay(knows_rows=False) else "world"


def _whole_masters_fit(settings: Settings, partition_size: int) -> bool:
    """Whether parameters, gradients and whole masters leave half of a device to activations."""
    nbytes = 0
    for site in settings.sites:
        nbytes += _nbytes(site, settings)
        # Gradients, masters and two moments; and what rounding loses.
        lost = torch.bfloat16.itemsize if settings.compression.keeps_errors else 0
        nbytes += (2 * MASTER_NBYTES + ADAM_NBYTES + lost) * _trained_numel(site)
    return nbytes / partition_size <= settings.least_memory_nbytes / 2


def _trained_numel(site: Site) -> int:
    return sum(ref.param.numel() for ref in site.params if ref.param.requires_grad)


def _param_nbytes(site: Site, settings: Settings) -> int:
    """Of an element of gathered parameters."""
    return max(_gathered_dtype(ref, settings).itemsize for ref in site.params if ref.param.requires_grad)


def replicas_exchange(settings: Settings, topology: Topology) -> bool:
    """Whether replicas exchange the largest unit sooner by sending each to each than in a ring."""
    numel = max((sum(ref.param.numel() for ref in site.params) for site in settings.sites), default=0)
    nbytes = 4 * numel // topology.partition_size
    span, two_stage = _replica_span(topology), topology.replicas_two_stage
    return exchange_pays(settings.cluster, span, nbytes, two_stage=two_stage)


class Choices:
    """What the cost model says about a model's units on this cluster."""

    def __init__(self, settings: Settings, topology: Topology, units: Sequence[Unit]) -> None:
        self._prefetch = settings.prefetch
        self._low_memory = settings.low_memory
        self._recomputes = any(settings.recomputed.values())
        self._memory = partial(_device_memory, settings)
        # The optimizer makes its state after the first boundary.
        stays = [unit for unit in units if unit.spec.trainable and not unit.spec.state_on_host]
        self._state_nbytes = ADAM_NBYTES * sum(unit.master.numel() for unit in stays)
        self._shares: dict[int, float] = {}  # by rows
        self._cluster = settings.cluster
        self._span = _span(topology)
        self._two_stage = topology.two_stage[0]
        self._specs = {unit.spec.index: unit.spec for unit in units}
        self._sizes = {index: spec.gathered_nbytes for index, spec in self._specs.items()}
        dtypes = [(spec.param_dtype.itemsize, spec.reduce_dtype.itemsize) for spec in self._specs.values()]
        params, gradients = (max(each) for each in zip(*dtypes, strict=True)) if dtypes else (4, 4)
        self._wire_shares = Shares.of(settings.compression, param_nbytes=params, wire_nbytes=gradients)
        self._replica_span = _replica_span(topology)
        self._exchanges = replicas_exchange(settings, topology)
        self._over_replicas = settings.optimizer_sharding == "world"
        kind = Kind.ALL_TO_ALL if self._exchanges else Kind.ALL_GATHER
        self.replica_batch_nbytes = batch_nbytes(self._cluster, self._replica_span, kind)

    def plans(self) -> Plans:
        """Where orders will be recorded."""
        batching = batching_for(self._cluster, self._span, max(self._sizes.values(), default=0))
        # Until the first steps have shown how much there is to compute: one unit ahead.
        prefetch = self._prefetch or Prefetch(units=1)
        return Plans(
            prefetch,
            sizes=self._sizes,
            batching=batching,
            stops_at_turn=self._low_memory,
            is_final=self._prefetch is not None,
        )

    def joining(self) -> Joining:
        """Which units wait for others before they are reduced, in each hop.

        Those of which a collective is mostly latency. Never one of half the largest unit's size: where blocks
        are alike, none would fit beside another in the reduce buffer.
        """
        specs = [spec for spec in self._specs.values() if spec.trainable]
        # What is rounded, and an exchange, have no form that takes several tensors at once.
        hop_1 = [spec.layout.numel * spec.reduce_dtype.itemsize for spec in specs]
        hop_2 = [spec.hop_2_nbytes for spec in specs]
        latency_1 = latency_nbytes(self._cluster, self._span, Kind.REDUCE_SCATTER, two_stage=self._two_stage)
        if any(spec.hop_1.changes(spec.reduce_dtype) for spec in specs):
            latency_1 = 0
        kind = Kind.REDUCE_SCATTER if self._over_replicas else Kind.ALL_REDUCE
        is_narrow = any(spec.hop_2.changes(spec.grad_dtype) for spec in specs)
        apart = is_narrow or (self._exchanges and self._over_replicas)
        latency_2 = 0 if apart else latency_nbytes(self._cluster, self._replica_span, kind)
        return Joining(
            hop_1_nbytes=min(latency_1, max(hop_1, default=0) // 2),
            hop_2_nbytes=min(latency_2, max(hop_2, default=0) // 2),
        )

    def prefetch(self, order: Sequence[int], rows: int) -> Prefetch:
        """How far to look ahead along ``order`` if units are multiplied with ``rows`` rows of activations.

        As far as there is something to hide behind, and as the device has memory left; and what stays, if it
        has some to spare.
        """
        step = MicroStep(
            cluster=self._cluster,
            span=self._span,
            two_stage=self._two_stage,
            order=order,
            sizes=self._sizes,
            numels={index: spec.layout.numel for index, spec in self._specs.items()},
            rows=rows,
            shares=self._wire_shares,
        )
        free, total = self._memory()
        free -= self._state_nbytes
        units = step.depth(low_memory=self._low_memory)
        largest = max(self._sizes.values(), default=0)
        # One unit ahead is what there was memory for up to now.
        room = int(max(0.0, _room(free, total))) if total else units * largest
        ahead = largest + room if room < units * largest else None
        free -= min(room, (units - 1) * largest)
        if self._low_memory:
            return Prefetch(units=units, nbytes=ahead)
        staying = step.stay_nbytes(
            wire_nbytes=max(spec.reduce_dtype.itemsize for spec in self._specs.values()),
            recomputes=self._recomputes,
            memory_nbytes=total,
            free_nbytes=free,
        )
        return Prefetch(units=units, nbytes=ahead, stay_nbytes=staying)

    def room(self) -> float:
        """Bytes of the device that nobody has used yet, and that the allocator does not need."""
        return _room(*self._memory())

    def reduction_share(self, rows: int) -> float:
        """How long a unit's reduction takes for each second of its forward."""
        if rows not in self._shares:
            self._shares[rows] = self._reduction_share(rows)
        return self._shares[rows]

    def _reduction_share(self, rows: int) -> float:
        largest = max(self._specs.values(), key=lambda spec: spec.layout.numel)
        return reduction_share(
            self._cluster,
            self._span,
            numel=largest.layout.numel,
            nbytes=largest.layout.numel * largest.reduce_dtype.itemsize,
            rows=rows,
            two_stage=self._two_stage,
            share=self._wire_shares.reduce,
        )


def _device_memory(settings: Settings) -> tuple[float, float]:
    """Bytes that are free now and in all, of what this rank has. Of a processor only as a cluster says it."""
    limit = settings.memory_nbytes
    if settings.device.type != "cuda":
        limit = settings.cluster.memory_nbytes if limit is None else limit
        return limit, limit
    free, total = (each / settings.ranks_on_gpu for each in torch.cuda.mem_get_info(settings.device))
    if limit is None:
        return free, total
    return min(free, limit - torch.cuda.memory_reserved(settings.device)), min(total, limit)


def _room(free: float, total: float) -> float:
    return free - total * (1 - USABLE)


def spans_nodes(topology: Topology) -> bool:
    """Whether a partition group has ranks on several nodes."""
    return any(len({topology.node_of[rank] for rank in group}) > 1 for group in topology.partition_groups)


def _span(topology: Topology) -> Span:
    return Span.over([topology.node_of[rank] for rank in topology.partition_groups[0]])


def _replica_span(topology: Topology) -> Span:
    return Span.over([topology.node_of[rank] for rank in topology.replication_groups[0]])


def _nbytes(site: Site, settings: Settings) -> int:
    """Of a site's gathered parameters."""
    return sum(ref.param.numel() * _gathered_dtype(ref, settings).itemsize for ref in site.params)


def _gathered_dtype(ref: ParamRef, settings: Settings) -> torch.dtype:
    seen = settings.precision.dtype_of_param(ref.param.dtype, settings.device)
    float8 = Float8Format.of(ref, seen)
    return seen if float8 is None else float8.dtype


def unit_specs(site: Site, settings: Settings, topology: Topology, index: Iterator[int]) -> list[UnitSpec]:
    """One unit for each combination of formats and trainability in a site: usually one."""
    precision, device = settings.precision, settings.device
    groups: dict[tuple[torch.dtype, torch.dtype, bool, Float8Format | None], list[ParamRef]] = {}
    for ref in site.params:
        dtype = ref.param.dtype
        # Norms with running statistics compute in their buffers' format, and take activations in any.
        keeps = any(keeps_statistics(module) for module, _ in ref.places)
        seen = dtype if keeps else precision.dtype_of_param(dtype, device)
        key = (seen, precision.dtype_of_master(dtype), ref.param.requires_grad, Float8Format.of(ref, seen))
        groups.setdefault(key, []).append(ref)
    specs = []
    for (seen, master_dtype, trainable, float8), refs in groups.items():
        param_dtype = seen if float8 is None else float8.dtype
        layout = plan_layout(
            [(ref.name, tuple(ref.param.shape)) for ref in refs],
            num_chunks=topology.partition_size,
            num_pieces=topology.num_replicas,
        )
        grad_dtype = master_dtype if trainable else param_dtype
        name = site.name or type(site.module).__name__
        if len(groups) > 1:
            name += f"[{'trainable' if trainable else 'frozen'} {str(param_dtype).removeprefix('torch.')}]"
        has_whole_masters = topology.num_replicas == 1 or settings.optimizer_sharding == "partition"
        specs.append(
            UnitSpec(
                index=next(index),
                name=name,
                refs=tuple(refs),
                layout=layout,
                trainable=trainable,
                param_dtype=param_dtype,
                master_dtype=master_dtype if trainable else param_dtype,
                float8=float8,
                reduce_dtype=precision.dtype_of_hop_1(seen),
                grad_dtype=grad_dtype,
                **_codecs(settings, topology, param_dtype, grad_dtype, trainable=trainable),
                state_on_host=trainable and settings.optimizer_state == "host",
                casts_masters=settings.low_memory
                and float8 is None
                and settings.optimizer_state == "device"
                and trainable
                and master_dtype is not param_dtype
                and has_whole_masters
                and topology.partition_size > 1,
            )
        )
    return specs


def _codecs(
    settings: Settings,
    topology: Topology,
    param_dtype: torch.dtype,
    grad_dtype: torch.dtype,
    *,
    trainable: bool,
) -> dict[str, Any]:
    """How a unit's values are on the wire. Between nodes they may be rounded, inside a node they are not."""
    found: dict[str, Any] = {}
    compression = settings.compression
    has_replicas, crosses = topology.num_replicas > 1, spans_nodes(topology)
    if has_replicas and trainable:
        narrow = settings.precision.dtype_of_hop_2(grad_dtype)
        keeps = compression.keeps_errors
        found["hop_2"] = codec_of(compression.hop2, narrow, at_random=not keeps)
        found["keeps_errors"] = keeps
    if crosses and param_dtype.is_floating_point:
        # What has 8 bits already stays as it is.
        found["gather"] = codec_of(compression.inter_gather if param_dtype.itemsize > 1 else None)
        found["hop_1"] = codec_of(compression.inter_reduce, at_random=True)
    return found

"""What the user asked for: checked before anything is touched, and compared between ranks."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.nn as nn

from mics.activations.policy import Activations
from mics.comm import World
from mics.comm.moves import moves_work
from mics.cost.clusters import Cluster, assumed_cluster, find_cluster
from mics.cost.memory import DRIVER_NBYTES
from mics.engine import is_sharded
from mics.errors import MicsError, SettingsError
from mics.layout.assign import Site, assign_sites, modules_around, unit_modules
from mics.layout.compression import UNCOMPRESSED, Compression
from mics.layout.order import Prefetch
from mics.layout.precision import Precision
from mics.layout.topology import check_partition_groups, check_partition_size
from mics.sharding.float8 import is_float8_weight
from mics.sharding.held import ParameterTable
from mics.sharding.model_checks import check_model

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

OptimizerSharding = Literal["auto", "world", "partition"]
OptimizerState = Literal["device", "host"]
_AUDIT_INTERVAL = 100  # optimizer steps: the digests take well under a step, so well under 1%


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the user asked for, checked, before anything is touched."""

    partition_groups: tuple[tuple[int, ...], ...]
    hierarchical: Literal["auto"] | bool
    optimizer_sharding: OptimizerSharding
    optimizer_state: OptimizerState = "device"
    """Where masters and optimizer state are between steps."""
    precision: Precision
    prefetch: Prefetch | None
    """How far ahead units are gathered; None: as far as the cost model says."""
    cluster: Cluster
    """What the cost model takes the cluster to be."""
    device: torch.device
    ranks_on_gpu: int = 1
    """Ranks that share this one's GPU, with it."""
    memory_nbytes: float | None = None
    """Of the device of a rank that is emulated; None: what this rank's device has."""
    least_memory_nbytes: float = 0.0
    """Of a device, the least of all ranks: what all of them may decide by; 0: not known."""
    activations: Activations | None
    recomputed: dict[nn.Module, bool]
    """For each unit, and for what is recomputed with the units in it."""
    low_memory: bool
    """Hold as little memory as possible, at a small cost in time."""
    audit_interval: int
    """Optimizer steps from one replica audit to the next; 0: none."""
    compression: Compression = UNCOMPRESSED
    sites: list[Site]

    @property
    def overlaps(self) -> bool:
        """Whether collectives run beside the computation."""
        return self.prefetch is None or self.prefetch.units > 0


def check_settings(
    model: nn.Module,
    world: World,
    *,
    partition_size: int,
    units: Iterable[nn.Module | type[nn.Module]] | None,
    mesh: DeviceMesh | None,
    hierarchical: Literal["auto"] | bool,
    optimizer_sharding: OptimizerSharding,
    optimizer_state: OptimizerState,
    precision: Precision,
    prefetch: Literal["auto"] | int | Prefetch,
    activations: Activations | None,
    low_memory: Literal["auto"] | bool,
    audit_interval: Literal["auto"] | int,
    compression: Compression | None,
    nodes: Sequence[str],
) -> Settings:
    if not isinstance(model, nn.Module):
        raise SettingsError(f"mics.shard: expected an nn.Module, found {type(model).__name__}")
    check_values(
        units=units,
        hierarchical=hierarchical,
        optimizer_sharding=optimizer_sharding,
        optimizer_state=optimizer_state,
        precision=precision,
        prefetch=prefetch,
        activations=activations,
        low_memory=low_memory,
        audit_interval=audit_interval,
        compression=compression,
    )
    device = device_of(model, world)
    _check_state(optimizer_state, model)
    chosen = _chosen(units)
    recomputed = dict.fromkeys(unit_modules(model, chosen), False)
    if activations is not None:  # here, where nothing has been touched yet: a callable may raise
        recomputed = activations.taken(list(recomputed), modules_around(model, list(recomputed)))
    return Settings(
        partition_groups=_partition_groups(world, partition_size, mesh),
        hierarchical=hierarchical,
        optimizer_sharding=optimizer_sharding,
        optimizer_state=optimizer_state,
        precision=precision,
        prefetch=_prefetch(prefetch),
        cluster=cluster_for(device, nodes, world),
        device=device,
        memory_nbytes=imagined_memory(world),
        activations=activations,
        recomputed=recomputed,
        # Who moves activations out is short of memory.
        low_memory=low_memory
        if isinstance(low_memory, bool)
        else activations is not None and activations.offload,
        audit_interval=_audit_interval(audit_interval),
        compression=_compression(compression, precision),
        sites=assign_sites(model, chosen),
    )


def check_values(
    *,
    units: Any,
    hierarchical: Any,
    optimizer_sharding: Any,
    optimizer_state: Any,
    precision: Any,
    prefetch: Any,
    activations: Any,
    low_memory: Any,
    audit_interval: Any,
    compression: Any,
) -> None:
    """Raise for what is wrong with any model, on any number of ranks."""
    if hierarchical not in ("auto", True, False):
        raise SettingsError(f'hierarchical: expected "auto", True or False, found {hierarchical!r}')
    if optimizer_sharding not in ("auto", "world", "partition"):
        raise SettingsError(
            f'optimizer_sharding: expected "auto", "world" or "partition", found {optimizer_sharding!r}'
        )
    if optimizer_state not in ("device", "host"):
        raise SettingsError(f'optimizer_state: expected "device" or "host", found {optimizer_state!r}')
    if not isinstance(precision, Precision):
        raise SettingsError(f"precision: expected a mics.Precision, found {precision!r}")
    if activations is not None and not isinstance(activations, Activations):
        raise SettingsError(f"activations: expected a mics.Activations or None, found {activations!r}")
    if not (low_memory == "auto" or isinstance(low_memory, bool)):
        raise SettingsError(f'low_memory: expected "auto", True or False, found {low_memory!r}')
    _check_units(units)
    _prefetch(prefetch)
    _audit_interval(audit_interval)
    _compression(compression, precision)


def _compression(compression: Any, precision: Precision) -> Compression:
    if compression is None:
        return UNCOMPRESSED
    if not isinstance(compression, Compression):
        raise SettingsError(f"compression: expected a mics.Compression or None, found {compression!r}")
    narrow = precision.replica_reduce_dtype
    if compression.hop2 is not None and narrow is not None and narrow.itemsize == 2:
        raise SettingsError(
            "expected one format of gradients between replicas, found two: "
            f'Precision(replica_reduce_dtype={narrow}) and Compression(hop2="{compression.hop2}"); '
            "leave one out"
        )
    return compression


def _check_units(units: Any) -> None:
    if units is None or isinstance(units, type):
        return
    if isinstance(units, str) or not isinstance(units, Iterable):
        found = f"one {type(units).__name__}" if isinstance(units, nn.Module) else repr(units)
        raise SettingsError(f"units: expected a list of modules or module classes, found {found}")


def _chosen(units: Any) -> list[Any] | None:
    """What was named as units, in a list; one class may come alone."""
    return [units] if isinstance(units, type) else None if units is None else list(units)


def _prefetch(prefetch: Any) -> Prefetch | None:
    if prefetch == "auto":
        return None
    if isinstance(prefetch, Prefetch):
        return prefetch
    if isinstance(prefetch, bool) or not isinstance(prefetch, int) or prefetch < 0:
        raise SettingsError(
            f'prefetch: expected "auto", a number of units from 0 or a mics.Prefetch, found {prefetch!r}'
        )
    return Prefetch(units=prefetch)


def _audit_interval(interval: Any) -> int:
    if interval == "auto":
        return _AUDIT_INTERVAL
    if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
        raise SettingsError(
            f'audit_interval: expected "auto" or a number of optimizer steps from 0, found {interval!r}'
        )
    return interval


def cluster_for(device: torch.device, nodes: Sequence[str], world: World) -> Cluster:
    """The emulated cluster, the one that MICS_CLUSTER names, or what the device suggests."""
    if world.imagined is not None:
        return world.imagined
    counts = Counter(nodes)
    num_nodes, ranks_per_node = len(counts), max(counts.values())
    named = os.environ.get("MICS_CLUSTER")
    if named:
        found = find_cluster(named)
        reason = why_not_cluster(found, device, ranks_per_node=ranks_per_node)
        if reason is not None and found.computing is not None:
            raise SettingsError(f"MICS_CLUSTER={named}: {reason}")
        return replace(found, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return assumed_cluster(name, num_nodes=num_nodes, ranks_per_node=ranks_per_node)


def why_not_cluster(cluster: Cluster, device: torch.device, *, ranks_per_node: int) -> str | None:
    """What tells a cluster from the one that this runs on, if anything does; its number of nodes does not."""
    way_out = "run mics calibrate here, or leave it out"
    if cluster.ranks_per_node != ranks_per_node:
        return f"expected {ranks_per_node} ranks on a node, found {cluster.ranks_per_node}; {way_out}"
    here = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    if cluster.computing is not None and cluster.computing.device != here:
        return f"expected a cluster of {here!r}, found one of {cluster.computing.device!r}; {way_out}"
    return None


def imagined_memory(world: World) -> float | None:
    """Bytes that a program has of an emulated device: the rest is the driver's. None: nobody says."""
    if world.imagined is None or not world.imagined.memory_nbytes:
        return None
    return max(1.0, world.imagined.memory_nbytes - DRIVER_NBYTES)


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


def whole_node(nodes: Sequence[str]) -> int:
    """The number of ranks of a node, if all have the same number; else everybody."""
    sizes = {nodes.count(node) for node in nodes}
    return sizes.pop() if len(sizes) == 1 else len(nodes)


def _check_unsharded(model: nn.Module) -> None:
    sharded = (ParameterTable.holds_units(module) or is_sharded(module) for module in model.modules())
    names = (name for name, _ in model.named_modules())
    inside = next((name for name, is_inside in zip(names, sharded, strict=True) if is_inside), None)
    if inside is not None:
        raise SettingsError(
            f"mics.shard: expected a model that is not sharded yet, found {inside or 'the model'!r} "
            "already sharded; call mics.shard once, on the outermost module, and again on new parts alone "
            "(new parameters beside a sharded module go into a module of their own, which is the new part)"
        )


def device_of(model: nn.Module, world: World) -> torch.device:
    """Where shards will live. All parameters must be on one device, and within reach of the collectives."""
    _check_unsharded(model)
    check_model(model)
    devices: dict[torch.device, str] = {}
    for name, param in model.named_parameters():
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


def _check_state(optimizer_state: OptimizerState, model: nn.Module) -> None:
    found = next((name for name, param in model.named_parameters() if is_float8_weight(param)), None)
    if found is not None and optimizer_state == "host":
        raise SettingsError(
            'optimizer_state="host": expected weights that are gathered in their own dtype, found '
            f"{found!r}, which is to be gathered in float8; keep the state on the device, or convert the "
            "model with Float8LinearConfig(enable_fsdp_float8_all_gather=False)"
        )


def describe(
    world: World, model: nn.Module, settings: Settings | None, error: Exception | None
) -> dict[str, Any]:
    """What this rank is about to do, for comparison with the others."""
    account: dict[str, Any] = {"rank": world.rank, "error": None, "gpu": None, "memory": 0.0}
    if settings is None or error is not None:
        return account | {"error": f"{type(error).__name__}: {error}"}
    described = [
        f"{site.name}: {ref.name} {tuple(ref.param.shape)} {ref.param.dtype} "
        f"trainable={ref.param.requires_grad} float8={is_float8_weight(ref.param)}"
        for site in settings.sites
        for ref in site.params
    ]
    described += [f"buffer {name} {tuple(b.shape)} {b.dtype}" for name, b in model.named_buffers()]
    return account | {
        "partition groups": settings.partition_groups,
        "hierarchical": settings.hierarchical,
        "optimizer_sharding": settings.optimizer_sharding,
        "optimizer_state": settings.optimizer_state,
        "precision": str(settings.precision),
        "prefetch": str(settings.prefetch or "auto"),
        "low_memory": settings.low_memory,
        "activations": _account_of(settings),
        "audit_interval": settings.audit_interval,
        "compression": str(settings.compression),
        "cluster (MICS_CLUSTER)": str(settings.cluster),
        "gpu": _gpu(settings.device),
        "memory": _memory_nbytes(world, settings),
        "moves": _makes_moves(settings),
        "device type": settings.device.type,
        "torch version": torch.__version__.split("+")[0],
        "number of parameters and buffers": len(described),
        "units, parameters and buffers": hashlib.sha256("\n".join(described).encode()).hexdigest()[:16],
    }


def _account_of(settings: Settings) -> str:
    """What happens to activations, in words: callables are not the same object on two ranks."""
    policy = settings.activations
    if policy is None:
        return "kept"
    recomputed = list(settings.recomputed.values())
    units = hashlib.sha256(str(recomputed).encode()).hexdigest()[:8]
    return (
        f"{sum(recomputed)} of {len(recomputed)} units recomputed ({units}), "
        f"offload={policy.offload}, offload_fraction={policy.offload_fraction}, "
        f"offload_bytes={policy.offload_bytes}, offload_uncheckpointed={policy.offload_uncheckpointed}, "
        f"keep_last={policy.keep_last}"
    )


def _makes_moves(settings: Settings) -> bool:
    """Whether this rank can send new parameters as moves, if it is to."""
    is_alone = len(settings.partition_groups) == 1 and settings.cluster.num_nodes == 1
    return settings.compression.refresh is not None and not is_alone and moves_work(settings.device)


def agreed(settings: Settings, accounts: Sequence[dict[str, Any]]) -> Settings:
    """With what all ranks have and can: the least memory of any, and moves where every rank can make them."""
    least = min(account["memory"] for account in accounts) / settings.ranks_on_gpu
    can_move = all(account["moves"] for account in accounts)
    compression = settings.compression if can_move else settings.compression.without_moves()
    return replace(settings, least_memory_nbytes=least, compression=compression)


def _gpu(device: torch.device) -> str | None:
    """What tells a GPU from all others of the world."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None


def _memory_nbytes(world: World, settings: Settings) -> float:
    """Of the device, as the cluster says it where there is none or it plays another."""
    if settings.device.type == "cuda" and world.imagined is None:
        return float(torch.cuda.get_device_properties(settings.device).total_memory)
    return settings.cluster.memory_nbytes


def ranks_on_gpu(accounts: Sequence[dict[str, Any]], world: World) -> int:
    """The most ranks that have one GPU: with more than one of them collectives compete for it."""
    gpus = Counter(account["gpu"] for account in accounts if account["gpu"] is not None)
    return max(gpus.values(), default=1) if world.imagined is None else 1


def compare(accounts: Sequence[dict[str, Any]]) -> None:
    """Raise if a rank failed, or if the ranks are not about to do the same."""
    failed = [account for account in accounts if account["error"] is not None]
    if failed:
        raise MicsError(
            f"mics.shard failed on rank {failed[0]['rank']}, so it cannot go on here: {failed[0]['error']}"
        )
    for key in accounts[0]:
        if key in ("rank", "gpu", "memory", "moves"):
            continue
        first = accounts[0][key]
        other = next((account for account in accounts if account[key] != first), None)
        if other is not None:
            raise SettingsError(
                f"mics.shard: expected the same {key} on all ranks, found {first} on rank 0 and "
                f"{other[key]} on rank "
                f"{other['rank']}; build the same model and pass the same settings everywhere"
            )

"""This process's place in the world: rank, node, and process groups made once and shared by all models."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from mics.comm.counter import TrafficCounter
from mics.comm.group import GroupCollectives
from mics.comm.host_group import HostGroup
from mics.comm.journal import in_call
from mics.comm.lanes import LanedCollectives, Lanes, LaneWatch
from mics.comm.liveness import Liveness
from mics.comm.messages import meet, tag_of
from mics.comm.protocol import Collectives
from mics.comm.two_stage import TwoStageCollectives
from mics.cost.clusters import Cluster
from mics.errors import CollectiveError, MicsError, SettingsError
from mics.layout.topology import Stages, Topology


@dataclass
class World:
    """The launched processes, as torch.distributed knows them."""

    rank: int
    size: int
    default_group: dist.ProcessGroup | None
    liveness: Liveness | None = None
    _groups: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = field(default_factory=dict)
    _lanes: dict[tuple[torch.device, bool], Lanes] = field(default_factory=dict)
    _host: HostGroup | None = None

    @property
    def imagined(self) -> Cluster | None:
        """The cluster that this process plays alone, if its process group says so; None: ranks are real."""
        return getattr(self.default_group, "imagined_cluster", None)

    def gather_objects(self, value: Any) -> list[Any]:
        """``value`` of every rank."""
        if self.default_group is None:
            return [value]
        if self.imagined is not None:
            return [value] * self.size  # imagined ranks say what this one says
        values: list[Any] = [None] * self.size
        with self.naming("all-gather", in_call("objects")):
            dist.all_gather_object(values, value)
        return values

    @contextmanager
    def naming(self, kind: str, label: str, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Collectives that torch runs for us over ``group`` (None: the default one).

        If one fails, the error names it and who is gone.
        """
        group = group or self.default_group
        with self.explaining(kind, label):
            if group is not None and self.liveness is not None:
                purpose = next((key[0] for key, other in self._groups.items() if other is group), "")
                self.liveness.enter(self.liveness.journal(purpose, group), kind, label)
                if any(device.type == "cpu" for device in group._device_types):
                    meet(tag_of(kind, label), group=group)
            yield

    @contextmanager
    def explaining(self, kind: str, label: str) -> Iterator[None]:
        """What fails in a group that is not torch's is explained alike."""
        try:
            yield
        except MicsError:
            raise
        except RuntimeError as error:
            culprits = "" if self.liveness is None else self.liveness.explain()
            raise CollectiveError(f"{kind} of {label} failed. {culprits}The backend said: {error}") from error

    def node_names(self) -> list[str]:
        """For every rank what tells its node from others: the launcher's node rank, else the host's name."""
        cluster = self.imagined
        if cluster is not None:
            return [str(cluster.node_of(rank)) for rank in range(self.size)]
        return self.gather_objects(os.environ.get("GROUP_RANK") or socket.gethostname())

    def backend_device(self, wanted: torch.device | None) -> torch.device:
        """The device that shards live on: ``wanted`` if the collectives reach it, else one they do reach."""
        backends = self._backends()
        if wanted is not None and wanted.type in backends:
            return wanted
        if "cuda" in backends and torch.cuda.is_available():
            return torch.device("cuda", torch.cuda.current_device())
        if wanted is not None and wanted.type not in ("cpu", "meta"):
            raise SettingsError(
                f"model on {wanted}: expected a process group with a backend for {wanted.type}, found one "
                f"for {sorted(backends)}; call init_process_group with that backend or move the model"
            )
        return torch.device("cpu")

    def start_liveness(self, device: torch.device) -> None:
        """Start this rank's heartbeat, once."""
        alone = self.default_group is None or self.size == 1 or self.imagined is not None
        if alone or self.liveness is not None:
            return
        store = _get_default_store()
        # What ranks of another life of this store wrote is not about these.
        life = self.gather_objects(secrets.token_hex(4))[0]
        self.liveness = Liveness(
            PrefixStore(f"mics-liveness/{life}", store.clone() if hasattr(store, "clone") else store),
            rank=self.rank,
            world_size=self.size,
            timeout=self._timeout(),
            on_gpu=device.type == "cuda",
        )

    @contextmanager
    def watching(self, watch: LaneWatch) -> Iterator[None]:
        """Inside, ``watch`` sees what all lanes do that are there already."""
        watched = list(self._lanes.values())
        for lanes in watched:
            lanes.watch = watch
        try:
            yield
        finally:
            for lanes in watched:
                lanes.watch = None

    def group(self, groups: Sequence[tuple[int, ...]], purpose: str = "") -> dist.ProcessGroup | None:
        """The process group of this rank among disjoint ``groups``; every rank calls with the same ones.

        Groups are made once for each ``purpose``: what runs at the same time must not share a communicator.
        """
        own = None
        for ranks in groups:
            if self.default_group is None:
                return None
            if len(ranks) == 1:
                continue
            key = purpose, ranks
            if key not in self._groups:
                whole = not purpose and ranks == tuple(range(self.size))
                self._groups[key] = (
                    self.default_group if whole else dist.new_group(list(ranks), timeout=self._timeout())
                )
            if self.rank in ranks:
                own = self._groups[key]
        return own

    def host_group(self) -> HostGroup:
        """A group of all ranks for objects in host memory, apart from the training's; every rank calls it."""
        if self._host is None and (self.default_group is None or self.size == 1):
            self._host = HostGroup()
        elif self._host is None:
            name = self.gather_objects(uuid4().hex)[
                0
            ]  # a store may outlive the process groups it is given to
            store = PrefixStore(f"mics-host-{name}", _get_default_store())
            self._host = HostGroup.join(store, rank=self.rank, size=self.size, timeout=self._timeout())
        return self._host

    def collectives(
        self,
        topology: Topology,
        counter: TrafficCounter,
        device: torch.device,
        *,
        overlap: bool,
        share_links: bool = False,
        exchange_replicas: bool = False,
    ) -> MeshCollectives:
        """The collectives of both mesh axes and of the world, for this rank.

        With ``share_links`` gathers and reductions inside the partition group take turns on one lane; with
        ``exchange_replicas`` each replica sends to each, in place of a ring.
        """
        maker = _Maker(world=self, topology=topology, counter=counter, overlap=overlap)
        gathers, reductions = ("partition",) * 2 if share_links else ("gather", "reduce")
        gather, reduce = maker.partition(gathers), maker.partition(reductions)
        replication = maker.replication("replicas", exchange=exchange_replicas)
        # Models share process groups, so they share lanes: one order of actions for each group.
        lanes = self._lanes.setdefault((device, overlap), Lanes(device, overlap=overlap))
        world = maker.over("world", [tuple(range(self.size))])
        return MeshCollectives(
            groups=UnitGroups(
                topology=topology,
                members=world,
                gather=LanedCollectives(gather, lanes, gathers),
                reduce=LanedCollectives(reduce, lanes, reductions),
                replication=LanedCollectives(replication, lanes, "replicas"),
                divisor=self.size,
            ),
            world=world,
            liveness=self.liveness,
            lanes=lanes,
            staging=lambda: gather.staging_nbytes + reduce.staging_nbytes + replication.staging_nbytes,
            over_gloo=device.type == "cpu" and world.is_real,
            exchanges_replicas=exchange_replicas,
        )

    def _backends(self) -> set[str]:
        """Device types the default group's collectives reach."""
        if self.default_group is None:
            return {"cpu", "cuda"} if torch.cuda.is_available() else {"cpu"}
        group = self.default_group
        # gloo also takes CUDA tensors, through the host: nobody who asks for it means to train on a GPU.
        return {
            d.type for d in group._device_types if (d.type, group._get_backend(d).name()) != ("cuda", "gloo")
        }

    def _timeout(self) -> timedelta:
        """The timeout the user gave to init_process_group: new_group would fall back to torch's default."""
        group = self.default_group
        assert group is not None
        timeout: timedelta = group._get_backend(group._device_types[0]).options._timeout
        return timeout


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes the collectives of one model. Every rank makes every group, in one order, also others' groups."""

    world: World
    topology: Topology
    counter: TrafficCounter
    overlap: bool

    def over(
        self, axis: str, groups: Sequence[tuple[int, ...]], purpose: str = "", *, exchange: bool = False
    ) -> GroupCollectives:
        """Over this rank's group among ``groups``."""
        purpose = purpose if self.overlap else ""
        return GroupCollectives(
            self.world.group(groups, purpose),
            axis=axis,
            counter=self.counter,
            liveness=self.world.liveness,
            purpose=purpose,
            exchange=exchange,
        )

    def partition(self, purpose: str) -> Collectives:
        """Over this rank's partition group, in two stages where the topology says so."""
        topology = self.topology
        stages = [topology.stages(rank) for rank in range(self.world.size)]
        found = self._in_stages("partition", topology.partition_groups, stages, purpose)
        assert found.position == topology.chunk(self.world.rank), "torch ordered a group differently"
        return found

    def replication(self, purpose: str, *, exchange: bool) -> Collectives:
        """Over this rank's replication group, likewise. ``exchange``: where replicas are on several nodes."""
        topology = self.topology
        stages = [topology.replica_stages(rank) for rank in range(self.world.size)]
        groups = topology.replication_groups
        found = self._in_stages("replication", groups, stages, purpose, exchange=exchange)
        assert found.position == topology.piece(self.world.rank), "torch ordered a group differently"
        return found

    def _in_stages(
        self,
        axis: str,
        groups: Sequence[tuple[int, ...]],
        stages: Sequence[Stages | None],
        purpose: str,
        *,
        exchange: bool = False,
    ) -> Collectives:
        """``stages``: of each rank. Groups whose ranks have none are served in one."""
        flat = self.over(
            axis, [each for each in groups if stages[each[0]] is None], purpose, exchange=exchange
        )
        intra_groups = sorted({each.intra for each in stages if each is not None})
        inter_groups = sorted({each.inter for each in stages if each is not None})
        intra = self.over("intra", intra_groups, f"{purpose} intra")
        inter = self.over("inter", inter_groups, f"{purpose} inter", exchange=exchange)
        if stages[self.world.rank] is None:
            return flat
        return TwoStageCollectives(axis=axis, intra=intra, inter=inter, counter=self.counter)


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitGroups:
    """The groups of ranks that a unit lives in. All units of a model share one of these today."""

    topology: Topology
    members: Collectives
    """All ranks that hold a part of it, in every replica."""
    gather: LanedCollectives
    """Parameters, inside the partition group."""
    reduce: LanedCollectives
    """Hop 1: gradients, inside the partition group."""
    replication: LanedCollectives
    """Hop 2 and the new parameters, across the replication group."""
    divisor: int
    """Ranks whose gradients are averaged."""


@dataclass(frozen=True, kw_only=True)
class MeshCollectives:
    """The collectives of one sharded model on this rank."""

    groups: UnitGroups
    """What its units are gathered and reduced over."""
    world: Collectives
    """Everything else, where the caller stands."""
    liveness: Liveness | None
    """What ranks tell each other without a collective; None where there is nobody to tell."""
    lanes: Lanes
    staging: Callable[[], int]
    over_gloo: bool
    """Whether gloo moves the model's tensors."""
    exchanges_replicas: bool
    """Whether each replica sends to each, in place of a ring."""

    def staging_nbytes(self) -> int:
        """Bytes that the collectives themselves keep (gloo's incoming chunks)."""
        return self.staging() + self.world.staging_nbytes


_joined: World | None = None


def join_world() -> World:
    """The world as launched; the same object as long as the default process group stays the same."""
    global _joined
    group = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    launched = int(os.environ.get("WORLD_SIZE", "1"))
    if group is None and launched > 1:
        raise SettingsError(
            f"expected an initialised process group because WORLD_SIZE is {launched}, found none; "
            "call torch.distributed.init_process_group() before mics.shard()"
        )
    if _joined is None or _joined.default_group is not group:
        if _joined is not None and _joined.liveness is not None:
            _joined.liveness.close()
        rank, size = (0, 1) if group is None else (dist.get_rank(), dist.get_world_size())
        _joined = World(rank=rank, size=size, default_group=group)
    return _joined

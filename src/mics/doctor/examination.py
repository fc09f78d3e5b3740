"""The examination as one rank goes through it: stage by stage, each with a time limit.

All ranks state their facts. Rank 0 then says who takes part in what, and collects. What hangs (a driver, a
network file system, a collective) hangs in a thread of its own: the rank says so and goes on.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any, Final, TypeVar

import torch
from torch.distributed.distributed_c10d import PrefixStore

from mics.doctor.clocks import answer_clocks, ask_clocks
from mics.doctor.compute import examine_device
from mics.doctor.doors import cut_off, knock_at_all, open_door, to_knock_at
from mics.doctor.facts import (
    ClockFacts,
    ComputeFacts,
    FolderFacts,
    Knocks,
    NetworkResults,
    Place,
    RankFacts,
    Stuck,
    decode,
    encode,
)
from mics.doctor.folders import FolderProbe, StoreProbe, probe_of
from mics.doctor.gpus import nccl_version, read_gpu
from mics.doctor.interfaces import read_network
from mics.doctor.machine import read_machine, read_place, read_versions
from mics.doctor.meeting import Meeting
from mics.doctor.survey import Survey, Wishes
from mics.doctor.transfers import Network, able_nodes
from mics.errors import SettingsError
from mics.train.config import TrainConfig
from mics.train.ranks import Rank, read_rank
from mics.train.sequences import open_sequences

T = TypeVar("T")
_WHOLE_SECONDS: Final = 55.0
_LIMITS: Final = {"facts": 15.0, "data": 8.0, "clocks": 3.0, "folder": 8.0, "compute": 12.0, "network": 35.0}
_MARGIN_SECONDS: Final = 2.0


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """The settings of the run to come, as this rank reads them."""

    train: TrainConfig | None
    """None: this rank cannot read them."""
    error: str = ""
    wishes: Wishes = field(default_factory=Wishes)

    @property
    def digest(self) -> str:
        return "" if self.train is None else hashlib.sha256(repr(self.train).encode()).hexdigest()[:12]


@dataclass(frozen=True, kw_only=True)
class Roles:
    """What rank 0 announces once it knows who is there."""

    leaders: list[int] = field(default_factory=list)
    """One rank of each node."""
    groups: list[list[int]] = field(default_factory=list)
    """Ranks of each node that can join a process group."""
    nodes: list[str] = field(default_factory=list)
    """Of the leaders, in the same order."""
    doors: list[str] = field(default_factory=list)
    """Of the same nodes."""
    token: str = ""
    network_seconds: float = 0.0

    @property
    def able(self) -> list[int]:
        return sorted(rank for ranks in self.groups for rank in ranks)


class Boxed(threading.Thread):
    """Work that may hang. Its thread is given up then, and ends with the process."""

    def __init__(self, work: Callable[[], Any]) -> None:
        super().__init__(daemon=True, name="mics-doctor")
        self._work = work
        self.value: Any = None
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            self.value = self._work()
        except Exception as error:  # whatever it is, it is a finding
            self.error = error


def boxed(work: Callable[[], T], seconds: float) -> tuple[T | None, str]:
    """What ``work`` returns, or why it returned nothing."""
    box = Boxed(work)
    box.start()
    box.join(seconds)
    if box.is_alive():
        return None, f"still at it after {seconds:.0f} s"
    if box.error is not None:
        return None, f"{type(box.error).__name__}: {(str(box.error).splitlines() or [''])[0]}"
    return box.value, ""


def is_anything_stuck() -> bool:
    return any(isinstance(thread, Boxed) and thread.is_alive() for thread in threading.enumerate())


def state_facts(place: Place, settings: RunSettings) -> tuple[RankFacts, Rank | None]:
    """This rank's own facts, and the device it would train on. Talks to nobody."""
    versions, gpu, me = read_versions(), None, None
    gpu_error = ""
    if settings.train is not None:
        try:
            me = read_rank(settings.train.launch, environ=os.environ, num_gpus=torch.cuda.device_count())
        except SettingsError as error:
            gpu_error = str(error)
    if me is not None and me.device.type == "cuda":
        rank = me
        gpu, gpu_error = boxed(lambda: read_gpu(rank), _LIMITS["facts"] - _MARGIN_SECONDS)
        versions["NCCL"] = nccl_version()
    restarts = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
    network = read_network(os.environ, on_gpu=gpu is not None)
    if place.local_rank == 0:
        network = replace(network, door=open_door(network))
    facts = RankFacts(
        place=place,
        versions=versions,
        machine=read_machine(os.environ),
        network=network,
        gpu=gpu,
        max_restarts=None if restarts is None else int(restarts),
        settings_error=settings.error,
        settings_digest=settings.digest,
        gpu_error=gpu_error,
    )
    if settings.train is not None and place.local_rank == 0:
        facts = replace(facts, **_look_at_data(settings.train, me.num_ranks if me is not None else 1))
    return facts, me


def _look_at_data(train: TrainConfig, num_ranks: int) -> dict[str, Any]:
    """What training would say about its data on this host: sizes of shards, vocabulary, enough sequences."""

    def look() -> str:
        try:
            open_sequences(train).check_validation(train.batch_size * num_ranks)
        except SettingsError as error:
            return str(error)
        return ""

    missing = [str(folder) for folder in train.data.missing_shards]
    if missing:
        return {"missing_shards": missing}
    box = Boxed(look)
    box.start()
    box.join(_LIMITS["data"])
    if box.is_alive():
        return {"data_seen": False}
    return {"data_error": f"data: could not be read: {box.error!r}" if box.error else box.value}


def able_ranks(survey: Survey) -> list[int]:
    """Ranks that a process group would not wait for in vain: their interface is there and leads outside."""
    several = len({facts.place.stack for facts in survey.ranks.values()}) > 1
    found = []
    for rank, facts in survey.ranks.items():
        loopbacks = {each.name for each in facts.network.interfaces if each.loopback}
        gloo = facts.network.gloo
        inside = several and gloo.name in loopbacks
        broken = gloo.name is None or gloo.error or facts.gpu_error or facts.settings_error
        if not broken and not inside and (facts.gpu is not None) == survey.on_gpu:
            found.append(rank)
    return sorted(found)


class Examination:
    """One rank's way through all stages. Rank 0 also collects what the others say."""

    def __init__(self, meeting: Meeting, settings: RunSettings, *, timeout: float) -> None:
        self.meeting = meeting
        self.settings = settings
        self.timeout = timeout
        self.is_first = meeting.rank == 0
        self.survey = Survey(num_ranks=meeting.num_ranks, ranks={}, wishes=settings.wishes)
        self.roles = Roles()
        self.me: Rank | None = None
        self._deadline = time.monotonic() + _WHOLE_SECONDS
        self._probe: FolderProbe | StoreProbe | None = None
        self._written: FolderFacts | None = None

    def introduce(self) -> None:
        """Everyone's facts, and what rank 0 makes of them."""
        place = read_place(os.environ)
        self.meeting.tell("hello", encode(place))
        facts, self.me = state_facts(place, self.settings)
        self.meeting.tell("facts", encode(facts))
        if self.is_first:
            hellos = self._collect(Place, "hello", range(self.meeting.num_ranks), self.timeout)
            ranks = self._collect(RankFacts, "facts", hellos, _LIMITS["facts"])
            self.survey = replace(self.survey, ranks=ranks, hellos=hellos)
            leaders = [ranks_of_node[0] for ranks_of_node in self.survey.nodes.values()]
            able = able_ranks(self.survey)
            roles = Roles(
                leaders=leaders,
                groups=able_nodes(self.survey.nodes, able),
                nodes=list(self.survey.nodes),
                # Where the interface is a finding already, nobody need knock.
                doors=[ranks[rank].network.door if rank in able else "" for rank in leaders],
                token=secrets.token_hex(4),
            )
            self.meeting.announce("roles", encode(roles))
        self.roles = self._hear("roles")

    def compare_clocks(self) -> None:
        seconds = _LIMITS["clocks"]
        if self.is_first:
            others = {node: rank for node, rank in self._leaders.items() if rank != 0}
            clocks = ask_clocks(self.meeting, others, seconds)
            self.survey = replace(self.survey, clocks={self.roles.nodes[0]: ClockFacts(), **clocks})
        elif self._leads:
            answer_clocks(self.meeting, self.timeout + _WHOLE_SECONDS)

    def visit(self) -> None:
        """Each node knocks at others' doors."""
        if not self._leads:
            return
        nodes, doors = self.roles.nodes, dict(zip(self.roles.nodes, self.roles.doors, strict=True))
        wanted = to_knock_at(nodes[self.roles.leaders.index(self.meeting.rank)], nodes)
        closed = knock_at_all({node: doors[node] for node in wanted if doors[node]})
        self.meeting.tell("doors", encode(Knocks(closed=closed)))

    def try_folder(self) -> None:
        """Each node writes; once all have, each reads."""
        folder = self.settings.wishes.checkpoint_dir
        wanted = folder is not None and self._leads
        if wanted and folder is not None:
            node = self.roles.nodes[self.roles.leaders.index(self.meeting.rank)]
            self._probe = probe_of(folder, token=self.roles.token, node=node)
            self._written, error = boxed(self._probe.write, _LIMITS["folder"])
            self._written = self._written or FolderFacts(error=error, sees_first=False)
            self.meeting.tell("written", encode(self._written))
        if self.is_first:
            if folder is not None:
                self.meeting.collect("written", self.roles.leaders, self._left(_LIMITS["folder"]))
            self.meeting.announce("written", encode(self.roles))
        self._hear("written")
        if self._probe is not None and self._written is not None and self._leads:
            found = self._read(self._probe, self._written)
            self.meeting.tell("folder", encode(found))

    def _read(self, probe: FolderProbe | StoreProbe, written: FolderFacts) -> FolderFacts:
        if "still at it" in written.error:
            return written  # whatever touches the folder would hang too
        nodes = self.roles.nodes
        other = nodes[(nodes.index(probe.node) + 1) % len(nodes)]
        found, error = boxed(lambda: probe.read(written, first=nodes[0], other=other), _LIMITS["folder"])
        return found or replace(written, error=written.error or f"reading: {error}")

    def compute(self) -> None:
        """Right numbers, and how fast."""
        if self.me is not None and not (
            self.me.device.type == "cuda" and self.me.rank not in self.roles.able
        ):
            device = self.me.device
            found, error = boxed(lambda: examine_device(device), _LIMITS["compute"])
            self.meeting.tell("compute", encode(found) if found is not None else f"!{error}")
        if self.is_first:
            self._collect_results()
        self.roles = self._hear("network")
        if self._probe is not None:
            boxed(self._probe.remove_file, _MARGIN_SECONDS)

    def _collect_results(self) -> None:
        survey, folder = self.survey, self.settings.wishes.checkpoint_dir
        computing = [rank for rank in survey.ranks if not self._is_broken(rank)]
        computed = self._collect(ComputeFacts, "compute", computing, _LIMITS["compute"])
        leaders = self.roles.leaders if folder is not None else []
        found = self._collect(FolderFacts, "folder", leaders, _LIMITS["folder"])
        by_node = {self.survey.ranks[rank].place.node: each for rank, each in found.items()}
        knocks = self._collect(Knocks, "doors", self.roles.leaders, _LIMITS["clocks"])
        closed = {
            (self.survey.ranks[rank].place.node, node): reason
            for rank, each in knocks.items()
            for node, reason in each.closed.items()
        }
        self.survey = replace(self.survey, computed=computed, folders=by_node, closed=closed)
        reached = {node: ranks for node, ranks in self.survey.nodes.items() if node not in cut_off(closed)}
        groups = able_nodes(reached, [rank for rank in self.roles.able if rank in computed])
        seconds = self._left(_LIMITS["network"]) - _MARGIN_SECONDS
        self.roles = replace(self.roles, groups=groups, network_seconds=max(5.0, seconds))
        self.meeting.announce("network", encode(self.roles))

    def _is_broken(self, rank: int) -> bool:
        facts = self.survey.ranks[rank]
        needs_gpu = facts.gpu is not None or bool(facts.gpu_error)
        return bool(facts.settings_error) or (needs_gpu and rank not in self.roles.able)

    def send(self) -> None:
        """Collectives and bandwidth, among those that can."""
        able, seconds = self.roles.able, self.roles.network_seconds
        if len(able) > 1 and self.meeting.rank in able and self.me is not None:
            # Of its own: a thread that hangs may hold it.
            store: PrefixStore = self.meeting.store.clone()  # type: ignore[attr-defined]
            network = Network(me=self.me, nodes=self.roles.groups, store=store, seconds=seconds)
            found, error = boxed(network.measure, seconds + 1)
            found = found or NetworkResults(error=f"{network.stage}: {error}")
            self.meeting.tell("network", encode(found))
        if self.is_first:
            taking = able if len(able) > 1 else []
            networks = self._collect(NetworkResults, "network", taking, seconds + _MARGIN_SECONDS)
            self.survey = replace(self.survey, networks=networks)

    def finish(self) -> None:
        """Leave nothing behind."""
        if self._probe is not None:
            boxed(self._probe.remove_folders, _MARGIN_SECONDS)

    @property
    def _leaders(self) -> dict[str, int]:
        return dict(zip(self.roles.nodes, self.roles.leaders, strict=True))

    @property
    def _leads(self) -> bool:
        return self.meeting.rank in self.roles.leaders

    def _hear(self, stage: str) -> Roles:
        return decode(Roles, self.meeting.hear(stage, self.timeout + _WHOLE_SECONDS))

    def _left(self, limit: float) -> float:
        return max(1.0, min(limit, self._deadline - time.monotonic()))

    def _collect(self, kind: type[T], stage: str, ranks: Iterable[int], seconds: float) -> dict[int, T]:
        """What ranks said in time. The others are stuck from now on."""
        wanted = list(ranks)
        limit = seconds if stage == "hello" else self._left(seconds)
        found, stuck, answers = {}, [], self.meeting.collect(stage, wanted, limit)
        for rank in wanted:
            data = answers.get(rank)
            if data is None or data.startswith(b"!"):
                stuck.append(Stuck(rank=rank, stage=stage, error="" if data is None else data[1:].decode()))
            else:
                found[rank] = decode(kind, data)
        self.survey = replace(self.survey, stuck=(*self.survey.stuck, *stuck))
        return found

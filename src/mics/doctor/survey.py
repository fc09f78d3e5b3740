"""The facts of all ranks in one place: what the checks read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TypeVar

from mics.checkpoint.remote import RemotePath
from mics.doctor.facts import (
    ClockFacts,
    ComputeFacts,
    FolderFacts,
    NetworkResults,
    Place,
    RankFacts,
    Stuck,
    Transfer,
    spans,
)

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Wishes:
    """What the run's settings ask of the cluster."""

    checkpoint_dir: Path | RemotePath | None = None
    """None: the run saves no checkpoints."""
    checkpoint_nbytes: int | None = None
    """Of one checkpoint, if the model is known."""
    kept: int = 1
    """Checkpoints that are kept."""
    partition_size: int | None = None
    shards: tuple[Path, ...] = ()
    """Folders to train on; none: a text."""
    num_nodes: int | None = None
    """Hosts that the run is meant for; None: any number."""
    ranks_per_node: int | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Everything that is known about a cluster. Ranks that did not answer are in ``stuck`` alone."""

    num_ranks: int
    ranks: Mapping[int, RankFacts]
    wishes: Wishes = field(default_factory=Wishes)
    clocks: Mapping[str, ClockFacts] = field(default_factory=dict)
    """By node."""
    folders: Mapping[str, FolderFacts] = field(default_factory=dict)
    """By node."""
    closed: Mapping[tuple[str, str], str] = field(default_factory=dict)
    """By who knocked and at whose door: why nobody answered."""
    computed: Mapping[int, ComputeFacts] = field(default_factory=dict)
    networks: Mapping[int, NetworkResults] = field(default_factory=dict)
    stuck: tuple[Stuck, ...] = ()
    hellos: Mapping[int, Place] = field(default_factory=dict)
    """Who came at all, also those that said no more than that."""

    @cached_property
    def nodes(self) -> dict[str, list[int]]:
        """The ranks of each node, in the order of their first rank."""
        found: dict[str, list[int]] = {}
        for rank in sorted(self.ranks):
            found.setdefault(self.ranks[rank].place.node, []).append(rank)
        return found

    @property
    def hosts(self) -> list[str]:
        """Their names, one for each node."""
        return [self.host_of(node) for node in self.nodes]

    @cached_property
    def leaders(self) -> dict[str, RankFacts]:
        """By node: the facts of its first rank, which stand for the host."""
        return {node: self.ranks[ranks[0]] for node, ranks in self.nodes.items()}

    @property
    def on_gpu(self) -> bool:
        return any(facts.gpu is not None for facts in self.ranks.values())

    @property
    def transfers(self) -> list[Transfer]:
        return [each for result in self.networks.values() for each in result.sent]

    def host_of(self, node: str) -> str:
        """A node's host by name, with the node's number where several nodes are on one host."""
        names = [facts.place.host for facts in self.leaders.values()]
        host = self.leaders[node].place.host or f"node {node}"
        return f"{host} node {node}" if names.count(host) > 1 else host

    def where(self, ranks: Iterable[int]) -> str:
        """``host-1 (ranks 4-7) and host-3 (rank 12)``; of very many the first."""
        by_node: dict[str, list[int]] = {}
        for rank in ranks:
            by_node.setdefault(self.ranks[rank].place.node, []).append(rank)
        parts = [
            f"{self.host_of(node)} (rank{'s' if len(found) > 1 else ''} {spans(found)})"
            for node, found in by_node.items()
        ]
        if len(parts) > 4:
            return ", ".join(parts[:3]) + f" and {len(parts) - 3} more hosts"
        return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else parts)

    def on_nodes(self, nodes: Iterable[str]) -> str:
        """The same for all ranks of some nodes."""
        known = self.nodes
        return self.where(rank for node in nodes for rank in known[node])

    def outliers(self, value_of: Callable[[RankFacts], T | None]) -> tuple[T | None, dict[T, list[int]]]:
        """What most ranks have, and who has something else. Ranks without a value are left out."""
        found: dict[T, list[int]] = {}
        for rank in sorted(self.ranks):
            value = value_of(self.ranks[rank])
            if value is not None:
                found.setdefault(value, []).append(rank)
        if not found:
            return None, {}
        # Of two halves rank 0's counts: the other one is then the one to change.
        usual = Counter({value: len(ranks) for value, ranks in found.items()}).most_common(1)[0][0]
        return usual, {value: ranks for value, ranks in found.items() if value != usual}

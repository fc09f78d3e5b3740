"""What is trained, on what, and how it is divided: the question that a prediction answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Final

from mics.cost.auto import two_stages_pay
from mics.cost.clusters import Cluster
from mics.cost.collectives import Span
from mics.cost.compute import Device
from mics.cost.depth import MicroStep, reduction_share
from mics.cost.memory import ADAM_NBYTES, Division, Keeping, Terms, memory_terms
from mics.cost.shapes import ModelShape, UnitShape
from mics.cost.stages import Shares, replicas_two_stage, staged_nbytes
from mics.layout.compression import LOSSLESS, Compression

_PARAM: Final = 2  # bytes
_SCORE_SAVED: Final = 5  # bytes of a score


MOVED_SHARE: Final = 0.33
"""Of the bytes of 16-bit parameters: how far they moved, at usual learning rates (docs/compression.md)."""


def refresh_nbytes(param_nbytes: int, *, lossless: bool) -> float:
    """Of a new parameter, which ranks compute with in ``param_nbytes``, on its way to a replica."""
    return param_nbytes * (MOVED_SHARE if lossless and param_nbytes == 2 else 1.0)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train a model on a cluster."""

    model: ModelShape
    cluster: Cluster
    partition_size: int
    micro_batch: int
    accumulation: int
    activations: Keeping
    wire_nbytes: int = 4
    """Of a gradient on its way, in both hops, where nothing is rounded."""
    state_nbytes: float = ADAM_NBYTES
    """Of the optimizer, for each parameter."""
    over_replicas: bool = True
    state_on_host: bool = False
    """Masters and optimizer state are in host memory between steps."""
    compression: Compression = LOSSLESS
    """What collectives round, and how new parameters go to the replicas."""
    prefetch: int | None = None
    hierarchical: bool = True
    """Gather in two stages where that pays, as the engine does."""
    rings: bool = False
    """Replicas reduce in the backend's own way, whatever the format."""
    fused: bool = True
    """Kernels of today; False: of 2022, which also save the scores of attention."""

    @property
    def num_replicas(self) -> int:
        return self.cluster.world_size // self.partition_size

    @property
    def param_nbytes(self) -> int:
        """Of a parameter as ranks compute with it."""
        return _PARAM if self.cluster.computing is None else self.cluster.computing.param_nbytes

    @property
    def tokens(self) -> int:
        """Of a micro-step on one rank."""
        return self.micro_batch * self.model.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.accumulation * self.cluster.world_size

    def refresh_nbytes(self, param_nbytes: int) -> float:
        """Of a new parameter, which ranks compute with in ``param_nbytes``, on its way to a replica."""
        is_moved = self.compression.refresh == "lossless" and not self.state_on_host
        return refresh_nbytes(param_nbytes, lossless=is_moved)

    @property
    def sends_moves(self) -> bool:
        """Whether new values go to the replicas as moves."""
        is_moved = self.refresh_nbytes(self.param_nbytes) < self.param_nbytes
        return is_moved and self.num_replicas > 1 and self.over_replicas

    @property
    def moves_old(self) -> bool:
        """Whether units that stay get their new values as moves: there are no replicas to have them from."""
        is_moved = self.refresh_nbytes(self.param_nbytes) < self.param_nbytes
        is_exact = self.compression.inter_gather is None
        return is_moved and is_exact and self.num_replicas == 1 and self.partition.num_nodes > 1

    @cached_property
    def shares(self) -> Shares:
        return Shares.of(self.compression, param_nbytes=self.param_nbytes, wire_nbytes=self.wire_nbytes)

    @cached_property
    def device(self) -> Device:
        return Device.of(self.cluster, fused=self.fused)

    @cached_property
    def partition(self) -> Span:
        return span_of_group(self.cluster, self.partition_size)

    @cached_property
    def replication(self) -> Span:
        p, k = self.partition_size, self.cluster.ranks_per_node
        on_a_node = max(1, k // p)
        replicas = self.num_replicas
        return Span(
            size=replicas, num_nodes=max(1, replicas // on_a_node), on_a_node=min(on_a_node, replicas)
        )

    @cached_property
    def replicas_two_stage(self) -> bool:
        """Whether replicas meet in two stages: as the engine decides it."""
        stages = replicas_two_stage(self.replication, self.compression, self.wire_nbytes)
        return stages and self.hierarchical and not self.rings

    @cached_property
    def two_stage(self) -> bool:
        """Whether units are gathered in two stages: as the engine decides it."""
        if not self.hierarchical or self.partition.num_nodes == 1 or self.partition.on_a_node == 1:
            return False
        numel = self.model.largest_numel
        return two_stages_pay(
            self.cluster,
            self.partition,
            gathered=max(unit.gathered_nbytes(self.param_nbytes) for unit in self.model.units),
            reduced=numel * self.wire_nbytes,
            shares=self.shares,
        )

    @cached_property
    def depth(self) -> int:
        """Units gathered ahead: as the engine decides it."""
        if self.prefetch is not None or self.partition_size == 1:
            return self.prefetch or 1
        return self._micro_step(self.model.without_repeats).depth(low_memory=self.activations.offload)

    @cached_property
    def stay_nbytes(self) -> int:
        """Of units that stay gathered between their uses: as the engine decides it."""
        if self.prefetch is not None or self.partition_size == 1 or self.activations.offload:
            return 0
        memory = self.cluster.memory_nbytes
        step = self._micro_step([unit for unit in self.model.units if unit.numel])

        def found(free: float) -> int:
            return step.stay_nbytes(
                wire_nbytes=self.wire_nbytes,
                recomputes=self.activations.checkpoint,
                memory_nbytes=memory,
                free_nbytes=free,
            )

        return found(memory - self.need().peak) if found(memory) else 0

    @property
    def staying_share(self) -> float:
        """Of the parameters."""
        return self.stay_nbytes / sum(unit.gathered_nbytes(self.param_nbytes) for unit in self.model.units)

    def _micro_step(self, shapes: Sequence[UnitShape]) -> MicroStep:
        units = dict(enumerate(shapes))
        # The backward of a lookup needs no weights.
        backward = [index for index in reversed(units) if units[index].kind != "embedding"]
        return MicroStep(
            cluster=self.cluster,
            span=self.partition,
            two_stage=self.two_stage,
            order=[*units, *backward],
            sizes={index: unit.gathered_nbytes(self.param_nbytes) for index, unit in units.items()},
            numels={index: unit.numel for index, unit in units.items()},
            rows=self.tokens,
            shares=self.shares,
        )

    @cached_property
    def division(self) -> Division:
        return replace(self._division, stay_nbytes=self.stay_nbytes)

    @cached_property
    def _division(self) -> Division:
        """With nothing that stays."""
        return Division(
            partition_size=self.partition_size,
            num_replicas=self.num_replicas,
            over_replicas=self.over_replicas,
            prefetch=self.depth,
            num_reduce_buffers=2 if self.two_stage else 1,
            param_nbytes=self.param_nbytes,
            state_nbytes=self.state_nbytes,
            low_memory=self.activations.offload,
            state_on_host=self.state_on_host,
            reduction_share=reduction_share(
                self.cluster,
                self.partition,
                numel=self.model.largest_numel,
                nbytes=self.model.largest_numel * self.wire_nbytes,
                rows=self.tokens,
                two_stage=self.two_stage,
                share=self.shares.reduce,
            ),
            keeps_errors=self.compression.keeps_errors,
            staged_nbytes=staged_nbytes(
                self.compression,
                self.partition,
                self.num_replicas,
                param_nbytes=self.param_nbytes,
                wire_nbytes=self.wire_nbytes,
                two_stage=self.two_stage,
                whole=not self.over_replicas,
                replicas_staged=self.replication.on_a_node if self.replicas_two_stage else 1,
            ),
            move_nbytes=MOVED_SHARE * self.param_nbytes if self.sends_moves or self.moves_old else 0.0,
        )

    def memory(self) -> Terms:
        return self.terms_of(self.division)

    def need(self) -> Terms:
        """The same without units that stay: they take what is left."""
        return self.terms_of(self._division)

    def terms_of(self, division: Division) -> Terms:
        """Memory of this model and these activations, divided in a way that may be another system's."""
        return memory_terms(
            self.model if self.fused else _with_scores(self.model),
            division,
            self.activations,
            self.tokens,
            accumulates=self.accumulation > 1,
        )


@lru_cache(maxsize=64)
def _with_scores(model: ModelShape) -> ModelShape:
    """With what blocks save where attention is not fused: soft-max and dropout of the scores, and its mask.

    The 5 a s of Korthikanti et al., "Reducing activation recomputation in large transformer models" (2022).
    """
    units = [
        replace(unit, saved_numel=unit.saved_numel + _SCORE_SAVED * unit.score_numel // _PARAM)
        for unit in model.units
    ]
    return replace(model, units=tuple(units))


def span_of_group(cluster: Cluster, size: int) -> Span:
    """A group of consecutive ranks."""
    k = cluster.ranks_per_node
    if size <= k:
        return Span(size=size, num_nodes=1, on_a_node=size)
    return Span(size=size, num_nodes=-(-size // k), on_a_node=k if size % k == 0 else size % k)


def partition_sizes(cluster: Cluster) -> list[int]:
    """Divisors of a node, and whole nodes that divide the cluster."""
    k, nodes = cluster.ranks_per_node, cluster.num_nodes
    inside = [size for size in range(1, k + 1) if k % size == 0]
    return inside + [k * count for count in range(2, nodes + 1) if nodes % count == 0]


def fitting_partition(
    model: ModelShape,
    cluster: Cluster,
    *,
    memory_nbytes: float,
    state_on_host: bool = False,
    compression: Compression = LOSSLESS,
) -> int | None:
    """The smallest partition size whose fixed terms leave half of the memory to activations."""
    for size in partition_sizes(cluster):
        setting = Setting(
            model=model,
            cluster=cluster,
            partition_size=size,
            micro_batch=1,
            accumulation=1,
            activations=Keeping(checkpoint=True),
            state_on_host=state_on_host,
            compression=compression,
        )
        if setting.need().fixed <= memory_nbytes / 2:
            return size
    return None

"""What is trained, on what, and how it is divided: the question that a prediction answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Final

from mics.auto import exchange_pays, stage_costs, two_stages_pay
from mics.cost import Cost, Kind, Span, cost
from mics.planner.compute import Device
from mics.planner.depth import MicroStep, reduction_share
from mics.planner.memory import Activations, Layout, Terms, memory_terms
from mics.planner.shapes import ModelShape, UnitShape
from mics.topology import Cluster

_PARAM: Final = 2  # bytes


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One way to train a model on a cluster."""

    model: ModelShape
    cluster: Cluster
    partition_size: int
    micro_batch: int
    accumulation: int
    activations: Activations
    wire_nbytes: int = 4
    """Of a gradient on its way, in both hops."""
    over_replicas: bool = True
    prefetch: int | None = None
    hierarchical: bool = True
    """Gather in two stages where that pays, as the engine does."""
    fused: bool = True
    """Kernels of today; False: of 2021."""

    @property
    def num_replicas(self) -> int:
        return self.cluster.world_size // self.partition_size

    @property
    def tokens(self) -> int:
        """Of a micro-step on one rank."""
        return self.micro_batch * self.model.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Of all ranks."""
        return self.tokens * self.accumulation * self.cluster.world_size

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
    def two_stage(self) -> bool:
        """Whether units are gathered in two stages: as the engine decides it."""
        if not self.hierarchical or self.partition.num_nodes == 1 or self.partition.on_a_node == 1:
            return False
        return two_stages_pay(self.cluster, self.partition, self.model.largest_numel * _PARAM)

    @cached_property
    def depth(self) -> int:
        """Units gathered ahead: as the engine decides it."""
        if self.prefetch is not None or self.partition_size == 1:
            return self.prefetch or 1
        return self._micro_step(self.model.without_repeats).depth(lean=self.activations.offload)

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
        return self.stay_nbytes / (_PARAM * sum(unit.numel for unit in self.model.units))

    def _micro_step(self, shapes: Sequence[UnitShape]) -> MicroStep:
        units = dict(enumerate(shapes))
        # The backward of a lookup needs no weights.
        backward = [index for index in reversed(units) if units[index].kind != "embedding"]
        return MicroStep(
            cluster=self.cluster,
            span=self.partition,
            two_stage=self.two_stage,
            order=[*units, *backward],
            sizes={index: unit.numel * _PARAM for index, unit in units.items()},
            numels={index: unit.numel for index, unit in units.items()},
            rows=self.tokens,
        )

    @cached_property
    def layout(self) -> Layout:
        return replace(self._layout, stay_nbytes=self.stay_nbytes)

    @cached_property
    def _layout(self) -> Layout:
        """With nothing that stays."""
        return Layout(
            partition_size=self.partition_size,
            num_replicas=self.num_replicas,
            over_replicas=self.over_replicas,
            prefetch=self.depth,
            num_reduce_buffers=2 if self.two_stage else 1,
            lean=self.activations.offload,
            reduction_share=reduction_share(
                self.cluster,
                self.partition,
                numel=self.model.largest_numel,
                nbytes=self.model.largest_numel * self.wire_nbytes,
                rows=self.tokens,
                two_stage=self.two_stage,
            ),
        )

    def memory(self) -> Terms:
        return self._memory(self.layout)

    def need(self) -> Terms:
        """The same without units that stay: they take what is left."""
        return self._memory(self._layout)

    def _memory(self, layout: Layout) -> Terms:
        return memory_terms(
            self.model, layout, self.activations, self.tokens, accumulates=self.accumulation > 1
        )

    def forward_seconds(self, unit: UnitShape) -> float:
        key = unit.kind, unit.numel
        if key not in self._forwards:
            self._forwards[key] = self.device.forward_seconds(unit, self.tokens)
        return self._forwards[key]

    @cached_property
    def _forwards(self) -> dict[tuple[str, int], float]:
        return {}

    def backward_seconds(self, unit: UnitShape) -> float:
        """Twice the forward, and once more where it is computed again."""
        again = self.activations.checkpoint and unit.kind == "block"
        return (3 if again else 2) * self.forward_seconds(unit)

    def host_seconds(self, unit: UnitShape) -> float:
        """Of the copy of a block's input to the host, or back."""
        if not self.activations.offload or unit.kind != "block" or not self.cluster.host_bandwidth:
            return 0.0
        return unit.input_numel * self.tokens * _PARAM / self.cluster.host_bandwidth

    def moves(self, kind: Kind, nbytes: float) -> list[tuple[str, Cost]]:
        """A gather or a reduction inside the partition group, by stage: (link, cost)."""
        key = kind, int(nbytes)
        if key not in self._moves:
            self._moves[key] = self._move(*key)
        return self._moves[key]

    @cached_property
    def _moves(self) -> dict[tuple[Kind, int], list[tuple[str, Cost]]]:
        return {}

    def _move(self, kind: Kind, nbytes: int) -> list[tuple[str, Cost]]:
        if not self.two_stage:
            return [("", cost(self.cluster, kind, self.partition, nbytes))]
        inter, intra = stage_costs(self.cluster, kind, self.partition, nbytes)
        stages = [("inter", inter), ("intra", intra)]
        return stages if kind is Kind.ALL_GATHER else stages[::-1]

    def replica_cost(self, kind: Kind, nbytes: float) -> Cost:
        """Of a chunk of ``nbytes`` across replicas, by a ring or by an exchange."""
        largest = 4 * self.model.largest_numel // self.partition_size
        if kind is not Kind.ALL_REDUCE and exchange_pays(self.cluster, self.replication, largest):
            kind = Kind.ALL_TO_ALL
        return cost(self.cluster, kind, self.replication, int(nbytes))


def span_of_group(cluster: Cluster, size: int) -> Span:
    """A group of consecutive ranks."""
    k = cluster.ranks_per_node
    if size <= k:
        return Span(size=size, num_nodes=1, on_a_node=size)
    return Span(size=size, num_nodes=-(-size // k), on_a_node=k if size % k == 0 else size % k)

"""The best ways to train a model on a cluster, and what stands in the way of better ones."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from mics.errors import SettingsError
from mics.planner.memory import Activations, Terms
from mics.planner.setting import Setting
from mics.planner.shapes import ModelShape
from mics.planner.systems import Prediction, predict
from mics.topology import Cluster

USABLE: Final = 0.92
"""Of a device's memory: the rest is the CUDA context, the allocator's holes and NCCL's buffers."""
_POLICIES: Final = (
    Activations(checkpoint=False),
    Activations(checkpoint=True),
    Activations(checkpoint=True, offload=True),
)
_SPLITS: Final = (1, 3)
"""Units of a block: one, or its attention and both matrices of its MLP."""
_AS_FAST: Final = 0.01
_MAX_MICRO_BATCH: Final = 64


@dataclass(frozen=True, kw_only=True)
class Wanted:
    """What is to be trained on what."""

    model: ModelShape
    cluster: Cluster
    global_batch: int
    """Rows of one optimizer step, over all ranks."""
    wire_nbytes: int = 4
    memory_nbytes: float | None = None
    """Of one device; None: the cluster's."""

    def __post_init__(self) -> None:
        world = self.cluster.world_size
        if self.global_batch < world or self.global_batch % world:
            fits = max(1, round(self.global_batch / world)) * world
            raise SettingsError(
                f"--global-batch: expected a multiple of the {world} GPUs (a row or more for each), found "
                f"{self.global_batch}; the nearest is {fits}"
            )

    @property
    def limit(self) -> float:
        return (self.memory_nbytes or self.cluster.memory_nbytes) * USABLE

    def fits(self, terms: Terms) -> bool:
        """On a GPU, and in its share of the node's own memory."""
        host = self.cluster.host_nbytes * USABLE / self.cluster.ranks_per_node
        return terms.peak <= self.limit and (not host or terms.host <= host)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One way that fits."""

    prediction: Prediction
    memory: Terms
    limited_by: str

    @property
    def setting(self) -> Setting:
        return self.prediction.setting

    @property
    def step_seconds(self) -> float:
        return self.prediction.step_seconds


@dataclass(frozen=True, kw_only=True)
class Found:
    """What the search came to. ``choices``: the best first, one for each partition size."""

    wanted: Wanted
    choices: tuple[Choice, ...]
    too_large: dict[int, float]
    """Partition sizes that do not fit, with the bytes that their smallest setting needs."""


def partition_sizes(cluster: Cluster) -> list[int]:
    """Divisors of a node, and whole nodes that divide the cluster."""
    k, nodes = cluster.ranks_per_node, cluster.num_nodes
    inside = [size for size in range(1, k + 1) if k % size == 0]
    return inside + [k * count for count in range(2, nodes + 1) if nodes % count == 0]


def candidates(wanted: Wanted, partition_size: int) -> Iterator[Setting]:
    """For each policy for activations the largest micro-batches that fit, with the coarsest units.

    A dearer policy only where it makes room for more than a cheaper one.
    """
    rows = wanted.global_batch // wanted.cluster.world_size
    for parts, prefetch in product(_SPLITS, (None, 1)):
        model = wanted.model.split(parts)
        largest = 0  # micro-batch that a cheaper policy has room for
        for policy in _POLICIES:
            settings = [
                Setting(
                    model=model,
                    cluster=wanted.cluster,
                    partition_size=partition_size,
                    micro_batch=micro_batch,
                    accumulation=rows // micro_batch,
                    activations=policy,
                    wire_nbytes=wanted.wire_nbytes,
                    prefetch=prefetch,
                    parts=parts,
                )
                for micro_batch in range(largest + 1, min(rows, _MAX_MICRO_BATCH) + 1)
                if rows % micro_batch == 0
            ]
            fitting = [setting for setting in settings if wanted.fits(setting.memory())]
            largest = max((setting.micro_batch for setting in fitting), default=largest)
            yield from fitting[-2:] if parts == 1 else fitting[-1:]  # many units take long to play through
        if largest:
            return


def smallest_need(wanted: Wanted, partition_size: int) -> float:
    """Bytes of the setting that needs least: one row, everything offloaded, fine units, one ahead."""
    setting = Setting(
        model=wanted.model.split(_SPLITS[-1]),
        cluster=wanted.cluster,
        partition_size=partition_size,
        micro_batch=1,
        accumulation=1,
        activations=_POLICIES[-1],
        prefetch=1,
    )
    return setting.memory().peak


def search(wanted: Wanted, system: str = "mics") -> Found:
    """Try every partition size; of each the fastest setting."""
    choices, too_large = [], {}
    for size in partition_sizes(wanted.cluster):
        settings = list(candidates(wanted, size))
        if not settings:
            too_large[size] = smallest_need(wanted, size)
            continue
        found = [predict(setting, system) for setting in settings]
        best = min(found, key=lambda prediction: prediction.step_seconds)
        choices.append(Choice(prediction=best, memory=best.setting.memory(), limited_by=limit_of(best)))
    fastest = min((choice.step_seconds for choice in choices), default=0.0)
    # What is as fast is better small: less of it depends on the network being what it should be.
    choices.sort(
        key=lambda choice: (
            max(choice.step_seconds, (1 + _AS_FAST) * fastest),
            choice.setting.partition_size,
        )
    )
    return Found(wanted=wanted, choices=tuple(choices), too_large=too_large)


def limit_of(prediction: Prediction) -> str:
    """What the step's time is mostly lost to."""
    step = prediction.step_seconds
    inter, intra = (prediction.exposed_seconds[link] / step for link in ("inter", "intra"))
    if inter < 0.03 and intra < 0.03:
        return "compute"
    if intra > inter:
        return "intra bandwidth"
    setting = prediction.setting
    quick = replace(setting.cluster, inter=replace(setting.cluster.inter, latency=0.0, ramp_nbytes=0.0))
    without = predict(replace(setting, cluster=quick), prediction.system)
    gained = (step - without.step_seconds) / max(1e-12, prediction.exposed_seconds["inter"])
    return "inter latency" if gained > 0.5 else "inter bandwidth"


def smallest_cluster(wanted: Wanted) -> int | None:
    """Nodes of this kind that would do, if any number of them does."""
    nodes = wanted.cluster.num_nodes
    while nodes <= 1 << 17:
        nodes *= 2
        cluster = replace(wanted.cluster, num_nodes=nodes)
        larger = replace(wanted, cluster=cluster, global_batch=cluster.world_size)
        if any(smallest_need(larger, size) <= larger.limit for size in partition_sizes(cluster)):
            return nodes
    return None


def fitting_partition(model: ModelShape, cluster: Cluster, *, memory_nbytes: float) -> int | None:
    """The smallest partition size whose fixed terms leave half of the memory to activations."""
    for size in partition_sizes(cluster):
        setting = Setting(
            model=model,
            cluster=cluster,
            partition_size=size,
            micro_batch=1,
            accumulation=1,
            activations=_POLICIES[1],
        )
        if setting.memory().fixed <= memory_nbytes / 2:
            return size
    return None

"""The best ways to train a model on a cluster, and what stands in the way of better ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final

from mics.cost.clusters import Cluster
from mics.cost.memory import USABLE, Keeping, Terms
from mics.cost.setting import Setting, partition_sizes
from mics.cost.shapes import ModelShape
from mics.planner.systems import Prediction, predict, predict_quickly
from mics.utils.global_batch import AskedBatch, GlobalBatch

_POLICIES: Final = (
    Keeping(checkpoint=False),
    Keeping(checkpoint=True),
    Keeping(checkpoint=True, offload=True),
)
_SPLITS: Final = (1, 3)
"""Units of a block: one, or its attention and both matrices of its MLP."""
_NARROW: Final = 2  # bytes
_AS_FAST: Final = 0.02  # a simulated step is no more exact than that
_MAX_SIZES: Final = 8  # beyond a node
_MAX_NODES: Final = 1 << 17
_MAX_MICRO_BATCH: Final = 64


def divided_batch(asked: AskedBatch, model: ModelShape, cluster: Cluster) -> GlobalBatch:
    """The batch in sequences, as many for every GPU."""
    world = cluster.world_size
    return asked.fit(seq_len=model.seq_len, multiple=world, because=f"as many for each of the {world:,} GPUs")


@dataclass(frozen=True, kw_only=True)
class Request:
    """What is to be trained on what."""

    model: ModelShape
    cluster: Cluster
    global_batch: int
    """Sequences per optimizer step, over all ranks."""
    asked_tokens: int | None = None
    """Tokens that ``global_batch`` was rounded from, where it was."""
    wire_nbytes: int = 4
    memory_nbytes: float | None = None
    """Of one device; None: the cluster's."""

    def __post_init__(self) -> None:
        divided_batch(AskedBatch(sequences=self.global_batch), self.model, self.cluster)

    @property
    def batch(self) -> GlobalBatch:
        return GlobalBatch(
            num_sequences=self.global_batch,
            seq_len=self.model.seq_len,
            asked_tokens=self.asked_tokens,
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

    request: Request
    choices: tuple[Choice, ...]
    too_large: dict[int, float]
    """Partition sizes that do not fit, with the bytes that their smallest setting needs."""


def candidates(request: Request, partition_size: int) -> Iterator[Setting]:
    """For each policy for activations the largest micro-batches that fit.

    What costs more (recomputation, finer units, fewer ahead) only where it makes room for more rows.
    """
    rows = request.global_batch // request.cluster.world_size
    cluster = replace(request.cluster, memory_nbytes=request.memory_nbytes or request.cluster.memory_nbytes)
    micro_batches = [size for size in range(1, min(rows, _MAX_MICRO_BATCH) + 1) if rows % size == 0]
    room = dict.fromkeys(range(len(_POLICIES)), 0)  # rows that fit up to now, by policy
    for parts, prefetch in product(_SPLITS, (None, 1)):
        model = request.model.split(parts)
        for number, policy in enumerate(_POLICIES):
            enough = max(room[cheaper] for cheaper in range(number + 1))
            fitting = []
            for micro_batch in micro_batches:
                if micro_batch > enough:
                    setting = Setting(
                        model=model,
                        cluster=cluster,
                        partition_size=partition_size,
                        micro_batch=micro_batch,
                        accumulation=rows // micro_batch,
                        activations=policy,
                        wire_nbytes=request.wire_nbytes,
                        prefetch=prefetch,
                    )
                    if not request.fits(setting.need()):
                        break  # nor will more rows
                    fitting.append(setting)
            if fitting:
                room[number] = fitting[-1].micro_batch
            yield from fitting[-2:] if (parts, prefetch) == (1, None) else fitting[-1:]


def smallest_need(request: Request, partition_size: int) -> float:
    """Bytes of the setting that needs least."""
    return _leanest(request, partition_size).need().peak


def _leanest(request: Request, partition_size: int) -> Setting:
    """One row, everything offloaded, fine units, one ahead."""
    return Setting(
        model=request.model.split(_SPLITS[-1]),
        cluster=request.cluster,
        partition_size=partition_size,
        micro_batch=1,
        accumulation=1,
        activations=_POLICIES[-1],
        prefetch=1,
    )


def sizes_to_try(cluster: Cluster) -> list[int]:
    """The partition sizes that a search looks at."""
    return _thinned(partition_sizes(cluster), cluster.ranks_per_node)


def search(request: Request, system: str = "mics", *, advance: Callable[[], object] = lambda: None) -> Found:
    """Try partition sizes; of each the fastest setting. ``advance`` is called after each, and at the end."""
    best: list[Prediction] = []
    too_large = {}
    for size in sizes_to_try(request.cluster):
        needed = smallest_need(request, size)
        settings = list(candidates(request, size)) if needed <= request.limit else []
        if settings:
            chosen = _in_order([predict_quickly(setting, system) for setting in settings])[0]
            best.append(_with_whole_masters(request, chosen))
        else:
            too_large[size] = needed
        advance()
    best = _in_order(best)
    if best:
        best[0] = predict(best[0].setting, system)  # all of it, for the timeline
    choices = [
        Choice(prediction=found, memory=found.setting.memory(), limited_by=limit_of(found)) for found in best
    ]
    advance()
    return Found(request=request, choices=tuple(choices), too_large=too_large)


def _with_whole_masters(request: Request, found: Prediction) -> Prediction:
    """The same with every replica's masters whole, if that fits and is faster.

    Where gradients are as narrow as parameters, an all-reduce moves no more than a reduce-scatter and the new
    parameters do, and all of it hides under the backward. It takes memory.
    """
    setting = found.setting
    whole = replace(setting, over_replicas=False)
    if setting.num_replicas == 1 or setting.wire_nbytes > _NARROW or not request.fits(whole.need()):
        return found
    other = predict_quickly(whole, found.system)
    return other if (1 + _AS_FAST) * other.step_seconds < found.step_seconds else found


def _in_order(found: Sequence[Prediction]) -> list[Prediction]:
    """The fastest first. Of those that are as fast, what asks for least.

    That is whole units, the least done with activations, and small groups: less of it depends on the network
    being what it should be.
    """
    fastest = min((prediction.step_seconds for prediction in found), default=0.0)

    def key(prediction: Prediction) -> tuple[float, int, int, int]:
        setting = prediction.setting
        policy = _POLICIES.index(setting.activations)
        seconds = max(prediction.step_seconds, (1 + _AS_FAST) * fastest)
        return seconds, setting.model.parts, policy, setting.partition_size

    return sorted(found, key=key)


def _thinned(sizes: list[int], node: int) -> list[int]:
    """All sizes inside a node, and of the others some from small to large."""
    inside, outside = [s for s in sizes if s <= node], [s for s in sizes if s > node]
    if len(outside) <= _MAX_SIZES:
        return sizes
    last = len(outside) - 1
    return inside + [outside[round(last * number / (_MAX_SIZES - 1))] for number in range(_MAX_SIZES)]


def limit_of(prediction: Prediction) -> str:
    """What the step's time is mostly lost to."""
    step = prediction.step_seconds
    lost = {link: seconds / step for link, seconds in prediction.exposed_seconds.items()}
    worst = max(lost, key=lambda link: lost[link])
    if lost[worst] < 0.03:
        return "compute"
    if worst != "inter":
        return "intra bandwidth" if worst == "intra" else "host bandwidth"
    setting = prediction.setting
    quick = replace(setting.cluster, inter=replace(setting.cluster.inter, latency=0.0, ramp_nbytes=0.0))
    without = predict_quickly(replace(setting, cluster=quick), prediction.system)
    gained = (step - without.step_seconds) / max(1e-12, prediction.exposed_seconds["inter"])
    return "inter latency" if gained > 0.5 else "inter bandwidth"


def smallest_cluster(request: Request) -> int | None:
    """Nodes of this kind that would do, if any number does: a model divided over all of them needs least."""

    def does(nodes: int) -> bool:
        cluster = replace(request.cluster, num_nodes=nodes)
        larger = replace(request, cluster=cluster, global_batch=cluster.world_size)
        return smallest_need(larger, cluster.world_size) <= request.limit

    enough = request.cluster.num_nodes
    while not does(enough):
        enough *= 2
        if enough > _MAX_NODES:
            return None
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        too_few, enough = (too_few, middle) if does(middle) else (middle, enough)
    return enough


def largest_term(request: Request) -> tuple[str, float]:
    """Of the setting that needs least on all GPUs: what takes most of it."""
    terms = _leanest(request, request.cluster.world_size).memory().on_device()
    return max(terms.items(), key=lambda item: item[1])

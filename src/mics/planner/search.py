"""The best ways to train a model on a cluster, and what stands in the way of better ones."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Final, Literal

from mics.cost.clusters import Cluster
from mics.cost.constants import Kernels
from mics.cost.memory import ADAM_NBYTES, USABLE, Keeping, Terms
from mics.cost.setting import Setting, partition_sizes
from mics.cost.shapes import ModelShape
from mics.layout.compression import LOSSLESS, Compression
from mics.planner.step_costs import whole_masters_pay
from mics.planner.systems import SYSTEMS, Prediction, compute_floor, predict, predict_quickly
from mics.utils.global_batch import AskedBatch, GlobalBatch
from mics.utils.numbers import GIB

_POLICIES: Final = (
    Keeping(checkpoint=False),
    Keeping(checkpoint=True),
    Keeping(checkpoint=True, offload=True),
)
_SPLITS: Final = (1, 3)
"""Units of a block: one, or its attention and both matrices of its MLP."""
_GROWS: Final = ("parameters", "masters", "optimizer state", "activations")
"""Terms that more rows do not make smaller."""
_LIMITING: Final = 0.1  # of a step, that waits for a link
_AS_FAST: Final = 0.02  # a simulated step is no more exact than that
_MAX_SIZES: Final = 8  # beyond a node
MAX_NODES: Final = 1 << 17
_MAX_MICRO_BATCH: Final = 64


def divided_batch(asked: AskedBatch, model: ModelShape, cluster: Cluster) -> GlobalBatch:
    """The batch in sequences, as many for every GPU."""
    world = cluster.world_size
    return asked.fit(seq_len=model.seq_len, multiple=world, because=f"as many for each of the {world:,} GPUs")


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """Why something does not fit: ``needed`` is more than ``limit``, both in bytes of one rank."""

    what: Literal["GPU memory", "host memory"]
    needed: float
    limit: float

    def __post_init__(self) -> None:
        assert self.needed > self.limit

    def __str__(self) -> str:
        """``42.1 of 36.8 GiB``, and of what if it is not the GPU's."""
        digits = 1 if self.limit >= 10 * GIB else 2
        while (needed := f"{self.needed / GIB:,.{digits}f}") == (limit := f"{self.limit / GIB:,.{digits}f}"):
            digits += 1
        return f"{needed} of {limit} GiB{' of host memory' if self.what == 'host memory' else ''}"


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
    state_nbytes: float = ADAM_NBYTES
    """Of the optimizer, for each parameter."""
    memory_nbytes: float | None = None
    """Of one device; None: the cluster's."""
    kernels: Kernels = "current"
    state_on_host: bool = False
    compression: Compression = LOSSLESS

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
    def rows(self) -> int:
        """Sequences per optimizer step, of one rank."""
        return self.global_batch // self.cluster.world_size

    @property
    def limit(self) -> float:
        return (self.memory_nbytes or self.cluster.memory_nbytes) * USABLE

    @property
    def host_limit(self) -> float:
        """A rank's share of the node's own memory; without end where that is not known."""
        return self.cluster.host_nbytes * USABLE / self.cluster.ranks_per_node or math.inf

    def shortage(self, terms: Terms) -> Shortage | None:
        """What there is too little of, if anything: the one answer to whether something fits."""
        limits: tuple[tuple[Literal["GPU memory", "host memory"], float, float], ...] = (
            ("GPU memory", terms.peak, self.limit),
            ("host memory", terms.host, self.host_limit),
        )
        what, needed, limit = max(limits, key=lambda each: each[1] / each[2])
        return Shortage(what=what, needed=needed, limit=limit) if needed > limit else None

    def fits(self, terms: Terms) -> bool:
        """On a GPU, and in its share of the node's own memory."""
        return self.shortage(terms) is None

    def on(self, num_nodes: int) -> Request:
        """The same on another number of nodes, with the nearest batch that they can divide."""
        cluster = replace(self.cluster, num_nodes=num_nodes)
        rows = max(1, round(self.global_batch / cluster.world_size))
        return replace(self, cluster=cluster, global_batch=rows * cluster.world_size)


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
    too_large: dict[int, Shortage]
    """Partition sizes that do not fit, with what the setting lacks that comes nearest."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Another system at its best, and as it would run our best setting."""

    choice: Choice | None
    """Its own best micro-batch, activations and group size, under its own memory; None: nothing fits."""
    shortage: Shortage | None
    """Where nothing fits: of what comes nearest."""
    same: Prediction | Shortage
    """With the micro-batch, the activations and the group size that are best for mics."""


def candidates(
    request: Request, partition_size: int, system: str = "mics", short: list[Shortage] | None = None
) -> Iterator[Setting]:
    """For each policy for activations the largest micro-batches that fit.

    What costs more (recomputation, finer units, fewer ahead) only where it makes room for more rows. What
    does not fit goes to ``short``.
    """
    most = min(request.rows, _MAX_MICRO_BATCH)
    micro_batches = [size for size in range(1, most + 1) if request.rows % size == 0]
    room = dict.fromkeys(range(len(_POLICIES)), 0)  # rows that fit up to now, by policy
    for parts, prefetch in _ways(system):
        for number, policy in enumerate(_POLICIES):
            enough = max(room[cheaper] for cheaper in range(number + 1))
            more = [size for size in micro_batches if size > enough]
            tried = _settings(request, partition_size, parts, prefetch, policy, more)
            fitting = list(_that_fit(request, tried, system, short))
            if fitting:
                room[number] = fitting[-1].micro_batch
            yield from fitting[-2:] if parts == 1 and prefetch is None else fitting[-1:]


def _ways(system: str) -> list[tuple[int, int | None]]:
    """Units of a block and how many are gathered ahead, that a system has a choice of."""
    found = SYSTEMS[system]
    splits = _SPLITS[:1] if found.style.keeps_parameters else _SPLITS
    return list(product(splits, (None, 1) if found.prefetch is None else (None,)))


def _settings(
    request: Request,
    partition_size: int,
    parts: int,
    prefetch: int | None,
    policy: Keeping,
    micro_batches: Sequence[int],
) -> Iterator[Setting]:
    model = request.model.split(parts)
    cluster = replace(request.cluster, memory_nbytes=request.memory_nbytes or request.cluster.memory_nbytes)
    for micro_batch in micro_batches:
        yield Setting(
            model=model,
            cluster=cluster,
            partition_size=partition_size,
            micro_batch=micro_batch,
            accumulation=request.rows // micro_batch,
            activations=policy,
            wire_nbytes=request.wire_nbytes,
            state_nbytes=request.state_nbytes,
            prefetch=prefetch,
            fused=request.kernels == "current",
            state_on_host=request.state_on_host,
            compression=request.compression,
        )


def _that_fit(
    request: Request, settings: Iterator[Setting], system: str, short: list[Shortage] | None
) -> Iterator[Setting]:
    """Those of more and more rows that fit, until no more rows can."""
    for setting in settings:
        terms = SYSTEMS[system].need(setting)
        lack = request.shortage(terms)
        if lack is None:
            yield setting
            continue
        if short is not None:
            short.append(lack)
        # Units gathered ahead and reduce buffers may get fewer with more rows. The rest only grows.
        grows = sum(nbytes for name, nbytes in terms.between_blocks.items() if name in _GROWS)
        if lack.what == "host memory" or grows > request.limit:
            return


def sizes_to_try(cluster: Cluster, system: str = "mics") -> list[int]:
    """The partition sizes that a search looks at."""
    if SYSTEMS[system].over_the_world:
        return [cluster.world_size]
    return _thinned(partition_sizes(cluster), cluster.ranks_per_node)


def search(request: Request, *, advance: Callable[[], object] = lambda: None) -> Found:
    """Try partition sizes; of each the fastest setting. ``advance`` is called after each, and at the end."""
    best, too_large = _fastest_by_size(request, "mics", advance)
    best = _in_order([_with_whole_masters(request, found) for found in best])
    if best:
        best[0] = predict(best[0].setting)  # all of it, for the timeline
    choices = [
        Choice(prediction=found, memory=found.setting.memory(), limited_by=limit_of(found)) for found in best
    ]
    advance()
    return Found(request=request, choices=tuple(choices), too_large=too_large)


def search_peer(
    request: Request, best: Setting, system: str, *, advance: Callable[[], object] = lambda: None
) -> Peer:
    """The same search for another system, and ``best``, which is ours, in its hands."""
    found, too_large = _fastest_by_size(request, system, advance)
    first = next(iter(_in_order(found)), None)
    same = request.shortage(SYSTEMS[system].need(best)) or predict_quickly(best, system)
    # What the search leaves out, such as finer units that make no room, may be faster all the same.
    if isinstance(same, Prediction) and (first is None or same.step_seconds < first.step_seconds):
        first = same
    if first is None:
        return Peer(choice=None, shortage=nearest(too_large.values()), same=same)
    need = SYSTEMS[system].need(first.setting)
    return Peer(
        choice=Choice(prediction=first, memory=need, limited_by=limit_of(first)), shortage=None, same=same
    )


def _fastest_by_size(
    request: Request, system: str, advance: Callable[[], object]
) -> tuple[list[Prediction], dict[int, Shortage]]:
    """Of each partition size the fastest setting, or what is missing. Of a peer only what may be its best."""
    best: list[Prediction] = []
    too_large = {}
    for size in sizes_to_try(request.cluster, system):
        short: list[Shortage] = []
        settings = list(candidates(request, size, system, short))
        if not settings:
            too_large[size] = nearest(short)
        fastest = min((each.step_seconds for each in best if system != "mics"), default=math.inf)
        best += _fastest(settings, system, fastest)
        advance()
    return best, too_large


def _fastest(settings: Collection[Setting], system: str, fastest: float) -> list[Prediction]:
    """The fastest, if one may be as fast as ``fastest``. What computes for too long is not played at all."""
    found: list[Prediction] = []
    for setting in sorted(settings, key=compute_floor):
        if compute_floor(setting) > (1 + _AS_FAST) * fastest:
            break
        found.append(predict_quickly(setting, system))
        fastest = min(fastest, found[-1].step_seconds)
    return _in_order(found)[:1]


def nearest(found: Collection[Shortage]) -> Shortage:
    """Of what lacks least."""
    return min(found, key=lambda lack: lack.needed / lack.limit)


def _with_whole_masters(request: Request, found: Prediction) -> Prediction:
    """The same with every replica's masters whole, if that fits and is faster.

    Where gradients are as narrow as parameters, an all-reduce moves no more than a reduce-scatter and the new
    parameters do, and all of it hides under the backward. It takes memory.
    """
    setting = found.setting
    whole = replace(setting, over_replicas=False)
    if setting.state_on_host or not request.fits(whole.need()) or not whole_masters_pay(setting):
        return found
    return predict_quickly(whole, found.system)


def _in_order(found: Sequence[Prediction]) -> list[Prediction]:
    """The fastest first. Of those that are as fast, what asks for least.

    That is whole units, the least done with activations, and small groups. Across nodes it is few
    micro-steps: each gathers all parameters. Less of it depends on the network being what it should be.
    """
    fastest = min((prediction.step_seconds for prediction in found), default=0.0)

    def key(prediction: Prediction) -> tuple[float, int, int, int, int]:
        setting = prediction.setting
        crosses = setting.partition_size > setting.cluster.ranks_per_node
        policy = _POLICIES.index(setting.activations)
        seconds = max(prediction.step_seconds, (1 + _AS_FAST) * fastest)
        micro_steps = setting.accumulation if crosses else 0
        return seconds, setting.model.parts, policy, setting.partition_size, micro_steps

    return sorted(found, key=key)


def _thinned(sizes: list[int], node: int) -> list[int]:
    """All sizes inside a node, and of the others some from small to large."""
    inside, outside = [s for s in sizes if s <= node], [s for s in sizes if s > node]
    if len(outside) <= _MAX_SIZES:
        return sizes
    last = len(outside) - 1
    return inside + [outside[round(last * number / (_MAX_SIZES - 1))] for number in range(_MAX_SIZES)]


def limit_of(prediction: Prediction) -> str:
    """What the step's time is mostly lost to; computation, unless a tenth of it waits for a link."""
    step = prediction.step_seconds
    worst, share = prediction.worst_wait
    if share < _LIMITING:
        return "compute"
    if worst != "inter":
        return "intra bandwidth" if worst == "intra" else "host bandwidth"
    setting = prediction.setting
    quick = replace(setting.cluster, inter=replace(setting.cluster.inter, latency=0.0, ramp_nbytes=0.0))
    without = predict_quickly(replace(setting, cluster=quick), prediction.system)
    gained = (step - without.step_seconds) / max(1e-12, prediction.exposed_seconds["inter"])
    return "inter latency" if gained > 0.5 else "inter bandwidth"


def smallest_cluster(request: Request) -> Request | None:
    """The same on as many nodes of this kind as would do, if any number does.

    A model divided over all of them needs least.
    """

    def does(nodes: int) -> bool:
        larger = request.on(nodes)
        return next(candidates(larger, larger.cluster.world_size), None) is not None

    enough = request.cluster.num_nodes
    while not does(enough):
        enough *= 2
        if enough > MAX_NODES:
            return None
    too_few = enough // 2
    while enough - too_few > 1:
        middle = (enough + too_few) // 2
        too_few, enough = (too_few, middle) if does(middle) else (middle, enough)
    return request.on(enough)


def largest_term(request: Request) -> tuple[str, float]:
    """What takes most of the memory where nothing more can be divided: on as many nodes as there may be."""
    parts, prefetch = _ways("mics")[-1]
    largest = request.on(MAX_NODES)
    leanest = next(_settings(largest, largest.cluster.world_size, parts, prefetch, _POLICIES[-1], [1]))
    return max(leanest.memory().on_device().items(), key=lambda item: item[1])

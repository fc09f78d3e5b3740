"""The whole answer to "what will it cost": choices, curves, money and goodput, as plain data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

from mics.cost.clusters import Cluster
from mics.errors import SettingsError
from mics.planner.goodput import Faults, Goodput, goodput
from mics.planner.search import Choice, Found, Request, largest_term, search, sizes_to_try, smallest_cluster
from mics.planner.systems import SYSTEMS, Prediction, predict_quickly
from mics.utils.numbers import memory, plural

_MAX_GPUS: Final = 100_000
_CURVE_STEP: Final = 4
PEERS: Final = ("mics", "hsdp", "fsdp2")


@dataclass(frozen=True, kw_only=True)
class Money:
    """Of training on a number of tokens."""

    tokens: float
    hours: float | None
    """None: it never ends, because failures come faster than work is done."""
    dollars: float | None


@dataclass(frozen=True, kw_only=True)
class Answer:
    """Everything that a report shows."""

    found: Found
    peers: dict[str, Prediction]
    """The best choice's setting, as other systems would run it."""
    weak: dict[str, list[tuple[int, float]]]
    """By system: GPUs and model TFLOP/s per GPU, with the batch per GPU kept."""
    strong: dict[str, list[tuple[int, float]]]
    """The same with the global batch kept."""
    goodput: Goodput | None
    money: Money | None

    @property
    def best(self) -> Choice:
        return self.found.choices[0]


def answer(
    request: Request,
    *,
    faults: Faults | None = None,
    tokens: float | None = None,
    price: float | None = None,
    curves: bool = True,
    advance: Callable[[], object] = lambda: None,
) -> Answer:
    """Search, compare and add up. Raises if nothing fits, with what would.

    ``advance`` is called as often as ``num_stages`` says.
    """
    found = search(request, advance=advance)
    if not found.choices:
        raise SettingsError(_too_large(found))
    return complete(found, faults=faults, tokens=tokens, price=price, curves=curves, advance=advance)


def num_stages(cluster: Cluster, *, curves: bool) -> int:
    """Parts of the work of an answer: partition sizes, the best of them in full, and two sets of curves."""
    return len(sizes_to_try(cluster)) + 1 + (2 if curves else 0)


def complete(
    found: Found,
    *,
    faults: Faults | None = None,
    tokens: float | None = None,
    price: float | None = None,
    curves: bool = True,
    advance: Callable[[], object] = lambda: None,
) -> Answer:
    """Compare and add up what a search has found, which is something."""
    request, best = found.request, found.choices[0]
    left = goodput(faults, request.cluster.num_nodes) if faults is not None else None
    money = None
    if tokens is not None:
        share = 1.0 if left is None else left.share
        hours = tokens / best.prediction.tokens_per_second / 3600 / share if share else None
        dollars = None if price is None or hours is None else hours * request.cluster.num_nodes * price
        money = Money(tokens=tokens, hours=hours, dollars=dollars)
    return Answer(
        found=found,
        peers={name: predict_quickly(best.setting, name) for name in PEERS},
        weak=_curves(request, best, advance, strong=False) if curves else {},
        strong=_curves(request, best, advance, strong=True) if curves else {},
        goodput=left,
        money=money,
    )


def _curves(
    request: Request, best: Choice, advance: Callable[[], object], *, strong: bool
) -> dict[str, list[tuple[int, float]]]:
    """From the smallest number of nodes that the best choice's groups fill."""
    setting = replace(best.setting, model=request.model)  # finer units would only take longer to play through
    per_node = setting.cluster.ranks_per_node
    first = max(1, -(-setting.partition_size // per_node))
    rows = setting.micro_batch * setting.accumulation
    found: dict[str, list[tuple[int, float]]] = {name: [] for name in PEERS}
    nodes = first
    while nodes * per_node <= _MAX_GPUS:
        cluster = replace(setting.cluster, num_nodes=nodes)
        here = replace(setting, cluster=cluster)
        if strong:
            of_a_gpu = rows * setting.cluster.world_size // cluster.world_size
            if of_a_gpu < 1:
                break
            micro_batch = min(setting.micro_batch, of_a_gpu)
            here = replace(here, micro_batch=micro_batch, accumulation=of_a_gpu // micro_batch)
        for name in PEERS:
            found[name].append((cluster.world_size, predict_quickly(here, name).tflops))
        nodes *= 2 if strong else _CURVE_STEP
        if nodes > _CURVE_STEP**3 * max(first, setting.cluster.num_nodes):
            break
    advance()
    return found


def _too_large(found: Found) -> str:
    request = found.request
    size, needed = min(found.too_large.items(), key=lambda item: item[1])
    nodes = smallest_cluster(request)
    term, nbytes = largest_term(request)
    would = (
        f"{plural(nodes, 'node')} of {request.cluster.name} would do"
        if nodes is not None
        else f"no number of such nodes would do, because {memory(nbytes)} of it are {term}: "
        + ("shorten --seq" if term in ("activations", "logits or workspace") else "make units finer")
    )
    return (
        f"{request.model.name} does not fit on {request.cluster.num_nodes} x {request.cluster.name}: "
        f"expected at most {memory(request.limit)} per GPU, found {memory(needed)} with "
        f"partition size {size}, one sequence per GPU and everything offloaded; {would}"
    )


def as_dict(found: Answer) -> dict[str, Any]:
    """For JSON: plain numbers, bytes and seconds."""
    request = found.found.request
    return {
        "model": {
            "name": request.model.name,
            "parameters": request.model.num_parameters,
            "units": len(request.model.units),
            "seq_len": request.model.seq_len,
        },
        "cluster": {
            "name": request.cluster.name,
            "nodes": request.cluster.num_nodes,
            "gpus": request.cluster.world_size,
            "memory_nbytes": request.limit,
        },
        "global_batch": request.global_batch,
        "global_batch_tokens": request.batch.num_tokens,
        "asked_tokens": request.asked_tokens,
        "choices": [_choice(choice) for choice in found.found.choices],
        "too_large": found.found.too_large,
        "systems": {
            name: {
                "about": SYSTEMS[name].about,
                "step_seconds": each.step_seconds,
                "tflops": each.tflops,
                "mfu": each.mfu,
            }
            for name, each in found.peers.items()
        },
        "weak_scaling": found.weak,
        "strong_scaling": found.strong,
        "goodput": None if found.goodput is None else vars(found.goodput),
        "money": None if found.money is None else vars(found.money),
    }


def _choice(choice: Choice) -> dict[str, Any]:
    setting, prediction = choice.setting, choice.prediction
    return {
        "partition_size": setting.partition_size,
        "replicas": setting.num_replicas,
        "micro_batch": setting.micro_batch,
        "accumulation": setting.accumulation,
        "activations": str(setting.activations),
        "optimizer_sharding": "world" if setting.over_replicas else "partition",
        "two_stage": setting.two_stage,
        "prefetch": setting.depth,
        "units_of_a_block": setting.model.parts,
        "step_seconds": prediction.step_seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "tokens_per_second_per_gpu": prediction.tokens_per_second_per_gpu,
        "mfu": prediction.mfu,
        "tflops": prediction.tflops,
        "tflops_with_recomputation": prediction.hardware_tflops,
        "compute_seconds": prediction.compute_seconds,
        "link_seconds": prediction.link_seconds,
        "exposed_seconds": prediction.exposed_seconds,
        "limited_by": choice.limited_by,
        "memory": choice.memory.on_device(),
        "memory_peak": choice.memory.peak,
        "host_memory": choice.memory.host,
    }

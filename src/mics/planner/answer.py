"""The whole answer to "what will it cost": choices, curves, money and goodput, as plain data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from mics.cost.clusters import Cluster
from mics.cost.setting import Setting
from mics.errors import SettingsError
from mics.planner.advice import advice
from mics.planner.goodput import Faults, Goodput, goodput
from mics.planner.search import (
    Choice,
    Found,
    Peer,
    Request,
    Shortage,
    largest_term,
    nearest,
    search,
    search_peer,
    sizes_to_try,
    smallest_cluster,
)
from mics.planner.systems import SYSTEMS, predict_quickly
from mics.utils.numbers import memory, plural

_MAX_GPUS: Final = 100_000
_CURVE_STEP: Final = 4
PEERS: Final = ("hsdp", "fsdp2", "zero3", "zero2")


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
    peers: dict[str, Peer]
    """Other systems, each at its own best; none where nobody asked for them."""
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


def num_stages(cluster: Cluster, *, curves: bool, peers: bool = True) -> int:
    """Parts of the work of an answer.

    Partition sizes of all systems, the best of ours in full, and two sets of curves.
    """
    sizes = sum(len(sizes_to_try(cluster, system)) for system in ("mics", *(PEERS if peers else ())))
    return sizes + 1 + (2 if curves else 0)


def complete(
    found: Found,
    *,
    faults: Faults | None = None,
    tokens: float | None = None,
    price: float | None = None,
    curves: bool = True,
    peers: bool = True,
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
    others = {name: search_peer(request, best.setting, name, advance=advance) for name in PEERS if peers}
    choices = {"mics": best} | {name: peer.choice for name, peer in others.items() if peer.choice is not None}
    return Answer(
        found=found,
        peers=others,
        weak=_curves(request, choices, advance, strong=False) if curves else {},
        strong=_curves(request, choices, advance, strong=True) if curves else {},
        goodput=left,
        money=money,
    )


def _curves(
    request: Request, choices: Mapping[str, Choice], advance: Callable[[], object], *, strong: bool
) -> dict[str, list[tuple[int, float]]]:
    """Each system with its own best setting, wherever that fits."""
    best = choices["mics"].setting
    first = max(1, -(-best.partition_size // best.cluster.ranks_per_node))
    found = {}
    for name, choice in choices.items():
        points = []
        for nodes in _numbers_of_nodes(best, first, strong=strong):
            setting = _on(request, choice.setting, nodes, strong=strong)
            if setting is not None and request.fits(SYSTEMS[name].need(setting)):
                points.append((setting.cluster.world_size, predict_quickly(setting, name).tflops))
        found[name] = points
    advance()
    return found


def _numbers_of_nodes(best: Setting, first: int, *, strong: bool) -> Iterator[int]:
    """From the smallest number of nodes that the best choice's groups fill."""
    nodes = first
    while nodes * best.cluster.ranks_per_node <= _MAX_GPUS:
        yield nodes
        nodes *= 2 if strong else _CURVE_STEP
        if nodes > _CURVE_STEP**3 * max(first, best.cluster.num_nodes):
            return


def _on(request: Request, setting: Setting, nodes: int, *, strong: bool) -> Setting | None:
    """The same on so many nodes, if there is a group and a batch for it."""
    here = replace(setting.cluster, num_nodes=nodes)
    before = setting.cluster.world_size
    # Finer units would only take longer to play through.
    moved = replace(setting, cluster=here, model=request.model)
    if setting.partition_size == before or here.world_size % setting.partition_size:
        moved = replace(moved, partition_size=here.world_size)
    if not strong:
        return moved
    rows = setting.micro_batch * setting.accumulation * before // here.world_size
    if rows < 1:
        return None
    micro_batch = min(setting.micro_batch, rows)
    return replace(moved, micro_batch=micro_batch, accumulation=rows // micro_batch)


def _too_large(found: Found) -> str:
    request = found.request
    lack = nearest(found.too_large.values())
    size = next(size for size, each in found.too_large.items() if each is lack)
    host = " of host memory" if lack.what == "host memory" else ""
    each = request.cluster.rank_word
    return (
        f"{request.model.name} does not fit on {request.cluster.num_nodes} x {request.cluster.name}: "
        f"expected at most {memory(lack.limit)}{host} per {each}, found {memory(lack.needed)} with "
        f"partition size {size} and one sequence per {each}; {_what_would_do(request, lack)}"
    )


def _what_would_do(request: Request, lack: Shortage) -> str:
    larger = smallest_cluster(request)
    if larger is not None:
        batch = larger.global_batch
        changed = "" if batch == request.global_batch else f" with a global batch of {batch:,} sequences"
        return f"{plural(larger.cluster.num_nodes, 'node')} of {request.cluster.name} would do{changed}"
    if lack.what == "host memory":
        if request.state_on_host:
            return "no number of such nodes would do: leave out --optimizer-state host"
        return "no number of such nodes would do, because of offloaded activations: shorten --seq"
    term, nbytes = largest_term(request)
    shorter = term in ("activations", "logits or workspace")
    return (
        f"no number of such nodes would do, because {memory(nbytes)} are {term} however many there are: "
        f"{'shorten --seq' if shorter else 'make units finer (units= of mics.shard)'}"
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
        "advice": advice(found.best),
        "choices": [_choice(choice) for choice in found.found.choices],
        "too_large": {size: vars(lack) for size, lack in found.found.too_large.items()},
        "systems": {"mics": _system("mics", found.best) | {"times": 1.0}}
        | {name: _peer(name, peer, found.best) for name, peer in found.peers.items()},
        "weak_scaling": found.weak,
        "strong_scaling": found.strong,
        "goodput": None if found.goodput is None else vars(found.goodput),
        "money": None if found.money is None else vars(found.money),
    }


def _system(name: str, choice: Choice) -> dict[str, Any]:
    """A system at its best."""
    left_out = (
        "memory",
        "two_stage",
        "prefetch",
        "optimizer_sharding",
        "optimizer_state",
        "compression",
    )
    return {"about": SYSTEMS[name].about} | {
        key: value for key, value in _choice(choice).items() if key not in left_out
    }


def _peer(name: str, peer: Peer, best: Choice) -> dict[str, Any]:
    """What it comes to, as a multiple of our step, or why nothing fits."""
    if peer.choice is None:
        assert peer.shortage is not None
        found: dict[str, Any] = {"about": SYSTEMS[name].about, "does_not_fit": vars(peer.shortage)}
    else:
        found = _system(name, peer.choice) | {"times": peer.choice.step_seconds / best.step_seconds}
    if isinstance(peer.same, Shortage):
        return found | {"same_setting": {"does_not_fit": vars(peer.same)}}
    seconds = peer.same.step_seconds
    return found | {"same_setting": {"step_seconds": seconds, "times": seconds / best.step_seconds}}


def _choice(choice: Choice) -> dict[str, Any]:
    setting, prediction = choice.setting, choice.prediction
    return {
        "partition_size": setting.partition_size,
        "replicas": setting.num_replicas,
        "micro_batch": setting.micro_batch,
        "accumulation": setting.accumulation,
        "activations": str(setting.activations),
        "optimizer_sharding": "world" if setting.over_replicas else "partition",
        "optimizer_state": "host" if setting.state_on_host else "device",
        "compression": asdict(setting.compression),
        "float8": any(unit.in_float8 for unit in setting.model.units),
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

"""What the planner says of a row in numbers that a result keeps, and of other systems at their own best."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from benchmarks.published.planned import fits, plan_row, prediction, setting_of
from benchmarks.published.rows import Measure, Point, Row

from mics.planner.search import Request, search, search_peer
from mics.planner.systems import Prediction, Setting

BESIDE_HSDP: Final = "mics-beside-hsdp"
"""mics with HSDP's setting: larger micro-batches, which a host can issue fast enough to be measured."""
PEERS: Final = {
    "mics": "mics",
    BESIDE_HSDP: "mics, HSDP's setting",
    "hsdp": "HSDP",
    "fsdp2": "FSDP2",
    "zero3": "ZeRO-3",
    "zero2": "ZeRO-2",
    "megatron-fsdp": "Megatron-FSDP",
}


@dataclass(frozen=True, kw_only=True)
class Range:
    """Predicted values of a row over its points."""

    low: float
    high: float
    num_points: int
    num_fitting: int

    @property
    def middle(self) -> float:
        return (self.low + self.high) / 2


def predict_row(row: Row) -> Range | None:
    """None: no plausible point fits, or what it is compared with does not."""
    found = plan_row(row)
    if not found.values:
        return None
    num_points = len(found.values) + len(found.too_large)
    return Range(low=found.low, high=found.high, num_points=num_points, num_fitting=len(found.values))


def usual_point(row: Row) -> Point:
    """In the middle of what is plausible, of those that fit: what peers are compared at.

    Of a speed-up the smallest batch: large ones hide everything, whoever trains.
    """
    fitting = [point for point in row.points() if all(map(fits, row.runs(point)))] or list(row.points())
    ordered = sorted(fitting, key=lambda point: point.micro_batch * point.accumulation * point.seq_len)
    return ordered[0 if row.measure is Measure.SPEEDUP else len(ordered) // 2]


@dataclass(frozen=True, kw_only=True)
class PeerAtBest:
    """A system at its own best setting for a batch: what it takes, or why it cannot."""

    system: str
    step_seconds: float | None = None
    partition_size: int | None = None
    micro_batch: int | None = None
    accumulation: int | None = None
    activations: str | None = None
    problem: str = ""


def peers_at_best(row: Row) -> list[PeerAtBest]:
    """Of the row's usual batch, with kernels of today: each system's own micro-batch, policy and groups."""
    point = usual_point(row)
    setting = setting_of(replace(point, kernels="current"))
    request = Request(
        model=setting.model,
        cluster=setting.cluster,
        global_batch=point.micro_batch * point.accumulation * setting.cluster.world_size,
        wire_nbytes=point.wire_nbytes,
    )
    ours = search(request).choices
    best = ours[0].setting if ours else setting
    found = [_at_best("mics", ours[0].prediction if ours else None, "")]
    for system in list(PEERS)[2:]:
        peer: Any = search_peer(request, best, system)
        choice = peer.choice
        problem = "" if choice is not None else f"does not fit: {peer.shortage}"
        found.append(_at_best(system, None if choice is None else choice.prediction, problem))
        if system == "hsdp" and choice is not None and _chosen(choice.setting) != _chosen(best):
            beside = replace(point, system="mics", kernels="current", **_chosen(choice.setting))
            found[1:1] = [_at_best(BESIDE_HSDP, prediction(beside), "")] if fits(beside) else []
    return found


def _chosen(setting: Setting) -> dict[str, Any]:
    """What a system has at its best: fields of a point, too."""
    return {
        "partition_size": setting.partition_size,
        "micro_batch": setting.micro_batch,
        "accumulation": setting.accumulation,
        "activations": str(setting.activations),
    }


def _at_best(system: str, found: Prediction | None, problem: str) -> PeerAtBest:
    if found is None:
        return PeerAtBest(system=system, problem=problem or "does not fit")
    return PeerAtBest(system=system, step_seconds=found.step_seconds, **_chosen(found.setting))

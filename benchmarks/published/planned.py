"""What the planner says of a published row: a range over every plausible point that fits in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Final

from benchmarks.published.rows import ROWS, Measure, Point, Row

from mics.cost.memory import USABLE, Keeping, Terms
from mics.cost.setting import Setting
from mics.cost.shapes import named_shape
from mics.planner.hardware import planned_cluster
from mics.planner.systems import SYSTEMS, Prediction, predict_quickly


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The planner's answer to a row."""

    row: Row
    values: dict[Point, float]
    """By point, of those that fit."""
    too_large: tuple[Point, ...]
    """Points that do not, or whose other side does not fit with any plausible micro-batch."""

    @property
    def low(self) -> float:
        return min(self.values.values())

    @property
    def high(self) -> float:
        return max(self.values.values())

    def __str__(self) -> str:
        """``118 to 122``, or that nothing fits."""
        if not self.values:
            return "does not fit"
        low, high = (f"{value:.{0 if self.row.published > 30 else 2}f}" for value in (self.low, self.high))
        return low if low == high else f"{low} to {high}"

    @property
    def is_right(self) -> bool:
        """By the criterion of `rows`."""
        return bool(self.values) and self.row.is_right(self.low, self.high)

    @property
    def error(self) -> float:
        """From the published value to the nearest point, as a share; 0 inside the range."""
        nearest = min(max(self.row.published, self.low), self.high)
        return nearest / self.row.published - 1


MOST_OF_ZERO: Final = 2.82
"""What the document says of MiCS over ZeRO on p3dn: the most over all models and both stages."""


def most_over_zero() -> str:
    """The largest ratio over models and stages, at each plausible point: a range."""
    most: dict[tuple[int, int], float] = {}
    for row in ROWS:
        if row.measure is Measure.SPEEDUP:
            for point, value in plan_row(row).values.items():
                key = point.micro_batch, point.accumulation
                most[key] = max(value, most.get(key, 0.0))
    return f"{min(most.values()):.2f} to {max(most.values()):.2f}"


def plan_row(row: Row) -> Planned:
    """Every point, simulated."""
    values, too_large = {}, []
    for point in row.points():
        value = _value(row, point)
        if value is None:
            too_large.append(point)
        else:
            values[point] = value
    return Planned(row=row, values=values, too_large=tuple(too_large))


def _value(row: Row, point: Point) -> float | None:
    """In the row's measure; None where it does not fit, or another system that it is compared with."""
    runs = row.runs(point)
    if row.measure is Measure.SPEEDUP:
        # The document gives the micro-batch, and a system that has no room for it takes less.
        ours, theirs = map(with_room, runs)
        if ours is None or theirs is None:
            return None
        return prediction(ours).tokens_per_second / prediction(theirs).tokens_per_second
    if not all(map(fits, runs if row.measure is Measure.DROP else runs[:1])):
        return None
    found = [prediction(each) for each in runs]
    if row.measure is Measure.TFLOPS:
        return found[0].hardware_tflops
    if row.measure is Measure.DROP:
        return ratio_of_drops([each.tokens_per_second for each in found])
    if row.measure is Measure.SCALING:
        return 100 * found[0].tokens_per_second_per_gpu / found[1].tokens_per_second_per_gpu
    return 100 * (found[0].step_seconds / found[1].step_seconds - 1)


def with_room(point: Point) -> Point | None:
    """The same batch in micro-steps small enough for the GPU's memory; None: not even one sequence fits."""
    while not fits(point):
        if point.micro_batch == 1:
            return None
        point = replace(point, micro_batch=point.micro_batch // 2, accumulation=2 * point.accumulation)
    return point


def ratio_of_drops(speeds: Sequence[float]) -> float | None:
    """Of one system and of another, here and then on the faster network; None: the other loses nothing."""
    ours, theirs, ours_there, theirs_there = speeds
    lost, other = 1 - ours / ours_there, 1 - theirs / theirs_there
    return lost / other if other > 0 else None


def setting_of(point: Point) -> Setting:
    """As the planner sees it."""
    return Setting(
        model=named_shape(point.model, seq_len=point.seq_len),
        cluster=planned_cluster(point.cluster),
        partition_size=point.partition_size,
        micro_batch=point.micro_batch,
        accumulation=point.accumulation,
        activations=Keeping(checkpoint=point.activations != "kept", offload=point.activations == "offload"),
        wire_nbytes=point.wire_nbytes,
        fused=point.kernels == "current",
    )


def need(point: Point) -> Terms:
    """Memory of one rank, by the system's own division."""
    return SYSTEMS[point.system].need(setting_of(point))


def fits(point: Point) -> bool:
    """In the memory of the cluster's GPU, and in its share of the node's own."""
    terms, cluster = need(point), planned_cluster(point.cluster)
    host = cluster.host_nbytes / cluster.ranks_per_node
    return terms.peak <= cluster.memory_nbytes * USABLE and terms.host <= host * USABLE


@lru_cache(maxsize=1024)
def prediction(point: Point) -> Prediction:
    """One simulated step."""
    return predict_quickly(setting_of(point), point.system)

"""From measured collectives to links: weighted least squares through the cost model's own formula."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np

from mics.cost.auto import move_seconds
from mics.cost.clusters import Cluster, Link
from mics.cost.collectives import Kind, Span, cost

LinkName = Literal["intra", "inter"]
LINK_NAMES: Final[tuple[LinkName, ...]] = ("intra", "inter")
Division = LinkName | Literal["world"]
"""Which ranks are in a group: those of a node, those of equal place on all nodes, everybody."""

TINY_NBYTES: Final = 4 << 10
"""Smaller messages are latency alone: they tell it from the ramp, and are not fitted."""
_ROUNDS: Final = 60
_DAMPING: Final = 1e-9
_LEAST_SPREAD: Final = 0.02  # of a measurement's time: no clock and no machine is more exact
_LEAST_LATENCY: Final = 1e-9
_OUTLIER: Final = 0.1  # as a logarithm: what is further off the line counts for less (Huber)
_PASSES: Final = 4
_FASTER: Final = 4.0  # than any collective was: what a link may be at most


@dataclass(frozen=True, kw_only=True)
class CollectiveTime:
    """One collective over one division at one size, all of its groups at once."""

    kind: Kind
    division: Division
    span: Span
    nbytes: int
    seconds: float
    spread: float = 0.0
    """Of the repeats, as a share of ``seconds``."""
    two_stage: bool = False

    def predicted(self, cluster: Cluster) -> float:
        """What the cost model says, in seconds."""
        if self.two_stage:
            return move_seconds(cluster, self.kind, self.span, self.nbytes, two_stage=True)
        return cost(cluster, self.kind, self.span, self.nbytes).seconds

    def error(self, cluster: Cluster) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted(cluster) / self.seconds - 1


def fit_links(cluster: Cluster, points: Sequence[CollectiveTime]) -> Cluster:
    """``cluster`` with the links that explain ``points`` best. A link that nothing was sent over stays."""
    for division in LINK_NAMES:
        found = [point for point in points if point.division == division]
        if found:
            cluster = _fit(cluster, division, found)
    return cluster


def worst_error(cluster: Cluster, points: Sequence[CollectiveTime], division: Division) -> float:
    """The largest error of a fitted point, by its size."""
    errors = [abs(p.error(cluster)) for p in points if p.division == division and p.nbytes > TINY_NBYTES]
    return max(errors, default=0.0)


def with_link(cluster: Cluster, name: LinkName, link: Link) -> Cluster:
    """The same cluster with another link."""
    return replace(cluster, intra=link) if name == "intra" else replace(cluster, inter=link)


def _fit(cluster: Cluster, division: LinkName, points: Sequence[CollectiveTime]) -> Cluster:
    fitted = [point for point in points if point.nbytes > TINY_NBYTES]
    exact = np.array([1 / max(point.spread, _LEAST_SPREAD) for point in fitted])
    before: Link = getattr(cluster, division)

    def cluster_of(logs: np.ndarray) -> Cluster:
        latency, bandwidth = (math.exp(each) for each in logs)
        link = replace(before, latency=latency, bandwidth=bandwidth, ramp_nbytes=0.0)
        return with_link(cluster, division, link)

    def errors(logs: np.ndarray) -> np.ndarray:
        """As logarithms of ratios: a small message counts as much as a large one."""
        here = cluster_of(logs)
        return np.array([math.log(point.predicted(here) / point.seconds) for point in fitted])

    logs, trust = _first_guess(fitted), np.ones(len(fitted))
    bounds = _bounds(fitted, _FASTER * cluster.ranks_per_node)  # they share an uplink
    for _ in range(_PASSES):
        logs = _least_squares(errors, exact * trust, logs, bounds)
        trust = np.sqrt(np.minimum(1.0, _OUTLIER / np.maximum(np.abs(errors(logs)), 1e-12)))
    return _with_ramp(cluster_of(logs), division, points)


def _first_guess(points: Sequence[CollectiveTime]) -> np.ndarray:
    """Logarithms of latency and bandwidth: near enough to begin with."""
    small, large = min(points, key=lambda p: p.nbytes), max(points, key=lambda p: p.nbytes)
    latency = small.seconds / max(1, small.span.size - 1) / 2
    return np.log([max(latency, _LEAST_LATENCY), large.nbytes / large.seconds])


def _bounds(points: Sequence[CollectiveTime], faster: float) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of the least and the most that latency and bandwidth may be.

    Where messages are small, all of their time may be latency: the bandwidth is then at least what they had.
    """
    fastest = max(point.nbytes / point.seconds for point in points) * faster
    slowest = min(point.nbytes / point.seconds for point in points) / 1e3
    longest = max(point.seconds for point in points)
    return np.log([_LEAST_LATENCY, slowest]), np.log([longest, fastest])


def _least_squares(
    errors: Callable[[np.ndarray], np.ndarray],
    weights: np.ndarray,
    logs: np.ndarray,
    bounds: tuple[np.ndarray, np.ndarray],
) -> np.ndarray:
    """Levenberg and Marquardt's method, for two unknowns: damped steps that only ever go down."""

    def residuals(values: np.ndarray) -> np.ndarray:
        return np.asarray(weights * errors(values))

    damping, step = 1e-2, 1e-5
    current = residuals(logs)
    for _ in range(_ROUNDS):
        slopes = np.stack([(residuals(logs + step * unit) - current) / step for unit in np.eye(2)], axis=1)
        normal, gradient = slopes.T @ slopes, slopes.T @ current
        damped = normal + damping * np.diag(np.diag(normal)) + _DAMPING * np.eye(2)
        moved = logs - np.clip(np.linalg.solve(damped, gradient), -2.0, 2.0)
        moved = np.clip(moved, *bounds)
        found = residuals(moved)
        if found @ found < current @ current:
            done = float(current @ current - found @ found) < 1e-12
            logs, current, damping = moved, found, damping / 4
            if done:
                break
        else:
            damping *= 8
    return logs


def _with_ramp(cluster: Cluster, division: LinkName, points: Sequence[CollectiveTime]) -> Cluster:
    """What a hop costs beside its bytes, divided into latency and ramp.

    The formula only knows their sum. A message with next to no bytes shows the latency.
    """
    link: Link = getattr(cluster, division)
    tiny = [p for p in points if p.nbytes <= TINY_NBYTES and p.kind is Kind.ALL_GATHER]
    if not tiny:
        return cluster
    latency = min(link.latency, min(p.seconds / (p.span.size - 1) for p in tiny))
    ramp = (link.latency - latency) * link.bandwidth
    return with_link(cluster, division, replace(link, latency=latency, ramp_nbytes=ramp))

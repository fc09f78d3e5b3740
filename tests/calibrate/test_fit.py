"""Links are found again in timings that the cost model itself made."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mics.calibrate.beside import Together
from mics.calibrate.collectives import KINDS, sizes
from mics.calibrate.fit import TINY_NBYTES, CollectiveTime, Division, fit_links, worst_error
from mics.cost.clusters import Cluster, Link
from mics.cost.collectives import Kind, Span
from tests import tiers

_SIZES = sizes(1 << 30)


def _span(division: Division, nodes: int, ranks: int) -> Span:
    if division == "intra":
        return Span(size=ranks, num_nodes=1, on_a_node=ranks)
    on_a_node = 1 if division == "inter" else ranks
    return Span(size=nodes * on_a_node, num_nodes=nodes, on_a_node=on_a_node)


def _timings(cluster: Cluster, *, noise: float, seed: int = 0) -> list[CollectiveTime]:
    """What a calibration of ``cluster`` would measure if the cost model were the truth."""
    chance = random.Random(seed)
    points = []
    for division in ("intra", "inter", "world"):
        span = _span(division, cluster.num_nodes, cluster.ranks_per_node)
        for kind in KINDS if span.size > 1 else ():
            for nbytes in _SIZES:
                point = CollectiveTime(
                    kind=kind, division=division, span=span, nbytes=nbytes, seconds=1.0, spread=noise
                )
                exact = point.predicted(cluster)
                points.append(replace(point, seconds=exact * (1 + noise * chance.uniform(-1, 1))))
    return points


def _start(cluster: Cluster) -> Cluster:
    """Nothing known of the links."""
    link = Link(bandwidth=1.0, latency=1.0)
    return replace(cluster, intra=link, inter=link)


_links = st.builds(
    Link,
    bandwidth=st.floats(5, 12).map(lambda power: 10**power),
    latency=st.floats(-6, -3).map(lambda power: 10**power),
)


@settings(max_examples=8 if tiers.quick else 30, deadline=None)
@given(
    intra=_links,
    inter=_links,
    nodes=st.integers(1, 5),
    ranks=st.sampled_from([1, 2, 4, 8]),
    seed=st.integers(0, 9),
)
def test_known_links_are_found(intra: Link, inter: Link, nodes: int, ranks: int, seed: int) -> None:
    """Every time is predicted as exactly as it was measured, rings and trees, on any cluster."""
    cluster = Cluster(num_nodes=nodes, ranks_per_node=ranks, intra=intra, inter=inter)
    points = _timings(cluster, noise=0.02, seed=seed)
    found = fit_links(_start(cluster), points)
    for division in ("intra", "inter"):
        assert worst_error(found, points, division) < 0.06
        if division == "intra" and ranks > 1:
            assert found.intra.bandwidth == pytest.approx(intra.bandwidth, rel=0.08)


def test_one_that_was_disturbed_does_not_bend_the_line() -> None:
    """Another program's burst makes a few collectives slow: the others decide."""
    link = Link(bandwidth=1e9, latency=50e-6)
    cluster = Cluster(num_nodes=2, ranks_per_node=2, intra=link, inter=replace(link, bandwidth=1e8))
    points = _timings(cluster, noise=0.02)
    slow = [replace(p, seconds=8 * p.seconds) if p.nbytes == 1 << 20 else p for p in points]
    found = fit_links(_start(cluster), slow)
    assert found.intra.bandwidth == pytest.approx(1e9, rel=0.1)
    assert found.inter.bandwidth == pytest.approx(1e8, rel=0.1)


def test_a_tiny_message_tells_latency_from_ramp() -> None:
    """The formula knows only their sum, which stays as fitted."""
    link = Link(bandwidth=1e9, latency=20e-6, ramp_nbytes=100e3)
    cluster = Cluster(num_nodes=2, ranks_per_node=1, intra=link, inter=link)
    points = [p for p in _timings(cluster, noise=0.0) if p.division == "inter"]
    tiny = [replace(p, seconds=21e-6) if p.nbytes == TINY_NBYTES else p for p in points]
    found = fit_links(_start(cluster), tiny).inter
    assert found.latency == pytest.approx(21e-6)
    assert found.latency + found.ramp_nbytes / found.bandwidth == pytest.approx(120e-6, rel=0.01)


def test_a_link_that_nothing_used_stays() -> None:
    link = Link(bandwidth=1e9, latency=20e-6)
    cluster = Cluster(num_nodes=1, ranks_per_node=4, intra=link, inter=Link(bandwidth=7.0, latency=0.5))
    points = [p for p in _timings(cluster, noise=0.0) if p.division == "intra"]
    assert fit_links(replace(cluster, intra=cluster.inter), points).inter == cluster.inter


def test_sizes_grow_to_the_limit() -> None:
    assert sizes(1 << 20) == [TINY_NBYTES, 64 << 10, 256 << 10, 1 << 20]
    assert sizes(1 << 30)[-1] == 1 << 30


@pytest.mark.parametrize(
    ("both", "slowdown"), [(3.0, 1.0), (2.0, 1.0), (4.0, 1.5), (5.0, 2.0)], ids=["hides", "", "half", "none"]
)
def test_what_beside_costs(both: float, slowdown: float) -> None:
    """Perfect overlap costs nothing; one after the other is as if computation took twice as long."""
    assert Together(first=3.0, second=2.0, both=both).slowdown == slowdown


def test_all_reduces_of_many_nodes_are_trees_where_small() -> None:
    """The fit goes through the formula's own choice between ring and tree."""
    link = Link(bandwidth=25e9, latency=15e-6)
    cluster = Cluster(num_nodes=64, ranks_per_node=8, intra=replace(link, bandwidth=200e9), inter=link)
    points = [p for p in _timings(cluster, noise=0.0) if p.kind is Kind.ALL_REDUCE]
    assert worst_error(fit_links(_start(cluster), points), points, "inter") < 1e-3

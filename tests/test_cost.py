"""The cost model against arithmetic done by hand, and what must hold of any cluster."""

from __future__ import annotations

import ast
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mics.cost import constants
from mics.cost.clusters import PRESETS, Cluster, Link, find_cluster
from mics.cost.collectives import Kind, Span, cost
from mics.cost.gpus import GPUS, find_gpu, formats_of
from mics.errors import SettingsError
from mics.planner import __file__ as planner_file

CLUSTER = Cluster(
    num_nodes=4,
    ranks_per_node=8,
    intra=Link(bandwidth=300e9, latency=3e-6),
    inter=Link(bandwidth=50e9, latency=20e-6),
)
NODE, WORLD, ACROSS = range(8), range(32), range(0, 32, 8)
GB = 10**9


def _seconds(kind: Kind, ranks: range, nbytes: int, cluster: Cluster = CLUSTER) -> float:
    return cost(cluster, kind, Span.of(cluster, ranks), nbytes).seconds


def test_rings_by_hand() -> None:
    """p-1 messages of S/p; inside a node at a rank's own speed, outside at the uplink's."""
    assert _seconds(Kind.ALL_GATHER, NODE, GB) == pytest.approx(7 * (3e-6 + GB / 8 / 300e9))
    assert _seconds(Kind.REDUCE_SCATTER, WORLD, GB) == pytest.approx(31 * (20e-6 + GB / 32 / 50e9))
    # One rank of each node: eight such rings share the uplink.
    assert _seconds(Kind.ALL_GATHER, ACROSS, GB) == pytest.approx(3 * (20e-6 + GB / 4 / (50e9 / 8)))
    assert _seconds(Kind.ALL_REDUCE, NODE, GB) == pytest.approx(2 * _seconds(Kind.ALL_GATHER, NODE, GB))


def test_two_stages_take_the_uplink_for_less() -> None:
    """(p-k)/p of the bytes instead of (p-1)/p, and N-1 network hops instead of p-1."""
    flat = cost(CLUSTER, Kind.ALL_GATHER, Span.of(CLUSTER, WORLD), GB)
    inter = cost(CLUSTER, Kind.ALL_GATHER, Span.of(CLUSTER, ACROSS), GB // 8)
    assert flat.inter_nbytes * 8 == pytest.approx(31 / 32 * GB)
    assert inter.inter_nbytes * 8 == pytest.approx(24 / 32 * GB)
    assert inter.seconds == pytest.approx(3 * 20e-6 + 24 / 32 * GB / 50e9)


def test_small_all_reduces_use_a_tree() -> None:
    """Three passes deep over four nodes, not 62 hops around them."""
    assert _seconds(Kind.ALL_REDUCE, WORLD, 8) == pytest.approx(2 * 2 * 20e-6 + 2 * 7 * 3e-6, rel=1e-3)
    ring = 2 * 31 * (20e-6 + GB / 32 / 50e9)
    assert _seconds(Kind.ALL_REDUCE, WORLD, GB) == pytest.approx(ring)


def test_small_messages_get_less_bandwidth() -> None:
    """A message of the ramp's size takes twice its time."""
    link = Link(bandwidth=1e9, latency=0.0, ramp_nbytes=1000)
    cluster = Cluster(num_nodes=2, ranks_per_node=1, intra=link, inter=link)
    assert _seconds(Kind.SEND, range(2), 1000, cluster) == pytest.approx(2e-6)
    assert _seconds(Kind.SEND, range(2), 10**9, cluster) == pytest.approx(1.0, rel=1e-5)


def test_exchange_and_point_to_point() -> None:
    """All eight ranks of a node send 24/32 of their gigabyte through one uplink."""
    assert _seconds(Kind.ALL_TO_ALL, WORLD, GB) == pytest.approx(20e-6 + 8 * 24 / 32 * GB / 50e9)
    assert _seconds(Kind.GATHER, WORLD, GB) == pytest.approx(20e-6 + 24 / 32 * GB / 50e9)
    assert _seconds(Kind.SEND, range(2), GB) == pytest.approx(3e-6 + GB / 300e9)


@given(
    kind=st.sampled_from(list(Kind)),
    nbytes=st.integers(0, 10**10),
    first=st.integers(0, 31),
    step=st.integers(1, 8),
    size=st.integers(1, 8),
)
def test_costs_are_sane(kind: Kind, nbytes: int, first: int, step: int, size: int) -> None:
    """Never negative, never less for more bytes, never less on a slower cluster; one rank pays nothing."""
    ranks = sorted({(first + step * index) % 32 for index in range(size)})
    span = Span.of(CLUSTER, ranks)
    found = cost(CLUSTER, kind, span, nbytes)
    assert found.seconds >= 0 and (found.seconds > 0) == (len(ranks) > 1)
    assert cost(CLUSTER, kind, span, 2 * nbytes).seconds >= found.seconds
    slower = replace(CLUSTER, inter=Link(bandwidth=25e9, latency=40e-6))
    assert cost(slower, kind, span, nbytes).seconds >= found.seconds
    assert (found.inter_seconds > 0) == (span.num_nodes > 1)
    # What a node's ranks send together never goes faster than its uplink, nor a rank's than its own link.
    assert 8 * found.inter_nbytes <= CLUSTER.inter.bandwidth * found.inter_seconds * (1 + 1e-9)
    assert found.intra_nbytes <= CLUSTER.intra.bandwidth * found.seconds * (1 + 1e-9)


def test_named_clusters() -> None:
    nodes = {"p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "dgx-a100", "dgx-h100"}
    assert set(PRESETS) == nodes
    assert find_cluster("dgx-a100").inter.bandwidth == 200e9
    cluster = find_cluster("p4d.24xlarge:16")
    assert (cluster.world_size, cluster.inter.bandwidth, cluster.intra.bandwidth) == (128, 50e9, 300e9)
    assert find_cluster("p3dn.24xlarge").num_nodes == 1


def test_clusters_name_their_gpus() -> None:
    """A V100 has no bfloat16; an A100 has as much memory as the cluster's has."""
    assert formats_of(find_cluster("p3dn.24xlarge").gpu) == ("float16",)
    assert formats_of(find_cluster("p4d.24xlarge").gpu)[0] == formats_of("")[0] == "bfloat16"
    assert find_gpu("a100", find_cluster("p4d.24xlarge").gpu).memory_gib == 40
    assert find_gpu("a100", find_cluster("p4de.24xlarge").gpu).memory_gib == 80
    assert find_gpu("a100", find_cluster("p3dn.24xlarge").gpu).memory_gib == 80
    for gpu in GPUS.values():
        assert 0.5 * gpu.peak_tflops < gpu.matrix_flops(8192) / 1e12 < 0.9 * gpu.peak_tflops
        assert gpu.attention_flops(2048, causal=True) < gpu.attention_flops(2048, causal=False)
    with pytest.raises(SettingsError, match="gpu: expected one of v100"):
        replace(find_cluster("p4d.24xlarge"), gpu="abacus")


def test_a_cluster_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(
        "ranks_per_node: 2\nintra: {bandwidth: 1e9, latency: 1e-6}\n"
        "inter: {bandwidth: 50e6, latency: 1e-4, ramp_nbytes: 4096}\n"
    )
    cluster = find_cluster(f"{path}:4")
    assert (cluster.name, cluster.world_size, cluster.inter.ramp_nbytes) == ("my", 8, 4096)


def test_a_file_is_not_taken_for_a_named_cluster(tmp_path: Path) -> None:
    """A plan derates named clusters, and launches with their names."""
    path = tmp_path / "p4d.24xlarge.yaml"
    links = "ranks_per_node: 2\nintra: &l {bandwidth: 1, latency: 0}\ninter: *l\n"
    path.write_text(links)
    with pytest.raises(SettingsError, match=r"expected a name of its own, found p4d.24xlarge"):
        find_cluster(str(path))
    path.write_text(f"{links}name: my-p4d\n")
    assert find_cluster(f"{path}:2").name == "my-p4d"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("ranks_per_node: 2", "expected the file to have"),
        (
            "- 1",
            "expected the file to have inter, intra and ranks_per_node, found no inter, intra and ranks_",
        ),
        ("{", "expected YAML"),
        ("ranks_per_node: 0\nintra: &l {bandwidth: 1, latency: 0}\ninter: *l", "ranks_per_node"),
        ("ranks_per_node: 2\nintra: &l {bandwidth: fast, latency: 0}\ninter: *l", "expected a number"),
        ("ranks_per_node: 2\nintra: &l {bandwidth: 0, latency: 0}\ninter: *l", "bandwidth > 0"),
        (
            "ranks_per_node: 2\nintra: &l {bandwidth: 1, latency: 20}\ninter: *l",
            "less than a second, found 20",
        ),
        ("ranks_per_node: 2\nintra: &l {bandwidth: 1, lag: 0}\ninter: *l", "found no latency; mics"),
        (
            "ranks_per_node: 2\nintra: &l {bandwidth: 1, latency: 0, lag: 0}\ninter: *l",
            "intra to have at most bandwidth, latency, ramp_nbytes and slowdown, found also lag; leave",
        ),
    ],
)
def test_a_file_that_is_no_cluster(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "my.yaml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=complaint):
        find_cluster(str(path))


@pytest.mark.parametrize("name", ["p9.huge", "p4d.24xlarge:0", "p4d.24xlarge:many", "none.yaml", ""])
def test_names_that_are_no_cluster(name: str) -> None:
    with pytest.raises(SettingsError, match="cluster"):
        find_cluster(name)


def test_every_share_and_speed_says_where_it_is_from() -> None:
    """A fraction that is not among the five fitted constants has a comment or a docstring: what it is."""
    silent = []
    for package in (constants.__file__, planner_file):
        for file in Path(package).parent.glob("*.py"):
            text = file.read_text()
            lines = text.splitlines()
            for node, after in pairwise(ast.parse(text).body):
                documented = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
                if _is_fraction(node) and not documented and not _has_comment(lines, node.lineno - 1):
                    silent.append(f"{file.name}: {lines[node.lineno - 1]}")
    assert silent == []


def _is_fraction(node: ast.stmt) -> bool:
    """A constant of a module that is made of numbers, with a float among them that is no unit (1e9)."""
    if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
        return False
    parts = list(ast.walk(node.value))
    numbers = [each.value for each in parts if isinstance(each, ast.Constant)]
    is_one = any(isinstance(number, float) and number < 1e6 for number in numbers)
    return is_one and all(isinstance(each, ast.Constant | ast.BinOp | ast.operator) for each in parts)


def _has_comment(lines: list[str], at: int) -> bool:
    """On its line, or above the constants that it stands with."""
    first = at
    while lines[first - 1] and not lines[first - 1].startswith(("#", '"""')):
        first -= 1
    return "#" in lines[at] or lines[first - 1].startswith("#")

"""What mics chooses by itself: from the cost model, on all ranks alike, and said where it matters."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mics
from mics import choices
from mics.cost.auto import (
    batch_nbytes,
    exchange_pays,
    horizon_for,
    latency_nbytes,
    move_seconds,
    prefetch_units,
    two_stages_pay,
)
from mics.cost.clusters import PRESETS, assumed_cluster
from mics.cost.collectives import Kind, Span
from mics.engine import engine_of
from mics.layout.order import Prefetch
from mics.models.gpt import GPT, GPTConfig
from tests.ranks import run_expecting_error, run_ranks

_MIB = 1 << 20
_NODE = PRESETS["p4d.24xlarge"]


def _over(num_nodes: int, on_a_node: int = 8) -> Span:
    return Span(size=num_nodes * on_a_node, num_nodes=num_nodes, on_a_node=on_a_node)


def _pays(cluster: mics.Cluster, num_nodes: int, nbytes: int) -> bool:
    return two_stages_pay(cluster, _over(num_nodes), gathered=nbytes, reduced=2 * nbytes)


@pytest.mark.parametrize("num_nodes", [2, 4, 64])
@pytest.mark.parametrize("nbytes", [_MIB, 400 * _MIB])
def test_two_stages_pay_on_fast_nodes(num_nodes: int, nbytes: int) -> None:
    """Half of the volume on two nodes; on many, a hop a node instead of a hop a rank."""
    assert _pays(_NODE, num_nodes, nbytes)


def test_two_stages_gain_volume_near_two_nodes_and_latency_beyond() -> None:
    instant = replace(
        _NODE, intra=replace(_NODE.intra, latency=0.0), inter=replace(_NODE.inter, latency=0.0, ramp_nbytes=0)
    )

    def gain(cluster: mics.Cluster, num_nodes: int) -> float:
        flat, staged = (
            move_seconds(cluster, Kind.ALL_GATHER, _over(num_nodes), 400 * _MIB, two_stage=stage)
            for stage in (False, True)
        )
        return flat / staged

    assert gain(instant, 2) > 1.4 > gain(instant, 4) > gain(instant, 64)
    assert gain(_NODE, 64) > 1.7 > gain(_NODE, 4)


def test_two_stages_do_not_pay_inside_slow_nodes() -> None:
    """Links inside the node that are no faster than the whole node's uplink: the bytes would go twice."""
    slow = replace(_NODE, intra=_NODE.inter)
    assert not _pays(slow, 2, 400 * _MIB)
    assert _pays(slow, 64, 64 << 10), "but small units still save hops"


def test_latency_decides_what_travels_together() -> None:
    """At the size where bytes take as long as latency, half of the time is latency; later a twentieth."""
    span = _over(64, 1)
    for nbytes, share in ((latency_nbytes(_NODE, span), 0.5), (batch_nbytes(_NODE, span), 0.05)):
        latency = move_seconds(_NODE, Kind.ALL_GATHER, span, 0, two_stage=False)
        found = latency / move_seconds(_NODE, Kind.ALL_GATHER, span, nbytes, two_stage=False)
        assert found == pytest.approx(share, rel=0.1)
    assert batch_nbytes(_NODE, _over(1, 1)) == 0


def test_replicas_exchange_where_hops_add_up() -> None:
    """64 nodes with one replica each: 63 hops for a ring, one for an exchange; not for small messages."""
    span = _over(64, 1)
    assert exchange_pays(_NODE, span, 100 * _MIB)
    assert not exchange_pays(_NODE, span, 1 * _MIB)
    assert not exchange_pays(_NODE, _over(4, 1), 100 * _MIB)  # three hops of many bytes each
    assert not exchange_pays(_NODE, _over(1, 1), 100 * _MIB)


def test_prefetch_follows_from_the_times() -> None:
    """One unit ahead where gathers are short; as many as hide the gather twice; no more than a few."""
    assert prefetch_units([1.0] * 8, [5.0] * 8) == 1
    assert prefetch_units([1.0] * 8, [1.5] * 8) == 2
    assert prefetch_units([9.0] * 8, [1.0] * 8) == 3
    assert prefetch_units([1.0, 1.0, 4.0, 1.0], [5.0, 0.1, 5.0, 5.0]) == 2, "a small unit hides nothing"
    assert prefetch_units([1.0, 1.0, 4.0, 1.0], [5.0, 0.1, 5.0, 5.0], low_memory=True) == 1, "most are hidden"
    assert prefetch_units([], []) == prefetch_units([1.0], [1.0]) == 1


def test_an_unknown_device_is_taken_for_an_ordinary_one() -> None:
    known = assumed_cluster("NVIDIA H200", num_nodes=4, ranks_per_node=8)
    other = assumed_cluster("Some GPU", num_nodes=4, ranks_per_node=8)
    assert known.intra.bandwidth > other.intra.bandwidth
    assert known.inter == other.inter
    assert assumed_cluster(None, num_nodes=2, ranks_per_node=3).world_size == 6


_SHAPE = GPTConfig(num_layers=3, num_heads=2, hidden_size=16, vocab_size=32, seq_len=8)


def _agreed(num_rows: list[int]) -> tuple[bool, int, int]:
    """What a rank looks ahead after three steps with batches of its own size, and what it would alone."""
    model = mics.shard(GPT(_SHAPE), partition_size=2)
    optimizer = torch.optim.AdamW(model.parameters())
    engine = engine_of(model)
    plans = engine.residency.plans
    agreement = engine.step._agreement
    choose = agreement._choose_prefetch
    assert choose is not None
    # As if computing took about as long as gathering: what is chosen then depends on the rows.
    agreement._choose_prefetch = lambda order, rows: Prefetch(units=1 if rows > 16 else 3)
    tokens = torch.zeros(num_rows[dist.get_rank()], 8, dtype=torch.long)
    for _ in range(3):
        model(tokens, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return plans.is_final, plans.prefetch.units, choose(plans.latest(), 8).units


def test_ranks_with_different_batches_look_equally_far() -> None:
    """They gather in the same order, so they must."""
    found = run_ranks(4, _agreed, [8, 1, 8, 8])
    assert [each[:2] for each in found] == [(True, 3)] * 4
    assert all(1 <= each[2] <= 3 for each in found)


@contextmanager
def _hearing() -> Iterator[list[str]]:
    """What is logged."""
    messages: list[str] = []
    choices._said.clear()  # by an earlier test of this process

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    handler = Handler()
    logging.getLogger("mics").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("mics").removeHandler(handler)


def _said(**settings: object) -> list[str]:
    with _hearing() as messages:
        for _ in range(2):
            model = mics.shard(GPT(_SHAPE), partition_size=4, **settings)  # type: ignore[arg-type]
            tokens = torch.zeros(1, 8, dtype=torch.long)
            model(tokens, tokens).backward()
    return messages


def test_a_ragged_group_falls_back_and_says_why_once() -> None:
    """Four ranks on nodes of three: on rank 0 alone, and not for every model."""
    first, *others = run_ranks(4, _said, ranks_per_node=3)
    assert len(first) == 1
    assert "[3, 1]" in first[0]
    assert others == [[], [], []]
    assert run_ranks(4, _said, ranks_per_node=2) == [[]] * 4
    assert run_ranks(4, _said, ranks_per_node=3, kwargs={"hierarchical": False}) == [[]] * 4


def test_formats_that_change_nothing_are_said_once() -> None:
    compression = mics.Compression(hop2="int8", inter_gather="int8")
    first, *others = run_ranks(4, _said, ranks_per_node=4, kwargs={"compression": compression})
    assert first == [
        "compression: hop2='int8' changes nothing: there are no replicas",
        "compression: inter_gather='int8' changes nothing: every partition group is inside one node",
    ]
    assert others == [[], [], []]


def test_a_format_that_sends_more_is_said() -> None:
    """Rounded gradients are exchanged: in one stage a node's two ranks send half of float32."""
    compression = mics.Compression(inter_reduce="int8")
    flat = {"hierarchical": False, "compression": compression}
    assert run_ranks(4, _said, ranks_per_node=2, kwargs=flat) == [[]] * 4
    with mics.emulate("p4d.24xlarge:2"), _hearing() as messages:
        mics.shard(GPT(_SHAPE), partition_size=16, **flat)  # type: ignore[arg-type]
        mics.shard(GPT(_SHAPE), partition_size=16, hierarchical=True, compression=compression)
    assert len(messages) == 1
    assert messages[0].startswith(
        "compression: inter_reduce='int8' sends 2.1 times the bytes of None between nodes: in one stage each "
        "of a node's 8 ranks sends to every other node"
    )


def test_several_replicas_on_a_node_may_send_more_rounded() -> None:
    """In one stage each of them sends to every other node, where a ring crosses each node's uplink once."""
    with mics.emulate("p4d.24xlarge:8"), _hearing() as messages:
        for partition_size, hop2, stages in ((1, None, False), (1, "int4", False), (2, "int8", False)):
            compression = mics.Compression(hop2=hop2)  # type: ignore[arg-type]
            mics.shard(
                GPT(_SHAPE), partition_size=partition_size, compression=compression, hierarchical=stages
            )
        for hop2, owners in (("int8", "world"), ("bf16", "partition")):
            settings = {"optimizer_sharding": owners, "compression": mics.Compression(hop2=hop2)}  # type: ignore[arg-type]
            mics.shard(GPT(_SHAPE), partition_size=1, **settings)  # type: ignore[arg-type]
        assert messages == []
        flat = {"hierarchical": False, "compression": mics.Compression(hop2="int8")}
        mics.shard(GPT(_SHAPE), partition_size=1, **flat)  # type: ignore[arg-type]
    assert messages == [
        "compression: hop2='int8' sends 1.8 times the bytes of None between nodes: in one stage each of a "
        "node's 8 replicas sends to every other node; leave it out, or have two stages (hierarchical, as "
        "many replicas on each node, ranks numbered node by node)"
    ]


def _without_parameters() -> tuple[bool, ...]:
    return engine_of(mics.shard(nn.ReLU(), partition_size=4)).topology.two_stage


def test_nothing_to_gather() -> None:
    assert run_ranks(4, _without_parameters, ranks_per_node=2) == [(True,)] * 4


def _stages(cluster: str | None) -> bool:
    if cluster is not None:
        os.environ["MICS_CLUSTER"] = cluster
    try:
        return any(engine_of(mics.shard(GPT(_SHAPE), partition_size=4)).topology.two_stage)
    finally:
        os.environ.pop("MICS_CLUSTER", None)


def test_the_cluster_that_is_named_decides(tmp_path: Path) -> None:
    """A file with links inside the node that are no faster than the network: one stage."""
    link = "{bandwidth: 1e6, latency: 0}"
    path = tmp_path / "slow-inside.yaml"
    path.write_text(f"ranks_per_node: 2\nintra: {link}\ninter: {link}")
    assert run_ranks(4, _stages, None, ranks_per_node=2) == [True] * 4
    assert run_ranks(4, _stages, str(path), ranks_per_node=2) == [False] * 4
    errors = run_expecting_error(4, _stages, "p9000")
    assert all("p4d.24xlarge" in error.message for error in errors), errors


@pytest.mark.parametrize(
    ("transfer", "compute", "expected"),
    [(0.0, 0.0, 1), (0.5, 1.0, 1), (1.5, 1.0, 2), (9.0, 1.0, 4), (1.0, 0.0, 4)],
)
def test_activations_are_sent_for_as_far_ahead_as_the_way_is_long(
    transfer: float, compute: float, expected: int
) -> None:
    assert horizon_for(transfer, compute) == expected

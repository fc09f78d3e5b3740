"""What the planner says about fitting agrees with itself: every shortage is one, and what would do does."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mics.cli import main
from mics.cost.shapes import ModelShape, named_shape
from mics.planner.hardware import planned_cluster
from mics.planner.search import (
    Request,
    Shortage,
    _in_order,
    candidates,
    nearest,
    search,
    sizes_to_try,
    smallest_cluster,
)
from mics.planner.systems import SYSTEMS, predict_quickly
from tests import tiers


def _short(name: str, seq_len: int) -> ModelShape:
    """Few blocks: what fits does not depend on how long the search takes."""
    return named_shape(name, seq_len=seq_len).with_blocks(12)


def _needs_more_than_there_is(lack: Shortage) -> bool:
    """As it is printed."""
    needed, limit = (float(part.replace(",", "")) for part in str(lack).partition(" GiB")[0].split(" of "))
    return needed > limit


requests = st.builds(
    lambda model, seq, cluster, nodes, rows, memory, host, wire: Request(
        model=_short(model, seq),
        cluster=replace(
            planned_cluster(f"{cluster}:{nodes}"), host_nbytes=planned_cluster(cluster).host_nbytes / host
        ),
        global_batch=rows * 8 * nodes,
        memory_nbytes=memory * 2**30,
        wire_nbytes=wire,
    ),
    st.sampled_from(["gpt-6.7b", "gpt-20b", "bert-50b", "gpt-175b"]),
    st.sampled_from([512, 2048, 16384]),
    st.sampled_from(["p3dn.24xlarge", "p4d.24xlarge"]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 2, 6]),
    st.floats(2, 40),
    st.sampled_from([1, 64, 4096]),
    st.sampled_from([2, 4]),
)


@given(requests, st.sampled_from(["mics", "hsdp", "zero3", "zero2"]))
@settings(max_examples=10 if tiers.quick else 25, deadline=None)
def test_what_is_too_large_needs_more_than_there_is(request: Request, system: str) -> None:
    """In every size, of GPU or host memory; and a size that is not too large has settings that fit."""
    for size in sizes_to_try(request.cluster, system):
        short: list[Shortage] = []
        found = list(candidates(request, size, system, short))
        assert all(request.fits(SYSTEMS[system].need(setting)) for setting in found)
        assert all(map(_needs_more_than_there_is, short))
        assert found or short
        if not found:
            assert nearest(short).needed > nearest(short).limit


@pytest.mark.full
@given(requests)
@settings(max_examples=5 if tiers.quick else 15, deadline=None)
def test_the_cluster_that_would_do_does(request: Request) -> None:
    """It is larger than the one that does not, and a search there finds something."""
    if any(list(candidates(request, size)) for size in sizes_to_try(request.cluster)):
        return
    larger = smallest_cluster(request)
    if larger is not None:
        assert larger.cluster.num_nodes > request.cluster.num_nodes
        assert larger.global_batch % larger.cluster.world_size == 0
        if larger.cluster.num_nodes <= 64:
            assert search(larger).choices


@pytest.mark.parametrize(
    ("model", "cluster", "seq", "size"),
    [("gpt-6.7b", "p4d.24xlarge:1", 16384, 2), ("gpt-13b", "p3dn.24xlarge:1", 8192, 8)],
)
def test_accumulation_counts(model: str, cluster: str, seq: int, size: int) -> None:
    """Gradients of earlier micro-steps are there beside the logits.

    One sequence a step fits, and two at once, where there are no earlier ones: the search must not stop at
    one after the other, which does not. Of 32 nothing fits, and that is what is said.
    """
    one = Request(model=named_shape(model, seq_len=seq), cluster=planned_cluster(cluster), global_batch=8)
    assert list(candidates(one, size))
    two = [(each.micro_batch, each.accumulation) for each in candidates(replace(one, global_batch=16), size)]
    assert set(two) == {(2, 1)}
    short: list[Shortage] = []
    assert not list(candidates(replace(one, global_batch=256), size, "mics", short))
    assert _needs_more_than_there_is(nearest(short))


def test_the_error_names_more_than_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    """It once said: expected at most 36.8 GiB, found 32.7; 1 node would do."""
    request = ["plan", "--model", "gpt-13b", "--cluster", "p3dn.24xlarge:1", "--seq", "8192"]
    assert main([*request, "--global-batch", "256"]) == 2
    error = capsys.readouterr().err
    found = re.search(r"at most ([\d.]+) GiB per GPU, found ([\d.]+) GiB.*; (\d+) nodes? of", error)
    assert found and float(found[2]) > float(found[1]) and int(found[3]) > 1, error


def test_host_memory_is_named() -> None:
    """Where offload is the only way, and the node's own memory is what is too small."""
    cluster = replace(planned_cluster("p4d.24xlarge:1"), host_nbytes=2**30)
    request = Request(
        model=_short("gpt-20b", 2048), cluster=cluster, global_batch=8, memory_nbytes=20 * 2**30
    )
    terms = SYSTEMS["mics"].need(next(candidates(replace(request, memory_nbytes=80 * 2**30), 8)))
    lack = request.shortage(replace(terms, host=2.0**30))
    assert lack is not None and lack.what == "host memory" and str(lack).endswith("GiB of host memory")


def test_across_nodes_few_micro_steps_are_better() -> None:
    """Of what is as fast: each micro-step gathers all parameters again. Within a node that costs little."""
    model, cluster = named_shape("roberta-50b", seq_len=512), planned_cluster("p4d.24xlarge:8")
    found = search(Request(model=model, cluster=cluster, global_batch=32 * 64, wire_nbytes=2)).choices
    (across,) = [each.setting for each in found if each.setting.partition_size == 64]
    assert (across.micro_batch, across.activations.checkpoint) == (16, True)
    other = predict_quickly(replace(across, micro_batch=8, accumulation=4, prefetch=None), "mics")
    same = predict_quickly(across, "mics")
    assert 1.0 < other.step_seconds / same.step_seconds < 1.03
    other = replace(other, measured=same.measured.plus(0.01, same.measured))  # as fast, but for 1%
    for order in ([same, other], [other, same]):
        assert _in_order(order)[0] is same
        within = [replace(each, setting=replace(each.setting, partition_size=8)) for each in order]
        assert _in_order(within) == within

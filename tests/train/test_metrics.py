"""Numbers a reader relies on: speed, MFU, the learning rate, and how they are written."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

import mics
from mics.comm import Traffic
from mics.layout.topology import Topology, plan_topology
from mics.train.hardware import memory_nbytes, peak_tflops
from mics.train.learning_rate import learning_rate_share
from mics.train.loop import _meter
from mics.train.metrics import Measurement, SentBytes, Speedometer, sent_bytes
from mics.train.model import BuiltModel
from mics.train.ranks import Rank
from mics.train.setup import Setup


def make_measurement(step: int, *, loss: float = 2.5, mfu: float | None = None) -> Measurement:
    return Measurement(
        step=step,
        loss=loss,
        grad_norm=0.5,
        learning_rate=1e-3,
        tokens_per_second=12345.6,
        tflops=0.0123,
        mfu=mfu,
        partition_nbytes=4_590_000,
        replication_nbytes=765_000,
        memory_nbytes=400_000_000,
        seconds=float(step),
        intra_nbytes=4_590_000,
        inter_nbytes=765_000,
    )


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989.4),
        ("NVIDIA H100 80GB HBM3", 989.4),
        ("NVIDIA H100 PCIe", 756.4),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA L40S", 362.1),
        ("NVIDIA L4", 121.0),
        ("Tesla V100-SXM2-16GB", 125.0),
        ("NVIDIA GeForce GTX 1080", None),
        ("NVIDIA RTX A1000", None),
    ],
)
def test_peaks_are_known_by_whole_words(name: str, peak: float | None) -> None:
    """An L40S is no L4 and an unknown GPU has no peak."""
    assert peak_tflops(name) == peak


def test_speed_is_per_device_and_mfu_against_its_peak() -> None:
    """1e6 tokens/s at 1e9 FLOPs each on 4 devices are 250 TFLOP/s, half of a peak of 500."""
    speed = Speedometer(flops_per_token=10**9, num_devices=4, peak_tflops=500.0)
    assert speed.tflops(1e6) == pytest.approx(250.0)
    assert speed.mfu(1e6) == pytest.approx(0.5)
    assert Speedometer(flops_per_token=1, num_devices=1, peak_tflops=None).mfu(1e6) is None


def test_processors_have_the_peak_that_calibrate_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four ranks of 20 GFLOP/s each, by the cluster file that the run uses; not in another format."""
    links = "intra: {bandwidth: 1e9, latency: 1e-6}\ninter: {bandwidth: 1e9, latency: 1e-6}\n"
    speeds = "{device: cpu, param_nbytes: 4, block_flops: 1e9, head_flops: 1e9, update_bandwidth: 1e9}"
    (tmp_path / "cluster.yaml").write_text(
        f"num_nodes: 2\nranks_per_node: 2\n{links}flops: 1e10\npeak_flops: 2e10\ncomputing: {speeds}\n"
    )
    monkeypatch.delenv("MICS_CLUSTER", raising=False)
    model = torch.nn.Linear(1, 1)
    mics.shard(model)
    setup = replace(Setup.of(model), node_sizes=(2, 2))
    built = BuiltModel(model=model, matrices=frozenset(), flops_per_token=10**6)
    me = Rank(
        rank=0, num_ranks=1, local_rank=0, ranks_per_node=1, ranks_per_gpu=1, device=torch.device("cpu")
    )
    assert _meter(built, setup, me)._speedometer.mfu(1e4) is None
    monkeypatch.setenv("MICS_CLUSTER", str(tmp_path / "cluster.yaml"))
    assert _meter(built, setup, me)._speedometer.mfu(1e4) == pytest.approx(0.125)
    assert _meter(built, replace(setup, precision="bf16"), me)._speedometer.mfu(1e4) is None
    monkeypatch.setenv("MICS_CLUSTER", "p4d.24xlarge")
    assert _meter(built, setup, me)._speedometer.mfu(1e4) is None


def test_the_learning_rate_rises_and_falls() -> None:
    """Straight up over the warm-up, down to the final share at the last step, never outside (0, 1]."""
    shares = [
        learning_rate_share(step, num_steps=100, warmup_steps=10, final_share=0.1) for step in range(100)
    ]
    assert shares[0] > 0
    assert max(shares) == shares[10] == 1.0
    assert shares[-1] == pytest.approx(0.1)
    assert all(a < b for a, b in pairwise(shares[:11]))
    assert all(a > b for a, b in pairwise(shares[10:]))


@pytest.mark.parametrize("num_steps", [1, 5])
def test_a_run_shorter_than_its_warm_up_works(num_steps: int) -> None:
    """Few steps never divide by zero."""
    for step in range(num_steps + 1):
        assert 0 < learning_rate_share(step, num_steps=num_steps, warmup_steps=10, final_share=0.1) <= 1


def _sent(topology: Topology, **nbytes: int) -> tuple[int, int]:
    """Bytes of rank 0 inside its node and to others, of what each axis sent."""
    traffic = Traffic(calls={}, nbytes={(axis, "any"): number for axis, number in nbytes.items()})
    found = sent_bytes(traffic, topology, 0)
    assert found.partition_nbytes == nbytes.get("partition", 0)
    return found.intra_nbytes, found.inter_nbytes


def test_bytes_are_counted_by_the_link_they_take() -> None:
    """Two nodes of two: groups in a node, groups over both in two stages or in one, and replicas."""
    nodes = (0, 0, 1, 1)
    inside = plan_topology(nodes, partition_size=2)
    assert _sent(inside, partition=100, replication=30, world=9) == (100 + 3, 30 + 6)
    over_both = plan_topology(nodes, partition_size=4)
    assert over_both.stages(0) is not None
    assert _sent(over_both, partition=100, intra=70, inter=20) == (70, 20)
    flat = plan_topology(nodes, partition_size=4, hierarchical=False)
    assert _sent(flat, partition=90) == (30, 60)  # two of its three peers are elsewhere
    whole = plan_topology(nodes, partition_size=1)
    assert _sent(whole, replication=90) == (30, 60)
    alone = plan_topology((0,), partition_size=1)
    assert _sent(alone, partition=0) == (0, 0)


def test_bytes_of_a_step_are_a_mean() -> None:
    before = SentBytes(partition_nbytes=10, intra_nbytes=10)
    after = SentBytes(partition_nbytes=40, intra_nbytes=50, inter_nbytes=3)
    expected = {"partition_nbytes": 15, "replication_nbytes": 0, "intra_nbytes": 20, "inter_nbytes": 2}
    assert (after - before).per_step(2) == expected


def test_the_memory_of_this_process_is_plausible() -> None:
    """A process with torch loaded holds between 50 MB and 100 GB."""
    assert 5e7 < memory_nbytes(torch.device("cpu")) < 1e11

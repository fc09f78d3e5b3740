"""What the planner predicts against what was measured and published: `python benchmarks/planner_accuracy.py`.

Three tables: step times that `mics bench` measured on one H200 as rank 0 of an emulated cluster, peak memory
from the same GPU, and the results that the authors of MiCS published. Published TFLOP/s count what is
computed again in the backward; the last column leaves it out.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mics.bench.models import BENCH_MODELS
from mics.cost.clusters import find_cluster
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import ModelShape, named_shape, shape_of_config
from mics.planner.hardware import planned_cluster
from mics.planner.systems import Prediction, predict

ORDINARY = Path(__file__).parent / "clusters" / "ordinary.yaml"
CHECKPOINTED = Keeping(checkpoint=True)


@dataclass(frozen=True)
class Measured:
    """A row of benchmarks/results/hiding_h200_2026-11-15.md."""

    system: str
    nodes: int
    partition_size: int
    accumulation: int
    wire_nbytes: int
    step_ms: float


MEASURED = (
    Measured("mics", 1, 8, 2, 4, 771),
    Measured("hsdp", 1, 8, 2, 4, 786),
    Measured("mics", 64, 8, 2, 4, 847),
    Measured("hsdp", 64, 8, 2, 4, 1089),
    Measured("mics", 64, 8, 4, 4, 1614),
    Measured("hsdp", 64, 8, 4, 4, 1884),
    Measured("mics", 64, 16, 2, 4, 834),
    Measured("hsdp", 64, 16, 2, 4, 1415),
    Measured("mics", 64, 512, 2, 4, 900),
    Measured("fsdp2", 64, 512, 2, 4, 2239),
    Measured("mics", 64, 8, 2, 2, 829),
    Measured("hsdp", 64, 8, 2, 2, 808),
    Measured("mics", 64, 16, 2, 2, 817),
    Measured("mics", 64, 512, 2, 2, 830),
    Measured("mics", 16, 8, 8, 2, 3093),
    Measured("mics", 64, 8, 8, 2, 3110),
)


@dataclass(frozen=True)
class Published:
    """A result of the seeds. Micro-batches and sequence lengths that they do not give are chosen here."""

    what: str
    model: str
    cluster: str
    partition_size: int
    micro_batch: int
    accumulation: int
    system: str
    tflops: float
    seq_len: int | None = None


PUBLISHED = (
    Published("RoBERTa-10B, ZeRO-3 before", "bert-10b", "p4d.24xlarge:8", 64, 16, 1, "zero3-before", 73),
    Published("RoBERTa-10B, ZeRO-3 after", "bert-10b", "p4d.24xlarge:8", 64, 16, 1, "zero3", 123),
    Published("RoBERTa-50B, ZeRO-3 before", "bert-50b", "p4d.24xlarge:8", 64, 8, 1, "zero3-before", 89),
    Published("RoBERTa-50B, ZeRO-3 after", "bert-50b", "p4d.24xlarge:8", 64, 8, 1, "zero3", 154),
    Published("100B on 512, MiCS", "gpt-100b", "p4d.24xlarge:64", 128, 4, 4, "mics-published", 170, 1024),
    Published("100B on 512, ZeRO-3", "gpt-100b", "p4d.24xlarge:64", 512, 4, 4, "zero3-before", 62, 1024),
    Published("175B on 128, MiCS", "gpt-175b", "p4de.24xlarge:16", 128, 8, 4, "mics-published", 169),
    Published("1.06T on 512, MiCS", "gpt-1t", "p4de.24xlarge:64", 512, 8, 1, "mics-published", 176),
)


def main() -> None:
    """Print the tables."""
    model = shape_of_config("gpt-3.6b", BENCH_MODELS["gpt-3.6b"].config)
    print("| system | ranks | p | micro-steps | wire bytes | measured ms | predicted ms | error |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|")
    for row in MEASURED:
        setting = Setting(
            model=model,
            cluster=find_cluster(f"{ORDINARY}:{row.nodes}"),
            partition_size=row.partition_size,
            micro_batch=4,
            accumulation=row.accumulation,
            activations=CHECKPOINTED,
            wire_nbytes=row.wire_nbytes,
        )
        found = 1e3 * predict(setting, row.system).step_seconds
        print(
            f"| {row.system} | {8 * row.nodes} | {row.partition_size} | {row.accumulation} | "
            f"{row.wire_nbytes} | {row.step_ms:.0f} | {found:.0f} | {_error(found, row.step_ms)} |"
        )
    print()
    _memory(model)
    print()
    _published()


def _memory(model: ModelShape) -> None:
    """Peaks of benchmarks/results/offload_h200_2026-11-16.md and of its walk.

    Three of the larger model without offload were measured when the arena had one block more than it has now.
    """
    larger = named_shape("gpt-20b")
    kept, offloaded = Keeping(checkpoint=False), Keeping(checkpoint=True, offload=True)
    measurements = (  # model, nodes, partition size, rows, activations, GiB
        (model, 1, 1, 4, kept, 47.85),
        (model, 1, 8, 4, kept, 30.49),
        (model, 1, 8, 4, CHECKPOINTED, 15.47),
        (model, 1, 8, 4, offloaded, 10.37),
        (larger, 1, 8, 4, CHECKPOINTED, 58.10),
        (larger, 1, 8, 14, CHECKPOINTED, 79.27),
        (larger, 1, 8, 4, offloaded, 48.83),
        (larger, 1, 8, 40, offloaded, 78.81),
        (larger, 8, 8, 4, CHECKPOINTED, 34.98),
        (larger, 8, 8, 26, CHECKPOINTED, 78.18),
        (larger, 8, 8, 4, offloaded, 28.87),
        (larger, 8, 8, 56, offloaded, 78.78),
    )
    print("| model | ranks | p | rows | activations | measured peak GiB | predicted GiB | error |")
    print("|---|---:|---:|---:|---|---:|---:|---:|")
    for shape, nodes, size, rows, activations, measured in measurements:
        setting = Setting(
            model=shape,
            cluster=find_cluster(f"{ORDINARY}:{nodes}"),
            partition_size=size,
            micro_batch=rows,
            accumulation=1,
            activations=activations,
        )
        found = setting.memory().peak / 2**30
        print(
            f"| {shape.name} | {8 * nodes} | {size} | {rows} | {activations} | {measured:.2f} | "
            f"{found:.2f} | {_error(found, measured)} |"
        )


def _published() -> None:
    print("| published | TFLOP/s | predicted | error | predicted without recomputation |")
    print("|---|---:|---:|---:|---:|")
    found = {row.what: _predict(row) for row in PUBLISHED}
    for row in PUBLISHED:
        ours = found[row.what]
        print(
            f"| {row.what} | {row.tflops:.0f} | {ours.hardware_tflops:.0f} | "
            f"{_error(ours.hardware_tflops, row.tflops)} | {ours.tflops:.0f} |"
        )
    for name, what, percent in (("MiCS", "100B on 512, MiCS", 99.4), ("ZeRO-3", "100B on 512, ZeRO-3", 72.0)):
        row = next(row for row in PUBLISHED if row.what == what)
        smaller = Published(
            row.what,
            row.model,
            "p4d.24xlarge:16",
            128,
            row.micro_batch,
            row.accumulation,
            row.system,
            0,
            row.seq_len,
        )
        share = 100 * found[what].hardware_tflops / _predict(smaller).hardware_tflops
        print(
            f"| weak scaling 128 to 512, {name}, % | {percent} | {share:.1f} | {_error(share, percent)} | |"
        )
    ratios = {}
    for model, size in (("bert-10b", 8), ("bert-15b", 16), ("bert-20b", 16), ("bert-50b", 64)):
        ours, theirs = (
            _predict(Published("", model, "p3dn.24xlarge:16", p, 8, 4, system, 0)).step_seconds
            for p, system in ((size, "mics-published"), (128, "zero3-before"))
        )
        ratios[model] = theirs / ours
    best = max(ratios.values())
    each = ", ".join(f"{name} {ratio:.2f}" for name, ratio in ratios.items())
    print(f"| MiCS over ZeRO-3 on p3dn, at most ({each}) | 2.82 | {best:.2f} | {_error(best, 2.82)} | |")


def _predict(row: Published) -> Prediction:
    setting = Setting(
        model=named_shape(row.model, seq_len=row.seq_len),
        cluster=planned_cluster(row.cluster),
        partition_size=row.partition_size,
        micro_batch=row.micro_batch,
        accumulation=row.accumulation,
        activations=CHECKPOINTED,
        wire_nbytes=2,
        over_replicas=False,
        fused=False,
    )
    return predict(setting, row.system)


def _error(found: float, expected: float) -> str:
    return f"{100 * (found / expected - 1):+.1f}%"


if __name__ == "__main__":
    main()

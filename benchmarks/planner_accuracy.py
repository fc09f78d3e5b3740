"""What the planner predicts against what was measured and published: `python -m benchmarks.planner_accuracy`.

Four tables: step times that `mics bench` measured on one H200 as rank 0 of an emulated cluster, peak memory
of mics and of other systems on the same GPU, and the results that the authors of MiCS published. Published
TFLOP/s count what is recomputed in the backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.published.planned import MOST_OF_ZERO, most_over_zero, plan_row
from benchmarks.published.rows import ROWS

from mics.bench.models import BENCH_MODELS
from mics.cost.clusters import find_cluster
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import ModelShape, named_shape, shape_of_config
from mics.layout.compression import LOSSLESS, UNCOMPRESSED, Compression
from mics.planner.systems import SYSTEMS, predict

ORDINARY = Path(__file__).parent / "clusters" / "ordinary.yaml"
CHECKPOINTED = Keeping(checkpoint=True)
INT8 = Compression(hop2="int8", inter_gather="int8", inter_reduce="int8")
FORMATS = {
    "as they are": UNCOMPRESSED,
    "as moves": LOSSLESS,
    "as moves, int8 across nodes": INT8,
    "the same, int4 in hop 2": replace(INT8, hop2="int4"),
}


@dataclass(frozen=True)
class Measured:
    """A row of benchmarks/results/hiding_h200_2026-11-15.md; with moves, of moves_h200_2026-11-18.md.

    The last twelve are of compression_h200_2026-11-19.md.
    """

    system: str
    nodes: int
    partition_size: int
    accumulation: int
    wire_nbytes: int
    step_ms: float
    compression: Compression = UNCOMPRESSED

    @property
    def setting(self) -> Setting:
        return Setting(
            model=shape_of_config("gpt-3.6b", BENCH_MODELS["gpt-3.6b"].config),
            cluster=find_cluster(f"{ORDINARY}:{self.nodes}"),
            partition_size=self.partition_size,
            micro_batch=4,
            accumulation=self.accumulation,
            activations=CHECKPOINTED,
            wire_nbytes=self.wire_nbytes,
            compression=self.compression,
        )


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
    Measured("mics", 64, 8, 2, 4, 807, compression=LOSSLESS),
    Measured("mics", 64, 16, 2, 4, 808, compression=LOSSLESS),
    *(
        Measured("mics", 64, size, 2, 4, step_ms, compression=compression)
        for size, measured in (
            (8, (826, 780, 758, 754)),
            (16, (819, 783, 765, 762)),
            (512, (888, 824, 767, 768)),
        )
        for step_ms, compression in zip(measured, FORMATS.values(), strict=True)
    ),
)


def main() -> None:
    """Print the tables."""
    print(
        "| system | ranks | p | micro-steps | wire bytes | new values | measured ms | predicted ms | error |"
    )
    print("|---|---:|---:|---:|---:|---|---:|---:|---:|")
    names = {compression: name for name, compression in FORMATS.items()}
    for row in MEASURED:
        found = 1e3 * predict(row.setting, row.system).step_seconds
        print(
            f"| {row.system} | {8 * row.nodes} | {row.partition_size} | {row.accumulation} | "
            f"{row.wire_nbytes} | {names[row.compression]} | "
            f"{row.step_ms:.0f} | {found:.0f} | {_error(found, row.step_ms)} |"
        )
    print()
    model = shape_of_config("gpt-3.6b", BENCH_MODELS["gpt-3.6b"].config)
    _memory(model)
    print()
    _peers_memory(model)
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
    """Ranges over what the documents leave open: `benchmarks/published/rows.py` says when one is right."""
    print("| published | value | predicted | error | points that fit |")
    print("|---|---:|---:|---:|---:|")
    for row in ROWS:
        found = plan_row(row)
        value = f"{'up to ' if row.at_most else ''}{row.published:g}"
        points = f"{len(found.values)} of {len(found.values) + len(found.too_large)}"
        error = "" if row.at_most else f"{100 * found.error:+.1f}%"
        print(f"| {row.what}: {row.measure} | {value} | {found} | {error} | {points} |")
    print(f"| BERT on 128 V100s: the most of these ratios | {MOST_OF_ZERO:g} | {most_over_zero()} | | |")


def _peers_memory(model: ModelShape) -> None:
    """Peaks of benchmarks/results/peers_h200_2026-11-15.md and offload_h200_2026-11-16.md."""
    larger = named_shape("gpt-20b")
    offloaded = Keeping(checkpoint=True, offload=True)
    print("| system | model | ranks | p | rows | activations | measured peak GiB | predicted GiB | error |")
    print("|---|---|---:|---:|---:|---|---:|---:|---:|")
    for system, shape, nodes, size, rows, accumulation, activations, measured in (
        ("fsdp2", model, 1, 8, 4, 2, CHECKPOINTED, 13.0),
        ("hsdp", model, 8, 8, 4, 2, CHECKPOINTED, 13.0),
        ("fsdp2", model, 2, 16, 4, 2, CHECKPOINTED, 9.6),
        ("fsdp2", model, 4, 32, 4, 2, CHECKPOINTED, 7.9),
        ("zero3", model, 1, 8, 4, 2, CHECKPOINTED, 14.9),
        ("fsdp2", larger, 1, 8, 4, 1, offloaded, 45.8),
        ("fsdp2", larger, 1, 8, 40, 1, offloaded, 77.6),
        ("hsdp", larger, 8, 8, 4, 1, offloaded, 45.8),
    ):
        setting = Setting(
            model=shape,
            cluster=find_cluster(f"{ORDINARY}:{nodes}"),
            partition_size=size,
            micro_batch=rows,
            accumulation=accumulation,
            activations=activations,
        )
        found = SYSTEMS[system].need(setting).peak / 2**30
        print(
            f"| {system} | {shape.name} | {8 * nodes} | {size} | {rows} | {activations} | {measured:.1f} | "
            f"{found:.1f} | {_error(found, measured)} |"
        )


def _error(found: float, expected: float) -> str:
    return f"{100 * (found / expected - 1):+.1f}%"


if __name__ == "__main__":
    main()

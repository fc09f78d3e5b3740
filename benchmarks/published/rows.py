"""What the three documents say, as data: one row for each figure that they publish.

A document fixes some values of a run and leaves others open. A row has a tuple for each: one value where the
document gives it, every plausible one where it does not. What is predicted for a row is therefore a range.

**When a prediction is right**: ``published`` is within 10% of the range, that is, of some plausible point.
Points that do not fit in the GPU's memory are left out. With ``at_most`` the document gives a bound: right
if the low end of the range is no more than 10% above it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import product
from typing import Final

TOLERANCE: Final = 0.1


class Measure(StrEnum):
    """What a published figure is."""

    TFLOPS = "TFLOP/s per GPU, with recomputation"
    SPEEDUP = "times as fast"
    SCALING = "% of linear weak scaling"
    SLOWDOWN = "% longer step"
    DROP = "times the relative drop of speed on a slower network"


@dataclass(frozen=True, kw_only=True)
class Point:
    """One plausible way to run a row. Names of models and clusters are those of `mics plan`."""

    model: str
    cluster: str
    system: str
    partition_size: int
    micro_batch: int
    accumulation: int
    seq_len: int
    activations: str
    """``kept``, ``checkpoint`` or ``offload`` (which includes checkpointing)."""
    wire_nbytes: int = 2
    kernels: str = "2022"


@dataclass(frozen=True, kw_only=True)
class Against:
    """What a ratio compares with; None: as in the row itself."""

    system: str | None = None
    cluster: str | None = None
    partition_size: int | None = None
    activations: str | None = None

    def of(self, point: Point) -> Point:
        """The other run that ``point`` is compared with."""
        changed = {name: value for name, value in vars(self).items() if value is not None}
        return replace(point, **changed)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One published figure. A tuple of one value: the document gives it; of several: it leaves it open."""

    key: str
    """``experiment/what``, one of a kind."""
    document: str
    """The file's stem in the source documents: zero3-on-efa, mics or trillion."""
    what: str
    published: float
    measure: Measure = Measure.TFLOPS
    at_most: bool = False
    """The document gives a bound, over several runs."""
    model: str
    cluster: str
    system: str
    partition_size: int
    micro_batch: tuple[int, ...]
    accumulation: tuple[int, ...]
    seq_len: tuple[int, ...]
    activations: tuple[str, ...] = ("checkpoint",)
    against: Against | None = None
    dropped_from: str = ""
    """Of a drop: the cluster with the faster network, where both systems run too."""
    note: str = ""

    @property
    def experiment(self) -> str:
        """What one command repeats."""
        return self.key.partition("/")[0]

    @property
    def open_values(self) -> dict[str, tuple[object, ...]]:
        """By name: what the document does not say."""
        every: dict[str, tuple[object, ...]] = {
            "micro_batch": self.micro_batch,
            "accumulation": self.accumulation,
            "seq_len": self.seq_len,
            "activations": self.activations,
        }
        return {name: values for name, values in every.items() if len(values) > 1}

    def runs(self, point: Point) -> list[Point]:
        """What a figure is made of: the run itself, what it is compared with, both on the faster network."""
        here = [point] if self.against is None else [point, self.against.of(point)]
        return here + [replace(each, cluster=self.dropped_from) for each in here if self.dropped_from]

    def points(self) -> Iterator[Point]:
        """Every plausible run, whether it fits or not."""
        values = product(self.micro_batch, self.accumulation, self.seq_len, self.activations)
        for micro_batch, accumulation, seq_len, activations in values:
            yield Point(
                model=self.model,
                cluster=self.cluster,
                system=self.system,
                partition_size=self.partition_size,
                micro_batch=micro_batch,
                accumulation=accumulation,
                seq_len=seq_len,
                activations=activations,
            )

    def is_right(self, low: float, high: float) -> bool:
        """Whether the published value is within 10% of a predicted range."""
        if self.at_most:
            return low <= (1 + TOLERANCE) * self.published
        return (1 - TOLERANCE) * low <= self.published <= (1 + TOLERANCE) * high


_P3DN: Final = "p3dn.24xlarge:16"
_BERT: Final = (  # model and the partition group that holds it in 32 GB a GPU
    ("bert-10b", 8),
    ("bert-15b", 16),
    ("bert-20b", 16),
    ("bert-50b", 64),
)


def _roberta() -> Iterator[Row]:
    """RoBERTa on 64 A100s, before and after the work of the first document. It gives no batch at all."""
    for size, before, after in (("10b", 73.0, 123.0), ("50b", 89.0, 154.0)):
        for name, system, published in (("before", "zero3-before", before), ("after", "zero3", after)):
            yield Row(
                key=f"roberta-{size}/{name}",
                document="zero3-on-efa",
                what=f"RoBERTa-{size.upper()} on 64 A100s, ZeRO-3 {name} the optimisations",
                published=published,
                model=f"roberta-{size}",
                cluster="p4d.24xlarge:8",
                system=system,
                partition_size=64,
                micro_batch=(8, 16, 32),
                accumulation=(1, 4),
                seq_len=(512,),
                note="RoBERTa's usual sequence; what it has beyond BERT's shape is the vocabulary",
            )


def _stages() -> Iterator[Row]:
    """Stages of ZeRO on EFA beside InfiniBand. The document names no model: 50B does not fit at stage 2."""
    yield Row(
        key="zero-stages/drop",
        document="zero3-on-efa",
        what="64 A100s, from InfiniBand to EFA: relative drop of ZeRO-3, over that of ZeRO-2",
        published=2.0,
        measure=Measure.DROP,
        model="roberta-10b",
        cluster="p4d.24xlarge:8",
        system="zero3-before",
        partition_size=64,
        micro_batch=(8, 16, 32),
        accumulation=(1, 4),
        seq_len=(512,),
        against=Against(system="zero2-before"),
        dropped_from="dgx-a100:8",
    )


def _bert() -> Iterator[Row]:
    """BERT on 128 V100s: the document says up to 2.82 times, over all sizes and both stages of ZeRO."""
    for model, size in _BERT:
        for system, stage in (("zero3-before", 3), ("zero2-before", 2)):
            yield Row(
                key=f"{model}/zero{stage}",
                document="mics",
                what=f"{model.upper()} on 128 V100s, MiCS against ZeRO-{stage} of DeepSpeed 0.5.6",
                published=2.82,
                measure=Measure.SPEEDUP,
                at_most=True,
                model=model,
                cluster=_P3DN,
                system="mics-published",
                partition_size=size,
                micro_batch=(8,),
                accumulation=(4, 8),
                seq_len=(512,),
                against=Against(system=system, partition_size=128),
                note="the paper's micro-batch is 8; where a system has no room for it, less",
            )


def _gpt_100b() -> Iterator[Row]:
    """100B on 128 to 512 A100s of 40 GB."""
    systems = (
        ("mics", "MiCS", "mics-published", 128, 170.0, 99.4),
        ("zero3", "ZeRO-3", "zero3-before", 512, 62.0, 72.0),
    )
    for name, words, system, size, speed, scaling in systems:
        row = Row(
            key=f"gpt-100b/{name}",
            document="mics",
            what=f"100B on 512 A100s, {words}",
            published=speed,
            model="gpt-100b",
            cluster="p4d.24xlarge:64",
            system=system,
            partition_size=size,
            micro_batch=(4, 8),
            accumulation=(1, 4),
            seq_len=(1024, 2048),
            note="over 170 TFLOP/s" if name == "mics" else "saturates at 62 TFLOP/s",
        )
        yield row
        yield replace(
            row,
            key=f"{row.key}-scaling",
            what=f"100B, weak scaling from 128 to 512 A100s, {words}",
            published=scaling,
            measure=Measure.SCALING,
            against=Against(cluster="p4d.24xlarge:16", partition_size=128),
            note="",
        )


def _largest() -> Iterator[Row]:
    yield Row(
        key="gpt-175b/mics",
        document="mics",
        what="175B on 128 A100s of 80 GB, MiCS",
        published=169.0,
        model="gpt-175b",
        cluster="p4de.24xlarge:16",
        system="mics-published",
        partition_size=128,
        micro_batch=(4, 8),
        accumulation=(1, 4),
        seq_len=(2048,),
    )
    trillion = Row(
        key="gpt-1t/mics",
        document="trillion",
        what="1.06T on 512 A100s of 80 GB, MiCS with offloaded activations",
        published=176.0,
        model="gpt-1t",
        cluster="p4de.24xlarge:64",
        system="mics-published",
        partition_size=512,
        micro_batch=(8,),
        accumulation=(1,),
        seq_len=(1024,),
        activations=("offload",),
    )
    yield trillion
    yield replace(
        trillion,
        key="gpt-1t/offload",
        what="1.06T, what prefetched activation offload costs",
        published=2.0,
        measure=Measure.SLOWDOWN,
        at_most=True,
        against=Against(activations="checkpoint"),
        note="about 1 to 2%",
    )


FITTED_TO: Final = ("gpt-175b/mics", "gpt-1t/mics")
"""What the efficiency of matrices of 2022 is fitted to: a factor made of it says nothing of these rows."""
ROWS: Final = (*_roberta(), *_stages(), *_bert(), *_gpt_100b(), *_largest())
BY_KEY: Final = {row.key: row for row in ROWS}
EXPERIMENTS: Final = tuple(dict.fromkeys(row.experiment for row in ROWS))


def rows_of(experiment: str) -> tuple[Row, ...]:
    """All figures of one experiment, in the order of the document."""
    return tuple(row for row in ROWS if row.experiment == experiment)

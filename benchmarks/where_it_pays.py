"""From which network on mics pays: step times of peers over the speed of a node's uplink, relative to mics.

    python benchmarks/where_it_pays.py                       # the table and the crossing points
    python benchmarks/where_it_pays.py --picture docs/where-it-pays.png

The planner's simulation, no GPU needed. It is within 5% of what the emulator measures of mics, HSDP and FSDP2
(docs/planner.md). Megatron-FSDP is predicted 1 to 7% faster than it was measured, so its ratio is a lower
bound.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes

from mics.cost.clusters import Cluster, find_cluster
from mics.cost.memory import Keeping
from mics.cost.setting import Setting
from mics.cost.shapes import ModelShape, named_shape
from mics.planner.systems import SYSTEMS, predict_quickly
from mics.utils.picture_style import THEMES, Theme, picture

PEERS: Final = {
    "hsdp": "HSDP",
    "fsdp2": "FSDP2 over all GPUs",
    "megatron-fsdp": "Megatron-FSDP, hop 1 in bf16",
    "megatron-fsdp-same": "Megatron-FSDP, mics with hop 1 in bf16 too",
}
_COLUMNS: Final = {
    "hsdp": "HSDP",
    "megatron-fsdp": "Megatron-FSDP",
    "megatron-fsdp-same": "Megatron-FSDP, same formats",
    "fsdp2": "FSDP2 over all GPUs",
}
_SIMULATED: Final = {name: name for name in PEERS} | {"megatron-fsdp-same": "megatron-fsdp"}
_OURS: Final = dict.fromkeys(PEERS, "mics") | {"megatron-fsdp-same": "mics-hop-1-bf16"}
SPEEDS: Final = (25, 50, 100, 200, 400, 800, 1600, 3200)  # Gbit/s per node
MODELS: Final = ("gpt-3.6b", "gpt-20b", "gpt-100b")
PARTITIONS: Final = (8, 64)
ORDINARY: Final = Path(__file__).parent / "clusters" / "ordinary.yaml"
WORTH: Final = 1.05
"""Below this ratio nobody should switch: it is within the simulation's error."""
_TICKS: Final = (0.8, 1.0, 1.5, 2.0, 3.0)


@dataclass(frozen=True, kw_only=True)
class Question:
    """One panel of the picture: what is trained, and how it is divided."""

    model: str
    partition_size: int
    micro_batch: int = 4
    accumulation: int = 2
    wire_nbytes: int = 4
    cluster: Cluster

    def setting(self, gbit: float) -> Setting:
        inter = replace(self.cluster.inter, bandwidth=gbit * 1e9 / 8)
        return Setting(
            model=_shape(self.model),
            cluster=replace(self.cluster, inter=inter),
            partition_size=self.partition_size,
            micro_batch=self.micro_batch,
            accumulation=self.accumulation,
            activations=Keeping(checkpoint=True),
            wire_nbytes=self.wire_nbytes,
        )

    def missing_nbytes(self, system: str) -> float:
        """What a system needs beyond a GPU's memory; 0 or less: it fits."""
        peak = SYSTEMS[_SIMULATED[system]].need(self.setting(SPEEDS[0])).peak
        return peak - self.cluster.memory_nbytes


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A peer's step time relative to that of mics, at each speed."""

    system: str
    ratios: tuple[float, ...]

    @property
    def worth_until(self) -> float | None:
        """Gbit/s per node from which on the peer stays within 5%; None: it never does.

        Between two speeds the ratio is taken to be straight over the logarithm of the speed.
        """
        points = list(zip(SPEEDS, self.ratios, strict=True))
        if points[-1][1] > WORTH:
            return None
        crossing = float(SPEEDS[0])
        for (slow, before), (fast, after) in pairwise(points):
            if before > WORTH >= after:
                share = (before - WORTH) / (before - after)
                crossing = slow * (fast / slow) ** share
        return crossing


@cache
def _shape(name: str) -> ModelShape:
    return named_shape(name)


def curves(question: Question) -> list[Curve]:
    """Of the peers that fit."""
    fitting = [system for system in PEERS if question.missing_nbytes(system) <= 0]
    simulated = {_SIMULATED[system] for system in fitting} | {_OURS[system] for system in fitting}
    times = {
        name: [predict_quickly(question.setting(speed), name).step_seconds for speed in SPEEDS]
        for name in simulated
    }
    return [
        Curve(
            system=system,
            ratios=tuple(
                their / our
                for their, our in zip(times[_SIMULATED[system]], times[_OURS[system]], strict=True)
            ),
        )
        for system in fitting
    ]


def lines_of_table(panels: Mapping[Question, Sequence[Curve]]) -> Iterator[str]:
    """Markdown: a row for each panel and peer, a column for each speed, and where it crosses."""
    yield f"| model | p | peer | {' | '.join(f'{speed:,}' for speed in SPEEDS)} | within 5% from |"
    yield f"|---|---:|---|{'---:|' * (len(SPEEDS) + 1)}"
    for question, found in panels.items():
        by_system = {curve.system: curve for curve in found}
        for system, name in PEERS.items():
            start = f"| {question.model} | {question.partition_size} | {name} |"
            if system not in by_system:
                needed = (question.missing_nbytes(system) + question.cluster.memory_nbytes) / 2**30
                yield f"{start} does not fit: {needed:,.0f} GiB |{' |' * len(SPEEDS)}"
                continue
            curve = by_system[system]
            cells = " | ".join(f"{ratio:.2f}" for ratio in curve.ratios)
            yield f"{start} {cells} | {_crossing(curve)} |"


def lines_of_crossings(panels: Mapping[Question, Sequence[Curve]]) -> Iterator[str]:
    """Markdown, for docs/which-network.md: from which speed on a peer is within 5%, a column for each."""
    yield f"| model | partition size | {' | '.join(_COLUMNS.values())} |"
    yield f"|---|---:|{'---:|' * len(_COLUMNS)}"
    for question, found in panels.items():
        where = {curve.system: _crossing(curve) for curve in found}
        cells = [where.get(system, "does not fit") for system in _COLUMNS]
        yield f"| {question.model} | {question.partition_size} | {' | '.join(cells)} |"


def _crossing(curve: Curve) -> str:
    where = curve.worth_until
    if where is None:
        return f"over {SPEEDS[-1]:,}"
    if where <= SPEEDS[0]:
        return "at every speed"
    digits = 10 ** max(0, math.floor(math.log10(where)) - 1)
    return f"{round(where / digits) * digits:,}"


def draw(file: Path, panels: Mapping[Question, Sequence[Curve]], theme: Theme) -> None:
    """Small multiples: models side by side, partition sizes below each other."""
    models = list(dict.fromkeys(question.model for question in panels))
    sizes = list(dict.fromkeys(question.partition_size for question in panels))
    cluster = next(iter(panels)).cluster
    with picture(
        file,
        height=3.1 * len(sizes) + 0.5,
        title="From which network on mics pays: a peer's step time relative to mics",
        subtitle=(
            f"{cluster.num_nodes} nodes of {cluster.ranks_per_node} GPUs as fast as an H200, simulated. "
            "Above the band mics is faster. Two micro-batches per step, gradients in float32."
        ),
        theme=theme,
    ) as figure:
        grid = figure.subplots(len(sizes), len(models), sharex=True, sharey=True, squeeze=False)
        for question, found in panels.items():
            axes = grid[sizes.index(question.partition_size)][models.index(question.model)]
            _draw_panel(axes, question, found, theme)
        for axes in grid[-1]:
            axes.set_xlabel("Gbit/s per node")
        for row in grid:
            row[0].set_ylabel("step time, mics = 1")
        handles = [grid[0][0].plot([], [], **_line(system, theme))[0] for system in PEERS]
        figure.legend(handles, list(PEERS.values()), loc="outside lower center", ncols=2, frameon=False)


def _line(system: str, theme: Theme) -> dict[str, Any]:
    """How a peer is drawn; what is no default is dashed."""
    dashed = _OURS[system] != "mics"
    return {
        "color": theme[system],
        "marker": "o",
        "markersize": 3.5 if dashed else 5.5,
        "linewidth": 1.4 if dashed else 2.4,
        "linestyle": (0, (4, 2)) if dashed else "-",
    }


def _draw_panel(axes: Axes, question: Question, found: Sequence[Curve], theme: Theme) -> None:
    axes.axhspan(1 / WORTH, WORTH, color=theme.grid, zorder=0)
    axes.axhline(1.0, color=theme.muted, linewidth=1.2)
    for curve in found:
        axes.plot(SPEEDS, curve.ratios, clip_on=False, **_line(curve.system, theme))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(SPEEDS[::2], [f"{speed:,}" for speed in SPEEDS[::2]])
    axes.set_yticks(_TICKS, [f"{tick:g} x" for tick in _TICKS])
    axes.minorticks_off()
    axes.set_ylim(0.75, 3.6)
    axes.set_xlim(SPEEDS[0], SPEEDS[-1])
    axes.set_title(f"{question.model}, partition {question.partition_size}")
    if question.missing_nbytes("hsdp") > 0:
        words = "HSDP and\nMegatron-FSDP\ndo not fit"
        axes.text(
            0.97, 0.95, words, transform=axes.transAxes, ha="right", va="top", backgroundcolor=theme.page
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", nargs="+", default=list(MODELS), help="names that mics plan knows")
    parser.add_argument("--partition-size", type=int, nargs="+", default=list(PARTITIONS))
    parser.add_argument(
        "--cluster", default=f"{ORDINARY}:64", help="everything but the uplink is taken from it"
    )
    parser.add_argument("--micro-batch", type=int, default=4, help="sequences per GPU and micro-step")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-steps per optimizer step")
    parser.add_argument("--bf16", action="store_true", help="gradients travel in bfloat16")
    parser.add_argument("--picture", type=Path, help="also draw it, light and dark, into this PNG file")
    arguments = parser.parse_args()
    questions = [
        Question(
            model=model,
            partition_size=size,
            micro_batch=arguments.micro_batch,
            accumulation=arguments.accumulation,
            wire_nbytes=2 if arguments.bf16 else 4,
            cluster=find_cluster(arguments.cluster),
        )
        for size in arguments.partition_size
        for model in arguments.model
    ]
    panels = {question: curves(question) for question in questions}
    print("\n".join([*lines_of_table(panels), "", *lines_of_crossings(panels)]))
    if arguments.picture is not None:
        for theme in THEMES:
            file = arguments.picture
            draw(file if theme.name == "light" else file.with_stem(f"{file.stem}-dark"), panels, theme)


if __name__ == "__main__":
    main()

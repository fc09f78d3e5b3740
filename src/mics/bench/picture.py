"""Pictures of a comparison: one step by lanes, systems side by side, and scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from mics.bench.timeline import LANES, Exposure, Timeline
from mics.utils.intervals import Interval, subtract
from mics.utils.numbers import fixed
from mics.utils.picture_style import BLUE, GREEN, GREY, INK, ORANGE, STYLE

_LANE_COLOURS: Final = {
    "compute": GREY,
    "intra": GREEN,
    "inter": BLUE,
    "to host": INK,
    "from host": INK,
}
_ALWAYS_SHOWN: Final = ("compute", "intra", "inter")
_SERIES: Final = (BLUE, ORANGE, GREEN, INK, GREY, "#8a5a9e", "#b5892f")


def draw_timeline(file: Path, timeline: Timeline, found: Exposure, *, title: str) -> None:
    """One step: a lane for compute and for each link; what no computing hides is orange.

    Copies between device and host have lanes where there are any to speak of.
    """
    shown = [lane for lane in LANES if lane in _ALWAYS_SHOWN or found.link_seconds[lane] > 2e-3]
    with mpl.rc_context(STYLE):
        figure = Figure(
            figsize=(12.0, 1.0 + 0.65 * len(shown)), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
        )
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        compute = timeline.busy("compute")
        for row, lane in enumerate(shown):
            busy = timeline.busy(lane)
            axes.broken_barh(_bars(busy), (row - 0.36, 0.72), color=_LANE_COLOURS[lane], linewidth=0)
            if lane != "compute":
                axes.broken_barh(
                    _bars(subtract(busy, compute)), (row - 0.36, 0.72), color=ORANGE, linewidth=0
                )
        seconds = {"compute": found.compute_seconds, **found.link_seconds}
        labels = [
            f"{lane}\n{1e3 * seconds[lane]:.0f} ms"
            + (f", {1e3 * found.exposed_seconds[lane]:.0f} exposed" if lane != "compute" else "")
            for lane in shown
        ]
        axes.set_yticks(range(len(shown)), labels)
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, 1e3 * timeline.seconds)
        axes.set_xlabel("ms; orange: a link is busy and nothing computes")
        axes.set_title(f"{title}: one step, {1e3 * timeline.seconds:.0f} ms")
        figure.savefig(file, dpi=150, facecolor="white")


def draw_systems(
    file: Path, values: Mapping[str, tuple[float, float, float]], *, title: str, label: str
) -> None:
    """A bar for each row of a comparison (median, lowest, highest)."""
    with mpl.rc_context(STYLE):
        height = 1.2 + 0.42 * max(1, len(values))
        figure = Figure(figsize=(9.0, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        names = list(values)
        medians = [values[name][0] for name in names]
        spread = [[m - values[n][1] for m, n in zip(medians, names, strict=True)],
                  [values[n][2] - m for m, n in zip(medians, names, strict=True)]]  # fmt: skip
        colours = [BLUE if name.split()[-1] == "mics" else GREY for name in names]
        axes.barh(names, medians, xerr=spread, color=colours, ecolor=INK, height=0.62)
        for row, median in enumerate(medians):
            axes.annotate(
                fixed(median, 4), (max(values[names[row]][2], median), row), xytext=(4, 0),
                textcoords="offset points", va="center",
            )  # fmt: skip
        axes.invert_yaxis()
        axes.margins(x=0.12)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel(label)
        axes.set_title(title)
        figure.savefig(file, dpi=150, facecolor="white")


def draw_scaling(
    file: Path, series: Mapping[str, Sequence[tuple[int, float]]], *, title: str, label: str
) -> None:
    """One line per system over the number of GPUs."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(8.0, 4.6), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1))
        FigureCanvasAgg(figure)
        axes = figure.subplots()
        for (name, points), colour in zip(series.items(), _SERIES, strict=False):
            worlds, values = zip(*sorted(points), strict=True)
            axes.plot(worlds, values, marker="o", color=colour, label=name)
            axes.annotate(
                f"{values[-1]:.0f}", (worlds[-1], values[-1]), xytext=(6, 0), textcoords="offset points"
            )
        ticks = sorted({world for points in series.values() for world, _ in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(world) for world in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("GPUs")
        axes.set_ylabel(label)
        axes.set_title(title)
        axes.legend()
        figure.savefig(file, dpi=150, facecolor="white")


def _bars(intervals: Sequence[Interval]) -> list[tuple[float, float]]:
    return [(1e3 * start, 1e3 * (end - start)) for start, end in intervals]

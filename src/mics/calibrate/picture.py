"""A calibration as a picture: measured collectives, and the lines that the fitted links give."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullFormatter

from mics.calibrate.fit import LINK_NAMES, TINY_NBYTES, CollectiveTime, LinkName, worst_error
from mics.calibrate.run import Calibration
from mics.cost.clusters import Cluster, speed_of
from mics.cost.collectives import Kind, cost
from mics.utils.numbers import percent
from mics.utils.picture_style import THEMES, Theme, picture

_ROLES: Final = {
    Kind.ALL_GATHER: ("all-gather", "all-gather", "o"),
    Kind.REDUCE_SCATTER: ("reduce-scatter", "reduce-scatter", "s"),
    Kind.ALL_REDUCE: ("all-reduce", "hop 2", "D"),
}
_TITLES: Final = {"intra": "inside a node", "inter": "between nodes"}


def draw_calibration(file: Path, found: Calibration) -> list[Path]:
    """Write ``file`` for light pages and ``-dark`` beside it; returns both."""
    drawn = []
    for theme in THEMES:
        target = file if theme.name == "light" else file.with_name(f"{file.stem}-dark{file.suffix}")
        _draw(target, found, theme)
        drawn.append(target)
    return drawn


def _draw(file: Path, found: Calibration, theme: Theme) -> None:
    cluster = found.cluster
    assert cluster.computing is not None
    divisions = [each for each in LINK_NAMES if any(p.division == each for p in found.points)]
    title = (
        f"Measured collectives and the fitted cost model: {cluster.num_nodes} x {cluster.ranks_per_node} "
        f"ranks, {cluster.computing.device}"
    )
    subtitle = "Points: measured, all groups at once. Lines: the links that mics calibrate wrote."
    with picture(file, height=4.2, title=title, subtitle=subtitle, theme=theme) as figure:
        all_axes = figure.subplots(1, len(divisions), squeeze=False, sharey=True)[0]
        for axes, division in zip(all_axes, divisions, strict=True):
            _draw_link(axes, found, division, theme)
        all_axes[0].set_ylabel("time")


def _draw_link(axes: Axes, found: Calibration, division: LinkName, theme: Theme) -> None:
    points = [point for point in found.points if point.division == division and point.nbytes > TINY_NBYTES]
    link = getattr(found.cluster, division)
    for kind, (name, role, marker) in _ROLES.items():
        own = [point for point in points if point.kind is kind]
        if own:
            sizes, times = _line(found.cluster, own)
            axes.plot(sizes, times, color=theme[role], linewidth=1.8)
            axes.plot(
                [point.nbytes for point in own],
                [point.seconds for point in own],
                marker,
                color=theme[role],
                label=name,
            )
    axes.set_xscale("log", base=4)
    axes.set_yscale("log")
    measured = sorted({point.nbytes for point in points})
    axes.set_xticks(measured[:: 1 + len(measured) // 5])
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _size(value)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _time(value)))
    axes.set_title(
        f"{_TITLES[division]}: {speed_of(link)}\n"
        f"worst point {percent(worst_error(found.cluster, points, division))} off",
    )
    axes.set_xlabel("bytes of the whole buffer")
    axes.legend(loc="upper left")


def _line(cluster: Cluster, points: Sequence[CollectiveTime]) -> tuple[list[float], list[float]]:
    first, last = min(p.nbytes for p in points), max(p.nbytes for p in points)
    sizes = [float(size) for size in np.geomspace(first, last, 60)]
    times = [cost(cluster, points[0].kind, points[0].span, int(size)).seconds for size in sizes]
    return sizes, times


def _size(nbytes: float) -> str:
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if nbytes >= unit:
            return f"{nbytes / unit:.0f} {name}"
    return f"{nbytes:.0f}"


def _time(seconds: float) -> str:
    for unit, name in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if seconds >= 0.999 * unit:
            return f"{seconds / unit:.0f} {name}"
    return f"{seconds:.0e}"

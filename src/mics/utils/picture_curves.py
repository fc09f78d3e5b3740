"""Systems over the number of GPUs: a line for each, named where it ends."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from matplotlib.axes import Axes

from mics.utils.numbers import fixed
from mics.utils.picture_style import TEXT, Theme, spread

VARIANTS: Final = (
    "hsdp-kept",
    "mics-partition",
    "mics-host",
    "mics-uncompressed",
    "mics-int8",
    "mics-int4",
    "megatron-fsdp-bf16",
    "deepspeed-zero2",
)
"""Of another system: drawn fainter."""

Curves = Mapping[str, Sequence[tuple[int, float]]]
"""By system, (GPUs, value)."""


def draw_curves(
    axes: Axes, curves: Curves, *, theme: Theme, words: Mapping[str, str] | None = None, unit: str = ""
) -> None:
    """From 0 up, over a logarithmic number of GPUs. ``words``: names of systems, if not their own."""
    found = {system: sorted(points) for system, points in curves.items() if points}
    for system, points in found.items():
        worlds, values = zip(*points, strict=True)
        variant = system in VARIANTS
        axes.plot(
            worlds,
            values,
            marker="o",
            color=theme[system],
            linestyle=(0, (4, 2)) if variant else "-",
            linewidth=1.4 if variant else 2.6,
            markersize=4.5 if variant else 7.0,
            zorder=5 if system == "mics" else 4 if variant else 3,
            clip_on=False,
        )
    ticks = sorted({world for points in found.values() for world, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{world:,}" for world in ticks])
    axes.minorticks_off()
    if len(ticks) > 1:  # up to the last point: names stand beside the grid, not on it
        axes.set_xlim(ticks[0] * (ticks[0] / ticks[-1]) ** 0.04, ticks[-1])
    axes.set_xlabel("GPUs")
    axes.set_ylim(0, 1.08 * max((value for points in found.values() for _, value in points), default=1.0))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    ends = {system: points[-1] for system, points in found.items()}
    _name_ends(axes, ends, words or {}, unit, theme)


def _name_ends(
    axes: Axes, ends: Mapping[str, tuple[int, float]], words: Mapping[str, str], unit: str, theme: Theme
) -> None:
    """To the right of all lines, kept apart from each other."""
    figure = axes.get_figure(root=True)
    if not ends or figure is None:
        return
    low, high = axes.get_ylim()
    gap = 1.4 * TEXT * (high - low) / (72 * axes.get_window_extent().height / figure.dpi)
    places = spread([value for _, value in ends.values()], gap)
    last = max(world for world, _ in ends.values())
    for (system, (world, value)), place in zip(ends.items(), places, strict=True):
        until = "" if world == last else f" at {world:,} GPUs"
        axes.annotate(
            f"{words.get(system, system)}: {fixed(value)}{unit}{until}",
            (last, place),
            (12, 0),
            textcoords="offset points",
            va="center",
            annotation_clip=False,
            color=theme[system],
            fontweight="bold" if system == "mics" else "normal",
        )

"""Pictures like those of the documents: throughput as bars, weak scaling with linear frames, mechanisms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from benchmarks.published import ablations, trillion
from benchmarks.published.dated import latest
from benchmarks.published.planned import setting_of
from benchmarks.published.predict import Range, usual_point
from benchmarks.published.results import HOST_BOUND, IN_NO_PACKAGE, RESULTS, Result, newest
from benchmarks.published.rows import ROWS, Measure, Point, Row, rows_of
from matplotlib.axes import Axes

from mics.cost.memory import USABLE
from mics.cost.setting import Setting
from mics.planner.systems import SYSTEMS, predict_quickly
from mics.utils.picture_style import THEMES, Theme, picture

DOCS: Final = Path(__file__).resolve().parents[2] / "docs"
_WORLDS: Final = (16, 32, 64)  # nodes of 8 GPUs
_SCALED: Final = {
    "mics-published": "MiCS as published",
    "zero3-before": "ZeRO-3 as published",
    "mics": "mics today",
    "fsdp2": "FSDP2 today",
}
_ROLES: Final = {"mics-published": "mics-partition", "zero3-before": "deepspeed"}


def themed(file: Path, theme: Theme) -> Path:
    return file if theme.name == "light" else file.with_stem(f"{file.stem}-{theme.name}")


def draw_throughput(file: Path, rows: Sequence[Row], results: dict[str, Result], theme: Theme) -> bool:
    """A group of bars for each published figure, its emulation twice. Whether there is anything."""
    shown = [row for row in rows if row.measure is Measure.TFLOPS and row.experiment in results]
    if not shown:
        return False
    with picture(
        file,
        height=0.8 + 1.0 * len(shown),
        title="TFLOP/s per GPU: published, predicted, emulated on one GPU",
        subtitle="With recomputation, as the documents count. Lines reach over what a document leaves open.",
        theme=theme,
    ) as figure:
        axes = figure.subplots()
        most = 0.0
        for place, row in enumerate(shown):
            result = results[row.experiment]
            bars = (
                (Range(low=row.published, high=row.published, num_points=1, num_fitting=1), theme.muted),
                (result.predicted[row.key], theme["mics-partition"]),
                (result.with_kernels_of_2022(row), theme["mics"]),
                (result.emulated(row), theme["fsdp2"]),
            )
            if result.emulated(row) is None:
                bars = bars[:3]
            for number, (found, colour) in enumerate(bars):
                why = result.why_not(row)
                missing = why if why in (HOST_BOUND, IN_NO_PACKAGE, IN_NO_PACKAGE) else "not run"
                _bar(axes, place + 0.21 * (number - 1.5), found, colour, theme, missing)
                most = max(most, 0.0 if found is None else found.high)
        axes.set_yticks(range(len(shown)), [row.what.replace(", ", "\n", 1) for row in shown])
        axes.set_ylim(len(shown) - 0.4, -0.6)
        axes.set_xlim(0, 1.25 * most)
        axes.grid(visible=False, axis="y")
        legend = {
            "published": theme.muted,
            "planner": theme["mics-partition"],
            "emulated, kernels of 2022": theme["mics"],
            "emulated": theme["fsdp2"],
        }
        handles: list[Any] = [axes.barh(0, 0, color=colour) for colour in legend.values()]
        figure.legend(handles, list(legend), loc="outside lower center", ncols=4, frameon=False)
    return True


def _bar(axes: Axes, place: float, found: Range | None, colour: str, theme: Theme, missing: str) -> None:
    if found is None:
        axes.annotate(missing, (0, place), (6, 0), textcoords="offset points", va="center", color=theme.muted)
        return
    axes.barh(place, found.high, height=0.19, color=colour)
    if found.high > 1.01 * found.low:
        axes.plot([found.low, found.high], [place, place], color=theme.ink, linewidth=1.4, marker="|")
    words = (
        f"{found.high:,.0f}" if found.high <= 1.01 * found.low else f"{found.low:,.0f} to {found.high:,.0f}"
    )
    axes.annotate(words, (found.high, place), (9, 0), textcoords="offset points", va="center")


def scaling_points() -> dict[str, list[tuple[int, float]]]:
    """100B with the same setting on each GPU: predicted TFLOP/s by system and GPUs."""
    row = next(row for row in rows_of("gpt-100b") if row.system == "mics-published")
    point = usual_point(row)
    found = {}
    for system in _SCALED:
        settings = _with_room([setting_of(_on(point, system, nodes)) for nodes in _WORLDS], system)
        found[system] = [
            (each.cluster.world_size, predict_quickly(each, system).hardware_tflops) for each in settings
        ]
    return found


def _with_room(settings: Sequence[Setting], system: str) -> list[Setting]:
    """The same on all sizes, with fewer units ahead, then smaller micro-steps, until it fits everywhere."""
    micro_batch = settings[0].micro_batch
    while micro_batch:
        for ahead in (None, 1):
            accumulation = settings[0].micro_batch * settings[0].accumulation // micro_batch
            tried = [
                replace(each, prefetch=ahead, micro_batch=micro_batch, accumulation=accumulation)
                for each in settings
            ]
            if all(SYSTEMS[system].need(each).peak <= each.cluster.memory_nbytes * USABLE for each in tried):
                return tried
        micro_batch //= 2
    return []


def _on(point: Point, system: str, nodes: int) -> Point:
    world = 8 * nodes
    kernels = "current" if system in ("mics", "fsdp2") else point.kernels
    size = point.partition_size if system.startswith("mics") else world
    cluster = f"{point.cluster.partition(':')[0]}:{nodes}"
    return replace(point, system=system, cluster=cluster, partition_size=size, kernels=kernels)


def draw_scaling(file: Path, found: dict[str, list[tuple[int, float]]], theme: Theme) -> None:
    """Total throughput as bars; frames show what linear scaling from the smallest cluster would be."""
    with picture(
        file,
        height=4.0,
        title="100B on 128 to 512 A100s: weak scaling",
        subtitle=(
            "PFLOP/s of all GPUs, predicted: as many sequences on each, in micro-batches that the system has "
            "room for. Frames: linear from 128 GPUs."
        ),
        theme=theme,
    ) as figure:
        axes = figure.subplots()
        shown = {system: points for system, points in found.items() if points}
        width = 0.8 / max(1, len(shown))
        for number, (system, points) in enumerate(shown.items()):
            first = points[0][1]
            for world, tflops in points:
                place = _WORLDS.index(world // 8) + width * (number - (len(shown) - 1) / 2)
                colour = theme[_ROLES.get(system, system)]
                axes.bar(place, world * tflops / 1e3, width=0.86 * width, color=colour)
                axes.bar(
                    place,
                    world * first / 1e3,
                    width=0.86 * width,
                    fill=False,
                    edgecolor=theme.ink,
                    linewidth=1.2,
                )
                axes.annotate(
                    f"{100 * tflops / first:.0f}%",
                    (place, world * first / 1e3),
                    (0, 4),
                    textcoords="offset points",
                    ha="center",
                )
        axes.set_xticks(range(len(_WORLDS)), [f"{8 * nodes} GPUs" for nodes in _WORLDS])
        axes.set_ylabel("PFLOP/s")
        axes.grid(visible=False, axis="x")
        handles: list[Any] = [axes.bar(0, 0, color=theme[_ROLES.get(system, system)]) for system in shown]
        figure.legend(
            handles,
            [_SCALED[system] for system in shown],
            loc="outside lower center",
            ncols=len(shown),
            frameon=False,
        )


def draw_ablations(file: Path, found: Sequence[ablations.Found], theme: Theme) -> None:
    """How much longer a step takes without each mechanism, a panel for each setting."""
    places = list(dict.fromkeys(row.place for row in found))
    words = {way.key: way.mechanism for way in ablations.WAYS}
    panels = []
    for place in places:
        rows = [row for row in found if row.place == place and row.limit_nbytes is None and row.error is None]
        default = next(row for row in rows if row.key == "default")
        shares = {
            words[row.key]: 100 * (row.median / default.median - 1)
            for row in rows
            if row.key in words and row.key != "default"
        }
        panels.append((place, default.median, shares))
    heights = [len(shares) + 1 for _, _, shares in panels]
    with picture(
        file,
        height=0.5 + 0.4 * sum(heights),
        title="What each mechanism is worth: a step without it, in per cent longer",
        subtitle="One mechanism taken away at a time, everything else as it is by default.",
        theme=theme,
    ) as figure:
        grid = figure.subplots(len(panels), 1, squeeze=False, height_ratios=heights)
        for (axes,), (place, seconds, shares) in zip(grid, panels, strict=True):
            axes.barh(list(shares), list(shares.values()), color=theme["mics"], height=0.66)
            axes.invert_yaxis()
            axes.set_xlim(min(0.0, 1.3 * min(shares.values())), 1.25 * max(1.0, *shares.values()))
            axes.set_title(f"{place}: {1e3 * seconds:,.0f} ms with everything on")
            axes.grid(visible=False, axis="y")
            for name, share in shares.items():
                axes.annotate(
                    f"{share:+.1f}%", (max(0.0, share), name), (6, 0), textcoords="offset points", va="center"
                )


def main(docs: Path = DOCS, folder: Path = RESULTS) -> None:
    """All pictures of docs/published.md that there are results for."""
    results = {row.experiment: newest(row.experiment, folder) for row in ROWS}
    known = {name: result for name, result in results.items() if result is not None}
    scaling = scaling_points()
    file, whole = latest(folder, "ablations"), latest(folder, trillion.THEME)
    for theme in THEMES:
        draw_throughput(themed(docs / "published-throughput.png", theme), ROWS, known, theme)
        draw_scaling(themed(docs / "published-scaling.png", theme), scaling, theme)
        if whole is not None:
            trillion.draw_memory(themed(docs / "gpt-1t-memory.png", theme), trillion.read(whole), theme)
        if file is not None:
            draw_ablations(themed(docs / "published-ablations.png", theme), ablations.read(file), theme)

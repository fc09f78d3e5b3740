"""A run as a picture: loss, memory and the bytes each kind of group moved."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from mics.train.metrics import Measurement
from mics.utils.numbers import GIB, volume
from mics.utils.picture_style import BLUE, GREEN, ORANGE, STYLE


def draw_run(
    file: Path,
    *,
    measurements: Sequence[Measurement],
    validations: Sequence[tuple[int, float]],
    title: str,
    on_gpu: bool,
) -> None:
    """Write the picture of a run as a PNG. Needs no screen."""
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(11.0, 5.6), layout=ConstrainedLayoutEngine(w_pad=0.12, h_pad=0.1))
        FigureCanvasAgg(figure)
        axes = figure.subplot_mosaic([["loss", "memory"], ["loss", "bytes"]], width_ratios=[1.5, 1.0])
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.012, ha="left")
        _draw_loss(axes["loss"], measurements, validations)
        _draw_memory(axes["memory"], measurements, on_gpu=on_gpu)
        _draw_bytes(axes["bytes"], measurements)
        figure.savefig(file, dpi=150, facecolor="white")


def _draw_loss(
    axes: Axes, measurements: Sequence[Measurement], validations: Sequence[tuple[int, float]]
) -> None:
    steps = [measurement.step for measurement in measurements]
    losses = [measurement.loss for measurement in measurements]
    axes.plot(steps, losses, color=BLUE, linewidth=2, label="training")
    axes.annotate(
        f"{losses[-1]:.2f}", (steps[-1], losses[-1]), (6, -10), textcoords="offset points", color=BLUE
    )
    if validations:
        at, values = zip(*validations, strict=True)
        axes.plot(at, values, color=ORANGE, linewidth=1.2, marker="o", markersize=5, label="validation")
        axes.annotate(
            f"{values[-1]:.2f}", (at[-1], values[-1]), (6, 4), textcoords="offset points", color=ORANGE
        )
    axes.set_title("Loss")
    axes.set_xlabel("step")
    axes.set_ylabel("nats per token")
    axes.margins(x=0.06)
    axes.legend(loc="upper right")


def _draw_memory(axes: Axes, measurements: Sequence[Measurement], *, on_gpu: bool) -> None:
    steps = [measurement.step for measurement in measurements]
    scale = GIB if max(measurement.memory_nbytes for measurement in measurements) >= GIB else 2**20
    memory = [measurement.memory_nbytes / scale for measurement in measurements]
    axes.fill_between(steps, memory, color=GREEN, alpha=0.25, linewidth=0)
    axes.plot(steps, memory, color=GREEN, linewidth=2)
    axes.set_ylim(0, max(memory) * 1.15)
    axes.set_title(
        "Memory of rank 0: peak of its tensors" if on_gpu else "Memory of rank 0: the whole process"
    )
    axes.set_xlabel("step")
    axes.set_ylabel("GiB" if scale == GIB else "MiB")


def _draw_bytes(axes: Axes, measurements: Sequence[Measurement]) -> None:
    """One bar for each kind of group: steps are alike, so their mean says more than a flat line."""
    later = measurements[1:] or measurements  # the first one holds what happens only once
    bars = (
        ("inside the\npartition group", BLUE, [measurement.partition_nbytes for measurement in later]),
        ("across the\nreplication group", ORANGE, [measurement.replication_nbytes for measurement in later]),
    )
    means = [sum(values) / len(values) for _, _, values in bars]
    axes.barh([name for name, _, _ in bars], means, color=[color for _, color, _ in bars], height=0.55)
    for position, mean in enumerate(means):
        axes.annotate(volume(mean), (mean, position), (6, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(*means, 1.0) * 1.3)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Bytes that rank 0 sends per step")

"""A run as a picture: loss, throughput, memory, learning rate, and the bytes each kind of group moved."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median

from matplotlib.axes import Axes

from mics.train.metrics import Measurement
from mics.utils.numbers import GIB, count, duration, fixed, plural, volume, whole
from mics.utils.picture_style import LIGHT, Theme, picture


def draw_run(
    file: Path,
    *,
    measurements: Sequence[Measurement],
    validations: Sequence[tuple[int, float]],
    title: str,
    on_gpu: bool,
    theme: Theme = LIGHT,
) -> None:
    """Write the picture of a run as a PNG. Needs no screen."""
    subtitle = _in_words(measurements, on_gpu=on_gpu)
    with picture(file, height=7.2, title=title, subtitle=subtitle, theme=theme) as figure:
        axes = figure.subplot_mosaic(
            [["loss", "throughput"], ["loss", "memory"], ["rate", "bytes"]],
            width_ratios=[1.25, 1.0],
            height_ratios=[1.0, 1.0, 0.85],
        )
        _draw_loss(axes["loss"], measurements, validations, theme)
        _draw_throughput(axes["throughput"], measurements, theme)
        _draw_memory(axes["memory"], measurements, theme, on_gpu=on_gpu)
        _draw_rate(axes["rate"], measurements, theme)
        _draw_bytes(axes["bytes"], measurements, theme)


def _in_words(measurements: Sequence[Measurement], *, on_gpu: bool) -> str:
    """``200 steps in 45 min: 12,300 tokens/s, 0.451 TFLOP/s of all ranks together (medians)``."""
    last, later = measurements[-1], _later(measurements)
    tflops = fixed(median(measurement.tflops for measurement in later))
    whose = "per GPU" if on_gpu else "of all ranks together"
    return (
        f"{plural(last.step, 'step')} in {duration(last.seconds)}: {_speed(later)} tokens/s, {tflops} model "
        f"TFLOP/s {whose} (medians)"
    )


def _later(measurements: Sequence[Measurement]) -> Sequence[Measurement]:
    """Without the first one, which holds what happens only once."""
    return measurements[1:] or measurements


def _speed(measurements: Sequence[Measurement]) -> str:
    speed = median(measurement.tokens_per_second for measurement in measurements)
    return whole(speed) if speed >= 100 else fixed(speed)


def _steps(measurements: Sequence[Measurement]) -> list[int]:
    return [measurement.step for measurement in measurements]


def _draw_loss(
    axes: Axes, measurements: Sequence[Measurement], validations: Sequence[tuple[int, float]], theme: Theme
) -> None:
    losses = [measurement.loss for measurement in measurements]
    colours = {"training": theme["mics"], "validation": theme["hsdp"]}
    axes.plot(
        _steps(measurements), losses, color=colours["training"], label=f"training, last {losses[-1]:.2f}"
    )
    if validations:
        at, values = zip(*validations, strict=True)
        axes.plot(
            at, values, color=colours["validation"], marker="o", label=f"validation, last {values[-1]:.2f}"
        )
    axes.set_title("Loss, nats per token")
    axes.set_xlabel("step")
    axes.legend(loc="upper right")


def _draw_throughput(axes: Axes, measurements: Sequence[Measurement], theme: Theme) -> None:
    speeds = [measurement.tokens_per_second for measurement in measurements]
    axes.plot(_steps(measurements), speeds, color=theme["mics"])
    axes.set_ylim(0, 1.15 * max(speeds))
    axes.yaxis.set_major_formatter(lambda value, _: count(value))
    axes.set_title("Throughput, tokens/s of all ranks")


def _draw_memory(axes: Axes, measurements: Sequence[Measurement], theme: Theme, *, on_gpu: bool) -> None:
    scale = GIB if max(measurement.memory_nbytes for measurement in measurements) >= GIB else 2**20
    unit = "GiB" if scale == GIB else "MiB"
    memory = [measurement.memory_nbytes / scale for measurement in measurements]
    steps = _steps(measurements)
    axes.fill_between(steps, memory, color=theme["fsdp2"], alpha=0.2, linewidth=0)
    axes.plot(steps, memory, color=theme["fsdp2"])
    axes.set_ylim(0, max(memory) * 1.15)
    axes.set_xlabel("step")
    what = "GPU peak allocated" if on_gpu else "process memory (RSS)"
    axes.set_title(f"Rank 0: {what}, {unit}")


def _draw_rate(axes: Axes, measurements: Sequence[Measurement], theme: Theme) -> None:
    rates = [measurement.learning_rate for measurement in measurements]
    axes.plot(_steps(measurements), rates, color=theme["optimizer"])
    axes.set_ylim(0, 1.15 * max(*rates, 1e-30))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.set_title("Learning rate")
    axes.set_xlabel("step")


def _draw_bytes(axes: Axes, measurements: Sequence[Measurement], theme: Theme) -> None:
    """One bar for each kind of group: steps are alike, so their mean says more than a flat line."""
    later = _later(measurements)
    bars = (
        ("partition\ngroup", "all-gather", [measurement.partition_nbytes for measurement in later]),
        ("replicas", "hop 2", [measurement.replication_nbytes for measurement in later]),
    )
    means = [sum(values) / len(values) for _, _, values in bars]
    axes.barh([name for name, _, _ in bars], means, color=[theme[role] for _, role, _ in bars], height=0.6)
    for position, mean in enumerate(means):
        axes.annotate(volume(mean), (mean, position), (6, 0), textcoords="offset points", va="center")
    axes.set_xlim(0, max(*means, 1.0) * 1.35)
    axes.invert_yaxis()
    axes.grid(visible=False)
    axes.set_xticks([])
    axes.spines["bottom"].set_visible(False)
    axes.tick_params(axis="y", length=0)
    axes.set_title("Rank 0: bytes sent per step to its")

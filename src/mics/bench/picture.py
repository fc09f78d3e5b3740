"""Pictures of a comparison: one step by lanes, systems side by side, and scaling."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from matplotlib.axes import Axes

from mics.bench.timeline import LANES, Exposure, Timeline
from mics.utils.intervals import Interval, subtract, total
from mics.utils.numbers import fixed, seconds
from mics.utils.picture_curves import VARIANTS, draw_curves
from mics.utils.picture_lanes import draw_lanes, draw_legend, label_time, mark_micro_batches
from mics.utils.picture_style import LIGHT, Theme, picture

_SHORT: Final = 2e-3  # seconds: copies to the host below that are batches and losses
_SLIVER: Final = 5e-3  # of a step: what nobody sees needs no name
_NAMES: Final = {
    "compute": "compute",
    "intra": "inside the node",
    "inter": "between nodes",
    "to host": "to host memory",
    "from host": "from host memory",
}


def draw_timeline(
    file: Path,
    timeline: Timeline,
    found: Exposure,
    *,
    title: str,
    subtitle: str = "",
    theme: Theme = LIGHT,
) -> None:
    """One step: a lane for computing by phase and for each link by purpose, and what no computing hides.

    A link that carried nothing has no lane, nor have copies to the host that are too short to speak of.
    """
    least = {"compute": -1.0, "intra": 0.0, "inter": 0.0, "to host": _SHORT, "from host": _SHORT}
    shown = [lane for lane in LANES if total(timeline.busy(lane)) > least[lane]]
    compute = timeline.busy("compute")
    lanes, exposed = {}, {}
    for lane in shown:
        label = _lane_label(lane, found)
        lanes[label] = _computed(timeline) if lane == "compute" else timeline.by_role(lane)
        if lane != "compute":
            exposed[label] = subtract(timeline.busy(lane), compute)
    spans = timeline.micro_batches()
    rows = len(lanes) + (0.5 if len(spans) > 1 else 0)
    heading = f"{title}: step {seconds(timeline.seconds)}"
    with picture(file, height=1.75 + 0.72 * rows, title=heading, subtitle=subtitle, theme=theme) as figure:
        axes = figure.subplots()
        draw_lanes(axes, lanes, exposed, seconds=timeline.seconds, theme=theme)
        if len(spans) > 1:
            mark_micro_batches(axes, spans, seconds=timeline.seconds, theme=theme)
        label_time(axes)
        roles = {
            role
            for parts in lanes.values()
            for role, intervals in parts.items()
            if total(intervals) > _SLIVER * timeline.seconds or role != "other"
        }
        draw_legend(axes, roles | ({"exposed"} if any(exposed.values()) else set()), theme=theme)


def _lane_label(lane: str, found: Exposure) -> str:
    if lane == "compute":
        return f"{_NAMES[lane]}\n{seconds(found.compute_seconds)}"
    busy, exposed = found.link_seconds[lane], found.exposed_seconds[lane]
    return f"{_NAMES[lane]}\n{seconds(busy)}, {seconds(exposed)} exposed"


def _computed(timeline: Timeline) -> dict[str, list[Interval]]:
    """By kind of phase."""
    found: dict[str, list[Interval]] = {}
    for phase, intervals in timeline.by_phase().items():
        found.setdefault("other" if phase is None else phase.kind, []).extend(intervals)
    return found


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One row of a comparison: a system in a setting."""

    system: str
    name: str
    setting: str
    """What tells its group of bars from others; all bars of a group follow each other."""
    median: float
    low: float
    high: float


def draw_systems(
    file: Path, bars: Sequence[Bar], *, title: str, subtitle: str = "", label: str, theme: Theme = LIGHT
) -> None:
    """A bar for each row of a comparison, under its setting if there are several."""
    settings = list(dict.fromkeys(bar.setting for bar in bars))
    places, heads, place = [], {}, 0.0
    for setting in settings:
        if len(settings) > 1:
            heads[setting] = place
            place += 0.9
        for _ in [bar for bar in bars if bar.setting == setting]:
            places.append(place)
            place += 1.0
        place += 0.25
    with picture(file, height=1.0 + 0.36 * place, title=title, subtitle=subtitle, theme=theme) as figure:
        axes = figure.subplots()
        _draw_bars(axes, bars, places, theme)
        for setting, at in heads.items():
            axes.annotate(
                setting, (0, at), (7, 0), textcoords="offset points", va="center", fontweight="bold"
            )
        axes.set_ylim(place - 0.4, -0.7)
        axes.set_xlabel(label)


def _draw_bars(axes: Axes, bars: Sequence[Bar], places: Sequence[float], theme: Theme) -> None:
    medians = [bar.median for bar in bars]
    spreads = [[bar.median - bar.low for bar in bars], [bar.high - bar.median for bar in bars]]
    axes.barh(
        places,
        medians,
        xerr=spreads,
        color=[(theme[bar.system], 0.55 if bar.system in VARIANTS else 1.0) for bar in bars],
        error_kw={"ecolor": theme.ink, "elinewidth": 1.4, "capsize": 3.0},
        height=0.68,
    )
    for bar, place in zip(bars, places, strict=True):
        axes.annotate(
            fixed(bar.median, 3),
            (bar.high, place),
            (9, 0),
            textcoords="offset points",
            va="center",
            fontweight="bold" if bar.system == "mics" else "normal",
        )
    axes.set_yticks(places, [bar.name for bar in bars])
    axes.tick_params(axis="y", length=0)
    axes.set_xlim(0, 1.1 * max([bar.high for bar in bars], default=1.0))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,g}")
    axes.grid(visible=False)  # every bar has its value


def draw_scaling(
    file: Path,
    series: Mapping[str, Sequence[tuple[int, float]]],
    *,
    title: str,
    subtitle: str = "",
    label: str,
    words: Mapping[str, str] | None = None,
    theme: Theme = LIGHT,
) -> None:
    """One line per system over the number of GPUs, named at its end, in ``words`` if not its own."""
    with picture(file, height=4.6, title=title, subtitle=subtitle, theme=theme) as figure:
        axes = figure.subplots()
        draw_curves(axes, series, theme=theme, words=words)
        axes.set_ylabel(label)

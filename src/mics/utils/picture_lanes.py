"""One step as lanes: what was busy when, and with what."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, groupby, pairwise
from statistics import median
from typing import Final

from matplotlib.axes import Axes
from matplotlib.patches import Patch, PathPatch
from matplotlib.path import Path

from mics.utils.intervals import Interval, union
from mics.utils.picture_style import WORDS, Theme

_NUM_BINS: Final = 1000  # a pixel or two each
_VISIBLE: Final = 4  # bins from one piece of work to the next
_MANY: Final = 40  # pieces of work
_HEIGHT: Final = 0.66  # of a lane that is busy all the time; the next one is 1 below
_STRIP: Final = 0.13  # under it, where it is exposed
_LEGEND_COLUMNS: Final = 3

Parts = Mapping[str, Sequence[Interval]]
"""By role, when it was at work; roles do not overlap."""

_MANY_SECONDS: Final = 10.0


def draw_lanes(
    axes: Axes,
    lanes: Mapping[str, Parts],
    exposed: Mapping[str, Sequence[Interval]],
    *,
    seconds: float,
    theme: Theme,
) -> None:
    """A lane for each label, the first on top. Its height says what share of a moment it was busy.

    What is exposed is a strip under its lane.
    """
    for row, (label, parts) in enumerate(lanes.items()):
        roles = [role for role in WORDS if parts.get(role)]
        strip = _shares(exposed.get(label, ()), seconds)
        busy = union(interval for role in roles for interval in parts[role])
        *shares, strip = _evened([*(_shares(parts[role], seconds) for role in roles), strip], busy, seconds)
        base = [row + _HEIGHT / 2] * _NUM_BINS
        for role, height in zip(roles, shares, strict=True):
            top = [low - _HEIGHT * share for low, share in zip(base, height, strict=True)]
            _fill(axes, base, top, seconds=seconds, colour=theme[role])
            base = top
        base = [row + _HEIGHT / 2 + 0.03] * _NUM_BINS
        low = [upper + _STRIP * share for upper, share in zip(base, strip, strict=True)]
        _fill(axes, base, low, seconds=seconds, colour=theme["exposed"])
    axes.set_yticks(range(len(lanes)), list(lanes), linespacing=1.15)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(lanes) - 0.42, -0.5)
    axes.set_xlim(0, seconds)
    axes.grid(axis="y", visible=False)
    axes.spines["left"].set_visible(False)


def label_time(axes: Axes, unit: str | None = None) -> None:
    """Name the axis under lanes, which is in seconds; without a unit, milliseconds where there are few."""
    if unit is None:
        unit = "ms" if axes.get_xlim()[1] < _MANY_SECONDS else "s"
    if unit == "ms":
        axes.xaxis.set_major_formatter(lambda moment, _: f"{1e3 * moment:,g}")
    axes.set_xlabel(f"{unit}; the height of a lane is the share of time that it is busy")


def mark_micro_batches(axes: Axes, spans: Sequence[Interval], *, seconds: float, theme: Theme) -> None:
    """A bracket over the lanes for each micro-batch, named as far as there is room."""
    top, high = -0.5, -0.86
    axes.set_ylim(axes.get_ylim()[0], high)
    shortest = min((end - start for start, end in spans), default=0.0) / seconds
    for number, (start, end) in enumerate(spans, 1):
        inset = 0.002 * seconds
        axes.plot(
            [start + inset, start + inset, end - inset, end - inset],
            [top + 0.06, top - 0.04, top - 0.04, top + 0.06],
            color=theme.muted,
            linewidth=1.2,
            clip_on=False,
        )
        label = f"micro-batch {number}" if shortest > 0.16 else str(number) if shortest > 0.04 else ""
        axes.text(
            (start + end) / 2,
            top - 0.1,
            label,
            ha="center",
            va="bottom",
            color=theme.muted,
            bbox={"color": theme.page, "pad": 1.0},
        )
        if number > 1:
            axes.axvline(start, color=theme.muted, linewidth=0.9, linestyle=(0, (2, 3)), zorder=3)


def draw_legend(axes: Axes, roles: Iterable[str], *, theme: Theme) -> None:
    """Under the picture, in the order of a step."""
    wanted = set(roles)
    axes.figure.legend(
        handles=[Patch(color=theme[role], label=words) for role, words in WORDS.items() if role in wanted],
        ncols=_LEGEND_COLUMNS,
        loc="outside lower left",
        handlelength=1.1,
        columnspacing=1.6,
    )


def _fill(axes: Axes, one: Sequence[float], other: Sequence[float], *, seconds: float, colour: str) -> None:
    """The area between two heights of each bin, as one shape of few rectangles."""
    corners: list[tuple[float, float]] = []
    levels = [(round(a, 2), round(b, 2)) for a, b in zip(one, other, strict=True)]
    at = 0
    for (low, high), run in groupby(levels):
        until = at + len(list(run))
        if low != high:
            left, right = (seconds * number / _NUM_BINS for number in (at, until))
            corners += [(left, low), (right, low), (right, high), (left, high), (left, low)]
        at = until
    if corners:
        codes = [Path.MOVETO, *[Path.LINETO] * 3, Path.CLOSEPOLY] * (len(corners) // 5)
        axes.add_patch(PathPatch(Path(corners, codes), facecolor=colour, linewidth=0))


def _evened(heights: list[list[float]], busy: Sequence[Interval], seconds: float) -> list[list[float]]:
    """Means over several bins where work comes and goes faster than one can see, so that it does not flicker.

    Where the lane is busy or idle for longer, everything stays as it is, and edges stay sharp.
    """
    if len(busy) < _MANY:
        return heights
    period = median(after[0] - before[0] for before, after in pairwise(busy)) * _NUM_BINS / seconds
    if period > _VISIBLE:
        return heights
    window = max(1, round(8 * period))
    total, near = _shares(busy, seconds), round(period) + 1
    sharp = []
    for number in range(_NUM_BINS):
        around = total[max(0, number - near) : number + near + 1]
        sharp.append(max(around) == 0 or min(total[max(0, number - 1) : number + 2]) > 0.99)
    return [
        [raw if keep else mean for raw, mean, keep in zip(height, _means(height, window), sharp, strict=True)]
        for height in heights
    ]


def _means(shares: list[float], window: int) -> list[float]:
    """Of the bins around each."""
    sums = [0.0, *accumulate(shares)]
    found = []
    for number in range(len(shares)):
        first = max(0, number - window // 2)
        last = min(len(shares), first + window)
        found.append((sums[last] - sums[first]) / (last - first))
    return found


def _shares(intervals: Iterable[Interval], seconds: float) -> list[float]:
    """Of each bin, how much of it is in the intervals, which do not overlap."""
    found = [0.0] * _NUM_BINS
    if seconds <= 0:
        return found
    for start, end in intervals:
        low, high = (max(0.0, min(1.0, moment / seconds)) * _NUM_BINS for moment in (start, end))
        for number in range(int(low), min(_NUM_BINS, int(high) + 1)):
            found[number] += max(0.0, min(high, number + 1) - max(low, number))
    return [min(1.0, share) for share in found]

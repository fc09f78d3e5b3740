"""The pictures of the planner's page: memory, one step, and what more nodes gain and cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle, pairwise
from typing import Final, Literal

from matplotlib.axes import Axes

from mics.planner.answer import Answer
from mics.planner.simulate import Task
from mics.planner.sweep import Sweep
from mics.planner.text import lanes_of
from mics.utils.intervals import Interval, subtract, union
from mics.utils.numbers import GIB, count, days, dollars, in_gib, memory, seconds, whole
from mics.utils.picture_lanes import draw_lanes, draw_legend, label_time, mark_micro_batches
from mics.utils.picture_style import Theme

_TERMS: Final = (
    "backward",
    "forward",
    "hop 2",
    "optimizer",
    "all-gather",
    "reduce-scatter",
    "host copy",
    "refresh",
    "recomputation",
    "other",
)
"""Colours of the terms of memory: neighbours differ."""
_LANES: Final = {
    "intra": "inside the node",
    "inter": "between nodes",
    "to host": "to host memory",
    "from host": "from host memory",
}
_ROLES: Final = {
    "gather": "all-gather",
    "reduce": "reduce-scatter",
    "hop": "hop 2",
    "new": "refresh",
    "moves": "refresh",
}
"""By the first word of a transfer's name."""


def draw_memory(axes: Axes, found: Answer, theme: Theme) -> None:
    """Terms from left to right, and how much there is."""
    left = 0.0
    terms = found.best.memory.on_device()
    for (name, nbytes), role in zip(terms.items(), cycle(_TERMS), strict=False):
        axes.barh(0, nbytes / GIB, left=left, color=theme[role], label=f"{name} {in_gib(nbytes)}", height=1.0)
        left += nbytes / GIB
    limit = found.found.request.limit
    axes.plot([limit / GIB] * 2, [-0.5, 0.62], color=theme.ink, linestyle=(0, (4, 2)), linewidth=1.6)
    right = limit / GIB > 0.85 * max(limit / GIB, left)
    axes.text(
        limit / GIB,
        0.7,
        f"usable {memory(limit)}",
        ha="right" if right else "center",
        va="bottom",
    )
    axes.set_ylim(-0.55, 1.15)
    axes.set_xlim(0, 1.02 * max(limit / GIB, left))
    axes.set_yticks([])
    axes.grid(visible=False)
    axes.spines["left"].set_visible(False)
    axes.set_xlabel("GiB")
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.legend(ncols=4, loc="outside lower left", handlelength=1.1, columnspacing=1.6)


def draw_step(axes: Axes, found: Answer, theme: Theme) -> None:
    """Lanes as the simulation played them: computing by phase, links by purpose."""
    prediction = found.best.prediction
    began = prediction.began
    computed = [task for task in prediction.tasks if task.stream == "compute" and task.name != "host"]
    end = max(task.end for task in computed) - began
    phases: dict[str, list[Interval]] = {}
    for task in computed:
        phases.setdefault(task.name.split()[0], []).append((task.start - began, task.end - began))
    lanes = {f"compute\n{seconds(prediction.compute_seconds)}": phases}
    exposed = {}
    compute = union(interval for intervals in phases.values() for interval in intervals)
    for link in lanes_of(prediction):
        busy, alone = prediction.link_seconds[link], prediction.exposed_seconds[link]
        label = f"{_LANES[link]}\n{seconds(busy)}, {seconds(alone)} exposed"
        lanes[label] = _transfers(prediction.tasks, link, began)
        exposed[label] = subtract((i for found in lanes[label].values() for i in found), compute)
    draw_lanes(axes, lanes, exposed, seconds=end, theme=theme)
    spans = _micro_batches(computed, began)
    if len(spans) > 1:
        mark_micro_batches(axes, spans, seconds=end, theme=theme)
    left_out = found.best.setting.accumulation - len(spans)
    more = f"; {left_out:,} more in the middle left out" if left_out else ""
    label_time(axes, f"seconds{more}")
    roles = {role for parts in lanes.values() for role, intervals in parts.items() if intervals}
    draw_legend(axes, roles | ({"exposed"} if any(exposed.values()) else set()), theme=theme)


def _transfers(tasks: Sequence[Task], link: str, began: float) -> dict[str, list[Interval]]:
    """Of one link, by role."""
    parts: dict[str, list[Interval]] = {}
    for task in tasks:
        for name, taken in task.links:
            if name == link:
                role = "host copy" if "host" in link else _ROLES.get(task.name.split()[0], "other")
                parts.setdefault(role, []).append((task.start - began, task.start - began + taken))
    return parts


def _micro_batches(computed: Sequence[Task], began: float) -> list[Interval]:
    """From each first forward after a backward to the next, or to the optimizer."""
    edges, before = [], ""
    for task in sorted(computed, key=lambda task: task.start):
        phase = task.name.split()[0]
        if task.start >= began and phase != before and phase in ("forward", "optimizer"):
            edges.append(task.start - began)
        before = phase
    return list(pairwise(edges))


def draw_nodes(axes: Axes, found: Sweep, theme: Theme) -> None:
    """Time on the left and cost on the right, over the number of nodes; as far as they are known."""
    possible = found.possible
    bills = [answer.money for _, answer in possible]
    hours = [bill.hours for bill in bills if bill is not None and bill.hours is not None]
    prices = [bill.dollars for bill in bills if bill is not None and bill.dollars is not None]
    figure = axes.get_figure(root=True)
    assert figure is not None
    axes.remove()
    left, right = figure.subplots(1, 2)
    if len(hours) == len(possible):
        left.set_title("Days of training")
        _over_nodes(
            left, found, [value / 24 for value in hours], lambda value: days(86400 * value), theme["mics"]
        )
    else:
        left.set_title("Tokens/s")
        speeds = [answer.best.prediction.tokens_per_second for _, answer in possible]
        _over_nodes(left, found, speeds, lambda value: count(round(value)), theme["mics"])
    if len(prices) == len(possible):
        right.set_title("Dollars")
        _over_nodes(right, found, prices, dollars, theme["hsdp"])
    else:
        right.set_title("Tokens/s per GPU")
        speeds = [answer.best.prediction.tokens_per_second_per_gpu for _, answer in possible]
        _over_nodes(right, found, speeds, whole, theme["hsdp"])


def _over_nodes(
    axes: Axes, found: Sweep, values: Sequence[float], words: Callable[[float], str], colour: str
) -> None:
    """A line with the value at both ends and, larger, where the advised number of nodes is."""
    nodes = [number for number, _ in found.possible]
    axes.plot(nodes, values, marker="o", color=colour)
    advised = nodes.index(found.advised[0])
    axes.plot([nodes[advised]], [values[advised]], marker="o", markersize=13, color=colour)
    for number in sorted({0, advised, len(nodes) - 1}):
        (right, up), side = _beside(values, number)
        axes.annotate(
            f"{words(values[number])}, advised" if number == advised else words(values[number]),
            (nodes[number], values[number]),
            (right, up),
            textcoords="offset points",
            ha=side,
            va="bottom" if up > 0 else "top" if up < 0 else "center",
            annotation_clip=False,
            fontweight="bold" if number == advised else "normal",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [f"{number:,}" for number in nodes])
    axes.minorticks_off()
    axes.set_ylim(0, 1.25 * max(values))
    axes.yaxis.set_major_formatter(lambda value, _: count(value))
    axes.set_xlabel("nodes")


def _beside(
    values: Sequence[float], number: int
) -> tuple[tuple[float, float], Literal["left", "center", "right"]]:
    """Where a point's value does not meet the line: points to the right and up, and which end is there."""
    if number == len(values) - 1:
        return (13, 0), "left"
    if number == 0:
        return (0, 11 if values[0] > values[1] else -11), "left"
    before, here, after = values[number - 1 : number + 2]
    if here <= min(before, after):
        return (0, -11), "center"
    if here >= max(before, after):
        return (0, 11), "center"
    return ((9, 6), "left") if before > after else ((-9, 6), "right")

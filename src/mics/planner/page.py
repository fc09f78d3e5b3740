"""The answer as one HTML page with pictures in it: nothing to load, nothing to install."""

from __future__ import annotations

import html
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

from mics.planner.answer import Answer
from mics.planner.sweep import KEY as SWEEP_KEY
from mics.planner.sweep import Sweep, advice_on_nodes, batches_of, cells
from mics.planner.text import KEY, advice, lanes_of, money, neighbours, result
from mics.utils.numbers import GIB, count, fixed, in_gib, memory, percent, seconds, tflops
from mics.utils.picture_style import BLUE, GREEN, GREY, INK, ORANGE, STYLE

_TERM_COLOURS: Final = (BLUE, "#6d9bd1", "#8a5a9e", "#b78fc9", GREEN, "#8cc7b0", ORANGE, "#b5892f")
_SERIES: Final = {"mics": BLUE, "hsdp": ORANGE, "fsdp2": GREY}
_LANES: Final = {"compute": GREY, "intra": GREEN, "inter": BLUE, "to host": ORANGE, "from host": ORANGE}
_SVG_STYLE: Final[dict[Any, Any]] = {**STYLE, "svg.fonttype": "none", "svg.hashsalt": "mics"}

_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; color: {ink}; max-width: 60rem; margin: 2rem auto; }}
h1 {{ font-size: 1.5rem; }} h2 {{ font-size: 1.1rem; margin-top: 2rem; }}
code {{ background: #f1f4f6; padding: .15em .35em; border-radius: 3px; }}
table {{ border-collapse: collapse; width: 100%; }}
th, td {{ text-align: right; padding: .3em .6em; border-bottom: 1px solid #dfe4e8; }}
th.left, td.left {{ text-align: left; }}
tr.best {{ background: #eef4fb; font-weight: 600; }}
svg {{ max-width: 100%; height: auto; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


def page(found: Answer) -> str:
    """The whole page."""
    request = found.found.request
    body = [
        _paragraph(f"{request.batch}."),
        *_plan(found),
        "<h2>Weak scaling: the batch per GPU stays the same</h2>",
        _draw(lambda axes: _curve(axes, found.weak), height=3.4),
        "<h2>Strong scaling: the global batch stays the same</h2>",
        _draw(lambda axes: _curve(axes, found.strong), height=3.4),
    ]
    return _page(f"{request.model.name} on {request.cluster.num_nodes:,} x {request.cluster.name}", body)


def sweep_page(found: Sweep) -> str:
    """The whole page of several numbers of nodes: table and curves, and the plan that is advised."""
    nodes, advised = found.advised
    request = advised.found.request
    heads, lines = cells(found)
    best = [number for number, line in enumerate(lines) if line[0] == f"{nodes:,}"]
    body = [
        *(_paragraph(f"{line}.") for line in batches_of(found.sizes)),
        _html_table(heads, lines, best=best[0], left="best setting"),
        _paragraph(SWEEP_KEY + "."),
        *map(_paragraph, advice_on_nodes(found)),
        _draw(lambda axes: _over_nodes(axes, found), height=3.4),
        f"<h2>The plan for {nodes:,} x {html.escape(request.cluster.name)}</h2>",
        *_plan(advised),
    ]
    return _page(f"{request.model.name} on how many nodes of {request.cluster.name}?", body)


def _page(title: str, body: Sequence[str]) -> str:
    return _PAGE.format(title=html.escape(title), body="\n".join(body), ink=INK)


def _paragraph(text: str) -> str:
    return f"<p>{html.escape(text)}</p>"


def _plan(found: Answer) -> list[str]:
    """What is said about one plan."""
    request, best = found.found.request, found.best
    lanes = 1 + len(lanes_of(best.prediction))
    return [
        f"<p><code>{html.escape(advice(best))}</code></p>",
        _paragraph(
            f"{count(request.model.num_parameters)} parameters, {request.cluster.world_size:,} GPUs: "
            f"{result(best)}."
        ),
        _paragraph(f"{money(found.money)}.") if found.money is not None else "",
        "<h2>Memory per GPU</h2>",
        _draw(lambda axes: _memory(axes, found), height=2.6),
        "<h2>One step</h2>",
        _draw(lambda axes: _timeline(axes, found), height=0.9 + 0.5 * lanes),
        "<h2>Choices: the best setting of each partition size</h2>",
        _table(found),
        _paragraph(KEY + "."),
        *map(_paragraph, neighbours(found)),
    ]


def _draw(fill: Callable[[Axes], None], *, height: float) -> str:
    with mpl.rc_context(_SVG_STYLE):
        figure = Figure(figsize=(9.6, height), layout="constrained")
        FigureCanvasSVG(figure)
        fill(figure.subplots())
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    return text[text.index("<svg") :]


def _memory(axes: Axes, found: Answer) -> None:
    left = 0.0
    terms = found.best.memory.on_device()
    for (name, nbytes), colour in zip(terms.items(), _TERM_COLOURS, strict=True):
        axes.barh(0, nbytes / GIB, left=left, color=colour, label=f"{name} {in_gib(nbytes)}")
        left += nbytes / GIB
    limit = found.found.request.limit / GIB
    axes.axvline(limit, color=INK, linestyle="--")
    usable = f"{memory(found.found.request.limit)} usable"
    axes.annotate(usable, (limit, 0.42), xytext=(6, 0), textcoords="offset points", va="top")
    axes.set_xlim(0, 1.2 * max(limit, left))
    axes.set_yticks([])
    axes.set_xlabel("GiB per GPU")
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35), fontsize=8.5)


def _timeline(axes: Axes, found: Answer) -> None:
    prediction = found.best.prediction
    links = lanes_of(prediction)
    rows: dict[str, list[tuple[float, float]]] = {lane: [] for lane in ("compute", *links)}
    for task in prediction.tasks:
        if task.stream == "compute":
            rows["compute"].append((task.start - prediction.began, task.end - task.start))
        for link, taken in task.links:
            rows[link].append((task.start - prediction.began, taken))
    for number, (lane, bars) in enumerate(rows.items()):
        axes.broken_barh(bars, (number - 0.36, 0.72), color=_LANES[lane], linewidth=0)
    busy, exposed = prediction.link_seconds, prediction.exposed_seconds
    labels = [f"{link} {seconds(busy[link])}\n{seconds(exposed[link])} exposed" for link in links]
    labels.insert(0, f"compute {seconds(prediction.compute_seconds)}")
    axes.set_yticks(range(len(rows)), labels)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_xlim(left=0)
    left_out = found.best.setting.accumulation > 3
    axes.set_xlabel("seconds" + ("; micro-steps in the middle are left out" if left_out else ""))


def _curve(axes: Axes, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
    for name, points in series.items():
        if points:
            worlds, values = zip(*points, strict=True)
            axes.plot(worlds, values, marker="o", color=_SERIES.get(name, INK), label=name)
    ticks = sorted({world for points in series.values() for world, _ in points})
    if ticks:
        axes.set_xscale("log", base=2)
        axes.set_xticks(ticks, [str(world) for world in ticks])
        axes.minorticks_off()
        axes.set_ylim(0, 1.12 * max(value for points in series.values() for _, value in points))
        axes.legend()
    axes.set_xlabel("GPUs")
    axes.set_ylabel("model TFLOP/s per GPU")


def _over_nodes(axes: Axes, found: Sweep) -> None:
    """Cost (blue, left) and time (orange, right) over the number of nodes."""
    possible = found.possible
    nodes = [number for number, _ in possible]
    bills = [answer.money for _, answer in possible]
    if all(bill is not None and bill.hours is not None for bill in bills):
        days = [bill.hours / 24 for bill in bills if bill is not None and bill.hours is not None]
        label, values = "days", days
    else:
        label, values = "tokens/s", [answer.best.prediction.tokens_per_second for _, answer in possible]
    priced = [bill.dollars for bill in bills if bill is not None and bill.dollars is not None]
    if len(priced) == len(possible):
        left, costs = "dollars", priced
    else:
        left, costs = "tokens/s per GPU", [a.best.prediction.tokens_per_second_per_gpu for _, a in possible]
    axes.plot(nodes, costs, marker="o", color=BLUE)
    axes.set_ylabel(left, color=BLUE)
    axes.set_ylim(0, 1.12 * max(costs))
    axes.yaxis.set_major_formatter(lambda value, _: count(value))
    right = axes.twinx()
    right.plot(nodes, values, marker="o", color=ORANGE)
    right.set_ylabel(label, color=ORANGE)
    right.set_ylim(0, 1.12 * max(values))
    right.yaxis.set_major_formatter(lambda value, _: count(value))
    right.grid(visible=False)
    axes.set_xscale("log", base=2)
    axes.set_xticks(nodes, [f"{number:,}" for number in nodes])
    axes.minorticks_off()
    axes.set_xlabel("nodes")


def _table(found: Answer) -> str:
    heads = (
        "p", "replicas", "batch", "accum.", "activations", "s/step", "TFLOP/s", "MFU", "GiB", "limited by"
    )  # fmt: skip
    lines = []
    for choice in found.found.choices[:10]:
        setting = choice.setting
        units = f", {setting.model.parts} units per block" if setting.model.parts > 1 else ""
        lines.append(
            [
                str(setting.partition_size),
                str(setting.num_replicas),
                str(setting.micro_batch),
                str(setting.accumulation),
                f"{setting.activations}{units}",
                fixed(choice.step_seconds),
                tflops(choice.prediction.tflops),
                percent(choice.prediction.mfu),
                in_gib(choice.memory.peak),
                choice.limited_by,
            ]
        )
    return _html_table(heads, lines, best=0, left="limited by")


def _html_table(heads: Sequence[str], lines: Sequence[Sequence[str]], *, best: int, left: str) -> str:
    at = heads.index(left)

    def row(cells: Sequence[str], tag: str) -> str:
        sides = [" class=left" if number == at else "" for number in range(len(cells))]
        return "".join(
            f"<{tag}{side}>{html.escape(cell)}</{tag}>" for side, cell in zip(sides, cells, strict=True)
        )

    found = [f"<table><tr>{row(heads, 'th')}</tr>"]
    found += [
        f"<tr{' class=best' if number == best else ''}>{row(line, 'td')}</tr>"
        for number, line in enumerate(lines)
    ]
    return "\n".join([*found, "</table>"])
